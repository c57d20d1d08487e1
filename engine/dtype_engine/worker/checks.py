"""Checks the values in events that an engine in another process sends. Without these checks, a wrong value, such as an unknown
dtype or a tensor without elements, could make the app fail later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dtype_engine.core import dtypes
from dtype_engine.core.kv_cache import KVCache
from dtype_engine.core.kv_formats import KV_FORMATS, SCANNED
from dtype_engine.recipe import Rule
from dtype_engine.results.check import KINDS
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.pictures import MOST_PICTURES, MOST_PIXELS, PicturePair
from dtype_engine.worker import events

_LARGEST_EXPONENT = 1100
"""The largest |exponent| to base 2 that the histogram of a weight's exponents may contain. Float64 reaches -1074 in subnormal
numbers.
"""
_MOST_SHOWN = 100
"""Maximum length of a list whose entries the app draws all at once, such as the rows of a speed measurement."""
_MOST_NOTICES = 1000
"""Maximum number of notices, which are sentences for the user, in one event."""


def check_event(event: object) -> None:
    """Check the values of an event that came from an engine, which may be another program on another machine.

    Raises ValueError if a value is one that no engine of this version sends, and UserError for a rule that does not parse.

    The recipe of an event is not checked, because the app only compares it with the current recipe.
    """
    for shown, most in _shown_whole(event):
        if shown > most:
            raise ValueError(f"{shown:,} entries in a list of at most {most:,}")
    match event:
        case events.CastDone():
            _check_losses(event.lost or ())
        case events.Measured():
            _check_losses(event.report.lost or ())
            _check_pictures(event.report.pictures)
        case events.RecipeMeasured():
            _check_losses(event.report.lost or ())
            _check_pictures(event.report.pictures)
            _check_rules(event.report.rules)
        case events.ExportPlanned() if event.plan is not None:
            _check_losses(event.plan.lost or ())
        case events.NonfiniteFound():
            _check_rules(event.found.remedy)
        case events.LossRemedyFound():
            _check_rules(event.found.rules)
        case events.ScanUpdated():
            if not event.report.dtypes:
                raise ValueError("a scan of no dtypes")
            _check_dtypes((*event.report.dtypes, *{score.dtype for score in event.report.weights}))
        case events.ActivationsEstimated():
            if not event.peaks or min(min(peak.nbytes, peak.context - 1, peak.batch - 1) for peak in event.peaks) < 0:
                raise ValueError("no pass takes such memory")
        case events.FilesChecked():
            if unknown := {finding.kind for finding in event.report.findings} - KINDS.keys():
                raise ValueError(f"there is no finding of the kind {min(unknown)}")
        case events.WeightInspected():
            if any(abs(power) > _LARGEST_EXPONENT or count < 1 for power, count in event.stats.exponents.counts):
                raise ValueError("a power of two that no value has")
            if any(error.elements < 1 for error in event.stats.errors):
                raise ValueError("an error of no elements")


def _shown_whole(event: object) -> Iterator[tuple[int, int]]:
    """Yield (length, maximum length) for each list in an event whose entries the app draws all at once. The length is limited
    because the app handles no keys while it draws them.
    """
    match event:
        case events.HeadersRead() | events.ModelReady() | events.Saved() | events.Composed():
            yield len(event.notices), _MOST_NOTICES
        case events.Measured() | events.RecipeMeasured():
            yield len(event.report.notices), _MOST_NOTICES
        case events.InputsReady():
            yield len(event.summary.made_of), _MOST_SHOWN
        case events.SpeedMeasured():
            yield len(event.report.rows), _MOST_SHOWN
            yield len(event.report.notices), _MOST_NOTICES
        case events.ActivationsEstimated():
            yield len(event.peaks), _MOST_SHOWN
        case events.FilesChecked():
            yield len(event.report.unchecked), _MOST_NOTICES
        case events.WeightInspected():
            yield len(event.stats.errors), _MOST_SHOWN


def check_kv_cache(cache: KVCache) -> None:
    """Raise ValueError if the description of a KV cache has impossible values, such as an unknown dtype or a negative size."""
    if cache.dtype is not None:
        _check_dtypes((cache.dtype,))
    if not 0 < (cache.longest or 1) < 1 << 40:
        raise ValueError(f"no model was made for {cache.longest} tokens")
    for tensor in cache.tensors:
        sizes = (
            tensor.layer,
            tensor.per_token,
            tensor.fixed,
            tensor.heads - 1,
            (tensor.window or 1) - 1,
            tensor.length or 0,
        )
        if min(sizes) < 0 or max(sizes) > 1 << 40:
            raise ValueError(f"no KV cache has a tensor like {tensor}")


def _check_losses(losses: Iterable[ValueLoss]) -> None:
    for loss in losses:
        _check_dtypes((loss.dtype,))
        if loss.elements < 1:
            raise ValueError(f"{loss.tensor} loses values and has none")


def _check_pictures(pairs: Sequence[PicturePair]) -> None:
    if len(pairs) > MOST_PICTURES:
        raise ValueError(f"{len(pairs)} pairs of pictures of at most {MOST_PICTURES}")
    for picture in (each for pair in pairs for each in (pair.reference, pair.candidate)):
        sizes = picture.width, picture.height
        if not 1 <= min(sizes) <= max(sizes) <= MOST_PIXELS or len(picture.pixels) != 3 * sizes[0] * sizes[1]:
            raise ValueError(f"{len(picture.pixels):,} bytes for a picture of {sizes[0]} x {sizes[1]} pixels")


def _check_rules(rules: Iterable[str]) -> None:
    for rule in rules:
        Rule.parse(rule)


def _check_dtypes(names: Iterable[str]) -> None:
    for name in names:
        if name not in dtypes.BY_NAME and name.removeprefix(SCANNED) not in KV_FORMATS:
            raise ValueError(f"there is no dtype {name}")
