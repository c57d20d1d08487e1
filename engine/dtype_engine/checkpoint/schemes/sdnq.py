"""Weights quantized by SDNQ (SD.Next), also with SVDQuant, for models of transformers and diffusers. `x` is a layer.

`x.weight` holds codes, and `x.scale` [out, groups, 1], or [out, 1] if a row is one group, holds a scale for each group. Unsigned
integers also have `x.zero_point`, which is added to the product of code and scale. Codes of fewer than 8 bits are packed in bytes
(see `_PACKED` in `runtime/formats/schemes/sdnq.py`): signed integers plus 2^(bits-1), floats as their bits. Codes of 8 bits may be
stored transposed, and their scales then are [1, out].

With SVDQuant, the product of `x.svd_up` [out, rank] and `x.svd_down` [rank, in] is added. They may be transposed, too. If
`use_hadamard` is declared, each group of columns of the sum was multiplied by a Hadamard matrix, which is its own inverse.

config.json gives the type of codes (`weights_dtype`), and other types for modules: by name in `modules_dtype_dict`, with all
settings in `modules_quant_config`. Codebooks, quantized scales, convolutions, and codes of 1 bit or of more than 8 are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import block_name, declared, mapping, quant_method, size
from dtype_engine.checkpoint.schemes.layout import Config, Layout, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import FLOATS
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights
from dtype_engine.core.errors import PatternError, TooSlow
from dtype_engine.core.regexes import limited

_INTEGER = re.compile(r"(u?)int([2-8])")
_FLOAT = re.compile(r"float([2-8])_e([1-6])m([0-6])fn(?:_sdnq)?")
_NAMES = {
    "fp8": "float8_e4m3fn", "fp7": "float7_e3m3fn", "fp6": "float6_e3m2fn",
    "fp5": "float5_e2m2fn", "fp4": "float4_e2m1fn", "fp3": "float3_e1m1fn", "fp2": "float2_e1m0fn",
}  # fmt: skip
"""Other names of types of codes."""
_PLAIN = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
"""Types that torch has, too. They are not packed."""
_AT_LEAST = re.compile(r"(?:minimum[-_]?)?(u?int|)(\d+)[-_]?(?:bits?)?")
_ROTATION = 256
"""The columns of a Hadamard matrix if config.json declares no other number."""
_CHANGES = ("scale_2", "scale_zero_point", "zero_point_scale", "zero_point_2")
"""Tensors of scales that are quantized themselves."""


class _Type(msgspec.Struct, frozen=True):
    """A type of codes."""

    name: str
    """Its short name in formats, such as "uint4"."""
    bits: int
    dtypes: tuple[str, ...]
    """The dtypes that codes may have in files."""
    unsigned: bool = False
    """Whether values have a zero point."""
    exponent: int | None = None
    """The bits of the exponent if codes are floats that torch does not have, otherwise None."""


def _type(name: str) -> _Type | None:
    """Return a type by the name that SDNQ gives it, or None if its weights are not read."""
    name = _NAMES.get(name, name)
    if name in _PLAIN:
        return _Type(_PLAIN[name], 8, (name,))
    if match := _INTEGER.fullmatch(name):
        bits, unsigned = int(match[2]), match[1] == "u"
        return _Type(name, bits, ("int8",) if (bits, unsigned) == (8, False) else ("uint8",), unsigned)
    match = _FLOAT.fullmatch(name)
    if match is None or int(match[1]) != 1 + int(match[2]) + int(match[3]):
        return None
    return _Type(f"e{match[2]}m{match[3]}", int(match[1]), ("uint8",), exponent=int(match[2]))


class _Entries:
    """Finds the first entry of a list of SDNQ's settings that applies to a weight: its name, a part of its name between dots, a
    pattern with `*`, or the beginning of its name after a dot (SDNQ, `utils.check_param_name_in`).
    """

    def __init__(self, entries: Iterable[object]) -> None:
        self._places: dict[str, int] = {}
        self._others: list[tuple[int, Callable[[str], bool]]] = []
        self._entries = [entry for entry in entries if isinstance(entry, str)]
        for place, entry in enumerate(self._entries):
            if entry.startswith("."):
                pattern = re.escape(entry[1:])
            elif "*" in entry:
                pattern = ".*".join(map(re.escape, entry.split("*")))
            else:
                self._places.setdefault(entry, place)
                continue
            try:
                self._others.append((place, limited(pattern, entry, "match")))
            except TooSlow:
                raise
            except PatternError:
                continue

    def of(self, name: str) -> str | None:
        """Return the first entry that applies to the weight `name`, or None. Raises TooSlow."""
        found = [self._places[part] for part in (name, *name.split(".")) if part in self._places]
        found += [place for place, matches in self._others if matches(name)]
        return self._entries[min(found)] if found else None


class _Settings:
    """The quantization settings in config.json, which may differ between modules."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._modules = mapping(settings.get("modules_quant_config"))
        self._keys = _Entries(self._modules)
        types = mapping(settings.get("modules_dtype_dict"))
        self._types = [(str(key).lower(), _Entries(names)) for key, names in types.items() if isinstance(names, list)]

    def of(self, name: str) -> Config:
        """Return the settings of the weight `name`. Raises TooSlow."""
        key = self._keys.of(name)
        own = {**self._settings, **(mapping(self._modules[key]) if key is not None else {})}
        for kind, names in self._types:
            if names.of(name) is not None:
                own["weights_dtype"] = _of_module(str(own.get("weights_dtype")), kind)
                break
        return own


def _of_module(usual: str, kind: str) -> str:
    """Return the type that a key of `modules_dtype_dict` gives to a weight. usual: its type otherwise. kind: a type, or the least
    number of bits, such as "minimum_6bit".
    """
    match = _AT_LEAST.fullmatch(kind)
    if match is None or not (kind.startswith("minimum") or kind.endswith(("bit", "bits"))):
        return kind
    known = _type(usual)
    if known is None or known.bits >= int(match[2]):
        return usual
    return f"uint{match[2]}" if match[1] == "uint" or int(match[2]) <= 4 else f"int{match[2]}"


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    declared_settings = declared(config)
    if quant_method(declared_settings) != SCHEME.name:
        return
    settings = _Settings(declared_settings)
    for name in tensors:
        module = name.removesuffix(".scale")
        if module != name and f"{module}.weight" in tensors:
            yield _weight(module, settings.of(f"{module}.weight"), tensors)


def _weight(module: str, settings: Config, tensors: Tensors) -> CodedWeight | None:
    kind = _type(str(settings.get("weights_dtype")))
    codes, scale, zero = (tensors.get(f"{module}.{end}") for end in ("weight", "scale", "zero_point"))
    if kind is None or codes is None or scale is None or codes.dtype not in kind.dtypes or scale.dtype not in FLOATS:
        return None
    if settings.get("use_codebook") or any(f"{module}.{end}" in tensors for end in _CHANGES):
        return None
    if (zero is not None) != kind.unsigned or (
        zero is not None and (zero.shape, zero.dtype) != (scale.shape, scale.dtype)
    ):
        return None
    transposed = kind.bits == 8 and len(codes.shape) == 2 and scale.shape == (1, codes.shape[1]) and codes.shape[1] > 1
    shape = codes.shape[::-1] if transposed else _shape(kind, codes, scale)
    if shape is None or not math.prod(shape):
        return None
    rows, columns = shape
    own = {"bits": kind.bits, "exponent": kind.exponent, "unsigned": kind.unsigned, "transposed": transposed}
    parts = {CODES: codes, "scale": scale} | ({} if zero is None else {"zero": zero})
    matrices = [tensors[f"{module}.svd_{end}"] for end in ("up", "down") if f"{module}.svd_{end}" in tensors]
    if matrices:
        if (turned := _turned(matrices, shape)) is None:
            return None
        own["low_rank_transposed"] = turned
        parts |= dict(zip(("up", "down"), matrices, strict=True))
    if settings.get("use_hadamard") and (rotation := _rotation(columns, settings.get("hadamard_group_size"))):
        own["rotation"] = rotation
    block = block_name(columns * rows // math.prod(scale.shape), columns)
    form = f"{SCHEME.name}:{'rotated_' * ('rotation' in own)}{kind.name}{'_svd' * bool(matrices)}@{block}"
    return CodedWeight(f"{module}.weight", shape, SCHEME, form, parts, own)


def _shape(kind: _Type, codes: CheckpointTensor, scale: CheckpointTensor) -> tuple[int, int] | None:
    """Return the (rows, columns) of a weight that is not transposed, or None if its tensors do not fit together."""
    if len(scale.shape) not in (2, 3) or scale.shape[-1] != 1 or not math.prod(scale.shape):
        return None
    rows, groups = scale.shape[0], math.prod(scale.shape[1:])
    values = codes.nbytes * 8 // kind.bits
    if kind.bits == 8 and kind.exponent is None:
        fits = codes.shape in ((rows, values // rows), (rows, groups, values // (rows * groups)))
    else:
        run = kind.bits // math.gcd(kind.bits, 2)  # the bytes that hold whole codes
        fits = codes.shape[1:] == ((run,) if run > 2 else ()) or kind.bits == 8
    columns = values // rows
    return (rows, columns) if fits and values == rows * columns and not columns % groups else None


def _turned(matrices: list[CheckpointTensor], shape: tuple[int, ...]) -> bool | None:
    """Return whether the two matrices whose product is added are transposed, or None if they do not fit the weight, or fit in both
    ways.
    """
    if len(matrices) != 2 or not {part.dtype for part in matrices} <= {*FLOATS}:
        return None
    up, down = (part.shape for part in matrices)
    fits = [
        len(up) == len(down) == 2 and (up[:1], down[1:], up[1:]) == (shape[:1], shape[1:], down[:1])
        for up, down in ((up, down), (up[::-1], down[::-1]))
    ]
    return fits[1] if fits[0] != fits[1] else None


def _rotation(columns: int, declared_size: Any) -> int:
    """Return the columns of a group that is rotated together, or 0 if the weight is not rotated (SDNQ,
    `quant_utils.get_hadamard_group_size`).
    """
    wide = min(columns, size(declared_size) or _ROTATION)
    wide = 1 << (wide - 1).bit_length()
    while columns % wide:
        wide //= 2
    return wide if wide >= 4 else 0


_LAYOUT = Layout(
    "packed in bytes with scales (SDNQ)", "weight", "scale", frozenset({"uint8"}), ("zero_point", "svd_up", "svd_down", *_CHANGES),
    proofs=("zero_point", "svd_up"), several=True,
)  # fmt: skip
SCHEME = Scheme("sdnq", "sdnq", _read, (_LAYOUT,), fused=False)
