"""Says to what the roundings of a model's weights were fitted, and which weights they left at the nearest values."""

from __future__ import annotations

from collections.abc import Iterable

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.rounding import FittedTo
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.session.calibration import Calibration


def fitted_to(planned: Iterable[str], calibration: Calibration | None) -> FittedTo | None:
    """Return what the roundings among some dtypes, such as those of a recipe's rules, are fitted to. None if there are none."""
    return calibration.fitted_to if calibration is not None and any(map(dtypes.has_rounding, planned)) else None


def rounding_notices(model: LiveModel, calibration: Calibration | None) -> tuple[str, ...]:
    """Return sentences for the user on the roundings of the current weights, or () if there are none."""
    fitted = fitted_to((weight.dtype for weight in model.weights.values()), calibration)
    if fitted is None or calibration is None:
        unused = calibration is not None and calibration.files
        return ("--calibration is not used: no rule has a rounding, as in int4@g32:gptq",) if unused else ()
    if calibration.on_measured_inputs:
        about = (
            "the roundings were fitted to the same inputs on which the drift is measured, so it is larger on other text; "
            "--calibration FILE fits them to that of a file"
        )
    else:
        about = f"the roundings were fitted to {printable(fitted.inputs)}"
    return (about, *model.rounder.notices, *_unused(model), *_few_tokens(model))


def _unused(model: LiveModel) -> tuple[str, ...]:
    names = [
        name for name, weight in model.weights.items() if dtypes.has_rounding(weight.dtype) and weight.rounded is None
    ]
    if not names:
        return ()
    have = "has" if len(names) == 1 else "have"
    return (
        f"{plural(len(names), 'weight')} {have} the nearest values, first {printable(names[0])}: no matrix product used "
        f"{'it' if len(names) == 1 else 'them'} in the calibration runs",
    )


def _few_tokens(model: LiveModel) -> tuple[str, ...]:
    found = {name: weight.rounded.nearest for name, weight in model.weights.items() if weight.rounded is not None}
    few = {name: nearest for name, nearest in found.items() if nearest}
    if not few:
        return ()
    name, nearest = next(iter(few.items()))
    count = sum(map(len, few.values()))
    return (
        f"{plural(count, 'expert')} of {plural(len(few), 'weight')} got too few calibration tokens and kept the nearest values, "
        f"first number {nearest[0]} of {printable(name)}",
    )
