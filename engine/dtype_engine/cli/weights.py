"""`dtype-engine weights`: reports how casts change the values of a checkpoint, or how two checkpoints differ. No model is run,
unless it is asked what roundings would gain.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dtype_engine.cli.options import INPUTS, ModelCommand, json_option
from dtype_engine.cli.program import (
    NO,
    UnwrittenFiles,
    answer,
    note,
    print_json,
    print_stderr,
    say,
    say_count,
    say_share,
)
from dtype_engine.cli.request import RunRequest
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.units import plural
from dtype_engine.recipe import Recipe, require_matches
from dtype_engine.results.as_json import as_json
from dtype_engine.results.rounding import WeightGain
from dtype_engine.results.weights import DifferentShape, WeightDifference, WeightsComparison

if TYPE_CHECKING:
    from dtype_engine.checkpoint import Checkpoint
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.runtime.session.session import Session


@click.command(cls=ModelCommand, runs=False, also=INPUTS)
@click.option(
    "--against",
    metavar="OTHER",
    help="Compare MODEL's weights with those of another checkpoint of the same architecture, instead of casting them.",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --against: save the comparison to this file while it runs. If the file exists, the comparison continues from "
    "it.",
)
@click.option(
    "--gains",
    "with_gains",
    is_flag=True,
    help="Also report by how much a rounding of each format, such as GPTQ, lowers the squared error of the layer's output: that of "
    "the cast, as in int4@g32:imatrix, or else :gptq. This runs the model on the inputs (--calibration, --text, ...).",
)
@json_option
def weights(request: RunRequest, against: str | None, save: Path | None, with_gains: bool, as_object: bool) -> int:
    """Report what the casts do to the values of each tensor: rounding errors, overflow and underflow. No forward pass is run,
    unless --gains is given.

    With --against OTHER, report instead how each weight of MODEL differs from the same weight of the checkpoint OTHER. The exit
    status is then 1 if anything differs.
    """
    if with_gains and against is not None:
        raise UserError("weights --against casts nothing: leave --gains out")
    if not with_gains:
        for option in INPUTS:
            if option.name in request.explicit:
                raise UserError(f"weights {option.opts[0]} goes with --gains, without which no model is run")
        request = msgspec.structs.replace(request, options=dataclasses.replace(request.options, device="cpu"))
    if against is not None:
        return _compare(request, against, save, as_object)
    if save is not None:
        raise UserError("weights --save goes with --against: casts are computed in seconds")
    source = request.locate()
    from dtype_engine.checkpoint import unchanged
    from dtype_engine.runtime.measure.planned_casts import casts_in_files, casts_of_model
    from dtype_engine.runtime.measure.weight_errors import round_trips, skipped

    session = _uncast(request, source) if with_gains else None
    if session is not None or source.kind != "checkpoint":
        from dtype_engine.runtime.building.load import load

        live = session.model if session is not None else load(source, request.options)
        recipe = request.with_preset(live.tree)
        tree, plan, remarks = live.tree, require_matches(live.tree, recipe), live.notices
        identities, casts = live.identities, casts_of_model(live, plan.dtypes)
    else:
        planned = request.plan(source)
        assert planned.checkpoint is not None
        tree, plan, remarks = planned.tree, planned.plan, planned.checkpoint.remarks
        identities, casts = planned.checkpoint.identities, casts_in_files(planned.checkpoint, tree.order, plan.dtypes)
        note(planned.checkpoint.of_sets)
    with unchanged(identities):
        errors = list(round_trips(casts, identities, partial(say_count, "weights")))
    gains: tuple[WeightGain, ...] = ()
    if session is not None:
        wanted = {cast.name: (cast.dtype,) for cast in casts}
        gains = session.rounding_gains(wanted, partial(say_share, "rounding"))
    say("")
    note(remarks)
    if rounded := sum(map(dtypes.has_rounding, (cast.dtype for cast in casts))):
        note([f"{plural(rounded, 'weight')} with roundings: the errors are those of the nearest values"])
    left_out = skipped(tree)
    if as_object:
        rules = [str(rule) for rule in plan.recipe.rules]
        found = {"weights": as_json(errors), "skipped": as_json(left_out)}
        print_json({"model": source.title, "rules": rules} | found | ({"gains": as_json(gains)} if with_gains else {}))
        return 0
    from dtype_engine.reports.text import skipped_text, weights_text

    answer(weights_text(errors, gains))
    if left_out:
        answer(skipped_text(left_out))
    return 0


def _uncast(request: RunRequest, source: Source) -> Session:
    """Open the model as stored, without the rules of the request."""
    return msgspec.structs.replace(request, recipe=Recipe(), preset=None).open_session(source)


def _compare(request: RunRequest, against: str, save: Path | None, as_object: bool) -> int:
    """Compare each weight of MODEL, the reference, with the same weight of `against`, print the result, and return the exit status.
    save: the file from which the comparison continues, or None. If the user interrupts it, the finished part is printed and saved
    there.
    """
    from dtype_engine.checkpoint.source import locate_by
    from dtype_engine.core.atomic_write import check_target
    from dtype_engine.reports.text_weights import comparison_text
    from dtype_engine.runtime.measure.saved_differences import SavedDifferences
    from dtype_engine.runtime.measure.weight_differences import TwoCheckpoints, sorted_worst_first

    if request.recipe.rules or request.preset is not None:
        raise UserError("weights --against compares the files as they are: leave out --cast, --recipe and --preset")
    sources = request.locate(), locate_by(against, request.options)
    reference, candidate = map(_checkpoint, sources)
    for source, checkpoint in zip(sources, (reference, candidate), strict=True):
        note(f"{source.title}: {sentence}" for sentence in checkpoint.of_sets)
    two = TwoCheckpoints(reference, candidate, request.options)
    if save is not None:
        check_target(save, replace=True)  # before hours of comparing
    saved = SavedDifferences(save, reference, candidate) if save is not None else None
    unwritten = UnwrittenFiles()
    done: list[WeightDifference] = []
    shapes: list[DifferentShape] = []

    def show() -> bool:
        pairing, titles = two.pairing, (sources[0].title, sources[1].title)
        only, pending = (pairing.only_reference, pairing.only_candidate), len(pairing.pairs) - len(done) - len(shapes)
        report = WeightsComparison(*titles, sorted_worst_first(done), tuple(shapes), *only, pending)
        say("")
        if as_object:
            print_json(as_json(report) | {"same": report.same})
        else:
            answer(comparison_text(report))
        return report.same

    try:
        for each in two.differences(saved.found if saved is not None else {}, partial(say_share, "comparing")):
            if isinstance(each, DifferentShape):
                shapes.append(each)
                continue
            done.append(each)
            if saved is not None and not unwritten.status:
                with unwritten.reported():
                    saved.add(each)
    except KeyboardInterrupt:
        show()
        if saved is not None and not unwritten.status:
            print_stderr(f"dtype-engine: note: {save} has what is done, and the same command continues from it")
        raise
    finally:
        if saved is not None and not unwritten.status:
            with unwritten.reported():
                saved.write()
    same = show()
    note((*reference.remarks, *candidate.remarks))
    return unwritten.status or (0 if same else NO)


def _checkpoint(source: Source) -> Checkpoint:
    checkpoint = source.open()
    if checkpoint is None:
        raise UserError(f"{source.title} is code, and weights --against compares the files of two checkpoints")
    return checkpoint
