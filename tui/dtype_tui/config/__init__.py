"""The configuration file, key bindings, themes, and the ASCII mode."""
