"""The live module whose tensors are cast in place, its tree, and where it has the tensors of the files."""
