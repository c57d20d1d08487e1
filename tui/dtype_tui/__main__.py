"""Where `dtype-tui` begins: nothing but the garbage policy is imported before it."""

from __future__ import annotations

from dtype_tui.process.ending import exit_at_once
from dtype_tui.process.gc_policy import pause_gc


def main() -> None:
    """The `dtype-tui` program."""
    pause_gc()
    from dtype_tui.cli.command import main as run

    try:
        run()
    except SystemExit as end:
        exit_at_once(end.code)


if __name__ == "__main__":
    main()
