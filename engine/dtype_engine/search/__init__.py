"""From sensitivity scores to a recipe for a budget."""
