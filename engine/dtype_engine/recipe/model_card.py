"""A model card: what a recipe, or a quantized checkpoint, changes in a model's outputs, and what is needed to measure it again.

The card's YAML is a recipe file. Its rules and settings are those of the candidate, and its entry `measured` has the fields of
`Conditions`, a hash for each input file, and the versions of the libraries. `reports/model_card.py` writes and reads the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec

from dtype_engine.core.number_ranges import SequenceLength, Sequences
from dtype_engine.core.text import Name
from dtype_engine.core.typed_data import as_type
from dtype_engine.recipe.file import Figure, RecipeFile
from dtype_engine.results.model_card import CardFigure

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
"""Matches the names of models on a hub."""
FILE, PROMPT = "file ", "prompt "
"""The prefixes of the entries for a file with inputs, whose value is its SHA-256, and for a prompt, whose value is its text."""


class Conditions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was compared with what, on which inputs: the part of a card's entry `measured` that a repeated measurement uses."""

    reference: Name
    """What the drift is measured from: "float32" or "stored", the model itself in these dtypes; or the name of a checkpoint."""
    reference_sha256: Sha256
    """A hash of the reference's weights (`weights_sha256`)."""
    inputs: Name
    """A description of the inputs."""
    inputs_sha256: Sha256
    """A hash of the token ids and of all other arguments of the forward passes."""
    device: Name
    candidate_sha256: Sha256 | None = None
    """A hash of the candidate's weights, or None if they are the reference's weights, cast by the rules."""
    sequence_length: SequenceLength | None = None
    """The maximum tokens in a sequence, or None for the default."""
    sequences: Sequences | None = None
    """The maximum number of sequences, or None for all."""
    chat: bool = False
    """Whether the texts were formatted by the model's chat template."""

    @property
    def of_one_checkpoint(self) -> bool:
        """Whether the reference has the weights that the rules cast, and not those of another checkpoint."""
        return self.candidate_sha256 is None


UNITS = {
    "reference": "what the drift is measured from",
    "reference_sha256": "of its weights: of the file, or of the lines of sha256sum for several files",
    "candidate_sha256": "of this model's weights, by the same rule",
    "inputs_sha256": "of the token ids and other arguments of the forward passes",
    "sequence_length": "tokens",
}
"""The comments for the entries of `measured`, by name."""


@dataclass(frozen=True)
class ModelCard:
    """The content of a model card."""

    figures: tuple[CardFigure, ...]
    recipe: RecipeFile
    """The rules, the settings and the conditions of the measurement."""

    @cached_property
    def conditions(self) -> Conditions:
        """The conditions of the measurement. Raises UserError for an entry that is missing, of the wrong type or out of range."""
        return as_type(
            {name: self.recipe.measured[name] for name in _NAMES if name in self.recipe.measured}, Conditions
        )

    @property
    def model(self) -> str:
        """The name of the model for which the recipe was made."""
        return self.recipe.model or "the model"

    @property
    def base(self) -> str:
        """The name of the checkpoint that the reference is: an id of a hub, or the name of a folder or file."""
        return self.model if self.conditions.of_one_checkpoint else self.conditions.reference

    @property
    def base_model(self) -> str | None:
        """`base` if it is the id of a model on a hub, otherwise None."""
        return self.base if HUB_ID.fullmatch(self.base) else None

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the libraries and of the system, by name."""
        return {name: str(value) for name, value in self.recipe.measured.items() if not _is_condition(name)}

    @property
    def inputs_text(self) -> str:
        """The inputs in words, with their files."""
        files = ", ".join(self.files)
        return f"{self.conditions.inputs} ({files})" if files else self.conditions.inputs

    @property
    def files(self) -> list[str]:
        """The names of the files with inputs, without their folders."""
        return [name.removeprefix(FILE) for name in self.recipe.measured if name.startswith(FILE)]


_NAMES = Conditions.__struct_fields__


def _is_condition(name: str) -> bool:
    return name in _NAMES or name.startswith((FILE, PROMPT))


def measured_entries(
    conditions: Conditions, inputs: Mapping[str, str], versions: Mapping[str, str]
) -> dict[str, Figure]:
    """Return the entry `measured` of a card's YAML. inputs: the entries for files and prompts. versions: by name."""
    entries: dict[str, Figure] = {name: getattr(conditions, name) for name in _NAMES}
    entries = {name: value for name, value in entries.items() if value is not None and value is not False}
    return {**entries, **inputs, **versions}
