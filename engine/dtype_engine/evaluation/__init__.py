"""Evaluations: units of work as plain data, which any process can run."""
