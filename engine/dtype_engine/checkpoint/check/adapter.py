"""Checks that the LoRA tensors of a PEFT adapter come in pairs, and that they fit the layers of the base model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import ends_of, mapping
from dtype_engine.checkpoint.weight_files import ADAPTER_CONFIG, read_json
from dtype_engine.core.text import printable
from dtype_engine.results.check import Finding

_LORA = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.\w+)?")
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
    pairs: dict[tuple[str, bool], dict[str, CheckpointTensor]] = {}
    for name, tensor in adapter.tensors.items():
        if (match := _LORA.fullmatch(name)) is not None:
            pairs.setdefault((match["module"], bool(match["embedding"])), {})[match["side"]] = tensor
    for (module, of_embedding), pair in pairs.items():
        first = next(iter(pair.values()))
        if what := _problem(module, of_embedding, pair, base) or _contradiction(module, pair, config, adapter):
            yield Finding("adapter", first.name, what, first.file.name)
    kept = config.get("modules_to_save")
    kept = [each for each in kept if isinstance(each, str)] if isinstance(kept, list) else []
    if kept and not any(f".{each}." in name for each in kept for name in adapter.tensors):
        what = f"names {printable(', '.join(kept), 200)}, of which no tensor is in the files"
        yield Finding("adapter", "modules_to_save", what, ADAPTER_CONFIG)


def _problem(
    module: str, of_embedding: bool, pair: Mapping[str, CheckpointTensor], base: Checkpoint | None
) -> str | None:
    """Return what is wrong with a module's LoRA matrices, such as `has no lora_A beside it`, or None. of_embedding: whether the
    module is an embedding, whose size is not checked. pair: the matrices, keyed by "A" and "B".
    """
    if len(pair) < 2:
        return f"has no lora_{'B' if 'A' in pair else 'A'} beside it"
    down, up = pair["A"].shape, pair["B"].shape
    if min(*down, *up, len(down) - 1, len(up) - 1) < 1:
        return f"is {list(down)}, and the lora_B beside it {list(up)}: one of them has no values"
    flat = len(down) == len(up) == 2
    if flat and down[0] != up[1]:
        return f"has rank {down[0]}, and the lora_B beside it has rank {up[1]}"
    if base is None:
        return None
    weight = _weight(module, base)
    if weight is None:
        return f"adapts {printable(module)}, which the base model lacks"
    if flat and len(weight.shape) == 2 and not of_embedding:
        outputs, inputs = weight.shape
        if (down[1], up[0]) not in ((inputs, outputs), (outputs, inputs)):  # a Conv1D of GPT-2 has its inputs first
            return (
                f"adapts {printable(module)} from {down[1]} to {up[0]} values, and its weight is {list(weight.shape)}"
            )
    return None


def _contradiction(
    module: str, pair: Mapping[str, CheckpointTensor], config: Mapping[str, Any], adapter: Checkpoint
) -> str | None:
    """Return how a module's LoRA matrices contradict adapter_config.json, or None if they do not."""
    if config.get("peft_type") != "LORA" or config.get("target_parameters"):  # these are of several experts
        return None
    if module.startswith("base_model.model."):
        return "begins with base_model.model. twice, as no name that PEFT looks for"
    rank, patterns = pair["A"].shape[0], mapping(config.get("rank_pattern"))
    declared = next((patterns[name] for name in ends_of(module) if name in patterns), config.get("r"))
    if type(declared) is int and declared != rank:
        return f"has rank {rank}, and {ADAPTER_CONFIG} declares {declared}"
    targets = config.get("target_modules")
    if targets and not any(name in targets for name in ends_of(module)):
        return f"adapts {printable(module)}, which is none of the target_modules of {ADAPTER_CONFIG}"
    magnitude = f"{pair['A'].name.partition('.lora_')[0]}.lora_magnitude_vector"
    if config.get("use_dora") is True and not {magnitude, f"{magnitude}.weight"} & adapter.tensors.keys():
        return f"has no lora_magnitude_vector beside it, and {ADAPTER_CONFIG} declares DoRA"
    return None


def _weight(module: str, base: Checkpoint) -> CheckpointTensor | None:
    """Return the weight of a module in the base model, or None. Its name there may have or lack the prefix `model.`."""
    names = (module, module.removeprefix("model."), f"model.{module}")
    return next((base.weights[f"{name}.weight"] for name in names if f"{name}.weight" in base.weights), None)
