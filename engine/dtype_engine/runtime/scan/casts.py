"""Which casts a scan estimates or measures, and which of them cause no drift."""

from __future__ import annotations

from collections.abc import Sequence

from dtype_engine.core.dtypes import quantizes_activations
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_formats import SCANNED
from dtype_engine.core.options import RunSettings
from dtype_engine.core.units import plural
from dtype_engine.recipe.plan import dtype_given, unfit_caches
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import equals_reference

NOT_SCORED = "states are rounded after each token, and a scan runs all tokens of a text at once"
"""Why a scan has no scores of recurrent states."""


def scanned_dtypes(model: LiveModel, targets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the dtypes to which casts of each weight are scanned: those of `targets`, and its stored dtype, which may also drift
    from the reference. The tensors of KV caches are scanned in those formats of `targets` that begin with `kv:`. Raises UserError
    if there is such a format, but no KV cache, or one that can't have it.
    """
    of_weights = tuple(target for target in targets if not target.startswith(SCANNED))
    of_caches = tuple(target for target in targets if target.startswith(SCANNED))
    wanted = {
        name: tuple(dict.fromkeys((weight.info.dtype, *of_weights)))
        for name, weight in model.weights.items()
        if weight.info.castable and weight.info.persistent
    }
    cache = model.tree.kv_cache
    names = [tensor.name for tensor in cache.of_tokens]
    if of_caches and not names:
        only = f"the model keeps recurrent states alone, which are not scored: {NOT_SCORED}" if cache.states else ""
        raise UserError(f"{of_caches[0]}: {cache.none_because or only or 'the model keeps no KV cache'}")
    for target in of_caches:
        if (unfit := unfit_caches(model.tree, names, target.removeprefix(SCANNED))) is not None:
            raise UserError(unfit)
    return wanted | (dict.fromkeys(names, of_caches) if of_caches else {})


def states_left_out(model: LiveModel, targets: Sequence[str]) -> tuple[str, ...]:
    """Return a notice if formats of KV caches are scanned, and the model also has states of recurrent layers, which are not."""
    states = model.tree.kv_cache.states
    if not states or not any(target.startswith(SCANNED) for target in targets):
        return ()
    return (f"{plural(len(states), 'recurrent state')} not scored: {NOT_SCORED}",)


def is_free(model: LiveModel, name: str, dtype: str, settings: RunSettings) -> bool:
    """Return whether a cast rounds neither the weight (or KV cache) `name` nor the activations multiplied by it."""
    if name not in model.weights:
        return dtype == SCANNED + "float32"
    given = dtype_given(model.weights[name].info, dtype)
    rounds = settings.quantize_activations == "weights" and quantizes_activations(given)
    return not rounds and equals_reference(model.weights[name], given)
