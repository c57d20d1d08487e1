"""Holds one open model with its recipe and its measurements: a session."""
