"""Checks a checkpoint as a whole: its headers, its scales and, if the user asks for it, all values. torch is not imported."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from dtype_engine.checkpoint.check.adapter import adapter_findings
from dtype_engine.checkpoint.check.declared import draft_findings, scheme_findings, size_findings
from dtype_engine.checkpoint.check.parts import find_misshapen, find_unpaired, find_unread
from dtype_engine.checkpoint.check.tokenizer import tokenizer_findings
from dtype_engine.checkpoint.check.values import count_scales, find_bad_values, integer_range, same_bytes
from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.file_identity import unchanged
from dtype_engine.checkpoint.modeling_source import foreign_prefix, kept_in_float32, wrappers
from dtype_engine.checkpoint.packed_weights import (
    OF_ACTIVATIONS,
    is_of_activations,
    names_of_parts,
    packed_weights,
    quantized_parts,
)
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.checkpoint.schemes.layout import PackedWeight
from dtype_engine.checkpoint.weight_files import read_index, read_json
from dtype_engine.checkpoint.weight_sets import is_second_set
from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.draft_heads import NO_DRAFT, WORDS
from dtype_engine.core.errors import UserError
from dtype_engine.core.fused import fused_groups
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.check import CheckReport, Finding
from dtype_engine.results.coverage import Coverage

Progress = Callable[[str, int, int], None]
"""A function of ("scales" or "values", amount that is read, total amount). Scales are counted in tensors, values in bytes."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


def check(
    checkpoint: Checkpoint,
    title: str,
    against: Checkpoint | None = None,
    against_title: str = "",
    values: bool = False,
    progress: Progress = ignore,
) -> CheckReport:
    """Check a checkpoint for errors, and return a report of the findings. title, against_title: the names of `checkpoint` and
    `against` in the report. against: the source, which should have the same tensors, or None. values: whether to check the values
    of all tensors, too. Raises UserError if a file can't be read or has changed since it was opened, or if `values` is set and the
    values are not on this machine.
    """
    files = checkpoint.identities + (against.identities if against is not None else ())
    with unchanged(files):  # a report of values that were read from two contents of a file would be wrong
        return _report(checkpoint, title, against, against_title, values, progress)


def _report(
    checkpoint: Checkpoint,
    title: str,
    against: Checkpoint | None,
    against_title: str,
    values: bool,
    progress: Progress,
) -> CheckReport:
    started = time.perf_counter()
    if values:
        checkpoint.need_values()
    tensors, config = checkpoint.foreign, checkpoint.config or {}
    weights = packed_weights(tensors)
    parts = names_of_parts(weights, tensors)
    findings = [*_of_sets(checkpoint), *_of_index(checkpoint), *_of_prefix(checkpoint)]
    findings += find_unpaired(tensors, weights, parts)
    read = {weight.parts[CODES].name for weight in checkpoint.coded.values()}
    findings += find_misshapen(tensors, [weight for weight in weights if weight.codes not in read], config)
    findings += _of_groups(tensors, weights)
    reported = {finding.tensor.rpartition(".")[0] for finding in findings}
    findings += find_unread(tensors, weights, read, reported, checkpoint.metadata, config)
    reported |= {finding.tensor.rpartition(".")[0] for finding in findings}
    scales, of_scales = _bad_scales(checkpoint, weights, progress)
    findings += of_scales
    known = quantized_parts(tensors, config)
    plain = {
        name: tensor for name, tensor in tensors.items() if name not in known and tensor.dtype in dtypes.COMPUTE_DTYPES
    }
    broken = {finding.tensor.rpartition(".")[0] for finding in findings}
    findings += _sibling_findings(checkpoint, weights, broken)
    findings += _dtype_findings(plain, config)
    findings += _of_ties(checkpoint, config)
    findings += [*scheme_findings(checkpoint, weights), *size_findings(checkpoint), *draft_findings(checkpoint)]
    findings += tokenizer_findings(checkpoint, _EMBEDDINGS)
    values_read = None
    if values:
        values_read, of_values = _value_findings(
            checkpoint, plain.keys() | {weight.codes for weight in weights}, progress
        )
        findings += of_values
    if checkpoint.form == "adapter":
        findings += adapter_findings(checkpoint, against)
    if checkpoint.merged is not None:
        findings += adapter_findings(checkpoint.merged.adapter, checkpoint)
    if checkpoint.form != "adapter" and against is not None:
        findings += _source_findings(checkpoint, weights, parts, against)
    return CheckReport(
        model=title,
        tensors=len(checkpoint.tensors),
        files=len(checkpoint.files),
        scales=scales,
        values=values_read,
        seconds=time.perf_counter() - started,
        findings=tuple(findings),
        unchecked=(*_undecoded(checkpoint, known, reported), *_unchecked(checkpoint, values, against)),
        against=against_title if against is not None else None,
        coverage=checkpoint.index.coverage if checkpoint.index is not None else None,
    )


def architecture_findings(coverage: Coverage, model: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding for each tensor that is only in the architecture or only in the files, or that differs in shape or dtype.
    model: the architecture's class.
    """
    files = {name: tensor.file.name for name, tensor in checkpoint.weights.items()}
    for each in coverage.misshapen:
        what = f"is {list(each.stored)} in the files, and {list(each.expected)} in the {model} of config.json"
        yield Finding("tensor-shape", each.name, what, files.get(each.name, ""))
    for name in coverage.integers:
        what = f"holds {checkpoint.dtype(name)}, and {model} has floats there"
        yield Finding("tensor-dtype", name, what, files.get(name, ""))
    for name in coverage.missing:
        yield Finding("missing-tensor", name, f"is in {model} and in no file")
    for name in coverage.unused:
        yield Finding("unused-tensor", name, f"has no place in {model}", files.get(name, ""))


def _undecoded(checkpoint: Checkpoint, parts: Mapping[str, str], reported: set[str]) -> Iterator[str]:
    """Yield one sentence for the user if tensors of quantized weights can't be decoded. parts: maps the name of each tensor of a
    quantized weight to why the tensor is not cast. reported: names of modules that already have a finding, and are skipped.
    """
    left = [
        name
        for name, why in parts.items()
        if name not in checkpoint.owners and why != OF_ACTIVATIONS and name.rpartition(".")[0] not in reported
    ]
    if left and checkpoint.form == "safetensors":
        yield (
            f"{plural(len(left), 'tensor')} of quantized weights that can't be decoded here, first {printable(left[0])}: "
            f"{parts[left[0]]}"
        )


def _unchecked(checkpoint: Checkpoint, values: bool, against: Checkpoint | None) -> tuple[str, ...]:
    said = []
    if other := [name for name in checkpoint.passed_over if not is_second_set(name, checkpoint.read_by)]:
        shown = ", ".join(printable(name, 100) for name in other[:4]) + (" and more" if len(other) > 4 else "")
        said.append(f"files of weights that are not loaded: {shown}")
    if checkpoint.form == "adapter" and against is None:
        said.append(
            f"the layers of its base model, {printable(checkpoint.base or '', 200)}: --against BASE compares them"
        )
    if checkpoint.form in ("pickle", "gguf"):
        what = "pickles" if checkpoint.form == "pickle" else "GGUF files"
        said.append(f"scales and values of {what} are not read")
    if checkpoint.headers_alone:
        said.append("scales and values, since only the headers are on this machine")
    elif not values and checkpoint.form not in ("pickle", "gguf"):
        said.append("values: dtype-engine check --values reads them for NaN, infinities and constants")
    return tuple(said)


def _of_sets(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding for each set of weights that is not read although it has the same file format as the set that is read."""
    first = checkpoint.read_by
    if first is None or first.variant is not None:
        return
    for name in checkpoint.passed_over:
        if is_second_set(name, first):
            yield Finding(
                "second-set", name, f"{_second_set(checkpoint, name)}: {printable(first.name, 100)} is loaded", name
            )


def _second_set(checkpoint: Checkpoint, name: str) -> str:
    if name.endswith(".json"):
        try:
            files = set(read_index(checkpoint.path / name).values())
        except UserError:
            return "can't be read as an index, and is not needed"
        absent = [file for file in files if not (checkpoint.path / file).is_file()]
        if absent:
            return f"names {plural(len(absent), 'file')} that {'is' if len(absent) == 1 else 'are'} not here"
    return "is a second set of weights"


def _of_index(checkpoint: Checkpoint) -> Iterator[Finding]:
    index = checkpoint.index
    if index is None:
        return
    for name, file in index.missing:
        yield Finding("missing-tensor", name, f"should be in {printable(file)} by the index, and is in no file", file)
    for left_out in index.left_out:
        what = f"has {len(left_out.tensors):,} tensors that no file of the index has, first {printable(left_out.tensors[0])}"
        yield Finding("left-out-file", left_out.name, what, left_out.name)
    for name, file, holder in index.moved:
        yield Finding(
            "index-entry", name, f"should be in {printable(file)} by the index, and {printable(holder)} has it", holder
        )
    for name in index.unnamed:
        yield Finding("index-entry", name, "is in a file and not in the index", checkpoint.tensors[name].file.name)
    metadata = read_json(checkpoint.path / index.name).get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    differs = isinstance(said, (int, float)) and said != held and checkpoint.merged is None
    if differs and checkpoint.form != "pickle" and not (index.missing or index.left_out or index.unnamed):
        yield Finding("index-entry", "total_size", f"is {said:,}, and the tensors have {held:,} bytes", index.name)


def _of_prefix(checkpoint: Checkpoint) -> Iterator[Finding]:
    if prefix := foreign_prefix(checkpoint.weights, checkpoint.config):
        what = f"begins the names of all {len(checkpoint.tensors):,} tensors, and {checkpoint.config['model_type']} has none there"  # type: ignore[index]
        yield Finding("foreign-prefix", prefix, what)
    for part, count in wrappers(checkpoint.weights, checkpoint.config).items():
        if f".{part}." not in f".{prefix}":
            what = (
                f"is a part of {plural(count, 'name')}: a wrapper added it, and the class of the model has none there"
            )
            yield Finding("foreign-prefix", f"{part}.", what)


def _bad_scales(checkpoint: Checkpoint, weights: list[PackedWeight], progress: Progress) -> tuple[int, list[Finding]]:
    """Return the number of scale tensors that could be read, and a finding for each with invalid scales, such as NaN or zero."""
    tensors = checkpoint.tensors
    wanted: dict[str, tuple[bool, bool, bool]] = {}
    for weight in weights:
        layout, scale = weight.layout, tensors[weight.scale]
        exponents, padded = scale.dtype == "uint8" and layout.exponents, layout.padded(tensors[weight.codes], scale)
        if scale.dtype != "uint8" or exponents:
            wanted[weight.scale] = exponents, layout.signed, padded
        for suffix in filter(None, (layout.fused_scale, *layout.more_scales)):
            if weight.part(suffix) in tensors:
                wanted[weight.part(suffix)] = False, False, padded
    for own in _own(checkpoint).values():
        for suffix, part in own.parts.items():
            if suffix in ("_scale", "_scale_inv", "_global_scale"):
                wanted[part.name] = part.dtype == "uint8", False, True
    for name in filter(is_of_activations, tensors):  # 0 and -1 may stand for scales that were not calibrated
        wanted.setdefault(name, (False, True, True))
    findings, read = [], 0
    for done, (name, (exponents, signed, zeros)) in enumerate(wanted.items()):
        counted = count_scales(tensors[name], exponents)
        progress("scales", done + 1, len(wanted))
        if counted is None:
            continue
        read += 1
        zero, negative = (0 if zeros else counted.zero), (0 if signed else counted.negative)
        if text := replace(counted, zero=zero, negative=negative).text(prod(tensors[name].shape)):
            findings.append(Finding("scale-values", name, text, tensors[name].file.name))
    return read, findings


def _own(checkpoint: Checkpoint) -> dict[str, CodedWeight]:
    """Return the weights that an export of this program stored with scales, by name."""
    return {name: weight for name, weight in checkpoint.coded.items() if weight.own}


def _sibling_findings(checkpoint: Checkpoint, weights: list[PackedWeight], broken: set[str]) -> Iterator[Finding]:
    """Yield a finding for each group of fused layers, such as q, k and v, whose formats or tensor scales differ. broken: names of
    modules that already have a finding; their groups are skipped.
    """
    if not all(weight.scheme.fused for weight in checkpoint.coded.values()):
        return  # runtimes that fuse nothing mix formats on purpose
    tensors = checkpoint.tensors
    formats = {name: tensor.dtype for name, tensor in tensors.items() if name.endswith(".weight")}
    by_name = {weight.name: weight for weight in weights}
    for name, weight in by_name.items():
        formats[name] = f"{tensors[weight.codes].dtype} with {tensors[weight.scale].dtype} scales"
    own = _own(checkpoint)
    formats |= {name: weight.format for name, weight in own.items()}
    quantised = by_name.keys() | own.keys()
    for group in fused_groups(formats):
        if not broken.isdisjoint(name.removesuffix(".weight") for name in group):
            continue
        held = dict.fromkeys(formats[name] for name in group)
        if len(held) > 1 and not quantised.isdisjoint(group):
            what = ", ".join(f"{name.rpartition('.weight')[0].rpartition('.')[2]} {formats[name]}" for name in group)
            yield Finding("mixed-siblings", group[0].removesuffix(".weight").rpartition(".")[0], what)
            continue
        for suffix in dict.fromkeys(by_name[name].layout.fused_scale for name in group if name in by_name):
            parts = [tensors.get(by_name[name].part(suffix)) for name in group if suffix and name in by_name]
            present = [part for part in parts if part is not None]
            if len(present) == len(group) and any(same_bytes(present[0], part) is False for part in present[1:]):
                layers = (part.name.rpartition(".")[0].rpartition(".")[2] for part in present)
                what = f"{', '.join(map(printable, layers))} have several {suffix[1:]}"
                yield Finding("sibling-scales", group[0].removesuffix(".weight").rpartition(".")[0], what)


def _dtype_findings(plain: Mapping[str, CheckpointTensor], config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if no tensor has the dtype that `config` declares, and one for each 16-bit tensor that the architecture keeps
    in float32. plain: the tensors that are not quantized.
    """
    key = "dtype" if "dtype" in config else "torch_dtype"
    declared = str(config.get(key) or "").removeprefix("torch.")
    stored = Counter(tensor.dtype for tensor in plain.values())
    if declared in dtypes.COMPUTE_DTYPES and stored and declared not in stored:
        (most, count), *_ = stored.most_common(1)
        yield Finding(
            "declared-dtype", key, f"is {declared}, and {count:,} of {len(plain):,} tensors are {most}", "config.json"
        )
    kept = kept_in_float32(config)
    for name, tensor in plain.items():
        always, in_half = ({word for word in words if f".{word}." in f".{name}."} for words in kept)
        if tensor.dtype in ("bfloat16", "float16") and (always or (in_half and tensor.dtype == "float16")):
            what = f"is {tensor.dtype}, and the architecture keeps {', '.join(sorted(always | in_half))} in float32"
            yield Finding("float32-island", name, what, tensor.file.name)


def _of_ties(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Iterator[Finding]:
    if config.get("tie_word_embeddings") is not True:
        return
    tensors = checkpoint.weights
    heads = [name for name in tensors if name.endswith(_HEADS)]
    embeddings = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    if len(heads) == 1 and len(embeddings) == 1 and heads[0] not in checkpoint.aliases:
        head, embedding = tensors[heads[0]], tensors[embeddings[0]]
        if head.shape == embedding.shape and same_bytes(head, embedding) is False:
            what = f"differs from {printable(embeddings[0])}, to which config.json ties it"
            yield Finding("tie-differs", heads[0], what, head.file.name)


def _of_groups(tensors: Mapping[str, CheckpointTensor], weights: list[PackedWeight]) -> Iterator[Finding]:
    """Yield a finding for each tensor of group indices (`g_idx`) that assigns a column to a group without a scale."""
    for weight in weights:
        for suffix, dimension in (("g_idx", 0), ("_g_idx", -1)):  # GPTQ's and that of compressed-tensors
            index, scale = tensors.get(weight.part(suffix)), tensors[weight.scale]
            found = integer_range(index) if index is not None and len(scale.shape) == 2 else None
            if index is None or found in (None, (-1, -1)):  # -1 stands for columns in their order
                continue
            (lowest, highest), groups = found, scale.shape[dimension]
            if lowest < 0 or highest >= groups:
                what = f"names groups from {lowest:,} to {highest:,}, and {printable(scale.name)} has {groups:,} groups"
                yield Finding("group-index", index.name, what, index.file.name)


def _value_findings(checkpoint: Checkpoint, weights: Collection[str], progress: Progress) -> tuple[int, list[Finding]]:
    """Return (number of tensors that could be read, findings). A finding says that a tensor has values that are NaN or infinite, or
    that all values of a matrix in `weights` (names) are equal.
    """
    whole, done, read = max(1, sum(tensor.nbytes for tensor in checkpoint.tensors.values())), 0, 0
    findings: list[Finding] = []

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress("values", done, whole)

    for name, tensor in checkpoint.tensors.items():
        found = find_bad_values(tensor, on_bytes)
        if found is None:
            continue
        read += 1
        bad, constant = found
        if bad:
            what = f"has {plural(bad, 'value')} that {'is' if bad == 1 else 'are'} not finite"
            findings.append(Finding("not-finite", name, what, tensor.file.name))
        elif name.endswith("running_var") and (counted := count_scales(tensor, False)) and counted.negative:
            what = f"has {counted.negative:,} negative variances, whose square roots are NaN"
            findings.append(Finding("not-finite", name, what, tensor.file.name))
        elif constant and name in weights and sum(extent > 1 for extent in tensor.shape) > 1:
            findings.append(Finding("constant", name, "has one value in all its elements", tensor.file.name))
    return read, findings


def _source_findings(
    checkpoint: Checkpoint, weights: list[PackedWeight], parts: set[str], against: Checkpoint
) -> Iterator[Finding]:
    """Yield a finding for each tensor that is only in the checkpoint or only in its source `against`, or whose shapes differ.
    parts: the names of all tensors of `weights`.
    """
    of_weights = {weight.name for weight in weights} | _own(checkpoint).keys()
    source_weights = packed_weights(against.foreign)
    theirs = names_of_parts(source_weights, against.foreign)
    source = {weight.name for weight in source_weights} | (against.weights.keys() - theirs)
    here = of_weights | (checkpoint.weights.keys() - parts)
    lost = against.draft if against.draft and not checkpoint.draft else NO_DRAFT
    if lost:
        count = plural(sum(map(lost.holds, source)), "weight")
        yield Finding("draft-head", lost.modules[0], f"is the {WORDS} of the source, {count}, and is not here")
    for name in source - here:
        if lost.holds(name):
            continue
        file = against.weights[name].file.name if name in against.weights else ""
        yield Finding("against-missing", name, f"is in the source{f', in {printable(file)}' if file else ''}")
    for name, tensor in against.weights.items():
        mine = checkpoint.weights.get(name)
        if mine is not None and name not in parts and name not in theirs and mine.shape != tensor.shape:
            what = f"is {list(mine.shape)}, and {list(tensor.shape)} in the source"
            yield Finding("against-shape", name, what, mine.file.name)
    known = quantized_parts(checkpoint.foreign, checkpoint.config)
    for name in here - source:
        if name not in known:
            yield Finding("against-new", name, "is not in the source")
