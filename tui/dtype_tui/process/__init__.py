"""Handles the app's process: early start of the engine, garbage collection, key parsing, lost terminals, crash logs, and exit."""
