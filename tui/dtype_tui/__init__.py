"""dtype-tui: a terminal app for exploring models in mixed dtypes, built on `dtype_engine`."""
