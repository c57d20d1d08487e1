"""Verifies an export against its source. Both are read by loaders that the exporter does not use."""
