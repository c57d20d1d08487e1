"""From what a user points at to a live module. `source` never imports torch; `load` and `live` do."""
