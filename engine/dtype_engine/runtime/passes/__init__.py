"""Forward passes: calls of modules, their outputs, what need not run again."""
