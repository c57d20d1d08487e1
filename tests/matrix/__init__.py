"""Every form of model with every way to use it: each cell is checked by something that is not ours, or refused in a sentence."""
