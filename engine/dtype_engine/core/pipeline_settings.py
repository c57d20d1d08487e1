"""How a pipeline of diffusers is called: the number of steps, the size of a picture and so on."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass

from dtype_engine.core.errors import UserError
from dtype_engine.core.number_ranges import PictureSide, Scale, Seed, Steps, Strength
from dtype_engine.core.typed_data import TypedFields, as_type


@dataclass(frozen=True, slots=True, repr=False)
class PipelineSettings(TypedFields):
    """How a pipeline of diffusers is called. None leaves an argument to the program, or to the pipeline's own default.

    Example:
        >>> print(de.PipelineSettings(steps=20, size=(512, 384), guidance=5.0))
        steps=20 size=512x384 guidance=5.0
    """

    steps: Steps | None = None
    """The number of denoising steps (`num_inference_steps`). None: 4."""
    size: tuple[PictureSide, PictureSide] | None = None
    """The width and height of a picture, in pixels. None: at most 256 x 256, or 64 x 64 for a video."""
    guidance: Scale | None = None
    """How strongly the prompt guides (`guidance_scale`)."""
    true_cfg: Scale | None = None
    """The same for pipelines that have a scale for negative prompts besides their guidance (`true_cfg_scale`), such as Flux's."""
    negative_prompt: str | None = None
    """What the pictures should not show."""
    strength: Strength | None = None
    """How much of the given picture is replaced by noise first (`strength`): from 0 to 1, all of it."""
    seed: Seed = 0
    """The seed of the first call's random numbers. Each further call has the next number."""

    def __str__(self) -> str:
        return " ".join(f"{name}={_word(value)}" for name, value in self.given().items())

    def given(self) -> dict[str, object]:
        """Return the settings that are not the defaults, by name."""
        found = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in found.items() if value != default}


def parse_size(text: str) -> tuple[int, int]:
    """Return the width and height in pixels that a text such as "512x384" names. Raises ValueError."""
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdecimal() and height.isdecimal() and len(text) < 12):
        raise ValueError(f"{text[:40]!r}: give WIDTHxHEIGHT in pixels, such as 512x384")
    return int(width), int(height)


def parse_settings(line: str, before: PipelineSettings) -> PipelineSettings | None:
    """Return `before` with the settings that a line names, such as `steps=20 size=512x384 negative-prompt="text, frames"`, or None
    if some of its words do not begin with the name of a setting and "=". Raises UserError for a value that a setting can't have.
    """
    try:
        words = shlex.split(line)
    except ValueError:  # an apostrophe
        return None
    pairs = [(name.replace("-", "_"), text) for name, equals, text in (word.partition("=") for word in words) if equals]
    if not pairs or len(pairs) < len(words) or any(name not in SETTINGS for name, _ in pairs):
        return None
    return as_type(before.given() | {name: _value(name, text) for name, text in pairs}, PipelineSettings)


SETTINGS = tuple(field.name for field in dataclasses.fields(PipelineSettings))
"""The names of all settings."""


def _value(name: str, text: str) -> object:
    """Return the value of a setting that a text stands for, or the text itself if it is no number."""
    if name == "negative_prompt":
        return text
    try:
        return parse_size(text) if name == "size" else float(text) if set(text) & set(".e") else int(text)
    except ValueError as error:
        if name == "size":
            raise UserError(f"{name}={error}") from None
        return text


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return shlex.quote(value) if isinstance(value, str) else str(value)
