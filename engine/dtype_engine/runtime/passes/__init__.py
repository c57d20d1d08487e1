"""Forward passes: hooks, traces, what need not run again."""
