"""Forward passes: calls of modules, traces, what need not run again."""
