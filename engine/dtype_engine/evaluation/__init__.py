"""Evaluations as plain data, which this process, other processes of this machine, or a cluster can run."""
