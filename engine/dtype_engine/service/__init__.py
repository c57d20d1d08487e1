"""The engine that the app controls: a thread that owns the model, runs commands, and emits the results as events."""
