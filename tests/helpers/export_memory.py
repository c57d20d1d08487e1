"""How much anonymous memory an export takes: prints bytes for a plain cast, for a scaled one, and of the largest tensor.

python -m tests.helpers.export_memory FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.helpers.exporting import export_checkpoint
from tests.helpers.peak_memory import peak_anonymous

from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint


def main() -> None:
    folder = Path(sys.argv[1])
    file = folder / "big.safetensors"
    save_file({f"layer.{n}.weight": torch.rand(8192, 4096).to(torch.bfloat16) for n in range(3)}, file)
    small = folder / "small.safetensors"
    save_file({"layer.weight": torch.rand(8, 8)}, small)
    checkpoint = open_checkpoint(file)
    for dtype in ("float16", "float8_e4m3fn"):  # whatever is imported on the way is not the export's
        export_checkpoint(open_checkpoint(small), "s", Recipe((Rule("*", dtype),)), folder / f"small-{dtype}")
    plain = Recipe((Rule("layer.{0..1}", "float16"),))
    scaled = Recipe((Rule("*", "float8_e4m3fn"),))
    print(
        peak_anonymous(lambda: export_checkpoint(checkpoint, "big", plain, folder / "plain")),
        peak_anonymous(lambda: export_checkpoint(checkpoint, "big", scaled, folder / "scaled")),
        max(tensor.nbytes for tensor in checkpoint.tensors.values()),
    )


main()
