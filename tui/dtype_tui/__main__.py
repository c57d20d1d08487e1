"""`python -m dtype_tui`."""

from .start import main

main()
