"""Pieces of text and plots for cells."""
