"""One thread: commands in, events out."""
