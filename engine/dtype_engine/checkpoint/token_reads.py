"""Finds which weights a model reads to generate one token, from its module tree and `config.json`. Does not import torch.

Experts are found as checkpoints and transformers name them: modules in a list `experts`, or tensors whose first dimension is the
number of experts. `config.json` says to how many of them a token is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from dtype_engine.checkpoint.kv_cache import CROSS, IN_AN_ENCODER, KEYS, VALUES, text_config, why_no_text
from dtype_engine.checkpoint.schemes.configuration import size
from dtype_engine.core.text import printable
from dtype_engine.core.token_reads import ReadPart, TokenReads
from dtype_engine.core.tree import Module, TensorInfo, Tree, is_number, numbered_parts
from dtype_engine.core.units import plural

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts", "moe_k")
"""Keys in the configurations of models. The value of each is the number of experts per token."""
_CHOSEN_BY_CODE = {"switch_transformers": 1, "nllb-moe": 2}
"""The number of experts per token of model types whose code fixes it."""
_IDLE = "zero_expert_num"
"""The entry of LongCat's config.json with the number of experts that compute nothing, which its router chooses like others."""
_NESTED = "ffn_config"
"""The entry of DBRX's config.json that holds the entries about experts."""
_NUMBERED = re.compile(r"(expert_)?\d+")
_PROMPT_ONLY = re.compile(r".*projector.*|connector|.*aligner|embed_(vision|audio)")
"""Modules that run once for a prompt's pictures or sounds, beside encoders."""
_TABLE = re.compile(r"wte|wpe|shared|.*emb.*")
_NO_TABLE = re.compile(r".*(bias|proj|norm|mapping|out|unemb).*")
_HEAD = re.compile(r"(lm_|output_)?head|output(_layer)?|embed_out|.*unemb.*")


def token_reads(tree: Tree, config: Mapping[str, Any] | None) -> TokenReads:
    """Return what a model reads to generate one token. config: `config.json`, or the live model's configuration as a dict, or None
    if unknown.
    """
    if config is None:
        return TokenReads(none_because="no config.json tells the model's architecture")
    if (why := why_no_text(tree, config)) is not None:
        return TokenReads(none_because=why)
    return _Reader(tree, config).read()


@lru_cache(1024)  # the many modules of a large model have few labels
def _is_for_prompts(label: str) -> bool:
    of_encoder = IN_AN_ENCODER.fullmatch(label) is not None and CROSS.fullmatch(label) is None
    return of_encoder or _PROMPT_ONLY.fullmatch(label) is not None


@lru_cache(1024)
def _is_table(label: str) -> bool:
    return _TABLE.fullmatch(label) is not None and _NO_TABLE.fullmatch(label) is None


class _Reader:
    def __init__(self, tree: Tree, config: Mapping[str, Any]) -> None:
        self.tree = tree
        text = text_config(config)
        nested = text.get(_NESTED)
        self.config = {**text, **nested} if isinstance(nested, Mapping) else text
        # The layers of BERT are in a module `encoder` even if they decode, and so are those of some decoders.
        several = bool(config.get("is_encoder_decoder")) or text is not config
        self.has_encoder = several and text.get("is_decoder") is not True
        self.counts = frozenset(
            count
            for key, value in self.config.items()
            if "experts" in key and key not in CHOSEN and "shared" not in key
            for each in (value if isinstance(value, list) else [value])
            if (count := size(each)) is not None and count > 1
        )
        self.idle = size(self.config.get(_IDLE)) or 0
        self.routed: tuple[int, int] | None = None
        self.unknown = False
        self.tables: list[TensorInfo] = []
        self.by_row = True

    def read(self) -> TokenReads:
        parts: list[ReadPart] = []
        unread: list[str] = []
        heads: list[Module] = []
        skipped = ""
        for module in self.tree.walk():
            if skipped and module.name.startswith(skipped):
                continue
            if module.name and self._is_unread(module):
                parts.append(ReadPart(module.name, 0, 1))
                unread.append(module.name)
                skipped = f"{module.name}."
                continue
            if found := list(self._experts(module)):
                parts += found
                skipped = f"{module.name}." if found[0].name == module.name else skipped
            if _HEAD.fullmatch(module.label) and not numbered_parts(module.name):
                heads.append(module)
            weight = module.tensors.get("weight")
            if weight is not None and len(weight.shape) == 2 and _is_table(module.label):
                self.tables.append(weight)
        parts += self._of_tables(bool(heads))
        notes: list[str] = []
        if unread:
            more = f" and {plural(len(unread) - 1, 'module')} more" if len(unread) > 1 else ""
            notes.append(f"no token that is generated reads {printable(unread[0])}{more}")
        if self.unknown:
            notes.append(
                "config.json does not say to how many experts a token is sent: all are counted, an upper bound"
            )
        return TokenReads(tuple(parts), None, self.routed, self.by_row, tuple(notes))

    def _is_unread(self, module: Module) -> bool:
        """Return whether a module runs for a prompt alone, such as an encoder, or for no token, such as a draft head. The keys and
        values of cross attention are computed once, from the encoder's output.
        """
        label = module.label
        if label in KEYS or label in VALUES:
            return any(CROSS.fullmatch(part) for part in module.name.split("."))
        if label == "encoder" and not self.has_encoder:
            return False
        return _is_for_prompts(label) or self.tree.draft.holds(module.name)

    def _experts(self, module: Module) -> Iterator[ReadPart]:
        """Yield the parts of a module that are experts of a router, and the parts among them that are not."""
        name, children = module.name, module.children
        if "shared" in name:
            return
        if module.label == "experts":
            numbered = [label for label in children if _NUMBERED.fullmatch(label)]
            if len(numbered) > 1 and (share := self._share(name, len(numbered))) is not None:
                yield ReadPart(name, *share, routed=True)
                yield from (ReadPart(children[label].name, 1, 1) for label in children if label not in numbered)
                return
        for tensor in module.tensors.values():
            count = self._packed(tensor)
            if count and (share := self._share(name, count)) is not None:
                yield ReadPart(tensor.name, *share, routed=True)

    def _packed(self, tensor: TensorInfo) -> int | None:
        """Return how many experts a tensor packs, or None if it packs none."""
        shape, parts = tensor.shape, tensor.name.split(".")
        below = "experts" in parts[:-1]
        if len(shape) > 2 and (shape[0] in self.counts or below):
            convolves = any("conv" in part for part in parts)
            return None if convolves or shape[0] < 2 else shape[0]
        if not below or len(shape) != 2 or "router" in parts:
            return None
        if "bias" in parts[-1]:
            return shape[0] if shape[0] in self.counts else None
        # DBRX packs [experts x rows, columns].
        return next((count for count in self.counts if shape[0] > count and shape[0] % count == 0), None)

    def _share(self, name: str, count: int) -> tuple[int, int] | None:
        """Return (experts that a token is sent to, experts among which the router chooses) for a module with `count` experts, or
        None if the first number is unknown, or if a token is sent to all.
        """
        chosen = self._chosen(name)
        if chosen is None:
            self.unknown = True
            return None
        if self.idle:
            count = max(self.counts, default=count) + self.idle
        self.routed = self.routed or (chosen, count)
        return (chosen, count) if chosen < count else None

    def _chosen(self, name: str) -> int | None:
        known = _CHOSEN_BY_CODE.get(str(self.config.get("model_type")))
        value = next((self.config[key] for key in CHOSEN if self.config.get(key) is not None), known)
        if isinstance(value, list):  # HunYuan has an entry for each layer
            layer = next((int(part) for part in name.split(".") if is_number(part) and len(part) < 9), len(value))
            value = value[layer] if layer < len(value) else None
        return size(value)

    def _of_tables(self, has_head: bool) -> Iterator[ReadPart]:
        """Yield the tables of embeddings, of which a token reads one row. Without an output head, the input's table is the head."""
        most = max((table.shape[0] for table in self.tables), default=0)
        names = {table.name for table in self.tables}
        has_head = has_head or any(
            len(tensor.shape) == 2
            and tensor.shape[0] == most
            and tensor.name not in names
            and not numbered_parts(tensor.name)
            for tensor in self.tree.tensors.values()
        )
        main = [table for table in self.tables if table.shape[0] == most]
        hidden = size(self.config.get("hidden_size"))
        best = sorted(main, key=lambda table: (table.shape[1] != hidden, table.shape[1]))
        head = best[0] if best and not has_head else None
        aliases = (name for table in self.tables for name in table.names)
        self.by_row = head is None and all(_is_table(_label(name)) for name in aliases)
        for table in self.tables:
            if table is not head and table.shape[0]:
                yield from (ReadPart(name, 1, table.shape[0]) for name in table.names if _is_table(_label(name)))


def _label(name: str) -> str:
    """Return the label of the module that holds a tensor."""
    return name.rpartition(".")[0].rpartition(".")[2]
