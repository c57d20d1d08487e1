"""Verifies an exported checkpoint against its source. Both are read by loaders that the exporter does not use."""
