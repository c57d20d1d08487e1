"""Reads JSON Lines with the `prompt_logprobs` of vLLM: an object for each sequence, with `prompt_token_ids`, the tokens, and
`prompt_logprobs`. This is a list with null for the first token and, for each other token, an object that maps the ids of the k
likeliest tokens and of the token itself to their log-probabilities, given the tokens before. A response of vLLM's server is such an
object, too; the response to a completion has both keys in its first choice.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import torch

from dtype_engine.core.errors import UserError
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.regular_files import open_regular, reading
from dtype_engine.runtime.logits.outputs import LogitsFile, Outputs

_LONGEST_LINE = 64 << 20
"""Maximum bytes of a line: 32,000 tokens with 20 log-probabilities each, as vLLM's server writes them."""
_MOST_OVER_1 = 1e-3
"""By how much the sum of a position's probabilities may exceed 1, because log-probabilities are rounded."""


class _LogProb(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    rank: int | None = None


class _Line(msgspec.Struct, frozen=True):
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, _LogProb] | None] | None = None
    choices: list[_Line] = []


class _VllmFile(LogitsFile):
    def __init__(self, path: Path, tokens: list[torch.Tensor], starts: list[int]) -> None:
        super().__init__(path, "vLLM", tokens, None, bounds=True)
        self._starts = starts

    def _read(self, number: int) -> Outputs:
        with reading(self.path), open_regular(self.path) as file:
            file.seek(self._starts[number])
            _, found = _decoded(f"{self.path}, sequence {number + 1}", file.readline(_LONGEST_LINE))
        # A token with a probability of 0 counts among those that are left out.
        found = [{token: each for token, each in row.items() if each.logprob > -math.inf} for row in found]
        most = max(map(len, found))
        ids = torch.zeros(len(found), most, dtype=torch.int64)
        values = torch.full((len(found), most), -torch.inf, dtype=torch.float64)
        for row, position in enumerate(found):
            ids[row] = next(iter(position))  # where there are fewer than `most`, one of them fills the rest
            ids[row, : len(position)] = torch.tensor([*position])
            values[row, : len(position)] = torch.tensor([each.logprob for each in position.values()])
        return Outputs(0, values, ids)


def read_vllm(path: Path, limits: InputLimits, bos: frozenset[int]) -> LogitsFile:
    """Read the tokens of all lines, and check their log-probabilities. Raises UserError for a line of another form, which it names,
    and for more tokens than the limit.
    """
    tokens, starts, number, count = list[torch.Tensor](), list[int](), 0, 0
    with reading(path), open_regular(path) as file:
        while True:
            start, number = file.tell(), number + 1
            line = file.readline(_LONGEST_LINE + 1)
            if not line:
                break
            if len(line) > _LONGEST_LINE:
                raise UserError(f"{path}, line {number}: it has over {_LONGEST_LINE:,} bytes; give shorter sequences")
            if not line.strip():
                continue
            ids, _ = _decoded(f"{path}, line {number}", line)
            count += len(ids)
            limits.refuse_file("tokens", str(path), count)
            tokens.append(torch.tensor(ids))
            starts.append(start)
    return _VllmFile(path, tokens, starts)


def _decoded(where: str, line: bytes) -> tuple[list[int], list[dict[int, _LogProb]]]:
    """Return (the tokens, the log-probabilities after each token but the last). where: with which the message of the UserError
    begins that is raised for a line of another form.
    """
    try:
        read = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}: it is no JSON with vLLM's prompt_logprobs ({error})") from None
    read = read if read.prompt_logprobs is not None or not read.choices else read.choices[0]
    ids, found = read.prompt_token_ids, read.prompt_logprobs
    if ids is None or found is None:
        raise UserError(f"{where}: it needs prompt_token_ids and prompt_logprobs (vLLM's server: return_token_ids)")
    rest = [each for each in found[1:] if each]
    if len(ids) < 2 or len(found) != len(ids) or found[0] or len(rest) != len(ids) - 1:
        raise UserError(f"{where}: it needs null and then log-probabilities for each of at least 2 tokens")
    if not all(0 <= token < 1 << 31 for token in ids):
        raise UserError(f"{where}: it has token ids that no vocabulary has")
    for number, position in enumerate(rest, 2):
        _check(f"{where}, token {number}", position)
    return ids, rest


def _check(where: str, position: dict[int, Any]) -> None:
    """Raise UserError unless a position has the likeliest token, and probabilities whose sum is at most 1."""
    values = torch.tensor([each.logprob for each in position.values()], dtype=torch.float64)
    ranks = [each.rank for each in position.values() if each.rank is not None]
    if not all(0 <= token < 1 << 31 for token in position) or not float(values.exp().sum()) <= 1 + _MOST_OVER_1:
        raise UserError(f"{where}: its values are no log-probabilities of tokens")
    if ranks and min(ranks) != 1:
        raise UserError(f"{where}: it lacks the likeliest token; ask vLLM for prompt_logprobs=1 or more")
