"""Torch-function modes in which the forward passes run. They replace weights by cast values and run operations on mixed dtypes."""
