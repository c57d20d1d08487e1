"""The torch-function mode that every forward pass runs under: what it adds to plain torch."""
