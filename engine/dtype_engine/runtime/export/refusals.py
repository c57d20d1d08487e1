"""Refuses exports that can't be written or loaded, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import ONLY_GGUF, llama_type
from dtype_engine.core.text import printable
from dtype_engine.recipe.schemes import PER_CHANNEL
from dtype_engine.runtime.export.contents import ExportTensor
from dtype_engine.runtime.export.layout import Layout


def refuse_scales(layout: Layout, items: Sequence[ExportTensor], linears: Sequence[str]) -> None:
    """Raise UserError if a weight in an export for diffusers or PEFT would be stored with scales that they can't load. linears: the
    names of the model's linear modules.
    """
    if layout.kind == "model":
        return
    for item in items:
        if not item.has_scales or item.dtype == item.stored or item.file_layout is not None:
            continue
        loader = "PEFT" if layout.kind == "adapter" else "diffusers"
        why = "" if layout.kind == "adapter" else f" here: {_why_not_torchao(item, linears)}"
        raise UserError(
            f"{loader}, which loads this, has no format for weights in {item.dtype} with scales{why}, and {printable(item.name)} "
            f"would be one; cast to one of {', '.join(dtypes.COMPUTE_DTYPES)}, or leave it as stored"
        )


def _why_not_torchao(item: ExportTensor, linears: Sequence[str]) -> str:
    """Return why torchao's layout, the one that diffusers reads, can't hold a weight."""
    formats = ", ".join(map(dtypes.short_name, PER_CHANNEL))
    if item.dtype not in PER_CHANNEL:
        return f"it reads {formats} in torchao's layout"
    if not linears:
        return (
            "it reads scales of linear layers, and without the diffusers package nothing says which layers are linear"
        )
    return (
        "it reads scales of weights of linear layers that are not tied, as the rules "
        f"type:Linear={dtypes.short_name(item.dtype)} and then *.bias=stored give them"
    )


def refuse_unstored(items: Sequence[ExportTensor]) -> None:
    """Raise UserError for a format that no checkpoint layout supports, and for formats that one checkpoint can't combine."""
    of_layout = {"": "", "fp8": ""}
    for item in items:
        if llama_type(item.dtype) is not None:
            raise UserError(f"{printable(item.name)} can't be exported in {item.dtype} to safetensors: {ONLY_GGUF}")
        blocks = dtypes.BY_NAME[item.dtype].blocks if item.dtype in dtypes.BY_NAME else None
        if blocks is not None and not blocks.layout:
            raise UserError(
                f"{printable(item.name)} can't be exported in {item.dtype}: no layout of a checkpoint has it, so it can be "
                "measured only; cast to mxfp8 or mxfp4 to export"
            )
        if item.portable:
            of_layout["fp8" if blocks is not None and blocks.layout == "fp8" else ""] = item.dtype
    if all(of_layout.values()):
        raise UserError(
            f"{of_layout['fp8']} and {of_layout['']} can't be exported together: the fp8 layout of DeepSeek allows no "
            "other formats; cast to fp8@128x128, whose scales are float32, instead"
        )


def refuse_unwritable(checkpoint: Checkpoint, items: Sequence[ExportTensor]) -> None:
    """Raise UserError for the first tensor that a safetensors file can't hold."""
    lost = [
        item
        for item in items
        if (not item.copied or checkpoint.form == "gguf")
        and ((row := dtypes.BY_NAME.get(item.dtype)) is None or not (item.has_scales or row.safetensors))
    ]
    refused = [item for item in items if checkpoint.weights[item.name].refusal is not None]
    first = next(iter(refused or lost), None)
    if first is None:
        return
    stored = checkpoint.weights[first.name]
    others = len(refused or lost) - 1
    more = f" (and {others} more)" if others else ""
    problem = stored.refusal or f"is stored as {first.dtype}"
    advice = "; give it a dtype to be dequantized to, as in --cast '*=bf16'" if stored.packed and not refused else ""
    so = "which safetensors can't hold" if stored.refusal is None else "so it can't be written as safetensors"
    raise UserError(f"{stored.file.name}: {printable(first.name)}{more} {problem}, {so}{advice}")
