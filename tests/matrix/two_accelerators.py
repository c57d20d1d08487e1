"""`python -m tests.matrix.two_accelerators COMMAND...` runs `dtype-engine` on a machine with two accelerators, the fake ones."""

from __future__ import annotations

import sys

from tests.helpers import fake_accelerator

from dtype_engine.cli import cli
from dtype_engine.cli.program import run


def main() -> int:
    library = fake_accelerator.register()
    fake_accelerator.device.count = 2
    status = run(cli, "dtype-engine", sys.argv[1:])
    del library
    return status


if __name__ == "__main__":
    sys.exit(main())
