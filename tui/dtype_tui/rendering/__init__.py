"""Text and plots for the terminal's cells."""
