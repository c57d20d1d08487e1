"""What the app knows and does, without a widget."""
