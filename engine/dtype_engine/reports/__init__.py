"""Results as text for a terminal, and reports: one HTML or Markdown file with everything that is known of a recipe on a model."""
