"""Checks of single values in events, such as dtypes, rules and the lengths of lists."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import COUNTS, LAYOUTS, MOST_LAYERS, DraftHead
from dtype_engine.core.kv_formats import KV_FORMATS, SCANNED
from dtype_engine.core.text import printable
from dtype_engine.recipe import Rule

# Importing these would delay the first paint.
if TYPE_CHECKING:
    from dtype_engine.core.kv_cache import KVCache
    from dtype_engine.core.token_reads import TokenReads
    from dtype_engine.results.losses import ValueLoss
    from dtype_engine.results.pictures import PicturePair

LARGEST_EXPONENT = 1100
"""The maximum absolute value of a number's exponent to base 2: subnormal float64 reaches -1074."""
_MOST_SHOWN = 100
"""Maximum length of a list that the app draws as a whole, because it handles no keys while it draws."""
MOST_NOTICES = 1000
"""Maximum number of notices, which are sentences for the user, in one event."""


def check_length(shown: Collection[object], most: int = _MOST_SHOWN) -> None:
    """Raise ValueError if a list has more than `most` entries."""
    if len(shown) > most:
        raise ValueError(f"{len(shown):,} entries in a list of at most {most:,}")


def check_kv_cache(cache: KVCache) -> None:
    """Raise ValueError if a KV cache has impossible values, such as an unknown dtype or a negative size."""
    if cache.dtype is not None:
        check_dtypes((cache.dtype,))
    check_dtypes(tensor.state_dtype for tensor in cache.tensors if tensor.state_dtype is not None)
    if not 0 < (cache.longest or 1) < 1 << 40:
        raise ValueError(f"no model was made for {cache.longest} tokens")
    for tensor in cache.tensors:
        sizes = (
            tensor.layer,
            tensor.per_token,
            tensor.fixed,
            tensor.heads - 1,
            tensor.runs - 1,
            (tensor.window or 1) - 1,
            tensor.length or 0,
        )
        if min(sizes) < 0 or max(sizes) > 1 << 40:
            raise ValueError(f"no KV cache has a tensor like {tensor}")


def check_token_reads(reads: TokenReads) -> None:
    """Raise ValueError if a token would read less than nothing, or more than all, of a part of the model."""
    if not all(0 <= part.read <= part.of < 1 << 40 and part.of for part in reads.parts):
        raise ValueError("a token reads from none to all of the bytes of a weight")
    check_length({part.of for part in reads.parts})
    if reads.routed is not None and min(reads.routed) < 1:
        raise ValueError(f"no token is sent to {reads.routed[0]} of {reads.routed[1]} experts")
    check_length(reads.notes)


def check_draft_head(draft: DraftHead) -> None:
    """Raise ValueError if a draft head has an unknown layout or impossible numbers, or more modules than any model has."""
    if draft.layout not in ("", *LAYOUTS) or draft.entry not in ("", *COUNTS):
        raise ValueError(f"there is no draft head of the layout {printable(draft.layout)}")
    if not 0 <= draft.first < 1 << 40 or not 0 <= (draft.declared or 0) <= MOST_LAYERS:
        raise ValueError(f"no model has {draft.declared} draft layers after {draft.first}")
    check_length(draft.modules)


def check_losses(losses: Iterable[ValueLoss]) -> None:
    for loss in losses:
        check_dtypes((loss.dtype,))
        if loss.elements < 1:
            raise ValueError(f"{loss.tensor} loses values and has none")


def check_pictures(pairs: Sequence[PicturePair]) -> None:
    from dtype_engine.results.pictures import MOST_PICTURES, MOST_PIXELS

    if len(pairs) > MOST_PICTURES:
        raise ValueError(f"{len(pairs)} pairs of pictures of at most {MOST_PICTURES}")
    for picture in (each for pair in pairs for each in (pair.reference, pair.candidate)):
        sizes = picture.width, picture.height
        if not 1 <= min(sizes) <= max(sizes) <= MOST_PIXELS or len(picture.pixels) != 3 * sizes[0] * sizes[1]:
            raise ValueError(f"{len(picture.pixels):,} bytes for a picture of {sizes[0]} x {sizes[1]} pixels")


def check_rules(rules: Iterable[str]) -> None:
    for rule in rules:
        Rule.parse(rule)


def check_dtypes(names: Iterable[str]) -> None:
    for name in names:
        if name not in dtypes.BY_NAME and name.removeprefix(SCANNED) not in KV_FORMATS:
            raise ValueError(f"there is no dtype {name}")
