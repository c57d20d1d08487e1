"""`dtype-engine weights A --against B`: compares the weights of two checkpoints one by one, without running a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dtype_engine.cli.program import answer, note, print_json, print_stderr, say, say_share
from dtype_engine.cli.request import RunRequest
from dtype_engine.core.errors import UserError
from dtype_engine.results.as_json import as_json
from dtype_engine.results.weights import DifferentShape, WeightDifference, WeightsComparison

if TYPE_CHECKING:
    from dtype_engine.checkpoint import Checkpoint
    from dtype_engine.checkpoint.source import Source

DIFFERENT = 1


def compare_weights(request: RunRequest, against: str, save: Path | None, as_object: bool) -> int:
    """Compare each weight of MODEL, the reference, with the same weight of the checkpoint `against`, print the result, and return
    the exit status. Raises UserError.

    save: the file to which the comparison is saved, and from which it continues. If the user interrupts the command, the weights
    compared so far are printed and saved.
    """
    from dtype_engine.checkpoint.source import locate
    from dtype_engine.runtime.measure.saved_differences import SavedDifferences
    from dtype_engine.runtime.measure.weight_differences import TwoCheckpoints, sorted_worst_first

    if request.recipe.rules or request.preset is not None:
        raise UserError("weights --against compares the files as they are: leave out --cast, --recipe and --preset")
    sources = request.locate(), locate(against, request.options.trust_pickle, request.options.download)
    reference, candidate = map(_checkpoint, sources)
    for source, checkpoint in zip(sources, (reference, candidate), strict=True):
        note(f"{source.title}: {sentence}" for sentence in checkpoint.of_sets)
    two = TwoCheckpoints(reference, candidate, request.options)
    saved = SavedDifferences(save, reference, candidate) if save is not None else None
    done: list[WeightDifference] = []
    shapes: list[DifferentShape] = []

    def progress(bytes_done: int, total: int) -> None:
        say_share("comparing", bytes_done, total)

    def report() -> WeightsComparison:
        return WeightsComparison(
            sources[0].title,
            sources[1].title,
            sorted_worst_first(done),
            tuple(shapes),
            two.pairing.only_reference,
            two.pairing.only_candidate,
            len(two.pairing.pairs) - len(done) - len(shapes),
        )

    try:
        for each in two.differences(saved.found if saved is not None else {}, progress):
            if isinstance(each, DifferentShape):
                shapes.append(each)
                continue
            done.append(each)
            if saved is not None:
                saved.add(each)
    except KeyboardInterrupt:
        say("")
        _print(report(), as_object)
        if saved is not None:
            print_stderr(f"dtype-engine: note: {save} has what is done, and the same command continues from it")
        raise
    finally:
        if saved is not None:
            saved.write()
    say("")
    _print(report(), as_object)
    note((*reference.remarks, *candidate.remarks))
    return 0 if report().same else DIFFERENT


def _print(report: WeightsComparison, as_object: bool) -> None:
    if as_object:
        print_json(as_json(report) | {"same": report.same})
        return
    from dtype_engine.reports.text_weights import comparison_text

    answer(comparison_text(report))


def _checkpoint(source: Source) -> Checkpoint:
    checkpoint = source.open()
    if checkpoint is None:
        raise UserError(f"{source.title} is code, and weights --against compares the files of two checkpoints")
    return checkpoint
