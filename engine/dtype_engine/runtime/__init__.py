"""All code of the engine that imports torch."""
