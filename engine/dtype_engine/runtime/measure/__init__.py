"""Measurements: drift, noise floor, attribution, non-finite values, speed and generation."""
