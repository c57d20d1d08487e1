"""What becomes of experts with scales in the programs that load an export: vLLM, and transformers, which packs them.

Of transformers 5.23 with compressed-tensors 0.20 it was tried; of vLLM its source was read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.recipe.schemes import DESCRIBED
from dtype_engine.runtime.export.contents import ExportTensor

_READ = (
    "float8_e4m3fn",
    "float8_e4m3fn@tensor",
    *(name for name in dtypes.BLOCK_FORMATS if name.startswith("mxfp4")),
    "int4@g128",
    "int4@g32",
    "int8@g128",
)
"""The formats that `CompressedTensorsDequantize` of transformers brings back as it packs experts."""


_EXPERT = re.compile(r"(.+\.experts)\.\d+\.\w+")


def expert_layer(module: str) -> str:
    """The experts that an expert's linear layer belongs to, as in `model.layers.0.mlp.experts`; "" for another module."""
    found = _EXPERT.fullmatch(module)
    return found[1] if found else ""


def all_experts(layer: str) -> str:
    """The linear layers of all the experts of a layer, as a target of compressed-tensors.

    vLLM asks for their scheme by the names `0.gate_proj`, `0.up_proj` and `0.down_proj`, whatever the checkpoint calls them, and
    transformers by an expression with `experts` in it.
    """
    return rf"re:{re.escape(layer)}\.\d+\.\w+$"


def experts(items: Sequence[ExportTensor]) -> list[ExportTensor]:
    """The weights that others load as linear layers, and transformers as part of a packed one."""
    return [item for item in items if item.packed_into and item.portable]


def misread(items: Sequence[ExportTensor]) -> str | None:
    """What `from_pretrained` of transformers does wrong with packed experts in the layout of compressed-tensors; None where it
    reads them.
    """
    found = sorted({item.dtype for item in experts(items)})
    if not found or not set(found) <= set(DESCRIBED):
        return None
    if "nvfp4" in found:
        return "it leaves out the scale of the tensor of experts in nvfp4 and computes something else, without a word"
    if unread := [dtype for dtype in found if dtype not in _READ]:
        return f"it stops with an error at experts in {', '.join(unread)}, which it packs as it loads them"
    into = {item.packed_into.rpartition(".")[0] for item in items if item.packed_into and item.name.endswith(".weight")}
    wide = into - {item.packed_into.rpartition(".")[0] for item in experts(items)}
    if len(found) > 1 or wide:
        return "it packs experts as it loads them, and takes all of them for one format"
    return None


def experts_notices(items: Sequence[ExportTensor]) -> tuple[str, ...]:
    """What is said of experts with scales beside the files."""
    notices = []
    if (problem := misread(items)) is not None:
        first = experts(items)[0]
        notices.append(
            f"experts (first {printable(first.name)}) are in the layout that vLLM reads; from_pretrained of transformers 5 does "
            f"not read them: {problem}"
        )
    formats: dict[str, dict[tuple[str, bool], None]] = {}
    for item in items:
        if item.packed_into and item.name.endswith(".weight"):
            of_layer = formats.setdefault(item.packed_into.rpartition(".")[0], {})
            of_layer[item.dtype, item.quantised_inputs] = None
    split = [layer for layer, found in formats.items() if len(found) > 1 and any(_scaled(dtype) for dtype, _ in found)]
    if split:
        each = ", ".join(dtype for dtype, _ in formats[split[0]])
        notices.append(
            f"vLLM has one format for all the experts of a layer and refuses to load others: first {printable(split[0])}: {each}"
        )
    return tuple(notices)


def _scaled(dtype: str) -> bool:
    return dtype in dtypes.STORAGE_DTYPES
