"""The process around the app: garbage collection, the terminal, the log of a crash."""
