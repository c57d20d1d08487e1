"""Passes over sequences in other groupings than one whole sequence at a time: several in a batch, or token by token."""
