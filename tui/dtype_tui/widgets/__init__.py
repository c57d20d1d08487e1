"""The app's widgets, one per file."""
