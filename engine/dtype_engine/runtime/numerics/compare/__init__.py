"""Compares output tensors of a candidate run with those of the reference run, and computes metrics."""
