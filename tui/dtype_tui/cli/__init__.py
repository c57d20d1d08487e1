"""`dtype-tui`: the command line, the model picker, and the app in a browser."""
