"""Runs forward passes, observes a model's modules, and reuses module outputs of earlier passes."""
