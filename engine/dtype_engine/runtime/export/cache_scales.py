"""The scales of KV caches in an export, in compressed-tensors' layout: `kv_cache_scheme` in config.json, and the tensors `k_scale`
and `v_scale` of each attention module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.kv_cache import STATES
from dtype_engine.core.kv_formats import stored_as
from dtype_engine.core.tree import Tree
from dtype_engine.recipe.kv_serving import cache_serving
from dtype_engine.runtime.export.contents import Contents, ExportTensor
from dtype_engine.runtime.formats.scales import amax_to_scale
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.name_mapping import map_names
from dtype_engine.runtime.weights.source import PlainSource

_FP8 = dtypes.BY_NAME["float8_e4m3fn"]
_STRATEGIES = {"float8_e4m3fn@tensor": "tensor", "fp8@head": "attn_head"}


def cache_scheme(tree: Tree, caches: Mapping[str, str]) -> dict[str, Any] | None:
    """Return compressed-tensors' `kv_cache_scheme` for the formats of a model's KV caches, or None if it can't describe them. It
    can only say that the keys and values of all layers are in fp8 with calibrated scales, one for each tensor or one for each
    head. caches: the formats by the names of the cache tensors.
    """
    forms = {stored_as(caches.get(tensor.name, "")) for tensor in tree.kv_cache.of_tokens}
    parts = {tensor.part for tensor in tree.kv_cache.of_tokens}
    strategy = _STRATEGIES.get(next(iter(forms))) if len(forms) == 1 else None
    if strategy is None or parts != {"k", "v"}:
        return None
    return {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}


def with_cache_scales(
    contents: Contents,
    tree: Tree,
    caches: Mapping[str, str],
    amax: Mapping[str, torch.Tensor],
    file_name: Callable[[str], str] = str,
) -> Contents:
    """Return the contents of an export with the scales of KV caches added. A notice is added instead if compressed-tensors can't
    express the formats, if there is no `config.json`, or if `config.json` describes weights that another program quantized. The
    notice says how to request these formats from a runtime.

    caches: the formats by the names of the cache tensors. amax: the calibrated largest |value| of each head, float32 [heads], by
    the name of the cache tensor. file_name: converts the name of a module to its name in the files.
    """
    scheme = cache_scheme(tree, caches)
    before = (contents.config or {}).get("quantization_config")
    quantised = before is not None and not any(item.has_scales for item in contents.items)
    if scheme is None or contents.config is None or quantised:
        notices = (*contents.notices, _in_recipe_alone(tree, caches))
        return dataclasses.replace(contents, has_cache_formats=True, notices=notices)
    if states := {name: form for name, form in caches.items() if name.endswith(STATES)}:
        contents = dataclasses.replace(contents, notices=(*contents.notices, _in_recipe_alone(tree, states)))
    items = {item.name: item for item in contents.items}
    for tensor in tree.kv_cache.of_tokens:
        by_head = scheme["strategy"] == "attn_head"
        largest = amax[tensor.name] if by_head else amax[tensor.name].max()
        scale = amax_to_scale(largest.reshape(-1, 1, 1) if by_head else largest.reshape(1), _FP8.max).cpu()
        name = f"{file_name(tensor.module)}.{tensor.part}_scale"
        source = PlainSource(scale.clone())
        items[name] = ExportTensor(name, tuple(scale.shape), "float32", "float32", False, False, (), source)
    return dataclasses.replace(contents, items=tuple(items.values()), has_cache_formats=True, cache_scheme=scheme)


def _in_recipe_alone(tree: Tree, caches: Mapping[str, str]) -> str:
    """Return a notice that says that only the recipe holds these formats, and how to request them from a runtime."""
    served = cache_serving(tree, caches, "vllm")
    refused = next((problem.why for problem in served.problems if problem.refused), "")
    how = f"start vLLM with {' '.join(served.flags)}" if served.flags else refused
    what = "recurrent states" if all(name.endswith(STATES) for name in caches) else "KV caches"
    return f"the formats of {what} are in recipe.yaml, not in the checkpoint: {how}"


def module_in_files(model: LiveModel, module: str) -> str:
    """Return the name in the checkpoint's files of the live model's module `module`. The two names may have different prefixes."""
    placements = {} if model.checkpoint is None else map_names(model.module, model.checkpoint.weights)
    for name, place in placements.items():
        local = place.name.removeprefix(f"{module}.")
        if local != place.name and name.endswith(f".{local}"):
            return name.removesuffix(f".{local}")
    return module
