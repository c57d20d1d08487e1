"""What tests in several rooms share."""
