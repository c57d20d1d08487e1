"""An export checked against its source, read by loaders that are not the exporter's."""
