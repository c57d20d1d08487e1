"""Checks that the LoRA tensors of a PEFT adapter come in pairs, and that they fit the layers of the base model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.core.text import printable
from dtype_engine.results.check import Finding

_LORA = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.\w+)?")


def adapter_findings(adapter: Checkpoint, base: Checkpoint | None) -> Iterator[Finding]:
    """Yield a finding for each pair of LoRA matrices that is not complete, or does not fit its layer of the base model."""
    pairs: dict[tuple[str, bool], dict[str, CheckpointTensor]] = {}
    for name, tensor in adapter.tensors.items():
        if (match := _LORA.fullmatch(name)) is not None:
            pairs.setdefault((match["module"], bool(match["embedding"])), {})[match["side"]] = tensor
    for (module, of_embedding), pair in pairs.items():
        first = next(iter(pair.values()))
        if what := _problem(module, of_embedding, pair, base):
            yield Finding("adapter", first.name, what, first.file.name)


def _problem(
    module: str, of_embedding: bool, pair: Mapping[str, CheckpointTensor], base: Checkpoint | None
) -> str | None:
    """Return what is wrong with a module's LoRA matrices, as in `has no lora_A beside it`, or None. of_embedding: whether the
    module is an embedding, whose size is not compared. pair: the matrices by letter, "A" and "B".
    """
    if len(pair) < 2:
        return f"has no lora_{'B' if 'A' in pair else 'A'} beside it"
    down, up = pair["A"].shape, pair["B"].shape
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


def _weight(module: str, base: Checkpoint) -> CheckpointTensor | None:
    """Return the weight of a module in the base model, or None. Names in the base model may have or lack the prefix `model.`."""
    names = (module, module.removeprefix("model."), f"model.{module}")
    return next((base.weights[f"{name}.weight"] for name in names if f"{name}.weight" in base.weights), None)
