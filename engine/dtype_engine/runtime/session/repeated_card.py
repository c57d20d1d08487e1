"""Repeats the measurement of a model card. The card comes from other people: nothing that it names is opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dtype_engine.checkpoint.source import Source
from dtype_engine.checkpoint.weights_hash import weights_sha256
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import FLOAT32, Options
from dtype_engine.core.text import printable
from dtype_engine.recipe import Recipe
from dtype_engine.recipe.model_card import ModelCard
from dtype_engine.reports.versions import versions
from dtype_engine.results.model_card import CardCheck, card_figures, repeated_figures
from dtype_engine.runtime.measure.listener import MeasurementListener, OnProgress
from dtype_engine.runtime.scan.saved import hash_of
from dtype_engine.runtime.session.model_card import OnBytes, need_files

if TYPE_CHECKING:
    from dtype_engine.runtime.session.session import Session


@dataclasses.dataclass(frozen=True)
class Repeat:
    """How the measurement of a card is repeated on a model."""

    options: Options
    recipe: Recipe
    """The rules with which the model is cast."""
    reference_bytes: int
    is_same: bool
    """Whether the weights are those that the card names. True if it names none of this model."""


def how_to_repeat(
    card: ModelCard, source: Source, against: Source | None, options: Options, on_bytes: OnBytes = ignore
) -> Repeat:
    """Return how to repeat the measurement of a card on the model `source`, which is the model of the card or an export of it.

    against: the reference that the user named, or None. options: those of the user, with the inputs. Raises UserError if the
    reference is not the card's.
    """
    conditions, model = card.conditions, need_files(source)
    options = dataclasses.replace(
        options,
        settings=card.recipe.settings or options.settings,
        sequence_length=conditions.sequence_length,
        sequences=conditions.sequences,
        chat=conditions.chat,
    )
    base, needs = printable(card.base, 200), f"give the model {printable(card.base, 200)} by --against"
    own_hash = weights_sha256(model, on_bytes)
    if against is None:
        if not conditions.of_one_checkpoint:
            raise UserError(f"the card compares {source.title} with another checkpoint: {needs}")
        if own_hash != conditions.reference_sha256:
            raise UserError(
                f"{source.title} is not the model {base} that the rules of the card cast: its weights have the SHA-256 "
                f"{own_hash[:12]}…, and the card has {conditions.reference_sha256[:12]}…; if it is an export of that model, {needs}"
            )
        return Repeat(
            dataclasses.replace(options, reference=conditions.reference),
            card.recipe.recipe,
            model.tree().stored_bytes,
            True,
        )
    reference = need_files(against)
    found = weights_sha256(reference, on_bytes)
    if found != conditions.reference_sha256:
        raise UserError(
            f"--against {against.title} is not the reference of the card: its weights have the SHA-256 {found[:12]}…, and the card "
            f"has {conditions.reference_sha256[:12]}… of {base}"
        )
    if conditions.of_one_checkpoint and conditions.reference != FLOAT32:
        raise UserError(
            "the card is measured from the stored dtypes, and --against from float32: check the card on the model itself, without "
            "--against"
        )
    return Repeat(
        dataclasses.replace(options, reference=against.asked or "demo"),
        Recipe() if conditions.of_one_checkpoint else card.recipe.recipe,
        reference.tree().stored_bytes,
        conditions.candidate_sha256 in (None, own_hash),
    )


def repeat_card(
    session: Session, card: ModelCard, file: str, reference_bytes: int, on_progress: OnProgress
) -> CardCheck:
    """Measure again what a card says, in a session that was opened as `how_to_repeat` says, and return both. file: the name of the
    card's file. Raises UserError if the inputs, or those to which roundings are fitted, are not the card's.
    """
    inputs = session.need_inputs()
    if hash_of(inputs) != card.conditions.inputs_sha256:
        raise UserError(
            f"the inputs are not those of the card, which was measured on {printable(card.inputs_text, 300)}, and here on "
            f"{printable(inputs.description, 300)}: give the same by --text, --prompt and so on"
        )
    fitted, wanted = session.fitted_to, card.recipe.fitted_to
    if fitted is not None and (wanted is None or fitted.fingerprint != wanted.fingerprint):
        to = "nothing that it names" if wanted is None else printable(wanted.inputs, 300)
        raise UserError(f"the roundings of the card were fitted to {to}: give the same by --calibration")
    report = session.drift(MeasurementListener(on_progress=on_progress))
    floor = session.floor(lambda done, total: on_progress("noise floor", done, total))
    now = card_figures(report, reference_bytes, session.plan.planned_bytes)
    here = versions() | {"device": report.device}
    before = card.versions | {"device": card.conditions.device}
    return CardCheck(
        file,
        report.inputs_run,
        repeated_figures(card.figures, now, floor if floor.ways else None, session.in_16_bits),
        (
            *_differences(before, here),
            *([] if floor.ways else ["no noise floor could be measured, so none is allowed for"]),
        ),
    )


def _differences(before: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """Yield what the card and this measurement have in another version, or on another device."""
    for name, value in here.items():
        if before.get(name, value) != value:
            yield f"{printable(name)} {printable(before[name])} on the card, {printable(value)} here"
