"""Reads the tensors of a weight in the layouts of GPTQ and torchao, to verify an export, without the code that writes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dtype_engine.checkpoint.schemes.small_tensors import json_object
from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.runtime.export.contents import ExportTensor


def as_compressed_tensors(
    item: ExportTensor, held: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], str | None]:
    """Return (the tensors that a file in the layout of compressed-tensors holds for the same codes and scales, in the order of
    `core.block_formats.parts`; what is wrong with the tensors of the weight, or None).

    Both layouts fill words of 32 bits with codes of one row of the weight, from the lowest bits on. GPTQ's holds the transposed
    matrix of words, and zero points also for symmetric codes: the middle of all codes.

    item: the weight as planned. held: its tensors in the order of its `entries`, in the planned dtypes and shapes.
    """
    codes, scales, zeros, groups = held
    row, layout = dtypes.BY_NAME[item.dtype], item.file_layout
    assert row.blocks is not None
    assert layout is not None
    _, scales_name, zeros_name, groups_name = (entry.name for entry in item.entries)
    found = [codes.t().contiguous(), scales.t().to(getattr(torch, row.blocks.scale)).contiguous()]
    problem = None
    if not torch.equal(found[1].to(torch.float32), scales.t().to(torch.float32)):
        problem = f"{scales_name} has values that {item.dtype} has not"
    if not np.array_equal(groups.numpy(), np.repeat(np.arange(len(scales)), row.blocks.columns)):
        problem = f"{groups_name} does not name the groups in their order"
    if row.blocks.zero_points:
        found.append(zeros.t().contiguous())
    else:
        middle = (1 << (row.bits - 1)) - layout.subtracted
        word = sum(middle << place for place in range(0, 32, row.bits))
        if not (zeros.numpy().view(np.uint32) == word).all():
            problem = f"{zeros_name} has zero points other than the middle of the codes"
    return (*found, torch.tensor(item.shape, dtype=torch.int64)), problem


def torchao_problem(item: ExportTensor, described: str | None) -> str | None:
    """Return what is wrong with the description of a weight in the metadata of a file in torchao's layout, or None. described: the
    text of this entry, or None if there is none.
    """
    row = dtypes.BY_NAME[item.dtype]
    kind = {"int": "an Int8Tensor", "float": "a Float8Tensor"}[row.kind]
    said = json_object(described or "")
    if kind.split()[1] != said.get("_type"):
        return f"should be {kind}, and the file says {printable(str(said['_type'])) if '_type' in said else 'nothing of it'}"
    data = said.get("_data")
    block = data.get("block_size") if isinstance(data, dict) else None
    rows, columns = item.shape
    if block != (expected := [rows if row.per_tensor else 1, columns]):
        return f"should have a scale for {expected} values, and the file says {printable(str(block))}"
    return None
