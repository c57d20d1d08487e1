"""Evaluations: units of work (scan a sequence, measure a recipe, compare tensors) as plain data that any process can run."""
