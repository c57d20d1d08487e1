"""Checks that the files hold what config.json declares: quantized weights, and the numbers of layers and of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dtype_engine.checkpoint.check.values import pieces
from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.modeling_source import is_known
from dtype_engine.checkpoint.packed_weights import NOT_CODES
from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.checkpoint.schemes.configuration import declared, ends_of, mapping, quant_method
from dtype_engine.checkpoint.schemes.layout import PackedWeight
from dtype_engine.checkpoint.schemes.registry import schemes
from dtype_engine.core.draft_heads import WORDS
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.check import Finding

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_LAYER = re.compile(r"(.*?\b(?:layers|layer|blocks|block|h))\.(\d{1,6})\.")
_UNLIKE = re.compile(r"nextn|mtp|block_configs|shar")
"""Matches the entries of models that have further layers, or layers without tensors."""


def scheme_findings(checkpoint: Checkpoint, weights: list[PackedWeight]) -> Iterator[Finding]:
    """Yield a finding for each way in which quantization settings and files contradict each other. Raises UserError."""
    config, settings = checkpoint.config or {}, declared(checkpoint.config or {})
    described = settings or mapping(config.get("quantization"))
    read = [weight for weight in checkpoint.coded.values() if not weight.own]
    if any(scheme.declared.needs_codes(settings) for scheme in schemes()) and all(
        tensor.dtype in NOT_CODES for tensor in checkpoint.tensors.values()
    ):
        what = f"declares {quant_method(settings)}, and no tensor of the files holds codes"
        yield _finding("quantization_config", what)
    if weights and not read and not described and is_known(config) and not _beside(checkpoint):
        what = f"is not there, and {plural(len(weights), 'weight')} {'is' if len(weights) == 1 else 'are'} "
        yield _finding("quantization_config", f"{what}{weights[0].layout.what}, first {printable(weights[0].name)}")
    yield from _misplaced_settings(config, {weight.module.removesuffix(".") for weight in weights})
    for weight in read:
        codes = weight.parts[CODES]
        for part, why in weight.scheme.declared.needed_parts(settings):
            if part not in weight.parts:
                yield Finding("missing-part", codes.name, f"has no {part} beside it, and {why}", codes.file.name)
        yield from _zero_point_findings(weight, settings)


def zero_point_sentences(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a sentence for each scheme whose first weight has zero points that contradict config.json."""
    settings = declared(checkpoint.config or {})
    firsts = {weight.scheme.name: weight for weight in reversed(checkpoint.coded.values())}
    found = (each for weight in firsts.values() for each in _zero_point_findings(weight, settings))
    return tuple(f"{printable(each.tensor)} {each.what}, so runtimes may compute other values" for each in found)


def _zero_point_findings(weight: CodedWeight, settings: Mapping[str, Any]) -> Iterator[Finding]:
    zero, pattern = weight.scheme.declared.zero_points(weight, settings) or (None, b"")
    if zero is None or zero.bytes is None or not zero.nbytes:
        return
    row = zero.nbytes // zero.shape[0]
    wanted = (pattern * (row // len(pattern) + 1))[:row] * zero.shape[0]
    if b"".join(pieces(zero.bytes)) != wanted:
        what = "holds other zero points than the middle of the codes, and config.json declares symmetric ones"
        yield Finding("declared-scheme", zero.name, what, zero.file.name)


def _finding(entry: str, what: str, kind: str = "declared-scheme") -> Finding:
    return Finding(kind, entry, what, "config.json")


def _beside(checkpoint: Checkpoint) -> bool:
    """Return whether a JSON file beside config.json may hold quantization settings."""
    return any(re.search("quant|qmap", file.name) for file in checkpoint.folder.glob("*.json"))


def _misplaced_settings(config: Mapping[str, Any], modules: set[str]) -> Iterator[Finding]:
    """Yield a finding if settings name a module with another prefix than the files do, so that loaders do not apply them. modules:
    the names of the quantized modules in the files.
    """
    settings = declared(config)
    for each in (mapping(config.get("quantization")) or settings, mapping(settings.get("extra_config"))):
        given = {name for name, of_module in each.items() if "." in name and isinstance(of_module, Mapping)}
        strange, bare = given - modules, modules - given
        pairs = [(name, end) for name in strange for end in ends_of(name) if end in bare]
        pairs += [(end, module) for module in bare for end in ends_of(module) if end in strange]
        if pairs:
            name, module = min(pairs)
            more = f"; settings of {len(strange) - 1:,} more are not used" if len(strange) > 1 else ""
            yield _finding(name, f"has settings of its own, and the files have {printable(module)} in its place{more}")


def draft_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding if config.json declares a draft head that no file has, and one for each module that the head lacks."""
    draft = checkpoint.draft
    if draft.declared and not draft and not checkpoint.components:
        yield _finding(draft.entry, f"is {draft.declared}, and no tensor belongs to a {WORDS}", "draft-head")
    for module in draft.missing(checkpoint.tensors):
        yield Finding("draft-head", module, f"is a part of the {WORDS}, and no tensor is in it")


def size_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding if the files lack a layer that config.json declares, and one if they have more, judged by tensors' names."""
    config = checkpoint.config or {}
    text = mapping(config.get("text_config")) or config
    stacks: dict[str, set[int]] = {}
    for match in filter(None, map(_LAYER.match, checkpoint.weights)):
        stacks.setdefault(match[1], set()).add(int(match[2]))
    key, count = next(((key, text[key]) for key in _LAYERS if type(text.get(key)) is int), ("", 0))
    if count < 1 or len(stacks) != 1 or any(map(_UNLIKE.search, (*config, *text))):
        return
    ((stack, held),) = stacks.items()
    absent = sorted(set(range(min(count, 100_000))) - held)
    more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
    if len(held) > 1 and absent:
        yield _finding(key, f"is {count:,}, and no tensor is in {printable(stack)}.{absent[0]}{more}", "declared-size")
    if len(held) > 1 and max(held) >= count:
        yield _finding(key, f"is {count:,}, and the files have {printable(stack)}.{max(held)}", "declared-size")
