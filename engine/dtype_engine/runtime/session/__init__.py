"""A session: one open model, its recipe, and its measurements."""
