"""Checks that each quantized weight has all its parts (codes, scales, zero points, ...), and that their shapes fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dtype_engine.checkpoint.packed_weights import are_plain, names_of_parts, packed_weights
from dtype_engine.checkpoint.schemes.configuration import declared
from dtype_engine.checkpoint.schemes.layout import Layout, PackedWeight, Tensors
from dtype_engine.checkpoint.schemes.registry import layouts, schemes
from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.results.check import Finding


def find_unpaired(tensors: Tensors, weights: list[PackedWeight], parts: set[str]) -> Iterator[Finding]:
    """Yield a finding for codes that lack scales or another tensor, and for scales that lack codes. parts: tensors of `weights`."""
    if are_plain(tensors):
        return
    for weight in weights:
        for suffix in weight.layout.required(tensors[weight.codes], tensors[weight.scale]):
            if weight.part(suffix) not in tensors:
                yield _finding("missing-part", weight.codes, tensors, f"has no {printable(weight.part(suffix))}")
    usual = Counter((tensors[weight.codes].dtype, weight.layout) for weight in weights)
    by_dtype: dict[str, Layout] = {}
    for (dtype, layout), _ in usual.most_common():
        if dtype not in dtypes.COMPUTE_DTYPES:  # bitsandbytes can store codes as bfloat16, beside plain weights
            by_dtype.setdefault(dtype, layout)
    lost: set[str] = set()
    for name, tensor in tensors.items():
        if name in parts:
            continue
        usual_layout = by_dtype.get(tensor.dtype) if len(tensor.shape) > 1 else None
        proven = (layout for layout in layouts() if layout.holds_codes(name, tensor.dtype, tensors))
        codes = next(proven, usual_layout)
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
        of_orphans = next((layout for layout in layouts() if layout.orphans and name.endswith(layout.orphans)), None)
        if of_orphans is not None:
            codes_name = of_orphans.codes_of(name)
            held = f"{tensors[codes_name].dtype} and no codes" if codes_name in tensors else "not there"
            yield _finding("orphan-part", name, tensors, f"belongs to {printable(codes_name)}, which is {held}")
            reported.add(module)
        elif tensor.dtype == "float8_e8m0fnu":
            yield _finding("orphan-part", name, tensors, "holds exponents of two (E8M0) and belongs to no codes")
            reported.add(module)


def unpaired_sentences(tensors: Tensors) -> tuple[str, ...]:
    """Return one sentence for the user about the first quantized weight that lacks a tensor, or () if there is none."""
    weights = packed_weights(tensors)
    found = list(find_unpaired(tensors, weights, names_of_parts(weights, tensors)))
    more = f" (and {len(found) - 1} more, which `dtype-engine check` lists)" if len(found) > 1 else ""
    return (f"{printable(found[0].tensor)} {found[0].what}{more}",) if found else ()


def find_misshapen(tensors: Tensors, weights: list[PackedWeight], config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each tensor of a quantized weight, such as its scales, whose shape does not match that of the codes."""
    for weight in weights:
        codes, scale = tensors[weight.codes], tensors[weight.scale]
        expected = weight.layout.scale_shapes(weight, tensors, config)
        if expected and scale.shape not in expected:
            wanted = " or ".join(str(list(shape)) for shape in expected[:3])
            what = f"is {list(scale.shape)}, where the codes {list(codes.shape)} ask for {wanted}"
            yield _finding("part-shape", weight.scale, tensors, what)
            continue
        for suffix, shape in weight.layout.part_shapes(weight, tensors, config).items():
            part = tensors.get(weight.part(suffix))
            if part is not None and part.shape != shape:
                what = f"is {list(part.shape)}, where its weight asks for {list(shape)}"
                yield _finding("part-shape", part.name, tensors, what)


def find_unread(
    tensors: Tensors,
    weights: list[PackedWeight],
    read: set[str],
    reported: set[str],
    metadata: Mapping[str, str],
    config: Mapping[str, Any],
) -> Iterator[Finding]:
    """Yield a finding for each weight that should be decodable but is not: other weights of its layout and dtype are decoded, or a
    scheme decodes every weight that config.json allows. Weights that a scheme leaves out on purpose are skipped. read: names of the
    codes that can be decoded. reported: names of modules that are skipped, because they already have a finding. metadata: that of
    the files' headers.
    """
    covered = any(scheme.declared.covers(declared(config)) for scheme in schemes())
    kinds = {(weight.layout, tensors[weight.codes].dtype) for weight in weights if weight.codes in read}
    unread = [weight.codes for weight in weights if weight.codes not in read]
    known = {name for scheme in schemes() for name in scheme.left_out(unread, tensors, metadata)}
    for weight in weights:
        module = weight.codes.rpartition(".")[0]
        if weight.codes in read or module in reported or weight.codes in known:
            continue
        if covered or (weight.layout, tensors[weight.codes].dtype) in kinds:
            what = "belongs to a weight whose tensors do not fit together as the configuration declares"
            yield _finding("part-shape", weight.codes, tensors, what)


def _finding(kind: str, name: str, tensors: Tensors, what: str) -> Finding:
    return Finding(kind, name, what, tensors[name].file.name)
