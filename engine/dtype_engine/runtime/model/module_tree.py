"""Makes the tree of a model from its module alone, without files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint.kv_cache import kv_cache
from dtype_engine.checkpoint.token_reads import token_reads
from dtype_engine.core.draft_heads import NO_DRAFT, DraftHead
from dtype_engine.core.tree import Kind, TensorInfo, Tree, ancestors, numbered_parts
from dtype_engine.runtime.formats.dequantize import dtype_name
from dtype_engine.runtime.libraries.hf_private import SKIPPED_BY_DIFFUSERS, float32_patterns
from dtype_engine.runtime.libraries.torch_private import own_tensors


def collect_tensors(module: nn.Module) -> tuple[list[TensorInfo], dict[str, torch.Tensor]]:
    """Return (descriptions of all distinct tensors of a module, in the module's order, with all their names; the tensors
    themselves, keyed by their first name).
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    kinds: dict[int, Kind] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for local, tensor, kind in own_tensors(child):
            name = f"{prefix}.{local}" if prefix else local
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
            kinds[id(tensor)] = kind if kind == "parameter" else kinds.get(id(tensor), kind)
    infos = [
        TensorInfo(
            known[0],
            _shape(tensors[key]),
            dtype_name(tensors[key].dtype),
            kinds[key],
            tuple(dict.fromkeys(known[1:])),
            **_if_sparse(tensors[key]),
        )
        for key, known in names.items()
    ]
    return infos, {known[0]: tensors[key] for key, known in names.items()}


def _if_sparse(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the fields of `TensorInfo` for the size of a sparse tensor and why it is never cast; {} for a dense tensor."""
    if tensor.layout is torch.strided:
        return {}
    entries = tensor.to_sparse().coalesce()
    nbytes = entries.values().nbytes + entries.indices().nbytes
    return {"packed_bytes": nbytes, "uncastable_reason": "is sparse, and is never cast"}


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape in a file. A byte of `float4_e2m1fn_x2` is one element in torch, and counts as two here."""
    if tensor.dtype == torch.float4_e2m1fn_x2 and tensor.ndim:
        return (*tensor.shape[:-1], 2 * tensor.shape[-1])
    return tuple(tensor.shape)


def tree_of(module: nn.Module, infos: Iterable[TensorInfo] | None = None, draft: DraftHead = NO_DRAFT) -> Tree:
    """Return the tree of a module, with its module classes and what it declares to keep in float32.

    infos: descriptions of the module's tensors and of others in its files, if they were collected already. draft: the layers among
    the others that predict several tokens at once.
    """
    listed = collect_tensors(module)[0] if infos is None else list(infos)
    classes = {name: type(child).__name__ for name, child in module.named_modules()}
    if draft:
        classes |= dict(_draft_classes(draft, listed, classes))
    tree = Tree(listed, classes)
    tree.draft = draft
    _mark_kept_in_fp32(module, tree)
    if hasattr(module, "can_generate"):  # a model of transformers
        config: Any = module.config
        settings = config.to_dict()
        tree.kv_cache = kv_cache(tree, settings)
        tree.token_reads = token_reads(tree, settings)
    return tree


def _draft_classes(
    draft: DraftHead, infos: Iterable[TensorInfo], classes: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield (name, class) of each module of a draft head that holds a tensor. Its layers are built like those of the model, so a
    module has the class of the model's modules with its name in their layers. Any other module with a matrix is a linear layer or
    an embedding, and any other norm is of the class of most norms of the model.
    """
    in_layers = {tail: kind for name, kind in classes.items() if (tail := _in_its_layer(name))}
    norms = Counter(kind for kind in classes.values() if "norm" in kind.lower())
    norm = next((kind for kind, _ in norms.most_common(1)), "")
    for info in infos:
        module, _, local = info.name.rpartition(".")
        if local != "weight" or not draft.holds(info.name):
            continue
        label = module.rpartition(".")[2]
        kind = in_layers.get(_in_its_layer(module), "")
        if not kind and len(info.shape) == 2:
            kind = "Embedding" if "embed" in label else "Linear"
        if kind := kind or (norm if "norm" in label else ""):
            yield module, kind


def _in_its_layer(name: str) -> str:
    """Return the name of a module within its layer, such as "self_attn.q_proj", or "" outside the numbered layers."""
    numbered = numbered_parts(name)
    return ".".join(name.split(".")[numbered[0] + 1 :]) if numbered else ""


def _mark_kept_in_fp32(module: nn.Module, tree: Tree) -> None:
    declared = [(prefix, *each) for prefix, child in module.named_modules() for each in float32_patterns(child)]
    for prefix, pattern, attribute in declared:
        for name, node in tree.modules.items():
            inside = name.startswith(f"{prefix}.") if prefix else bool(name)
            if inside and node.keep_in_fp32 is None and re.search(pattern, name[len(prefix) :].lstrip(".")):
                node.keep_in_fp32 = f"declared by the model ({attribute})"
        for tensor in tree.tensors.values() if attribute != SKIPPED_BY_DIFFUSERS else ():
            relative = tensor.name[len(prefix) :].lstrip(".") if tensor.name.startswith(prefix) else ""
            if re.search(pattern, relative) and not any(
                tree.modules[name].keep_in_fp32 for name in ancestors(tensor.name)
            ):
                tree.kept_in_fp32.setdefault(tensor.name, f"declared by the model ({attribute})")
