"""Sorts a model's tensors by the kind of layer that holds them (attention, MLP, norms, ...).

No file tells the kind of a layer, so names and class names decide. The last part of a tensor's dotted name that is recognized gives
the kind. In `model.layers.0.self_attn.q_norm.weight` this part is `q_norm`: a norm inside an attention.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain

from dtype_engine.core.tree import Module, Totals, Tree

OTHER = "other"
KINDS = ("embeddings", "attention", "state space", "MLP", "experts", "norms", "head", OTHER)
"""All kinds of layers, in the order in which a model usually runs them."""

_NAMES: tuple[tuple[str, str], ...] = (
    ("norms", r"norms?\d*|.*norm(\d*|_f|_final)|norm_.*|.*_norm_.*|(.*_)?ln(_.*|\d*)|bn\d*|.*layernorm.*"),
    ("experts", r"(.*_)?experts?|.*_exps|.*_shexp|router|.*gate_inp.*|.*moe.*|shared_expert_gate"),
    ("attention", r".*attn.*|.*attention.*"),
    ("state space", r".*mamba.*|ssm.*|mixer|time_mix.*|rwkv.*"),
    ("MLP", r"mlp\d*|.*_mlp|mlp_.*|.*ffn?(_.*)?|feed_?forward.*|intermediate|densereludense|fc_?\d+|channel_mix.*|ff"),
    ("head", r"lm_?head|heads?|classifier|score|embed_out|output_layer|qa_outputs|cls|logits?"),
    ("embeddings", r".*embed.*|.*embd.*|wte|wpe|shared|class_token|cls_token|pos_.*"),
)
_CLASSES: tuple[tuple[str, str], ...] = (
    ("norms", r".*Norm(\dd)?"),
    ("experts", r".*(Experts?|Router|MoE|Moe|SparseMoeBlock)"),
    ("attention", r".*Attention.*"),
    ("state space", r".*Mamba2?(Mixer|Block)?"),
    ("MLP", r".*(MLP|Mlp|FeedForward|FFN|Intermediate)"),
    ("embeddings", r".*Embeddings?"),
)
_BY_NAME = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _NAMES]
_BY_CLASS = [(kind, re.compile(pattern)) for kind, pattern in _CLASSES]


def kinds_of_modules(tree: Tree) -> dict[str, str]:
    """Return the kind of each module, such as "attention", by name. A module that isn't recognized has the kind of its parent."""
    by_label: dict[tuple[str, str | None], str | None] = {}
    kinds: dict[str, str] = {}
    for module in tree.walk():
        parent = module.name.rpartition(".")[0]
        inherited = kinds.get(parent, OTHER)
        key = (module.label, module.class_name)
        if key not in by_label:
            by_label[key] = _recognised(module)
        found = by_label[key]
        if module.label in ("gate", "router") and any("expert" in label for label in tree.modules[parent].children):
            found = "experts"
        elif found is None and module.label == "output":
            if not parent:  # in Llama's original files and in GGUF
                found = "head"
            elif "intermediate" in tree.modules[parent].children:  # the second matrix of BERT's MLPs
                found = "MLP"
        # A projection of patches is part of the embedding, and an expert's own MLP is part of the expert.
        nested = inherited in ("experts", "embeddings", "head") and found not in (None, "norms", "attention")
        kinds[module.name] = inherited if found is None or nested else found
    return kinds


def _recognised(module: Module) -> str | None:
    by_name = (kind for kind, pattern in _BY_NAME if pattern.fullmatch(module.label))
    class_name = module.class_name if module.label else None  # the model's own class says nothing about its layers
    by_class = (kind for kind, pattern in _BY_CLASS if pattern.fullmatch(class_name or ""))
    return next(chain(by_name, by_class), None)


def kind_of_tensor(name: str, kinds: Mapping[str, str]) -> str:
    """Return the kind of layer that a tensor belongs to. kinds: from `kinds_of_modules`."""
    module, _, local = name.rpartition(".")
    if kinds[module] != OTHER:
        return kinds[module]
    return next((kind for kind, pattern in _BY_NAME if pattern.fullmatch(local)), OTHER)  # such as a ViT's `pos_embed`


def totals_by_kind(tree: Tree, planned: Mapping[str, str]) -> dict[str, Totals]:
    """Return the totals of the tensors of each kind of layer, in the order of KINDS. planned: dtypes by tensor name.

    The sums over all kinds are the model's totals: a tied weight counts once, by its canonical name.
    """
    kinds = kinds_of_modules(tree)
    found: dict[str, Totals] = {}
    for tensor in tree.order:
        if tensor.counted:
            totals = found.setdefault(kind_of_tensor(tensor.name, kinds), Totals())
            totals.add_tensor(tensor, planned.get(tensor.name, tensor.dtype))
    return {kind: found[kind] for kind in KINDS if kind in found}
