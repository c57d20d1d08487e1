"""The results of measurements, as plain frozen data."""
