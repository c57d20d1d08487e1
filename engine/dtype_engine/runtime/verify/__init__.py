"""Verifies an export against its source. The export and the source are read by loaders that the exporter does not use."""
