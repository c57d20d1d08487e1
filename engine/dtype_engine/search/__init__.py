"""Finds the recipe with the least drift or the fewest bytes under a limit, from the scores of a scan."""
