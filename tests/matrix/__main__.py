"""`python -m tests.matrix [ROW]...` fills the matrix and the table of schemes and prints them: the oracle of every cell, or why it
is refused.

Exit status 1 when a cell is not as the table in `expected.py` has it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent


def main(asked: list[str]) -> int:
    from . import forms, run
    from .commands import Cell
    from .expected import OF_SCHEMES, WAYS

    faults: list[str] = []
    legend: dict[str, str] = {}
    tables = {"form": (WAYS, forms.FORMS, run.fill), "scheme": (OF_SCHEMES, forms.SCHEMES, run.fill_scheme)}

    def mark(cell: Cell | str) -> str:
        if isinstance(cell, str):
            return "**!**"
        if cell.refusal:
            return "–"
        return legend.setdefault(cell.oracle, chr(ord("a") + len(legend)))

    with tempfile.TemporaryDirectory(prefix="dtype-matrix-") as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        for kind, (ways, rows, fill) in tables.items():
            print(f"| {kind} | " + " | ".join(ways) + " |")
            print("|---|" + "---|" * len(ways))
            for number, name in enumerate(row for row in rows if not asked or row in asked):
                if find_spec(forms.NEEDS.get(name, "torch")) is None:
                    print(f"{name}: left out, it needs {forms.NEEDS[name]}", file=sys.stderr)
                    continue
                cells = fill(name, Path(folder) / f"{kind}{number}")
                faults += run.wrong(name, cells)
                print(f"| {name} | " + " | ".join(mark(cells[way]) for way in ways) + " |", flush=True)
                print(f"{name}: {len(cells)} cells", file=sys.stderr)
            print()
    print("Checked against: " + "; ".join(f"**{letter}** {oracle}" for oracle, letter in legend.items()) + ".")
    print("– refused in a sentence that names the reason.")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
