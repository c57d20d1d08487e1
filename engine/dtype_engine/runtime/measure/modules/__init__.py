"""Drift of every module's output, over the sequences in which modules are compared."""
