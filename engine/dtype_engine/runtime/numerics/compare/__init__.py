"""Compares output tensors of a candidate with those of the reference, and computes metrics."""
