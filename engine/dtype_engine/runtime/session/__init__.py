"""One open model, and what can be asked of it."""
