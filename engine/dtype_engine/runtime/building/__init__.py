"""Makes a module of a checkpoint or of the user's code, and fills it with the weights."""
