"""Lets another checkpoint of the same architecture be the reference model, against which drift is measured.

The open model is the candidate. A reference run uses the same module with the weights of the other checkpoint, and with the numbers
that its configuration sets, such as the `eps` of a norm. A checkpoint that needs another structure is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dtype_engine.checkpoint.source import Source
from dtype_engine.core.draft_heads import WORDS
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.options import FLOAT32, ModelOptions
from dtype_engine.core.text import printable
from dtype_engine.runtime.building.load import OnStep, blocks, load
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.module_tree import tree_of
from dtype_engine.runtime.model.side_settings import side_settings
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.weights.blockwise import BlockwiseSource

_WITHOUT_EFFECT = frozenset(
    {
        "name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "auto_map",
        "quantization_config", "quantization", "compression_config", "use_cache", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
        "id2label", "label2id", "finetuning_task", "task_specific_params",
        "output_attentions", "output_hidden_states", "return_dict", "initializer_range", "initializer_factor",
        "pretraining_tp", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "hidden_dropout_prob",
        "attention_probs_dropout_prob", "router_aux_loss_coef", "output_router_logits", "gradient_checkpointing",
    }
)  # fmt: skip
"""Configuration entries that may differ. They don't change the output of a forward pass, or a difference in them is also found by
comparing the weights.
"""
_SHOWN = 3
"""Maximum number of differences between two checkpoints that an error message lists."""


def use_reference(live: LiveModel, source: Source, options: ModelOptions, on_step: OnStep = lambda step: None) -> None:
    """Make another checkpoint (`source`) the reference model of an open model. Each weight gets the other checkpoint's values as
    `other_reference`. The settings of modules in which the checkpoints differ go into `live.side_settings`.

    options: how to open the other checkpoint. Raises UserError if the tensors or shapes of the two checkpoints differ, or if one
    module can't run with the configurations of both.
    """
    if options.weights is not None:
        raise UserError(
            "--weights goes with one model; for --against, write functions that load the weights of both models"
        )
    of_reference = dataclasses.replace(options, device="cpu", reference=FLOAT32)
    try:
        other = load(source, of_reference, lambda step: on_step(f"reference: {step}"))
    except NoForward as error:
        raise UserError(f"the reference can't be used: {error.sentence}") from None
    sides = printable(source.title, 100), printable(live.title, 100)
    _refuse_other_structure(other, live, sides)
    buffers = _use_other_configuration(other, live, sides)
    by_any_name = {name: weight for weight in other.weights.values() for name in weight.info.names}
    infos = dict(live.tree.tensors)
    for name, weight in live.weights.items():
        if weight.info.persistent and _has_numbers(weight):
            theirs = by_any_name[name]
            weight.other_reference = theirs.stored
            weight.info = infos[name] = dataclasses.replace(infos[name], reference_dtype=theirs.info.dtype)
        elif name in buffers:
            weight.other_reference = other.weights[name].stored
    live.tree = tree_of(live.module, infos.values(), live.tree.draft)
    if not live.memory.limited:
        live.memory = other.memory
    if live.memory.limited:
        for weight in live.weights.values():
            if isinstance(weight.other_reference, BlockwiseSource):
                weight.other_reference.memory = live.memory
        # A pass reads the files of only one of the two checkpoints. Which one is known when a weight is used, so the blocks have no
        # ranges in advance.
        live.memory.use_blocks(dict.fromkeys(blocks(live, live.memory.most), ()))
    live.notices += tuple(
        f"{has} has a {WORDS}, and {lacks} has none"
        for has, lacks, with_it, without in ((*sides, other, live), (*sides[::-1], live, other))
        if with_it.tree.draft and not without.tree.draft
    )
    live.reference = options.reference
    live.notices += tuple(f"of the reference: {notice}" for notice in other.notices if notice not in live.notices)
    live.files += other.files
    live.identities += other.identities


def _has_numbers(weight: Weight) -> bool:
    """Return whether a weight holds floats. Only floats get reference values: integers are indexes and counters."""
    return weight.stored.dtype.is_floating_point


def _refuse_other_structure(other: LiveModel, live: LiveModel, sides: tuple[str, str]) -> None:
    theirs, ours = _shapes(other), _shapes(live)
    for mine, missing in ((sides, [*theirs.keys() - ours.keys()]), (sides[::-1], [*ours.keys() - theirs.keys()])):
        if missing:
            first = ", ".join(printable(name, 100) for name in sorted(missing)[:_SHOWN])
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise UserError(f"{mine[0]} has tensors that {mine[1]} lacks, so they can't be compared: {first}{more}")
    for name, shape in theirs.items():
        if shape != ours[name]:
            raise UserError(
                f"{printable(name, 200)} is {list(shape)} in {sides[0]} and {list(ours[name])} in {sides[1]}, "
                "so they can't be compared"
            )
    for weight in live.weights.values():
        holders = {id(held): held for held in other.weights.values() if set(held.info.names) & set(weight.info.names)}
        if len(holders) > 1:
            names = " and ".join(printable(held.info.name, 100) for held in holders.values())
            raise UserError(f"{names} are two tensors in {sides[0]} and one in {sides[1]}, so they can't be compared")


def _shapes(model: LiveModel) -> dict[str, tuple[int, ...]]:
    return {
        name: weight.stored.shape
        for weight in model.weights.values()
        if weight.info.persistent
        for name in weight.info.names
    }


def _use_other_configuration(other: LiveModel, live: LiveModel, sides: tuple[str, str]) -> frozenset[str]:
    """Let the reference (`other`) and the candidate (`live`) each run with the settings of its own configuration, and add a notice
    that names the settings that differ. Returns the names of the differing buffers that are computed from the configuration. sides:
    the titles of reference and candidate. Raises UserError if a module can't run with the settings of both.
    """
    theirs, ours = (dict(_entries(_configuration(model))) for model in (other, live))
    scaled = any(
        name.endswith("rope_type") and kind not in ("default", None) for name, kind in (*ours.items(), *theirs.items())
    )
    differing = [
        name
        for name in sorted(theirs.keys() | ours.keys())
        # The maximum length changes the output only if it scales rotary frequencies. Learned positions are weights.
        if not _alike(theirs.get(name), ours.get(name)) and (scaled or not name.endswith("max_position_embeddings"))
    ]
    shown = "; ".join(
        f"{printable(name, 60)} is {printable(str(theirs.get(name)), 60)} in {sides[0]} and "
        f"{printable(str(ours.get(name)), 60)} in {sides[1]}"
        for name in differing[:_SHOWN]
    )
    shown += f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    buffers = _different_buffers(other, live)
    swappable = all(name in other.weights and _fit(other.weights[name], live.weights.get(name)) for name in buffers)
    if buffers or any("rope" in name for name in differing):
        swappable &= _has_fixed_frequencies(live) and _has_fixed_frequencies(other)
    settings = side_settings(other.module, live.module, _WITHOUT_EFFECT) if differing else []
    if not swappable or isinstance(settings, str):
        where = settings if isinstance(settings, str) else min(buffers, default="the rotary frequencies")
        raise UserError(
            f"{sides[0]} and {sides[1]} compute differently in {printable(where, 200)}, so they can't run in one model: "
            f"{shown or 'it has other values'}"
        )
    live.side_settings = tuple(settings)
    if differing:
        live.notices += (f"each of the two runs with its own configuration: {shown}",)
    return frozenset(buffers)


def _alike(one: Any, other: Any) -> bool:
    """Return whether two values of a configuration are equal, except for the rounding to float32 in a GGUF file."""
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _configuration(model: LiveModel) -> Any:
    to_dict = getattr(getattr(model.module, "config", None), "to_dict", None)
    return to_dict() if to_dict is not None else {}


def _entries(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for each entry of a configuration, or a nested one, that can change results. Names begin with
    `prefix`.
    """
    for name, value in settings.items() if isinstance(settings, Mapping) else ():
        if name in _WITHOUT_EFFECT or name.startswith("_"):
            continue
        if name == "type" and settings.get("rope_type") == value:
            continue  # the older name of this entry
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _has_fixed_frequencies(model: LiveModel) -> bool:
    """Return whether a model uses its stored rotary frequencies for inputs of every length, and computes none from the length."""
    kinds = [getattr(module, "rope_type", None) for module in model.module.modules()]
    named = [str(kind) for each in kinds for kind in (each.values() if isinstance(each, Mapping) else (each,))]
    return not {"dynamic", "longrope"}.intersection(named)


def _different_buffers(other: LiveModel, live: LiveModel) -> list[str]:
    """Return the names of buffers that are computed from the configuration, such as rotary frequencies, and whose values differ."""
    theirs, ours = (
        {name: weight.stored.read() for name, weight in model.weights.items() if not weight.info.persistent}
        for model in (other, live)
    )
    return [
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    ]


def _fit(theirs: Weight, ours: Weight | None) -> bool:
    """Return whether a reference run can use the values of the buffer `theirs` in place of the values of `ours`."""
    return ours is not None and ours.stored.shape == theirs.stored.shape and _has_numbers(ours) and _has_numbers(theirs)
