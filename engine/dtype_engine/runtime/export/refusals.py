"""Refuses exports that can't be written or loaded, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import ONLY_GGUF, llama_type
from dtype_engine.core.text import printable
from dtype_engine.runtime.export.contents import ExportTensor
from dtype_engine.runtime.export.layout import Layout


def refuse_scales(layout: Layout, items: Sequence[ExportTensor]) -> None:
    """Raise UserError if a weight in an export for diffusers or PEFT would be stored with scales, which they can't load."""
    if layout.kind == "model":
        return
    loader, but = "PEFT", ""
    if layout.kind != "adapter":
        loader = "diffusers"
        but = " but those of its quantizers (torchao, quanto, bitsandbytes), which export does not write"
    for item in items:
        if item.has_scales and item.dtype != item.stored:
            raise UserError(
                f"{loader}, which loads this, has no format for weights in {item.dtype} with scales{but}, and "
                f"{printable(item.name)} would be one; cast to one of {', '.join(dtypes.COMPUTE_DTYPES)}, or leave it as stored"
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
