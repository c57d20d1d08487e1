"""Which programs read the weights of an export: all of them, only runtimes such as vLLM, or only this program."""

from __future__ import annotations

from collections.abc import Sequence

from dtype_engine.runtime.export.contents import ExportTensor
from dtype_engine.runtime.export.experts import misread


def own_layout(items: Sequence[ExportTensor]) -> list[ExportTensor]:
    """Return the weights whose codes and scales are in a layout that only this program reads."""
    return [item for item in items if item.has_scales and not item.portable]


def transformers_reads(items: Sequence[ExportTensor]) -> bool:
    """Return whether `from_pretrained` of transformers loads the values of these weights, or raises an error by itself. If not, it
    would load other values, such as random ones for weights that it does not find.
    """
    return not own_layout(items) and misread(items) is None
