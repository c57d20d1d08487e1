"""Evaluations: units of work (scan one sequence, measure the drift of one recipe, compare some tensors) as plain data, which any
process can run.
"""
