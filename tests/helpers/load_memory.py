"""How much anonymous memory `load_pretrained` takes: prints bytes at most while loading, those left, and of all weights.

python -m tests.helpers.load_memory SMALL FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers.peak_memory import anonymous_bytes, peak_anonymous

import dtype_engine as de
from dtype_engine.core.system_memory import trim_heap


def main() -> None:
    small, folder = map(Path, sys.argv[1:])
    de.load_pretrained(small)  # whatever is imported on the way is not the model's
    models = []
    trim_heap()
    before = anonymous_bytes()
    peak = peak_anonymous(lambda: models.append(de.load_pretrained(folder)))
    left = anonymous_bytes() - before
    print(peak, left, sum(parameter.nbytes for parameter in models[0].parameters()))


main()
