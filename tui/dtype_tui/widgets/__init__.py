"""The app's widgets, one job a file."""
