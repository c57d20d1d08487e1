"""Counts the tokens that a model's routers send to each expert, in reference runs over the inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.roundings import Statistic
from dtype_engine.results.expert_tokens import ExpertTokens
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.input_statistics import collect_statistics
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.model_behavior import ModelBehavior

_EXPERTS = "experts"


def expert_tokens(
    model: LiveModel, inputs: Inputs, behavior: ModelBehavior, on_run: Callable[[], object], cancelled: IsCancelled
) -> tuple[tuple[ExpertTokens, ...], tuple[str, ...]]:
    """Run the reference over the inputs if the model has experts, and return (the tokens of each module of experts, notices about
    modules whose experts can't be told apart). behavior: what earlier passes have shown about the model. on_run: called after each
    sequence. Raises NoForward, KernelError, Cancelled.
    """
    weights, chosen = _observed(model)
    if not weights:
        return (), ()
    wanted: dict[str, Statistic] = {name: "squares" for names in weights.values() for name in names}
    found = collect_statistics(model, inputs, wanted, behavior, on_run, cancelled)
    most = sum(_positions(batch.kwargs.get("input_ids")) for batch in inputs.batches)
    counted, unknown = [], []
    for module, names in weights.items():
        parts = [found[name].parts if name in found else {} for name in names]
        if len(names) == 1 and len(model.weights[names[0]].stored.shape) > 2:
            count = model.weights[names[0]].stored.shape[0]
            tokens = [parts[0][index].tokens if index in parts[0] else 0 for index in range(count)]
        else:
            tokens = [part[None].tokens if None in part else 0 for part in parts]
        if not sum(tokens) or (most and sum(tokens) > chosen[module] * most):
            unknown.append(module)
        else:
            counted.append(ExpertTokens(module, tuple(tokens)))
    return tuple(counted), _unknown_words(unknown)


def _unknown_words(modules: list[str]) -> tuple[str, ...]:
    if not modules:
        return ()
    return (
        f"tokens of experts not counted, first of {modules[0]}: its code does not run each expert with its own tokens",
    )


def _observed(model: LiveModel) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return (the weights whose inputs are counted, how many experts get a token), both by module of experts: one weight that packs
    the experts, or one weight of each expert, in their order.
    """
    weights: dict[str, list[str]] = {}
    chosen: dict[str, int] = {}
    for part in model.tree.token_reads.parts:
        if not part.routed:
            continue
        if part.name in model.weights:
            module = part.name.rpartition(".")[0]
            if len(model.weights[part.name].stored.shape) > 2 and module not in weights:
                weights[module], chosen[module] = [part.name], part.read
            continue
        node = model.tree.modules[part.name]
        firsts = (model.tree.order[child.first : child.end] for child in node.children.values())
        names = [next((each.name for each in inside if len(each.shape) == 2), "") for inside in firsts]
        weights[part.name] = [name for name in names if name in model.weights]
        chosen[part.name] = part.read
    return weights, chosen


def _positions(ids: object) -> int:
    return ids.numel() if isinstance(ids, torch.Tensor) else 0
