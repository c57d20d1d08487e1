"""The programs that load an export of a recipe, in lines for the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

# The first paint does not need these rules, so they are imported where they are used.
if TYPE_CHECKING:
    from dtype_engine.recipe import Plan
    from dtype_engine.recipe.loading import Loading
    from dtype_tui.state.experiment import Experiment

_HEAD = "loads in: "


def loadings(experiment: Experiment, plan: Plan) -> tuple[Loading, ...]:
    """Return how each program loads an export of a plan, or () if the model's classes are not known yet. This is slow for a large
    model.
    """
    from dtype_engine.recipe.loading import TRANSFORMERS, loads_in
    from dtype_engine.recipe.targets import Context

    if not (experiment.model.live and experiment.tree.has_classes):
        return ()
    context = Context(experiment.tree, plan, activations=experiment.settings.quantize_activations)
    return loads_in(context, experiment.model.loader == TRANSFORMERS)


def loading_lines(found: Sequence[Loading] | None, width: int, most: int = 9) -> list[str]:
    """Return lines such as `loads in: transformers ✓  vLLM ✗ (q, k, v differ)`, at most `most` of at most `width` cells. The
    reasons are left out if they do not fit. A reason that the next program shares stands after that one. found: None while a thread
    finds it.
    """
    if found is None:
        return [f"{_HEAD}…"]
    if not found:
        return []
    after = [*(each.short for each in found[1:]), ""]
    entries = [
        each.words if each.short == following or len(each.words_and_reason) + 2 > width else each.words_and_reason
        for each, following in zip(found, after, strict=True)
    ]
    full = _wrapped(entries, width)
    return full if len(full) <= most else _wrapped([each.words for each in found], width)[:most]


def loading_reasons(found: Sequence[Loading]) -> Iterator[str]:
    """Yield a sentence for each reason why programs do not load the export or compute with other values, if `loading_lines` has
    only a few words of it.
    """
    for why in dict.fromkeys(each.why for each in found if each.why != each.short):
        programs = ", ".join(each.words.rpartition(" ")[0] for each in found if each.why == why)
        yield f"{programs}: {why}"


def _wrapped(entries: Sequence[str], width: int) -> list[str]:
    lines = [_HEAD + entries[0]]
    for entry in entries[1:]:
        if len(lines[-1]) + 2 + len(entry) <= width:
            lines[-1] += f"  {entry}"
        else:
            lines.append(f"  {entry}")
    return lines
