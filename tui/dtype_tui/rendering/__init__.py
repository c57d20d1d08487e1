"""Text and plots in terminal cells."""
