"""The line of keys at the bottom: what one can do next from here, the likeliest first."""

from __future__ import annotations

from .experiment import Experiment

ALWAYS = "? help  q quit"


def next_keys(experiment: Experiment, filtered: bool, busy: bool, width: int) -> str:
    """A line of `key what` pairs, two spaces apart, for what is on the screen now; as many as `width` cells have room for, and
    always those for help and quitting.
    """
    if filtered:
        keys = "n next match  N previous  Esc clears the filter  c cast  1-8 dtype"
    elif experiment.failure:
        keys = "u undo  8 as stored  Enter details  m measure again  : command"
    elif not experiment.recipe.rules:
        keys = "2 cast this to bf16  c cast by pattern  / filter  Enter details  : command"
    elif experiment.report is None and not busy and experiment.no_forward is None:
        keys = "m measure  u undo  c cast  1-8 dtype  f dtype flow  : command"
    elif experiment.report is not None and experiment.report.output.max_abs > 0:
        keys = "w worst module  u undo  c cast  1-8 dtype  f dtype flow  : command"
    else:
        keys = "u undo  c cast  1-8 dtype  / filter  Enter details  : command"
    pairs = keys.split("  ")
    while pairs and len(line := f" {'  '.join(pairs)}  {ALWAYS}") > width:
        pairs.pop()
    return line if pairs else f" {ALWAYS}"
