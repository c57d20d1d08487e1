"""dtype-engine: cast a model's weights by pattern, run it in mixed dtypes, and measure what that did."""
