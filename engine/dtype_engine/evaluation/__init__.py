"""What is to be evaluated as plain data, and who evaluates it: this process, others on this machine, a cluster."""
