"""Results as text, and reports to keep: one file, HTML or Markdown, with all that is known of a recipe on a model."""
