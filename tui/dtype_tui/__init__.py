"""dtype-tui: the terminal explorer over `dtype_engine`."""
