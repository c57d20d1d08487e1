"""Drift, noise floor, attribution, non-finite values, speed, generation."""
