"""Forward passes: running a model, observing its modules, and reusing outputs of earlier passes."""
