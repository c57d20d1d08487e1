"""Compare a candidate's output with the reference's: tensors in, figures out."""
