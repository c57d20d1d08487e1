"""`python -m dtype_tui`."""

from .cli import main

main()
