"""Weights quantized by compressed-tensors, as llm-compressor writes it. In config.json, `config_groups` gives the settings of
groups of modules. `x` is a layer.

Integers of 1 to 8 bits are packed in the int32 words of `x.weight_packed`, along the row. The file stores each integer plus
2^(bits-1). Versions before 0.16 leave the last bits of a word unused if they do not suffice for an integer. Later versions pack
without gaps. `x.weight_shape` holds the weight's shape. Zero points are packed in the same way, but along the first dimension.
`x.weight_g_idx` holds the group of each column.

Floats of 4 or 6 bits are packed in the bytes of `x.weight_packed`, and each group has a scale. With NVFP4, these scales are divided
by `x.weight_global_scale`. AutoRound's format `nvfp4-e5m3-pack-quantized` has groups of 16 like NVFP4, but no scale of the tensor.
Its scales are bytes without a sign: 5 bits of exponent with the bias 15, and 3 bits of mantissa. They may be stored as one column
with a row for each group.

float8 and int8 codes are in `x.weight`. The formats in `_UNREAD` are not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import (
    block_in,
    config_groups,
    declared,
    is_target,
    mapping,
    size,
    sizes,
    targets_of,
)
from dtype_engine.checkpoint.schemes.layout import (
    BYTES,
    FLOAT8,
    LOW_RANK,
    WORDS,
    Config,
    Layout,
    PackedWeight,
    Shapes,
    Tensors,
)
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, FLOATS, FP8, describe, same_grid, with_beside
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Declared, Metadata, Scheme, Weights
from dtype_engine.checkpoint.schemes.small_tensors import read_small

_UNREAD = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")
_INTEGERS = {"int32": "i", "int64": "q"}
_E5M3_GROUP = 16
"""The columns that share a scale in AutoRound's variant of NVFP4."""
_INPUTS = {
    (8, "float", "token", None): "float8_e4m3fn", (8, "int", "token", None): "int8", (8, "float", "group", 128): "fp8@128x128",
    (8, "float", "tensor", None): "float8_e4m3fn@tensor", (8, "int", "tensor", None): "int8@tensor",
    (8, "float", "group", 32): "mxfp8", (4, "float", "group", 32): "mxfp4", (4, "float", "tensor_group", 16): "nvfp4",
}  # fmt: skip
"""Maps (bits, type, strategy, group size) of `input_activations` to a format of `core.dtypes`."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    settings = declared(config)
    groups = settings.get("config_groups")
    if settings.get("quant_method") not in ("compressed-tensors", None) or not isinstance(groups, Mapping):
        return
    if _transforms_inputs(settings.get("transform_config")):
        return
    for scale in tensors:
        if not scale.endswith("weight_scale"):
            continue
        name = scale.removesuffix("_scale")
        zero = f"{name}_zero_point" in tensors
        arguments_of = _arguments(name.rpartition(".")[0], groups, settings.get("format"))
        tried = sorted(arguments_of, key=lambda each: (each.get("symmetric") is False) != zero)
        weights = (read_weight(name, arguments, tensors) for arguments in tried)
        yield next((weight for weight in weights if weight is not None), None)


def _transforms_inputs(transforms: object) -> bool:
    """Return whether the setting `transform_config` also changes inputs or outputs of layers, for example by a rotation."""
    places = [mapping(group).get("apply") for group in mapping(mapping(transforms).get("config_groups")).values()]
    uses = (use for place in places for use in (place if isinstance(place, list) else [place]))
    return any(isinstance(use, Mapping) and not str(use.get("location")).startswith("weight") for use in uses)


def _arguments(module: str, groups: Mapping[str, Any], usual: object) -> list[Mapping[str, Any]]:
    """Return the `weights` settings that may apply to a module, in the order in which to try them. They are those of the groups in
    `config_groups` that name the module. If no group names it, the settings of all groups are returned, because the headers of the
    files do not tell a module's class. Groups that name a class, such as "Linear", come first.

    usual: the format of groups that do not declare one.
    """
    named: list[Mapping[str, Any]] = []
    of_classes: list[Mapping[str, Any]] = []
    others: list[Mapping[str, Any]] = []
    for group in map(mapping, groups.values()):
        arguments, targets = group.get("weights"), targets_of(group)
        if not isinstance(arguments, Mapping) or (group.get("format") or usual) in _UNREAD:
            continue
        if is_target(targets, module):
            named.append(arguments)
        elif any(isinstance(target, str) and target.isidentifier() for target in targets):
            of_classes.append(arguments)
        else:
            others.append(arguments)
    return named or of_classes + others


def read_weight(name: str, arguments: Mapping[str, Any], tensors: Tensors) -> CodedWeight | None:
    """Return the weight `name`, which has a tensor of scales, as `arguments`, the settings under `weights` of a group, describe it,
    or None if its tensors do not fit them.
    """
    block = _block(arguments)
    if block is None:
        return None
    packed = tensors.get(f"{name}_packed")
    if packed is not None and packed.dtype == "int32":
        return _read_words(name, packed, arguments, block, tensors)
    if packed is not None:
        return _read_small_floats(name, packed, arguments, block, tensors)
    codes, scale = tensors.get(name), tensors[f"{name}_scale"]
    if codes is None or codes.dtype not in ((*FP8,) if arguments.get("type") == "float" else ("int8",)):
        return None
    parts: dict[str, CheckpointTensor | None] = {CODES: codes, "scale": scale}
    kind = FP8.get(codes.dtype) or f"int{size(arguments.get('num_bits')) or 8}"
    if scale.dtype in EXPONENTS:
        kind = "mxfp8"
    zero = tensors.get(f"{name}_zero_point")
    if arguments.get("symmetric") is False and codes.dtype == "int8":
        if zero is None or zero.dtype != "int8" or not same_grid(zero.shape, scale.shape):
            return None
        parts["zero_point"], zero, kind = zero, None, f"u{kind}"
    scales = (*FLOATS, *(EXPONENTS if block == (1, 32) else ()))
    return with_beside(describe(name, SCHEME, kind, codes.shape, block, parts, scales=scales), zero)


def _read_words(
    name: str, packed: CheckpointTensor, arguments: Mapping[str, Any], block: tuple[int, int] | str, tensors: Tensors
) -> CodedWeight | None:
    bits, held = size(arguments.get("num_bits")), tensors.get(f"{name}_shape")
    if bits is None or bits > 8 or arguments.get("type") != "int" or held is None or held.dtype not in _INTEGERS:
        return None
    if held.shape != (len(packed.shape),):
        return None
    shape = struct.unpack(f"<{prod(held.shape)}{_INTEGERS[held.dtype]}", read_small(held))
    if len(shape) < 2 or packed.shape[:-1] != shape[:-1] or min(shape) < 1:
        return None
    dense = packed.shape[-1] == -(-shape[-1] * bits // 32)
    if not dense and packed.shape[-1] != -(-shape[-1] // (32 // bits)):
        return None
    scale, index, zero = tensors[f"{name}_scale"], tensors.get(f"{name}_g_idx"), tensors.get(f"{name}_zero_point")
    parts: dict[str, CheckpointTensor | None] = {CODES: packed, "scale": scale}
    beside = []
    if arguments.get("symmetric") is False:
        rows = -(-shape[-2] * bits // 32) if dense else -(-shape[-2] // (32 // bits))
        in_words = zero is not None and zero.dtype == "int32" and zero.shape == (*shape[:-2], rows, *scale.shape[-1:])
        in_bytes = zero is not None and zero.dtype == "int8" and same_grid(zero.shape, scale.shape)
        if not (in_words or in_bytes):
            return None
        parts["zero_point"] = zero
    elif zero is not None:
        beside.append(zero)
    if index is None and block != "channel" and arguments.get("actorder") in ("group", "dynamic"):
        return None
    if index is not None and block != "channel":
        if len(shape) != 2 or index.dtype not in _INTEGERS or index.shape != shape[1:]:
            return None
        groups = set(struct.unpack(f"<{shape[1]}{_INTEGERS[index.dtype]}", read_small(index)))
        if groups == {-1}:  # not set: each group consists of successive columns
            beside.append(index)
        elif min(groups) >= 0 and scale.shape and max(groups) < scale.shape[-1]:
            parts["columns"] = index
        else:
            return None
    settings = {"code": "words", "bits": bits, "dense": dense}
    kind = f"{'uint' if 'zero_point' in parts else 'int'}{bits}"
    return with_beside(describe(name, SCHEME, kind, shape, block, parts, settings=settings), held, *beside)


def _read_small_floats(
    name: str, packed: CheckpointTensor, arguments: Mapping[str, Any], block: tuple[int, int] | str, tensors: Tensors
) -> CodedWeight | None:
    bits = size(arguments.get("num_bits"))
    if packed.dtype != "uint8" or arguments.get("type") != "float" or bits not in (4, 6) or not packed.shape:
        return None
    shape = (*packed.shape[:-1], packed.shape[-1] * 8 // bits)
    parts: dict[str, CheckpointTensor | None] = {CODES: packed, "scale": tensors[f"{name}_scale"]}
    settings: dict[str, Any] = {"code": "e2m1"}
    if bits == 6:
        settings = {"code": "six bits", "element": "mxfp6_e2m3"}
        if shape[-1] % 16:
            return None
        return describe(name, SCHEME, "mxfp6_e2m3", shape, block, parts, scales=EXPONENTS, settings=settings)
    if block == (1, 32):
        return describe(name, SCHEME, "mxfp4", shape, block, parts, scales=EXPONENTS, settings=settings)
    if tensors[f"{name}_scale"].dtype == "uint8":
        return _read_e5m3(name, shape, block, parts, tensors)
    parts["tensor_scale"] = tensors.get(f"{name}_global_scale")
    settings["divide"] = True
    return describe(name, SCHEME, "nvfp4", shape, block, parts, scales=("float8_e4m3fn",), settings=settings)


def _read_e5m3(
    name: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | str,
    parts: dict[str, CheckpointTensor | None],
    tensors: Tensors,
) -> CodedWeight | None:
    scale = tensors[f"{name}_scale"]
    if block != (1, _E5M3_GROUP) or f"{name}_global_scale" in tensors:
        return None
    grid = (*shape[:-1], -(-shape[-1] // _E5M3_GROUP))
    if scale.shape == (prod(grid), 1):
        parts = {**parts, "scale": replace(scale, shape=grid)}
    settings = {"code": "e2m1", "scale_code": "ue5m3"}
    return describe(name, SCHEME, "nvfp4_e5m3", shape, block, parts, scales=("uint8",), settings=settings)


def _block(arguments: Mapping[str, Any]) -> tuple[int, int] | str | None:
    """Return what shares a scale: a block (rows, columns), "channel" for a row, or "tensor" for all. None if it is not declared."""
    strategy, group = arguments.get("strategy"), arguments.get("group_size")
    if strategy is None:
        strategy = "channel" if group == -1 else "tensor" if group is None else "group"
    if strategy in ("tensor", "channel"):
        return str(strategy)
    if strategy == "block":
        return sizes(arguments.get("block_structure"))
    columns = size(group)
    return (1, columns) if strategy in ("group", "tensor_group") and columns is not None else None


def _input_format(weight: CodedWeight, settings: Config) -> str:
    """Return the format to which runtimes round the layer's inputs, or "" (see `Scheme.input_format`). It is the format of the
    group in `config_groups` that names the module or, if no group does, of the first group with a format.
    """
    module, of_class = weight.name.rpartition(".")[0], ""
    if weight.settings.get("scale_code") == "ue5m3":  # inputs get such scales, too, and no format here has them
        return ""
    for targets, arguments in config_groups(settings, "input_activations"):
        form = _of_arguments(arguments) if targets else ""
        if is_target(targets, module):
            return form
        of_class = of_class or form
    return of_class


def _of_arguments(arguments: Mapping[str, Any]) -> str:
    dynamic = (False,) if arguments.get("strategy") == "tensor" else (True, "local")
    if arguments.get("dynamic") not in dynamic or arguments.get("symmetric") is False:
        return ""
    key = tuple(arguments.get(name) for name in ("num_bits", "type", "strategy", "group_size"))
    return next((form for wanted, form in _INPUTS.items() if wanted == key), "")


def _needs_codes(settings: Config) -> bool:
    plain = str(settings.get("format") or "dense").startswith(("dense", "fake"))
    declared_here = settings.get("quant_method") == "compressed-tensors" and not plain
    return declared_here and any(weights for _, weights in config_groups(settings, "weights"))


def _zero_points(weight: CodedWeight, settings: Config) -> tuple[CheckpointTensor, bytes] | None:
    """Return (zero points, the byte that they must be) if int8 codes are symmetric, otherwise None. The byte is 0."""
    zero = next((part for part in weight.beside if part.name.endswith("weight_zero_point")), None)
    symmetric = all(group.get("symmetric") is True for _, group in config_groups(settings, "weights"))
    return (zero, b"\0") if zero is not None and zero.dtype == "int8" and symmetric else None


def _cache_formats(settings: Config) -> tuple[tuple[str, str, str], ...]:
    scheme = mapping(settings.get("kv_cache_scheme"))
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    if not isinstance(bits, int) or not isinstance(kind, str):
        return ()
    if (bits, kind) != (8, "float"):
        return (("", "", f"{kind}{bits}"),)
    by_head = scheme.get("strategy") == "attn_head"
    form = "fp8@token" if scheme.get("dynamic") is True else "fp8@head" if by_head else "float8_e4m3fn@tensor"
    return (("", "", form),)


def _in_nvfp4(codes: CheckpointTensor, scale: CheckpointTensor) -> bool:
    return (codes.dtype, scale.dtype) == ("uint8", "float8_e4m3fn")


def _packed_scale_shapes(weight: PackedWeight, tensors: Tensors, config: Config) -> Shapes:
    codes, scale = tensors[weight.codes], tensors[weight.scale]
    if len(codes.shape) < 2:
        return ()
    *rows, columns = codes.shape
    if _in_nvfp4(codes, scale):
        return ((*rows, -(-2 * columns // 16)),)
    if codes.dtype == "uint8":  # values of four bits, or of six
        shapes = [(*rows, -(-values // 32)) for values in (2 * columns, 4 * columns // 3)]
        groups = (weights.get("group_size") for _, weights in config_groups(declared(config), "weights"))
        if scale.dtype == "uint8" and _E5M3_GROUP in groups:
            grid = (*rows, -(-2 * columns // _E5M3_GROUP))
            shapes += [grid, (prod(grid), 1)]
        return tuple(shapes)
    counts = {-(-(32 * columns // bits) // size) if size and size > 0 else 1 for bits, size in _integers(config)}
    return tuple((*rows, count) for count in sorted(counts)) or ((*rows, scale.shape[-1] if scale.shape else 1),)


def _integers(config: Config) -> Iterator[tuple[int, int | None]]:
    """Yield (bits per value, declared group size or None) for each way in which `config` says that integer weights are packed."""
    for _, weights in config_groups(declared(config), "weights"):
        bits, columns = weights.get("num_bits"), weights.get("group_size")
        if weights.get("type", "int") == "int" and isinstance(bits, int) and 0 < bits <= 8:
            yield bits, columns if isinstance(columns, int) else None


def _scale_shapes(weight: PackedWeight, tensors: Tensors, config: Config) -> Shapes:
    codes, scale = tensors[weight.codes], tensors[weight.scale]
    if len(codes.shape) < 2:
        return ()
    *front, rows, columns = codes.shape
    if codes.dtype == "uint8":  # NVFP4, MXFP4, or integers of a program that only its configuration tells
        width = {"float8_e4m3fn": 16, "uint8": 32}.get(scale.dtype)
        return () if width is None else ((*front, rows, 2 * columns // width),)
    if scale.dtype == "uint8":
        return ((*front, rows, -(-columns // 32)),)
    if weight.part("_offset") in tensors and scale.shape[-1:] > (0,) and columns % scale.shape[-1] == 0:
        return ((*front, rows, scale.shape[-1]),)  # msModelSlim's groups, whose size only another file tells
    height, width = block_in(config)
    blocks = (*front, -(-rows // height), -(-columns // width))
    return ((*front, rows, 1), (), (1,), (rows,), (*front, 1, 1), blocks)


_PACKED = Layout(
    "packed by compressed-tensors", "_packed", "_scale", BYTES | WORDS,
    ("_shape", "_zero_point", "_g_idx", "_global_scale"), ("input_global_scale",), alone=("weight_packed",),
    orphans=("weight_global_scale",), fused_scale="_global_scale", exponents=True,
    required=lambda codes, scale: ("_shape",) if codes.dtype == "int32" else ("_global_scale",) if _in_nvfp4(codes, scale) else (),
    scale_shapes=_packed_scale_shapes, part_shapes=lambda *_: {"_shape": (2,), "_global_scale": (1,)},
)  # fmt: skip
SCALED = Layout(
    "quantized with scales (compressed-tensors)", "", "_scale", FLOAT8 | BYTES | {"int32"},
    ("_zero_point", "_scale_2", "_offset", "_shape"),
    ("input_scale", "output_scale", "input_zero_point", "input_offset", "pre_quant_scale", "deq_scale", "quant_bias",
     *(f"{begin}{end}" for begin in LOW_RANK for end in "ab")),
    orphans=("weight_scale", "weight_scale_2"), fused_scale="_scale_2", exponents=True, scale_shapes=_scale_shapes,
    required=lambda codes, scale: ("_scale_2",) if _in_nvfp4(codes, scale) else (),
)  # fmt: skip
"""The layout of weights that are not packed, also of ModelOpt and Quark."""
_SPARSE = Layout(
    "sparse (compressed-tensors)", "compressed", "bitmask", frozenset({"bfloat16", "float16", "float32", *FLOAT8}),
    ("shape", "row_offsets", "scale"), ("weight_scale",),
)  # fmt: skip
SCHEME = Scheme(
    "ct", "block_scaled", _read, (_PACKED, SCALED, _SPARSE), describing=("_shape", "_g_idx"), input_format=_input_format,
    reciprocal_scales=True, ignored=("ignore",), ignored_by=("compressed-tensors",), cache_formats=_cache_formats,
    declared=Declared(needs_codes=_needs_codes, zero_points=_zero_points),
)  # fmt: skip
