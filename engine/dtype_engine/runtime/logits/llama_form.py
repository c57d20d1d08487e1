"""Reads the files that `llama-perplexity --kl-divergence-base` writes (tools/perplexity/perplexity.cpp of llama.cpp).

In little-endian order: "_logits_", then int32: the tokens of a chunk n, the size V of the vocabulary, the number of chunks, and the
tokens of all chunks. Then follow the positions n // 2 to n - 2 of each chunk. A position has two float32, scale and least
log-probability, and V uint16 codes, padded to an even number; a log-probability is scale * code + least. Logits that are more than
16 under the largest are stored as if they were 16 under it.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import torch

from dtype_engine.checkpoint import ByteRange
from dtype_engine.core.errors import UserError
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.regular_files import open_regular, reading
from dtype_engine.runtime.logits.outputs import LogitsFile, Outputs
from dtype_engine.runtime.weights.files import read_range

MAGIC = b"_logits_"
_HEADER = struct.Struct("<8s3i")
_SCALES = 4
"""How many uint16 the two float32 before the codes take."""
_RANGE, _MOST_CODE, _ROUNDING = 16, 65535, 1e-3
"""If the logits of a position span more than 16, those with the code 0 are clipped, and the largest has the code 65535."""


class _LlamaFile(LogitsFile):
    def __init__(self, path: Path, tokens: list[torch.Tensor], classes: int, start: int) -> None:
        super().__init__(path, "llama.cpp", tokens, classes)
        self._classes, self._start = classes, start

    def _read(self, number: int) -> Outputs:
        first, rows, width = _rows(len(self.tokens[0]), self._classes)
        nbytes = 2 * rows * width
        place = ByteRange(self.path, self._start + number * nbytes, nbytes)
        data = read_range(place, torch.uint16, 0, rows * width).view(rows, width)
        scales = data[:, :_SCALES].contiguous().view(torch.float32)
        codes = data[:, _SCALES : _SCALES + self._classes].to(torch.float32)
        clipped = (codes == 0) & (scales[:, :1] * _MOST_CODE > _RANGE - _ROUNDING)
        return Outputs(first, codes.mul_(scales[:, :1]).add_(scales[:, 1:]), clipped=clipped)


def read_llama(path: Path, limits: InputLimits, bos: frozenset[int]) -> LogitsFile:
    """Read the header and the tokens. Where the vocabulary adds a token that begins a text, llama.cpp runs each chunk with this
    token in place of its first one. The file does not say so, but its text then begins with this token.

    bos: the ids of the model's tokens that begin a text. Raises UserError for a damaged file, or more tokens than the limit.
    """
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise UserError(f"{path} is cut short: its header is not complete")
    _, length, classes, chunks = _HEADER.unpack(head)
    if length < 3 or classes < 2 or chunks < 1:
        raise UserError(
            f"{path}: its header has {chunks} chunks of {length} tokens and a vocabulary of {classes}: it is damaged"
        )
    limits.refuse_file("tokens", str(path), chunks * length)
    _, rows, width = _rows(length, classes)
    start = _HEADER.size + 4 * chunks * length
    needed = start + 2 * chunks * rows * width
    if size != needed:
        what = "is cut short" if size < needed else "is damaged"
        raise UserError(f"{path} {what}: it has {size:,} bytes, and its header describes {needed:,}")
    place = ByteRange(path, _HEADER.size, start - _HEADER.size)
    tokens = read_range(place, torch.int32, 0, chunks * length).view(chunks, length).long()
    if int(tokens[0, 0]) in bos:
        tokens[:, 0] = tokens[0, 0].clone()
    return _LlamaFile(path, list(tokens), classes, start)


def _rows(length: int, classes: int) -> tuple[int, int, int]:
    """Return the first position of a chunk that has values, how many positions have some, and how many uint16 each takes."""
    first = length // 2
    return first, length - 1 - first, _SCALES + 2 * ((classes + 1) // 2)
