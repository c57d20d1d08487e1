"""Torch-function modes: how a forward pass runs with mixed dtypes."""
