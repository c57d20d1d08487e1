"""Which weight of one checkpoint is which weight of another checkpoint of the same architecture.

Equal names are a pair. Other names are compared under the names that the live model of transformers has, so prefixes and renamed
tensors make no difference, and one expert's weight finds its rows in a weight that holds all experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.errors import NoForward
from dtype_engine.core.options import Options
from dtype_engine.runtime.model.load import build_on_meta
from dtype_engine.runtime.model.module_tree import collect_tensors
from dtype_engine.runtime.model.name_mapping import Placement, map_names


@dataclass(frozen=True, slots=True)
class Pair:
    """A weight that both checkpoints have."""

    reference: str
    """The weight's key in the `weights` of the reference."""
    candidate: str
    """The weight's key in the `weights` of the candidate."""
    reference_part: tuple[int | None, int] | None = None
    """Which rows of the reference's weight are the candidate's whole weight: (index of the matrix, or None if there is only one;
    number of the part among those stacked in the rows of this matrix). None if the whole weights are compared.
    """
    candidate_part: tuple[int | None, int] | None = None
    """The same with the roles exchanged: the reference's whole weight is these rows of the candidate's weight."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """The weights that two checkpoints have in common, and those that only one has, in the order of the files."""

    pairs: tuple[Pair, ...]
    only_reference: tuple[str, ...]
    only_candidate: tuple[str, ...]


def pair_weights(reference: Checkpoint, candidate: Checkpoint, options: Options) -> Pairing:
    """Find the weights that two checkpoints have in common. transformers is imported only if names differ.

    Raises UserError if `options` name an architecture that transformers lacks.
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
"""Where the live model has a weight: the name of the live tensor; and the position inside it, or None if it is the whole tensor."""


def _by_place(left: Mapping[str, _Place], right: Mapping[str, _Place]) -> list[Pair]:
    """Return the pairs of weights that have the same place in the live model, or one of which is a part of the other."""
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


def _places(checkpoint: Checkpoint, names: list[str], other: Checkpoint, options: Options) -> Mapping[str, _Place]:
    """Return where the live model has each weight. All names of a tied weight have one place. Without a known architecture, that of
    the `other` checkpoint is taken or, if it is unknown too, every weight is where its name says. A weight that loading turns or
    mixes with others has no place.
    """
    if (made := _made(checkpoint, options)) is not None:
        module, placements = made
    elif (made := _made(other, options)) is not None:
        module, placements = made[0], map_names(made[0], names)
    else:
        return {name: (name, None) for name in names}
    canonical = {name: info.name for info in collect_tensors(module)[0] for name in info.names}
    prefix = f"{getattr(module, 'base_model_prefix', '') or ''}."  # only a model with a head has it
    places = {}
    for name in names:
        placement = placements.get(name, Placement(name, False))
        if not placement.part or placement.place is not None:
            places[name] = canonical.get(placement.name, placement.name).removeprefix(prefix), placement.place
    return places


def _made(checkpoint: Checkpoint, options: Options) -> tuple[nn.Module, Mapping[str, Placement]] | None:
    """Return a checkpoint's module without data and where it has each tensor, or None if the architecture is unknown."""
    try:
        return build_on_meta(checkpoint, options)
    except NoForward:  # its tensors are not those of the architecture
        return None
