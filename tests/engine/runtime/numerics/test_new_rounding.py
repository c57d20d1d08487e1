"""A rounding that the program does not have takes a row, and a function beside the others: all else follows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dtype_engine.core.roundings as table

TOY = """
import importlib.util, sys

# The row has to be there before the table of dtypes is made of it.
name = "dtype_engine.core.roundings"
spec = importlib.util.spec_from_file_location(name, sys.argv[2])
sys.modules[name] = table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)
table.ROUNDINGS["toy"] = table.Rounding("toy", "toy", "squares", "the nearest values, but 0 for channels that get nothing")

from dtype_engine.runtime.numerics import roundings

def toy(values, form, given, across):
    scales = roundings.nearest_scales(values, form)
    keep = (given.squares > 0).float()
    return roundings.Rounded(roundings._Grid(form, scales, values.shape).nearest(values * keep), scales)

roundings.ROUNDERS["toy"] = toy
import torch
import dtype_engine as de

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
session = de.open(module, inputs=torch.randn(40, 64))
session.cast("*.weight", "int4@g32:toy")
rounded = session.drift()
session.export(sys.argv[1])
checked = session.verify(sys.argv[1])
session.cast("*.weight", "int4@g32")
assert rounded.output.max_abs == session.drift().output.max_abs  # no channel gets nothing
assert checked.same and checked.rounded == 2, checked
"""


def test_a_new_rounding_is_cast_measured_exported_and_verified(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOY, str(tmp_path / "out"), str(table.__file__)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
