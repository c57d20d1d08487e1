"""Drift of the outputs of modules, over the sequences in which modules are compared."""
