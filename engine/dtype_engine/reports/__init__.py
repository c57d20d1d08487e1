"""Formats results as text for a terminal, and as reports: each is one HTML or Markdown file with all that is known about a recipe
on a model.
"""
