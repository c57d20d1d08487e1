"""Types of numbers in saved files and messages. Decoding refuses a number outside the range of its type."""

from __future__ import annotations

from typing import Annotated

import msgspec

LARGEST_COUNT = 1 << 60
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
"""A number that can't be negative or NaN, such as a number of seconds or a sum of squares. It may be infinite."""
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
"""A part of a whole: more than nothing, and less than all."""
MOST_TOKENS = 1 << 24
"""The most tokens of one sequence for which a command can ask."""
SequenceLength = Annotated[int, msgspec.Meta(ge=2, le=MOST_TOKENS)]
Sequences = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
"""A number of calibration sequences."""
Threads = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Processes = Annotated[int, msgspec.Meta(ge=1, le=9999)]
Dimensions = Annotated[int, msgspec.Meta(ge=0, le=64)]
"""A number of dimensions of a tensor. torch's limit is 64."""
Dimension = Annotated[int, msgspec.Meta(ge=-64, le=63)]
"""The index of a dimension of a tensor, from the end if it is negative."""
Steps = Annotated[int, msgspec.Meta(ge=1, le=1_000)]
"""A number of denoising steps."""
PictureSide = Annotated[int, msgspec.Meta(ge=8, le=8_192)]
"""The width or height of a picture that a model makes, in pixels."""
Scale = Annotated[float, msgspec.Meta(ge=0, le=1_000)]
"""A factor of guidance by a prompt."""
Strength = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
"""The seed of random numbers."""
