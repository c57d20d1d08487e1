"""Measures how far the outputs of modules drift, over the sequences in which modules are compared."""
