"""Loading a model: from the path, id or module that a user names to a live `nn.Module`."""
