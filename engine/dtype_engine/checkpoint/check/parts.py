"""Checks that each quantized weight has all its parts (codes, scales, zero points, ...), and that their shapes fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dtype_engine.checkpoint.packed_weights import (
    BLOCK_SCALED,
    BNB_4BIT,
    BNB_8BIT,
    COMFY,
    COMPRESSED,
    DEEPSEEK_V4,
    GPT_OSS,
    GPTQ,
    HQQ,
    MLX,
    QUANTO,
    QUANTO_BITS,
    SCALED,
    TORCHAO,
    Layout,
    PackedWeight,
    names_of_parts,
    packed_weights,
)
from dtype_engine.checkpoint.parameter_counts import integer_schemes
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes import comfy, mlx
from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.results.check import Finding

Tensors = Mapping[str, CheckpointTensor]
Shape = tuple[int, ...]

_ORPHANS = {
    "_scale_inv": "", "weight_scale": "weight", "weight_scale_2": "weight", "weight_global_scale": "weight_packed",
    ".absmax": "", ".SCB": ".weight", ".qzeros": ".qweight", "._weight_scale": "._weight_qdata",
    "weight._scale": "weight._data", ".scale_weight": ".weight", "_proj_scales": "_proj_blocks",
}  # fmt: skip
"""Maps the suffix of scales or zero points to the suffix of the codes that they belong to. For example, `x.qzeros` belongs to the
codes `x.qweight`.
"""
_BNB_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def find_unpaired(tensors: Tensors, weights: list[PackedWeight], parts: set[str]) -> Iterator[Finding]:
    """Yield a finding for each tensor of quantized codes that lacks its scales or another required tensor, and for each tensor of
    scales that lacks its codes.

    tensors: all tensors of the checkpoint, by name. weights: the weights that have codes and scales. parts: the names of all
    tensors that belong to these weights.
    """
    for weight in weights:
        for suffix in _required_suffixes(weight, tensors):
            if weight.part(suffix) not in tensors:
                yield _finding("missing-part", weight.codes, tensors, f"has no {printable(weight.part(suffix))}")
    usual = Counter((tensors[weight.codes].dtype, weight.layout) for weight in weights)
    by_dtype: dict[str, Layout] = {}
    for (dtype, layout), _ in usual.most_common():
        if (
            dtype not in dtypes.COMPUTE_DTYPES
        ):  # bitsandbytes can store the bytes of codes as bfloat16, beside plain weights
            by_dtype.setdefault(dtype, layout)
    lost: set[str] = set()
    for name, tensor in tensors.items():
        if name in parts:
            continue
        usual_layout = by_dtype.get(tensor.dtype) if len(tensor.shape) > 1 else None
        codes = _layout_of_codes(name, tensor, tensors) or usual_layout
        if codes is None or not name.endswith(codes.codes or ".weight"):
            continue
        scale = name[: len(name) - len(codes.codes)] + codes.scale
        if scale not in tensors:
            lost.add(name)
            yield _finding("missing-part", name, tensors, f"holds {tensor.dtype} codes and has no {printable(scale)}")
    reported = {name.rpartition(".")[0] for name in lost}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        if name in parts or module in reported:
            continue
        end = next((end for end in _ORPHANS if name.endswith(end)), None)
        if end is not None:
            codes_name = name.removesuffix(end) + _ORPHANS[end]
            held = f"{tensors[codes_name].dtype} and no codes" if codes_name in tensors else "not there"
            yield _finding("orphan-part", name, tensors, f"belongs to {printable(codes_name)}, which is {held}")
            reported.add(module)
        elif tensor.dtype == "float8_e8m0fnu":
            yield _finding("orphan-part", name, tensors, "holds exponents of two (E8M0) and belongs to no codes")
            reported.add(module)


def unpaired_sentences(tensors: Tensors) -> tuple[str, ...]:
    """Return a tuple of one sentence for the user if tensors of quantized weights are missing, otherwise (). The sentence names the
    first incomplete weight, what it lacks (such as the scales of its codes), and how many more problems there are.
    """
    weights = packed_weights(tensors)
    found = list(find_unpaired(tensors, weights, names_of_parts(weights, tensors)))
    more = f" (and {len(found) - 1} more, which `dtype-engine check` lists)" if len(found) > 1 else ""
    return (f"{printable(found[0].tensor)} {found[0].what}{more}",) if found else ()


def _required_suffixes(weight: PackedWeight, tensors: Tensors) -> tuple[str, ...]:
    """Return the suffixes of the tensors that a weight requires in addition to its codes and scales, such as zero points. tensors:
    all tensors of the checkpoint, by name; the dtypes of the codes and scales decide what the weight requires.
    """
    codes, scale = tensors[weight.codes], tensors[weight.scale]
    nvfp4 = codes.dtype == "uint8" and scale.dtype == "float8_e4m3fn"
    if weight.layout is COMPRESSED:
        return ("_shape",) if codes.dtype == "int32" else ("_global_scale",) if nvfp4 else ()
    if weight.layout is SCALED:
        return ("_scale_2",) if nvfp4 else ()
    if weight.layout is GPTQ:
        return () if codes.dtype == "int16" else ("qzeros",)  # AWQ's "gemv_fast" may name the zero points otherwise
    if weight.layout is BNB_4BIT:
        return (".quant_map", *((".nested_absmax", ".nested_quant_map") if scale.dtype == "uint8" else ()))
    return ()


def _layout_of_codes(name: str, tensor: CheckpointTensor, tensors: Tensors) -> Layout | None:
    """If the tensor's name and dtype, or the other tensors of its weight, prove that it holds codes, return its quantization
    layout, such as GPTQ; otherwise None. This recognizes codes even if their scales are missing.
    """
    if tensor.dtype in BNB_4BIT.dtypes and any(name + suffix in tensors for suffix in BNB_4BIT.more):
        return BNB_4BIT
    return next(
        (
            layout
            for layout in (COMPRESSED, GPTQ, HQQ, TORCHAO, QUANTO_BITS, QUANTO, GPT_OSS)
            if name.endswith(layout.codes) and tensor.dtype in layout.dtypes
        ),
        None,
    )


def find_misshapen(tensors: Tensors, weights: list[PackedWeight], config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each tensor of a quantized weight, such as its scales or zero points, whose shape does not match that of
    the weight's codes. tensors: all tensors of the checkpoint, by name. weights: the weights that have codes and scales. config:
    the content of config.json.
    """
    for weight in weights:
        codes, scale = tensors[weight.codes], tensors[weight.scale]
        expected = _scale_shapes(weight, codes.shape, scale.shape, tensors, config)
        if expected and scale.shape not in expected:
            wanted = " or ".join(str(list(shape)) for shape in expected[:3])
            what = f"is {list(scale.shape)}, where the codes {list(codes.shape)} ask for {wanted}"
            yield _finding("part-shape", weight.scale, tensors, what)
        for suffix, shape in _other_shapes(weight, codes.shape, scale.shape):
            part = tensors.get(weight.part(suffix))
            if part is not None and part.shape != shape:
                what = f"is {list(part.shape)}, where its weight asks for {list(shape)}"
                yield _finding("part-shape", part.name, tensors, what)


def find_unread(
    tensors: Tensors, weights: list[PackedWeight], read: set[str], reported: set[str], metadata: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield a finding for each quantized weight that could not be read although other weights of the same layout and dtype could. A
    weight of ComfyUI that is described as being in an unsupported format gives no finding.

    weights: the weights that have codes and scales. read: the names of the codes of all weights that could be read. reported: names
    of modules that already have a finding. metadata: the metadata of the files' headers.
    """
    kinds = {(weight.layout, tensors[weight.codes].dtype) for weight in weights if weight.codes in read}
    known = comfy.in_other_formats((weight.codes for weight in weights if weight.codes not in read), tensors, metadata)
    for weight in weights:
        module = weight.codes.rpartition(".")[0]
        if weight.codes in read or module in reported or weight.codes in known:
            continue
        if (weight.layout, tensors[weight.codes].dtype) in kinds:
            what = "belongs to a weight whose tensors do not fit together as the configuration declares"
            yield _finding("part-shape", weight.scale, tensors, what)


def _declared_block(config: Mapping[str, Any]) -> tuple[int, int]:
    declared = config.get("quantization_config")
    declared = declared if isinstance(declared, Mapping) else {}
    found = declared.get("weight_block_size")
    groups = declared.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("block_structure"):
            found = weights["block_structure"]
    if isinstance(found, list) and len(found) == 2 and all(type(size) is int and size > 0 for size in found):
        return found[0], found[1]
    return 128, 128


def _scale_shapes(
    weight: PackedWeight, codes: Shape, scale: Shape, tensors: Tensors, config: Mapping[str, Any]
) -> tuple[Shape, ...]:
    """Return all shapes that the scales of a quantized weight may have, or () if the weight's quantization layout does not
    determine them. codes, scale: the shapes that the codes and the scales have in the file. tensors: all tensors of the checkpoint,
    by name. config: the content of config.json, which may give the block size.
    """
    if f"{weight.stem.rpartition('.')[0]}.comfy_quant" in tensors:
        return ()  # these are in the order of the tensor cores, and padded
    layout, held, block = weight.layout, tensors[weight.codes].dtype, _declared_block(config)
    if layout is GPT_OSS:
        return (codes[:-1],)
    if layout is BNB_8BIT:
        return (codes[:1],)
    if layout is COMFY:
        return ((), (1,), codes[:1], (*codes[:1], 1))
    if layout is BNB_4BIT:
        return tuple((-(-2 * tensors[weight.codes].nbytes // size),) for size in _BNB_BLOCKS)
    if len(codes) < 2:
        return ()
    *front, rows, columns = codes
    if layout is BLOCK_SCALED or (layout is DEEPSEEK_V4 and held != "int8"):
        return ((*front, -(-rows // block[0]), -(-columns // block[1])),)
    if layout is DEEPSEEK_V4:
        return ((*front, rows, 2 * columns // 32),)
    if layout is MLX:
        _, bits, size = mlx.settings_of(config, weight.stem.removesuffix("."))
        if any(type(number) is not int or number < 1 for number in (bits, size)):
            return ()
        return ((*front, rows, -(-32 * columns // (bits * size))),)
    if layout is COMPRESSED:
        if held == "uint8" and tensors[weight.scale].dtype == "float8_e4m3fn":
            return ((*front, rows, -(-2 * columns // 16)),)
        if held == "uint8":  # values of four bits, or of six
            return tuple((*front, rows, -(-values // 32)) for values in (2 * columns, 4 * columns // 3))
        counts = {
            -(-(32 * columns // bits) // size) if size and size > 0 else 1 for bits, size in integer_schemes(config)
        }
        return tuple((*front, rows, count) for count in sorted(counts)) or ((*front, rows, scale[-1] if scale else 1),)
    if layout is SCALED:
        if held == "uint8":
            return () if scale[:1] == (2 * rows,) else ((*front, rows, 2 * columns // 16),)
        if tensors[weight.scale].dtype == "uint8":
            return ((*front, rows, -(-columns // 32)),)
        blocks = (*front, -(-rows // block[0]), -(-columns // block[1]))
        return ((*front, rows, 1), (), (1,), (rows,), (*front, 1, 1), blocks)
    if layout is GPTQ:
        return _gptq_shapes(weight, codes, tensors, config)
    return ()


def _gptq_shapes(weight: PackedWeight, codes: Shape, tensors: Tensors, config: Mapping[str, Any]) -> tuple[Shape, ...]:
    """Compute the shape that the scales of a GPTQ or AWQ weight must have. GPTQ packs codes along the inputs, AWQ along the
    outputs. Returns a tuple with this shape, or () if the configuration does not give bits and group size. codes: the shape of the
    codes.
    """
    declared = config.get("quantization_config")
    declared = declared if isinstance(declared, Mapping) else {}
    bits, size = declared.get("bits"), declared.get("group_size")
    zeros = tensors.get(weight.part("qzeros"))
    if (
        zeros is None
        or tensors[weight.codes].dtype == "int16"
        or type(bits) is not int
        or type(size) is not int
        or bits < 1
    ):
        return ()
    awq = zeros.shape[-1:] == codes[-1:]
    inputs, outputs = (codes[0], codes[1] * 32 // bits) if awq else (codes[0] * 32 // bits, codes[1])
    return ((-(-inputs // size) if size > 0 else 1, outputs),)


def _other_shapes(weight: PackedWeight, codes: Shape, scale: Shape) -> Iterator[tuple[str, Shape]]:
    """Yield (suffix of the tensor's name, expected shape) for each tensor of a quantized weight that holds neither codes nor
    scales, such as its zero points. Tensors of unknown shape are left out. codes, scale: the shapes of the weight's codes and
    scales in the file.
    """
    if weight.layout is MLX:
        yield "biases", scale
        yield "qbiases", scale
    elif weight.layout is HQQ:
        yield "zero", scale
    elif weight.layout is COMPRESSED:
        yield "_shape", (2,)
        yield "_global_scale", (1,)


def _finding(kind: str, name: str, tensors: Tensors, what: str) -> Finding:
    return Finding(kind, name, what, tensors[name].file.name)
