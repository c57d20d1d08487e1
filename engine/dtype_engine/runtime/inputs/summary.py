"""Summarizes inputs as plain data, with one row for each batch, for the screen and for JSON."""

from __future__ import annotations

import torch

from dtype_engine.core.text import printable
from dtype_engine.results.inputs import InputBatch, InputsSummary, InputTensor
from dtype_engine.runtime.formats.dequantize import dtype_name
from dtype_engine.runtime.inputs.batch import Batch, Inputs

_SHOWN = 160


def summarize(inputs: Inputs) -> InputsSummary:
    """Return the inputs as plain data: a description, how they were created, and for each batch its text and the shapes of its
    tensors.
    """
    batches = tuple(_row(batch) for batch in inputs.batches)
    known = [batch.positions for batch in batches if batch.positions is not None]
    made_of = inputs.made_of or (f"given by {inputs.description}",)
    return InputsSummary(inputs.description, made_of, sum(known) if known else None, batches)


def one_of_each_shape(inputs: Inputs) -> list[Batch]:
    """Return enough batches to check whether the model runs on all of them. If the user provided tensors, these are the first batch
    of each combination of shapes and dtypes. If this program created the tensors, one batch suffices, because all were created
    alike.
    """
    if inputs.made:
        return list(inputs.batches[:1])
    by_shape: dict[object, Batch] = {}
    for batch in inputs.batches:
        by_shape.setdefault(tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.named_tensors()), batch)
    return list(by_shape.values())


def _row(batch: Batch) -> InputBatch:
    tensors = tuple(
        InputTensor(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in batch.named_tensors()
    )
    text = printable(" ".join(batch.text[: 2 * _SHOWN].split()), _SHOWN) if batch.text else None
    if batch.about and text:
        description = f"{batch.about}: {text}"
    else:
        description = batch.about or text or ", ".join(tensor.name for tensor in tensors) or "nothing"
    return InputBatch(description, _positions(batch), tensors)


def _positions(batch: Batch) -> int | None:
    """Return the number of token positions in a batch, counted in the decoder if it has its own tokens. Returns None without
    tokens.
    """
    for name in ("decoder_input_ids", "input_ids"):
        ids = batch.kwargs.get(name)
        if isinstance(ids, torch.Tensor):
            mask = batch.kwargs.get("attention_mask") if name == "input_ids" else None
            if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
                return int(mask.sum())
            return ids.numel()
    return None
