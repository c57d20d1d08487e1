"""Whether an exported checkpoint is what its recipe makes of the source: every tensor, bit for bit, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..checkpoint import Checkpoint, CheckpointTensor, open_checkpoint
from ..drift import DriftMeter
from ..errors import Cancelled, UserError
from ..model.live import LiveModel, Weight
from ..model.load import fill, load, load_module
from ..model.mapped import read_mapped
from ..model.source import Source
from ..options import Options
from ..readings import OutputDrift
from ..readings_export import TensorDifference, VerifyReport
from ..recipe.file import read_recipe
from ..session import Session, open_session
from .contents import Contents, Item, Piece, as_bytes, of_checkpoint, of_live
from .run import OnBytes


def verify(
    folder: Path,
    source: Source,
    drift: bool = False,
    options: Options | None = None,
    on_bytes: OnBytes = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> VerifyReport:
    """Compare an exported folder with the recipe in it applied to `source`.

    With `drift`, also run both: the drift of the weights loaded back must be that of the source cast by the recipe. Raises
    UserError when either can't be read, NoForward when `drift` can't be run, and Cancelled.
    """
    started = time.perf_counter()
    options = options or Options()
    recipe = read_recipe(folder / "recipe.yaml")
    exported = open_checkpoint(folder)
    checkpoint = source.open()
    session: Session | None = None
    if checkpoint is None or drift:
        session = open_session(source, options)
        session.apply(recipe)
    if checkpoint is not None:
        contents = of_checkpoint(checkpoint, source.title, recipe, options)
    else:
        assert session is not None
        contents = of_live(session.model, recipe, session.plan.dtypes)
    differences = compare(contents, exported, on_bytes, cancelled)
    before = after = None
    if drift and session is not None and not differences:
        before = session.drift(cancelled=cancelled).output
        after = drift_of_export(session, source, exported, options, cancelled)
    return VerifyReport(
        folder=str(folder),
        model=source.title,
        rules=tuple(map(str, recipe.rules)),
        tensors=len(contents.items),
        nbytes=contents.nbytes,
        differences=differences,
        seconds=time.perf_counter() - started,
        drift_before=before,
        drift_after=after,
    )


def compare(
    contents: Contents,
    exported: Checkpoint,
    on_bytes: OnBytes = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[TensorDifference, ...]:
    """What is different in the export from what it ought to hold. Reads one tensor at a time. Raises Cancelled."""
    found: list[TensorDifference] = []
    done = 0
    for item in contents.items:
        if cancelled():
            raise Cancelled
        what = _difference(item, exported)
        if what is not None:
            found.append(TensorDifference(item.name, what))
        done += item.nbytes
        on_bytes(done, contents.nbytes)
    expected = {piece.name for item in contents.items for piece in item.pieces}
    found += [TensorDifference(name, "is not in the source") for name in exported.tensors if name not in expected]
    found += [TensorDifference(place, what) for place, what in contents.layout.differences(exported.path)]
    return tuple(found)


def _difference(item: Item, exported: Checkpoint) -> str | None:
    """What is wrong with one tensor, None for nothing."""
    for place, piece in enumerate(item.pieces):
        stored = exported.tensors.get(piece.name)
        if stored is None:
            return "has no scales" if place else "is missing"
        if (stored.dtype, stored.shape) != (piece.dtype, piece.shape):
            return f"is {stored.dtype} {list(stored.shape)} and should be {piece.dtype} {list(piece.shape)}"
    if item.scaled:
        named = exported.scaled.get(item.name)
        if named is None or named.dtype != item.dtype:
            return f"should be {item.dtype}, and the file says {named.dtype if named else 'nothing of scales'}"
    for piece, expected in zip(item.pieces, item.read(), strict=True):
        if what := _values_differ(piece, expected, exported.tensors[piece.name]):
            return what
    return None


def _values_differ(piece: Piece, expected: torch.Tensor, stored: CheckpointTensor) -> str | None:
    ours, theirs = as_bytes(expected), as_bytes(read_mapped(stored))
    if torch.equal(ours, theirs):
        return None
    width = max(1, expected.element_size())
    elements = int((ours.view(-1, width) != theirs.view(-1, width)).any(dim=1).sum())
    return f"{elements} of {expected.numel()} values of {piece.name} differ"


def drift_of_export(
    session: Session,
    source: Source,
    exported: Checkpoint,
    options: Options,
    cancelled: Callable[[], bool] = lambda: False,
) -> OutputDrift:
    """The drift of an export's weights, loaded back, against the reference of the session on its source.

    The loaded module runs; only the stored weights that the reference widens come from the source. Raises UserError where the
    two have not the same weights.
    """
    model, inputs = session.model, session.inputs
    if model.checkpoint is not None:
        loaded = load_module(exported, exported.path.name, options)
    else:
        loaded = fill(load(source, options).module, exported)
    back = LiveModel.wrap(loaded.module, exported.path.name, model.device, scaled=loaded.scaled)
    if back.weights.keys() != model.weights.keys():
        raise UserError(
            f"{exported.path}: its model has other weights than {model.title}, so their drift can't be compared"
        )
    for name, weight in back.weights.items():
        _stand_on(weight, model.weights[name])
    back.tree = model.tree
    if inputs is None:
        raise UserError(session.no_forward or "the model can't be run")
    meter = DriftMeter(back, inputs)
    meter.settings = session.settings
    return meter.measure(cancelled=cancelled).output


def _stand_on(weight: Weight, source: Weight) -> None:
    """Make a loaded weight a cast of the source's."""
    weight.dtype = weight.info.dtype
    weight.info, weight.original = source.info, source.original
    weight.stored_scale = source.stored_scale
    if weight.changed:
        weight.lost = None
