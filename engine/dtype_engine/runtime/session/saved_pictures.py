"""Saves the pictures that the reference run and the candidate run produce, to look at them side by side."""

from __future__ import annotations

from pathlib import Path

import torch

from dtype_engine.core.cancellation import never
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.session.session import Session


def save_pictures(session: Session, folder: Path, force: bool) -> list[Path]:
    """Do a reference run and a candidate run on every input, and write their pictures to `folder` as `1-reference.png`,
    `1-candidate.png`, and so on. Of a video, the first frame is written. Returns the paths of the files.

    force: whether to replace existing files. Raises UserError if the model produces no pictures, or if a file exists or can't be
    written.
    """
    pixels = getattr(type(session.model.module), "picture_range", None)
    if pixels is None:
        raise UserError(f"{session.model.title} makes no pictures to save")
    written = []
    with ForwardRunner(session.model, session.settings, never, watch=False) as runner:
        for number, batch in enumerate(session.need_inputs().batches, 1):
            for side, run, call in (
                ("reference", runner.reference, runner.reference_call(batch)),
                ("candidate", runner.candidate, runner.candidate_call(batch)),
            ):
                file = folder / f"{number}-{side}.png"
                if file.exists() and not force:
                    raise UserError(f"{file} exists; replace it with --force")
                _write(file, main_output(run(call).output)[1], *pixels)
                written.append(file)
    return written


def _write(file: Path, output: torch.Tensor, low: float, high: float) -> None:
    """Write the first picture of a batch. output: [batch, channels, height, width]; for videos, another dimension before or after
    the channels holds the frames. low, high: the pixel values of black and of full brightness.
    """
    from PIL import Image

    first = output[0]
    if first.ndim == 4:
        first = first[0] if first.shape[1] in (1, 3) else first[:, 0]
    scaled = ((first.detach().float().cpu().nan_to_num(low, high, low) - low) / (high - low)).clamp(0, 1)
    values = (255 * scaled).round().to(torch.uint8).movedim(0, -1).numpy()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values).save(file)
    except OSError as error:
        raise UserError(f"can't write {file}: {error.strerror or error}") from None
