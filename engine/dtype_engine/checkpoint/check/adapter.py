"""Checks that the LoRA tensors of a PEFT adapter come in pairs, and that they fit the layers of the base model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dtype_engine.checkpoint.adapter_names import PREFIX, BaseNames, LoraNames, lora_names
from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.schemes.configuration import ends_of, mapping
from dtype_engine.checkpoint.weight_files import ADAPTER_CONFIG, read_json
from dtype_engine.core.text import printable
from dtype_engine.results.check import Finding

_PLAIN = re.compile(r"[\w.]+")


def adapter_findings(adapter: Checkpoint, base: Checkpoint | None) -> Iterator[Finding]:
    """Yield a finding for each pair of LoRA matrices that is incomplete, does not fit its layer of the base model, or contradicts
    adapter_config.json.
    """
    config = read_json(adapter.path / ADAPTER_CONFIG) if adapter.path.is_dir() else {}
    if not all(map(_PLAIN.fullmatch, mapping(config.get("rank_pattern")))):
        config["r"] = None  # regular expressions may take long, and are not evaluated
    targets = config.get("target_modules")
    config["target_modules"] = {each for each in targets if isinstance(each, str)} if isinstance(targets, list) else ()
    if config.get("target_parameters"):
        base = None  # a parameter has another name than `weight`; merging it finds what does not fit
    names = BaseNames(base.weights) if base is not None else None
    for each in lora_names(adapter)[0]:
        if not each.sides:
            continue
        first = next(iter(each.sides.values()))
        if what := _problem(each, base, names) or _contradiction(each, config):
            yield Finding("adapter", first.name, what, first.file.name)
    kept = config.get("modules_to_save")
    kept = [each for each in kept if isinstance(each, str)] if isinstance(kept, list) else []
    if kept and not any(f".{each}." in name for each in kept for name in adapter.tensors):
        what = f"names {printable(', '.join(kept), 200)}, of which no tensor is in the files"
        yield Finding("adapter", "modules_to_save", what, ADAPTER_CONFIG)


def _problem(each: LoraNames, base: Checkpoint | None, names: BaseNames | None) -> str | None:
    """Return what is wrong with a module's LoRA matrices, such as `has no lora_A beside it`, or None. The size of an embedding is
    not checked.
    """
    if len(each.sides) < 2:
        return f"has no lora_{'B' if 'A' in each.sides else 'A'} beside it"
    down, up = each.sides["A"].shape, each.sides["B"].shape
    if min(*down, *up, len(down) - 1, len(up) - 1) < 1:
        return f"is {list(down)}, and the lora_B beside it {list(up)}: one of them has no values"
    flat = len(down) == len(up) == 2
    if flat and down[0] != up[1]:
        return f"has rank {down[0]}, and the lora_B beside it has rank {up[1]}"
    if base is None or names is None:
        return None
    weight = names.find(f"{each.module}.weight")
    if weight is None:
        return f"adapts {printable(each.module)}, which the base model lacks"
    shape = base.weights[weight].shape
    if flat and len(shape) == 2 and not each.embedding:
        outputs, inputs = shape
        if (down[1], up[0]) not in ((inputs, outputs), (outputs, inputs)):  # a Conv1D of GPT-2 has its inputs first
            return f"adapts {printable(each.module)} from {down[1]} to {up[0]} values, and its weight is {list(shape)}"
    return None


def _contradiction(each: LoraNames, config: Mapping[str, Any]) -> str | None:
    """Return how a module's LoRA matrices contradict adapter_config.json, or None if they do not."""
    if config.get("peft_type") != "LORA" or config.get("target_parameters"):  # these are of several experts
        return None
    module = each.module
    if module.startswith(PREFIX):
        return f"begins with {PREFIX} twice, as no name that PEFT looks for"
    rank, patterns = each.sides["A"].shape[0], mapping(config.get("rank_pattern"))
    declared = next((patterns[name] for name in ends_of(module) if name in patterns), config.get("r"))
    if type(declared) is int and declared != rank:
        return f"has rank {rank}, and {ADAPTER_CONFIG} declares {declared}"
    targets = config.get("target_modules")
    if targets and not any(name in targets for name in ends_of(module)):
        return f"adapts {printable(module)}, which is none of the target_modules of {ADAPTER_CONFIG}"
    if config.get("use_dora") is True and each.magnitude is None:
        return f"has no lora_magnitude_vector beside it, and {ADAPTER_CONFIG} declares DoRA"
    return None
