"""A small checkpoint of weights that another program quantized, made key by key, and what its writers share: codes that are packed
by Python's integers, and the values of small floats by their definitions. None of it shares code with the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.runtime.weights.coded import CodedSource

Array = np.ndarray[Any, Any]


@dataclass
class Case:
    """A checkpoint with one quantized weight or more, which can be changed before it is written."""

    tensors: dict[str, torch.Tensor]
    right: Mapping[str, Array]
    """The values of each weight that is read, float32, by name."""
    format: str = ""
    """The format that the first weight is read as."""
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    hf_quant_config: dict[str, Any] | None = None
    beside: dict[str, Any] = field(default_factory=dict)
    """The contents of further JSON files, by name."""
    alone: bool = False
    """Whether it is a file without a configuration."""

    def save(self, folder: Path) -> Path:
        """Write the checkpoint to a folder. Returns what is to be opened: the folder, or its only file."""
        folder.mkdir(exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt", **self.metadata})
        if self.alone:
            return folder / "model.safetensors"
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, content in self.beside.items():
            (folder / name).write_text(json.dumps(content))
        if self.hf_quant_config is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(self.hf_quant_config))
        return folder

    def open(self, folder: Path) -> Checkpoint:
        """Write the checkpoint to a folder and open it."""
        return open_checkpoint(self.save(folder))

    def check(self, folder: Path, form: str) -> None:
        """Write and open the checkpoint, and compare each weight's format, shape and values with what it was made from: all rows,
        and rows that begin and end inside words, blocks and tiles.
        """
        found = self.open(folder).coded
        assert found.keys() == self.right.keys()
        for name, right in self.right.items():
            weight = found[name]
            assert (weight.format, weight.shape) == (form, right.shape)
            np.testing.assert_array_equal(CodedSource(weight).read().numpy(), right)
            for first, last in ((0, 1), (3, 21), (len(right) - 2, len(right))):
                np.testing.assert_array_equal(CodedSource(weight).rows(first, last).numpy(), right[first:last])


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each code of e2m1, as OCP Microscaling Formats 1.0 lists them."""


def float_values(exponent_bits: int, mantissa_bits: int) -> Array:
    """Return the value of each code of a small float by its definition. The codes of NaN in float8_e4m3fn are not considered."""
    values, bias = [], 2 ** (exponent_bits - 1) - 1
    for code in range(2 ** (1 + exponent_bits + mantissa_bits)):
        mantissa = code % 2**mantissa_bits / 2**mantissa_bits
        exponent = code >> mantissa_bits & 2**exponent_bits - 1
        magnitude = mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias)
        values.append(-magnitude if code >> (exponent_bits + mantissa_bits) else magnitude)
    return np.array(values, np.float32)


E4M3 = float_values(4, 3)
"""The value of each code of float8_e4m3fn that is not NaN."""


def spread(scales: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """Return the scale of each element: that of its block, of which the last in a row or column may be smaller."""
    rows, columns = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    return scales.reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))[rows][:, columns]


def nibbles(codes: Array, high_first: bool = False) -> torch.Tensor:
    """Pack codes of 4 bits [..., columns] in bytes [..., columns / 2]."""
    first, second = codes[..., 0::2].astype(np.uint8), codes[..., 1::2].astype(np.uint8)
    return torch.from_numpy(first << 4 | second if high_first else first | second << 4)


def words(codes: Array, bits: int, dense: bool = True) -> torch.Tensor:
    """Pack unsigned codes [rows, columns] in int32 words [rows, words], bit by bit: without gaps, or only whole codes in a word."""
    rows = []
    for row in codes.tolist():
        number, per_word = 0, 32 // bits
        for index, code in enumerate(row):
            number |= code << (index * bits if dense else index // per_word * 32 + index % per_word * bits)
        count = -(-len(row) * bits // 32) if dense else -(-len(row) // per_word)
        rows.append(np.frombuffer(number.to_bytes(4 * count, "little"), "<i4"))
    return torch.from_numpy(np.stack(rows).copy())


def swizzled(scale: Array) -> Array:
    """Return scales [rows, columns] in tiles of 128 rows x 4 columns as tensor cores read them, with zeros in places that are not
    used.
    """
    rows, columns = scale.shape
    down, across = -(-rows // 128), -(-columns // 4)
    flat = np.zeros(down * across * 512, scale.dtype)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * across + column // 4
            flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scale[row, column]
    return flat.reshape(32 * down, 16 * across)


def text(value: str) -> torch.Tensor:
    """Return a text as the bytes of a tensor."""
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def floats(tensor: torch.Tensor) -> Array:
    """Return a tensor's values as float32."""
    return tensor.to(torch.float32).numpy()
