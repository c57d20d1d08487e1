"""The configuration file, keys, themes, ASCII."""
