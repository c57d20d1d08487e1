"""Converts recipes for diffusers' layerwise casting: the dtype in which weights are stored, the dtype in which the model computes,
and patterns of the modules to skip.

diffusers walks down from the model's root. It skips a module, and everything below the module, if `re.search` finds a pattern in
the module's dotted name. It casts whole modules of certain classes, biases included, and uses no scales.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

from dtype_engine.core import dtypes
from dtype_engine.core.llama_types import llama_type
from dtype_engine.core.tree import Module, ancestors
from dtype_engine.recipe.targets.base import Context, Conversion, Match, Target, UnsupportedList, as_comment, tool_regex
from dtype_engine.recipe.targets.name_patterns import regexes

_KINDS = frozenset(
    {"Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Linear", "Embedding"}
)
_STORED_IN = (*dtypes.COMPUTE_DTYPES, "float8_e4m3fn", "float8_e5m2")
"""The dtypes in which `.to()` can store weights usefully. Without scales, integers would round most weights to zero."""


class Diffusers(Target):
    name = "diffusers"
    matcher = "re.search in the names of modules, from the root down"

    def write(self, context: Context) -> Conversion:
        leaves = _leaves(context)
        storage, base = _best_pair(context, leaves)
        cast = _to_cast(context, leaves, storage, base)
        outcome = _outcome(context, leaves, cast, storage, base)
        skipped = _outermost(leaves, cast) if cast else []
        modules = [name for name in context.tree.modules if name]
        patterns = [f"^{regex}$" for regex in regexes(skipped, modules)]
        notes = (
            f"weights are cast to {storage} and computed in {base}; the modules listed to skip are kept in {base}",
            "diffusers casts without scales: small values underflow that the plan's scales would preserve"
            if storage in dtypes.STORAGE_DTYPES
            else "diffusers computes in one dtype, whatever dtype a weight is stored in",
        )
        return Conversion(
            _snippet(storage if cast else base, base, patterns, bool(cast), notes),
            tuple((pattern, base) for pattern in patterns), base, _losses(context, outcome).result(), notes,
        )  # fmt: skip

    def matchable(self, context: Context) -> frozenset[str]:
        return frozenset(name for tensors in _leaves(context).values() for name in tensors)

    def match(self, context: Context, pattern: str) -> Match:
        if pattern.startswith("type:"):
            return Match(problem="classes go into skip_modules_classes, not into a pattern")
        search = tool_regex(pattern.removeprefix("re:"), pattern, "search")
        taken: set[str] = set()
        for leaf, tensors in _leaves(context).items():
            # diffusers also searches the root's name, which is empty.
            if any(map(search, (leaf, *ancestors(leaf)))):
                taken.update(tensors)
        return Match(frozenset(taken))


def _leaves(context: Context) -> dict[str, list[str]]:
    """Return the castable tensors by leaf. A leaf is a module that diffusers casts as a whole because of the module's class."""
    leaves: dict[str, list[str]] = {}
    stack: list[Module] = [context.tree.root]
    while stack:
        module = stack.pop()
        if context.is_kind(module, _KINDS):
            leaves[module.name] = [tensor.name for tensor in context.tree.below(module.name) if tensor.castable]
        else:
            stack.extend(reversed(module.children.values()))
    return leaves


def _cast_dtype(context: Context, tensor: str) -> str:
    """Return the dtype to which diffusers would cast a tensor to follow the plan. diffusers stores no scales, so int8 or float8
    with scales becomes the dtype of the codes. A block format and a type of llama.cpp, which diffusers can't store at all, are
    returned unchanged.
    """
    dtype = context.plan.dtypes[tensor]
    return dtype if dtype in dtypes.BLOCK_FORMATS or llama_type(dtype) is not None else dtypes.BY_NAME[dtype].torch_name


def _best_pair(context: Context, leaves: Mapping[str, list[str]]) -> tuple[str, str]:
    """Return (dtype to store weights in, dtype to compute in) with which the fewest elements deviate from their planned dtype.
    leaves: from `_leaves`.
    """
    present = {_cast_dtype(context, tensor.name) for tensor in context.in_scope() if tensor.persistent}
    bases = [dtype for dtype in dtypes.COMPUTE_DTYPES if dtype in present] or ["float32"]
    storages = [dtype for dtype in _STORED_IN if dtype in present] or bases

    def lost(pair: tuple[str, str]) -> int:
        cast = _to_cast(context, leaves, *pair)
        outcome = _outcome(context, leaves, cast, *pair)
        return sum(
            tensor.numel for tensor in context.in_scope() if _cast_dtype(context, tensor.name) != outcome[tensor.name]
        )

    pairs = itertools.product(storages, bases)
    return min(pairs, key=lambda pair: (lost(pair), pair[0] != pair[1]))


def _to_cast(context: Context, leaves: Mapping[str, list[str]], storage: str, base: str) -> set[str]:
    """Return the modules of `leaves` to cast to `storage`: those in which the plan has more elements in `storage` than in
    `base`.
    """
    if storage == base:
        return set()
    cast: set[str] = set()
    for leaf, tensors in leaves.items():
        gain = 0
        for name in tensors:
            dtype, numel = _cast_dtype(context, name), context.tree.tensors[name].numel
            gain += numel if dtype == storage else -numel if dtype == base else 0
        if gain > 0:
            cast.add(leaf)
    return cast


def _outcome(
    context: Context, leaves: Mapping[str, list[str]], cast: set[str], storage: str, base: str
) -> dict[str, str]:
    """Return each tensor's dtype if diffusers stores the modules `cast` of `leaves` in `storage` and all other tensors in
    `base`.
    """
    outcome = {tensor.name: base if tensor.persistent else tensor.dtype for tensor in context.in_scope()}
    for leaf in cast:
        outcome.update(dict.fromkeys(leaves[leaf], storage))
    return outcome


def _losses(context: Context, outcome: Mapping[str, str]) -> UnsupportedList:
    losses = UnsupportedList()
    for tensor in context.in_scope():
        planned, instead = context.plan.dtypes[tensor.name], outcome[tensor.name]
        if _cast_dtype(context, tensor.name) == instead:
            if planned in dtypes.STORAGE_DTYPES:
                losses.add(tensor.name, planned, instead, "diffusers stores without scales", "scale")
            continue
        if not tensor.persistent:
            why = "diffusers leaves non-persistent buffers as they are"
        elif dtypes.BY_NAME[planned].kind == "int" or planned in dtypes.BLOCK_FORMATS:
            why = f"diffusers casts without scales, which {planned} needs"
        elif planned in dtypes.STORAGE_DTYPES and not context.is_kind(context.module_of(tensor.name), _KINDS):
            why = "diffusers casts linear, convolutional and embedding layers only"
        else:
            why = "diffusers has one storage and one compute dtype, and casts a layer's weight and bias together"
        losses.add(tensor.name, planned, instead, why)
    return losses


def _outermost(leaves: Mapping[str, list[str]], cast: set[str]) -> list[str]:
    """Return a short list of modules to skip, so that diffusers casts exactly the leaves in `cast`. For each other leaf, the list
    has the topmost module at or above it that contains no leaf in `cast`.
    """
    holding: set[str] = set()
    for leaf in cast:
        holding.update((leaf, *ancestors(leaf)))
    skipped: dict[str, None] = {}
    for leaf in leaves:
        if leaf not in cast:
            clear = [name for name in (leaf, *ancestors(leaf)) if name not in holding]
            skipped[clear[-1]] = None
    return list(skipped)


def _snippet(storage: str, base: str, patterns: list[str], casting: bool, notes: tuple[str, ...]) -> str:
    """Return Python code that casts the model to `base` and, if `casting`, stores weights in `storage` except in the modules that
    `patterns` match.

    If there are no patterns, the code passes `()` to diffusers: with None, diffusers would cast the whole model as one module.
    """
    listed = "".join(f"    r{json.dumps(pattern)},\n".replace("\\\\", "\\") for pattern in patterns)
    call = (
        f"    apply_layerwise_casting(\n        model, storage_dtype=torch.{storage}, compute_dtype=torch.{base}, "
        "skip_modules_pattern=SKIP_MODULES_PATTERN\n    )\n"
        if casting
        else ""
    )
    imported = "\nfrom diffusers.hooks import apply_layerwise_casting\n" if casting else ""
    return (
        as_comment(notes)
        + f"import torch\n{imported}\n"
        + f"SKIP_MODULES_PATTERN = (\n{listed})\n\n\n"
        + "def cast(model: torch.nn.Module) -> torch.nn.Module:\n"
        + "    saved = model.state_dict(keep_vars=True)\n"
        + "    for tensor in saved.values():\n"
        + "        if tensor.is_floating_point():\n"
        + f"            tensor.data = tensor.data.to(torch.{base})\n"
        + call
        + "    return model\n"
    )


TARGET = Diffusers()
