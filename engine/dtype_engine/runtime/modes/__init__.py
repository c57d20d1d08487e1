"""The torch-function modes under which forward passes run, and the operations that they add to plain torch."""
