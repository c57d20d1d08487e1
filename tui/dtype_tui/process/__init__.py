"""Handles the app's process: early start of the engine, garbage collection, key parsing, lost terminals, and crash logs."""
