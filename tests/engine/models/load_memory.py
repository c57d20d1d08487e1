"""How much anonymous memory `load_pretrained` takes: prints bytes at most while loading, those left, and of all weights."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path

import dtype_engine as de


def anonymous() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])


def main() -> None:
    small, folder = map(Path, sys.argv[1:])
    de.load_pretrained(small)  # whatever is imported on the way is not the model's
    ctypes.CDLL(None).malloc_trim(0)
    before = highest = anonymous()
    done = threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, anonymous())

    watcher = threading.Thread(target=look)
    watcher.start()
    model = de.load_pretrained(folder)
    done.set()
    watcher.join()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    print(highest - before, anonymous() - before, weights)


main()
