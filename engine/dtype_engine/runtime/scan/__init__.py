"""Estimates or measures how sensitive the model's output is to each weight in each dtype."""
