"""The engine as the app sees it: it takes commands and emits events, and one thread owns the model."""
