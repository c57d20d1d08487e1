"""Results as text for a terminal, and reports: one HTML or Markdown file with all that is known about a recipe on a model."""
