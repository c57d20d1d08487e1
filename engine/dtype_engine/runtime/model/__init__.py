"""Loading the path, id or Python module that a user names as a live `nn.Module`."""
