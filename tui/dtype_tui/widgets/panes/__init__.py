"""The side panes Drift, Memory and Recipe."""
