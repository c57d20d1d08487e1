"""Measures, in separate passes, the weights whose effect on the output a scan can't estimate with gradients.

An effect is not followed if the model writes to the weight, reads its values in Python (and would read others after a cast), uses
it without gradients, or passes it to code whose operations no torch-function mode can intercept. In the first three cases,
`WeightOpRecorder.unfollowed` names the weight. In the last case, the weight has an estimate of 0, like a weight that the model does
not use. To find out which of these weights are used, one pass casts all of them, or as many as fit into memory. If the output
changes, further passes cast half of them, and so on.

Gradients also do not show an effect of weights whose operations have an output dtype that the model's code reads and computes in
elsewhere. A Llama, for example, computes the cosines and sines of positions (RoPE) in the dtype of the embeddings' output. These
few weights are measured in the 16-bit dtypes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.activations import ActivationRounding
from dtype_engine.runtime.modes.op_tables import Arguments
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.scan.local_errors import PRODUCTS, LocalErrors, summed_in_float32
from dtype_engine.runtime.scan.routing import Key
from dtype_engine.runtime.scan.weight_ops import ValueRead

MOST_PASSES = 128
"""Maximum number of passes over a sequence that measure single weights, each in one dtype."""
_MOST_READ = 2
"""At most this many weights are measured because the model's code reads the dtype of their operations' outputs: the first ones."""
_NOISE = 4.0
"""A drift is attributed to casts only if it is more than this many times as large as the drift of a pass without casts."""


class CastWeightsMode(ReferenceMode):
    """Runs the reference with some weights cast, like a candidate run of a recipe that casts only these weights.

    During the pass, the module's own tensors hold the cast values. Operations that no torch-function mode can intercept therefore
    use the cast values, too. If the model is larger than memory, its tensors stay placeholders, since passes run side by side.
    """

    def __init__(
        self, weights: Mapping[int, Weight], device: torch.device, cast: Mapping[str, str], errors: LocalErrors
    ) -> None:
        super().__init__(weights, device)
        self.errors = errors
        self._values: dict[int, torch.Tensor] = {}
        self._given: dict[int, str] = {}
        """The dtypes of the weights that are cast at each use, by the `id` of the weight's tensor."""
        changed = dict(weights)
        for key, weight in weights.items():
            if (dtype := cast.get(weight.info.name)) is not None:
                if weight.blockwise:
                    self._given[key] = dtype
                else:
                    self._values[key] = errors.cast(weight.info.name, dtype)
                changed[key] = dataclasses.replace(weight, dtype=dtype)
        self.weights = changed
        self.replaced -= self._values.keys()
        self.rounding = ActivationRounding() if errors.rounding is not None else None

    def __enter__(self) -> CastWeightsMode:
        for key, value in self._values.items():
            tensor = self.weights[key].tensor
            self._values[key], tensor.data = tensor.data, value
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for key, before in self._values.items():
            self.weights[key].tensor.data = before

    def is_quantized(self, weight: Weight) -> bool:
        cast = id(weight.tensor) in self._values or id(weight.tensor) in self._given
        return cast and weight.dtype in dtypes.STORAGE_DTYPES

    def dtype_of(self, weight: Weight) -> torch.dtype:
        given = self._given.get(id(weight.tensor))
        return super().dtype_of(weight) if given is None else self.errors.dtype_of(weight.info.name, given)

    def value_of(self, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
        given = self._given.get(id(weight.tensor))
        return super().value_of(weight, dtype) if given is None else self.errors.cast(weight.info.name, given)

    def rows_of(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        given = self._given.get(id(weight.tensor))
        return super().rows_of(weight, ids) if given is None else self.errors.look_up(weight.info.name, given, ids)

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        if self.device.type == "cpu" and name in PRODUCTS:
            func = summed_in_float32(func)
        return super().run(func, name, args, kwargs)


def measure_unfollowed(
    drift: Callable[[Mapping[str, str]], float],
    costly: Mapping[str, Sequence[str]],
    unfollowed: Collection[str],
    followed: Collection[str],
    errors: LocalErrors,
) -> dict[Key, float]:
    """Return the measured drift, by (weight, dtype), of the weights whose effect on the output the scan could not follow.

    drift: casts weights (a mapping from names to dtypes), runs a pass, and returns its drift. costly: the dtypes of each weight
    whose cast changes values. unfollowed: the weights that the model is known to use in a way that gradients do not follow.
    followed: the weights with an estimate that is not 0. errors: knows the weights' sizes, and how many bytes may be cast at once.
    Raises UserError if more than `MOST_PASSES` passes are needed.
    """
    found = [name for name in costly if name in unfollowed]
    unknown = [name for name in costly if costly[name] and name not in unfollowed and name not in followed]
    limit: list[float] = []

    def affect(names: Sequence[str]) -> bool:
        moved = drift({name: min(costly[name], key=_bits) for name in names})
        if moved and not limit:
            limit.append(_NOISE * drift({}))
        return bool(moved) and moved > limit[0]

    waiting = _groups(unknown, errors)
    while waiting:
        _check(found, costly)
        names = waiting.pop()
        if affect(names):
            middle = len(names) // 2
            found += names if len(names) == 1 else []
            waiting += [names[middle:], names[:middle]] if middle else []
    _check(found, costly)
    return {(name, dtype): drift({name: dtype}) for name in found for dtype in costly[name]}


def _bits(dtype: str) -> int:
    """Return the number of bits of an element in `dtype`. Another program's format counts as 64 bits, since it rounds little."""
    row = dtypes.BY_NAME.get(dtype)
    return 64 if row is None else row.bits


def weights_to_measure(
    read: Iterable[str], wanted: Mapping[str, Sequence[str]], sequence: int, sequences: int
) -> list[Key]:
    """Return the (weight, dtype) pairs to measure in the sequence with the index `sequence`. sequences: the number of all
    sequences. read: the weights of operations for which the model's code read the dtype of an output, in the order of the pass.
    wanted: the dtypes in which each weight is scored.

    If there are few sequences, each measures all n pairs. If there are many, sequences 0 to n - 1 measure one pair each, sequence n
    measures none, and this repeats. On average, there is then less than one pass per sequence.
    """
    few = [name for name in dict.fromkeys(read) if name in wanted][:_MOST_READ]
    keys = [(name, dtype) for name in few for dtype in wanted[name] if dtype in ("bfloat16", "float16")]
    if not keys or sequences < 2 * (len(keys) + 1):
        return keys
    turn = sequence % (len(keys) + 1)
    return keys[turn : turn + 1]


def read_otherwise(reads: Sequence[ValueRead], costly: Mapping[str, Sequence[str]], errors: LocalErrors) -> set[str]:
    """Return the names of the weights from which the model's code would read a different value after a cast. reads: the values that
    it has read. costly: the dtypes to which each weight is cast. errors: casts the weights.
    """
    found: set[str] = set()
    for read in reads:
        name = read.source[1].weight
        if name not in found and any(read.differs(errors.cast(name, dtype)) for dtype in costly.get(name, ())):
            found.add(name)
    return found


def _groups(names: Sequence[str], errors: LocalErrors) -> list[list[str]]:
    groups: list[list[str]] = []
    held = errors.budget
    for name in names:
        size = 4 * errors.weights[name].info.numel
        if held + size > errors.budget:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def _check(found: Sequence[str], costly: Mapping[str, Sequence[str]]) -> None:
    if sum(len(costly[name]) for name in found) > MOST_PASSES:
        raise UserError(
            f"more than {MOST_PASSES // max(map(len, costly.values()))} weights, such as {found[0]}, act on the output without "
            "a gradient, so the scan can't estimate their scores; scan --exact measures each weight"
        )
