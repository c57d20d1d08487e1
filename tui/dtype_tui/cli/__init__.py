"""The commands `dtype-tui` and `dtype-tui serve`, and the model picker."""
