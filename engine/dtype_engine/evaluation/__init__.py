"""Evaluations as plain data, which this process, other processes on this machine, or a cluster can run."""
