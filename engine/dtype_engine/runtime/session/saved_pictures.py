"""Saves the pictures that the reference run and the candidate run produce, to look at them side by side."""

from __future__ import annotations

from pathlib import Path

import torch

from dtype_engine.core.cancellation import never
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.numerics.compare.pictures import first_picture, picture_range
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.session.session import Session

_SIDES = ("reference", "candidate")


def check_pictures(session: Session, folder: Path, force: bool) -> None:
    """Raise UserError if the model makes no pictures or, unless `force`, if a file exists that `save_pictures` would write."""
    if picture_range(session.model.module) is None:
        raise UserError(f"{session.model.title} makes no pictures to save")
    for number in range(1, len(session.need_inputs().batches) + 1):
        for side in _SIDES:
            if not force and (file := _file(folder, number, side)).exists():
                raise UserError(f"{file} exists; replace it with --force")


def save_pictures(session: Session, folder: Path, force: bool) -> list[Path]:
    """Do a reference run and a candidate run on every input, and write their pictures to `folder` as `1-reference.png`,
    `1-candidate.png`, and so on. Of a video, the first frame is written. Returns the paths of the files.

    force: whether to replace existing files. Raises UserError if `check_pictures` does, or if a file can't be written.
    """
    check_pictures(session, folder, force)
    pixels = picture_range(session.model.module)
    assert pixels is not None
    written = []
    with ForwardRunner(session.model, session.settings, never, watch=False) as runner:
        for number, batch in enumerate(session.need_inputs().batches, 1):
            runs = (
                (runner.reference, runner.reference_call(batch)),
                (runner.candidate, runner.candidate_call(batch)),
            )
            for side, (run, call) in zip(_SIDES, runs, strict=True):
                file = _file(folder, number, side)
                _write(file, main_output(run(call).output)[1], *pixels)
                written.append(file)
    return written


def _file(folder: Path, number: int, side: str) -> Path:
    return folder / f"{number}-{side}.png"


def _write(file: Path, output: torch.Tensor, low: float, high: float) -> None:
    """Write the first picture of a batch, as `first_picture` returns it. low, high: the values of black and of full brightness."""
    from PIL import Image

    values = (255 * first_picture(output, low, high)).round().to(torch.uint8).movedim(0, -1).numpy()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(file)
    except OSError as error:
        raise UserError(f"can't write {file}: {error.strerror or error}") from None
