"""Drift of every module's output."""
