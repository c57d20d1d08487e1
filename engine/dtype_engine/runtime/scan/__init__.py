"""The sensitivity of every weight in every dtype."""
