"""Small copies of the pictures that the reference and the candidate make."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_PICTURES = 4
"""The maximum number of inputs whose pictures are kept."""
MOST_PIXELS = 256
"""Maximum width and height in pixels."""


@dataclass(frozen=True, slots=True)
class Picture:
    width: int
    height: int
    pixels: bytes = field(repr=False, metadata={"json": False})
    """Red, green and blue of every pixel, row by row from the upper left corner: 3 x width x height bytes."""


@dataclass(frozen=True, slots=True)
class PicturePair:
    """The pictures that both models make of one input. Of a video, the first frame is taken."""

    reference: Picture
    candidate: Picture
