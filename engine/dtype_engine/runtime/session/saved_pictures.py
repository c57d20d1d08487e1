"""Saves the pictures or sounds that the reference run and the candidate run produce, to compare them side by side."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from dtype_engine.core.atomic_write import write_atomic
from dtype_engine.core.cancellation import never
from dtype_engine.core.errors import UserError, exhausted
from dtype_engine.runtime.numerics.compare.pictures import first_picture, picture_range
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.session.session import Session

_SIDES = ("reference", "candidate")
_MOST_CHANNELS = 2


def check_pictures(session: Session, folder: Path, force: bool) -> None:
    """Raise UserError if the model makes no pictures or sounds, or if a file to be written exists and `force` is False."""
    module = session.model.module
    if picture_range(module) is None and not getattr(module, "sound_rate", None):
        raise UserError(f"{session.model.title} makes no pictures to save")
    for number in range(1, len(session.need_inputs().batches) + 1):
        for side in _SIDES:
            if not force and (file := _file(module, folder, number, side)).exists():
                raise UserError(f"{file} exists; replace it with --force")


def save_pictures(session: Session, folder: Path, force: bool) -> list[Path]:
    """Do a reference run and a candidate run on every input, and write their pictures to `folder` as `1-reference.png`,
    `1-candidate.png`, and so on. Of a video, the first frame is written; sounds are WAV files. Returns the paths of the files.

    force: whether to replace existing files. Raises UserError if `check_pictures` does, or if a file can't be written.
    """
    check_pictures(session, folder, force)
    module = session.model.module
    written = []
    with ForwardRunner(session.model, session.settings, never, watch=False) as runner:
        for number, batch in enumerate(session.need_inputs().batches, 1):
            runs = (
                (runner.reference, runner.reference_call(batch)),
                (runner.candidate, runner.candidate_call(batch)),
            )
            for side, (run, call) in zip(_SIDES, runs, strict=True):
                file = _file(module, folder, number, side)
                _write(file, main_output(run(call).output)[1], module)
                written.append(file)
    return written


def _file(module: Any, folder: Path, number: int, side: str) -> Path:
    return folder / f"{number}-{side}.{'wav' if picture_range(module) is None else 'png'}"


def _write(file: Path, output: torch.Tensor, module: Any) -> None:
    """Write the first picture or the first sound of a batch that a module has made."""
    pixels = picture_range(module)
    content = _wave(output, module.sound_rate) if pixels is None else _png(output, *pixels)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't write {file}: {exhausted(error) or error.strerror}") from None
    write_atomic(file, content, replace=True)


def _png(output: torch.Tensor, lowest: float, highest: float) -> bytes:
    """Return the first picture of a batch as a PNG file. lowest, highest: the values of black and white."""
    from PIL import Image

    values = (255 * first_picture(output, lowest, highest)).round().to(torch.uint8).movedim(0, -1)
    file = io.BytesIO()
    Image.fromarray(values.numpy()).save(file, "PNG")
    return file.getvalue()


def _wave(output: torch.Tensor, rate: int) -> bytes:
    """Return the first sound of a batch as a WAV file with its values in float32. output: [batch, channels, samples] or [batch,
    samples]. rate: samples per second. Raises UserError for an output of another shape, such as a spectrogram.
    """
    import soundfile

    first = output[0] if output.ndim > 2 else output[:1]
    if first.ndim != 2 or first.shape[0] > _MOST_CHANNELS:
        raise UserError(f"an output of the shape {list(output.shape)} is no sound of one or two channels to save")
    file, values = io.BytesIO(), first.detach().to("cpu", torch.float32).T
    soundfile.write(file, values.numpy(), rate, "FLOAT", format="WAV")  # clips no value, and keeps small differences
    return file.getvalue()
