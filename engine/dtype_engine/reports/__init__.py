"""Formats results as text for a terminal, and as reports of a recipe on a model in HTML and Markdown."""
