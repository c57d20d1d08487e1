"""The side panes: Drift, Memory, Recipe."""
