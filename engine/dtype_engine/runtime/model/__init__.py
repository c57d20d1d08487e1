"""Loads an `nn.Module` from the path, id or Python module that a user names."""
