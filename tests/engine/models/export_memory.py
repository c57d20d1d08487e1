"""How much anonymous memory an export takes: prints bytes for a plain cast, for a scaled one, and of the largest tensor."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.runtime.export import export_checkpoint


def anonymous() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])


def most(run: Callable[[], object]) -> int:
    ctypes.CDLL(None).malloc_trim(0)
    before = highest = anonymous()
    done = threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, anonymous())

    watcher = threading.Thread(target=look)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return highest - before


def main() -> None:
    folder = Path(sys.argv[1])
    file = folder / "big.safetensors"
    save_file({f"layer.{n}.weight": torch.rand(2048, 4096).to(torch.bfloat16) for n in range(8)}, file)
    small = folder / "small.safetensors"
    save_file({"layer.weight": torch.rand(8, 8)}, small)
    checkpoint = open_checkpoint(file)
    for dtype in ("float16", "float8_e4m3fn"):  # whatever is imported on the way is not the export's
        export_checkpoint(open_checkpoint(small), "s", Recipe((Rule("*", dtype),)), folder / f"small-{dtype}")
    recipe = Recipe((Rule("layer.{0..5}", "float16"),))
    grown = most(lambda: export_checkpoint(checkpoint, "big", recipe, folder / "plain"))
    scaled = most(
        lambda: export_checkpoint(checkpoint, "big", Recipe((Rule("*", "float8_e4m3fn"),)), folder / "scaled")
    )
    print(grown, scaled, max(tensor.nbytes for tensor in checkpoint.tensors.values()))


main()
