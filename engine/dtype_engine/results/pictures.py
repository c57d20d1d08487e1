"""Small copies of the pictures that the reference and the candidate make."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_PICTURES = 4
"""The number of inputs whose pictures are kept: the first ones."""
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
    """What both models make of one input. Of a video, it is the first frame."""

    reference: Picture
    candidate: Picture
