"""Finds the weights that two checkpoints of the same architecture have in common: those with equal names, and those that are loaded
into the same place of the module that transformers builds. An expert is also paired with a weight that holds all experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.errors import NoForward
from dtype_engine.core.options import ModelOptions
from dtype_engine.runtime.building.load import build_on_meta
from dtype_engine.runtime.model.module_tree import collect_tensors
from dtype_engine.runtime.model.name_mapping import Placement, map_names


@dataclass(frozen=True, slots=True)
class Pair:
    """A weight that both checkpoints have."""

    reference: str
    candidate: str
    """`reference` and `candidate` are the weight's names in the two checkpoints, keys of `Checkpoint.weights`."""
    reference_part: tuple[int | None, int] | None = None
    candidate_part: tuple[int | None, int] | None = None
    """If the reference has only a part of the candidate's weight, such as one expert: the position of this part, as in
    `Placement.place`. `reference_part` is the reverse.
    """


@dataclass(frozen=True, slots=True)
class Pairing:
    """The weights that two checkpoints have in common, and those that only one has, in the order of the files."""

    pairs: tuple[Pair, ...]
    only_reference: tuple[str, ...]
    only_candidate: tuple[str, ...]


def pair_weights(reference: Checkpoint, candidate: Checkpoint, options: ModelOptions) -> Pairing:
    """Find the weights that two checkpoints have in common. transformers is imported only if each checkpoint has names that the
    other lacks. Raises UserError if `options` name an architecture that transformers lacks.
    """
    left, right = list(reference.weights), list(candidate.weights)
    same = set(left) & set(right)
    pairs = [Pair(name, name) for name in left if name in same]
    if len(same) < len(left) and len(same) < len(right):
        places = _places(reference, left, candidate, options), _places(candidate, right, reference, options)
        more = _by_place(*places)
        # A weight that holds the weights of all experts is in several pairs.
        pairs += [pair for pair in more if pair.reference not in same and pair.candidate not in same]
    order = {name: number for number, name in enumerate(left)}
    in_left, in_right = {pair.reference for pair in pairs}, {pair.candidate for pair in pairs}
    return Pairing(
        tuple(sorted(pairs, key=lambda pair: order[pair.reference])),
        tuple(name for name in left if name not in in_left),
        tuple(name for name in right if name not in in_right),
    )


_Place = tuple[str, tuple[int | None, int] | None]
"""Where a weight of a checkpoint is in the module: the name of the module's tensor, and the position inside it, as in
`Placement.place`, or None if the weight is the whole tensor.
"""


def _by_place(left: Mapping[str, _Place], right: Mapping[str, _Place]) -> list[Pair]:
    """Return the pairs of weights that have the same place, or where one weight is a part of the other. left, right: the places of
    the weights of the reference and of the candidate, keyed by name.
    """
    in_left = {place: name for name, place in reversed([*left.items()])}
    in_right = {place: name for name, place in reversed([*right.items()])}
    pairs = []
    for name, place in left.items():
        if place in in_right:
            pairs.append(Pair(name, in_right[place]))
        elif (packed := in_right.get((place[0], None))) is not None:
            pairs.append(Pair(name, packed, candidate_part=place[1]))
    for name, place in right.items():
        if place[1] is not None and (packed := in_left.get((place[0], None))) is not None:
            pairs.append(Pair(packed, name, reference_part=place[1]))
    return pairs


def _places(checkpoint: Checkpoint, names: list[str], other: Checkpoint, options: ModelOptions) -> Mapping[str, _Place]:
    """Return the place of each weight of a checkpoint in the module of its architecture or, if this is unknown, in the module of
    the `other` checkpoint's architecture. If both are unknown, each weight's place is its own name. All names of a tied weight have
    one place. Weights that loading packs in another way than by stacking rows are left out.
    """
    if (made := _made(checkpoint, options)) is not None:
        module, placements = made
    elif (made := _made(other, options)) is not None:
        module, placements = made[0], map_names(made[0], names)
    else:
        return {name: (name, None) for name in names}
    canonical = {name: info.name for info in collect_tensors(module)[0] for name in info.names}
    prefix = f"{getattr(module, 'base_model_prefix', '') or ''}."  # only a model with a head has this prefix
    places = {}
    for name in names:
        placement = placements.get(name, Placement(name, False))
        if not placement.part or placement.place is not None:
            places[name] = canonical.get(placement.name, placement.name).removeprefix(prefix), placement.place
    return places


def _made(checkpoint: Checkpoint, options: ModelOptions) -> tuple[nn.Module, Mapping[str, Placement]] | None:
    try:
        return build_on_meta(checkpoint, options)
    except NoForward:  # the files' tensors do not fit the architecture
        return None
