"""The engine as the app sees it: it accepts commands and emits events, and one thread owns the model."""
