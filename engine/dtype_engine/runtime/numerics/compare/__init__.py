"""Comparing a candidate's output with the reference's: tensors in, metrics out."""
