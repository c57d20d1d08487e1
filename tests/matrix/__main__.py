"""`python -m tests.matrix [FORM]...` fills the matrix and prints it: the oracle of every cell, or why it is refused.

Exit status 1 when a cell is not as the table in `expected.py` has it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def main(asked: list[str]) -> int:
    from . import forms, run
    from .commands import Cell
    from .expected import WAYS

    faults: list[str] = []
    legend: dict[str, str] = {}
    rows: list[str] = []

    def mark(cell: Cell | str) -> str:
        if isinstance(cell, str):
            return "**!**"
        if cell.refusal:
            return "–"
        return legend.setdefault(cell.oracle, chr(ord("a") + len(legend)))

    with tempfile.TemporaryDirectory(prefix="dtype-matrix-") as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        for number, form in enumerate(asked or forms.names()):
            cells = run.fill(form, Path(folder) / str(number))
            faults += run.wrong(form, cells)
            rows.append(f"| {form} | " + " | ".join(mark(cells[way]) for way in WAYS) + " |")
            print(f"{form}: {len(cells)} cells", file=sys.stderr)
    print("| form | " + " | ".join(WAYS) + " |")
    print("|---|" + "---|" * len(WAYS))
    print("\n".join(rows))
    print("\nChecked against: " + "; ".join(f"**{letter}** {oracle}" for oracle, letter in legend.items()) + ".")
    print("– refused in a sentence that names the reason.")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
