"""Finds the best recipe for a budget from sensitivity scores."""
