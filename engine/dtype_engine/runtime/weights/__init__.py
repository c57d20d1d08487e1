"""The source of every weight: where its values come from, as the files store them, and how they are read."""
