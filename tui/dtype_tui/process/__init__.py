"""The app's process: the engine's early start, garbage collection, key parsing, loss of the terminal, crash logs, exit."""
