"""Private names of other libraries, temporary changes of these libraries, and control over their output."""
