"""Draft heads: layers of a checkpoint that predict several tokens at once (multi-token prediction, MTP).

A runtime uses them to draft tokens, which the model then accepts or rejects. Forward passes of transformers leave them out.
`LAYOUTS` has a row for each way in which checkpoints name such layers, with the way in which runtimes build them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dtype_engine.core.text import Name

WORDS = "draft head (MTP)"
NOT_RUN = "no forward pass uses it"
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
"""The entries of config.json that give the number of draft layers."""
MOST_LAYERS = 100
"""Maximum number of draft layers, and of topmost modules. Published models have up to three layers."""
_MOST_BEFORE = 1_000_000
"""Maximum number of the model's layers."""
_NAMED = re.compile(r"((?:[^.]+\.)*?mtp(?:_[a-z_]+)?)\.")
"""Matches the topmost module of a draft head that a layout does not number together with the model's layers."""
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")

Runtime = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class Build:
    """How a runtime builds a draft head: from the model's own quantization settings, by names that may differ from the files'."""

    source: str
    """The file of the runtime's source code, and the class in it."""
    wide: tuple[str, ...] = ()
    """The ends of names of layers that the runtime creates without the quantization settings, so that they have no scales."""
    named: tuple[tuple[str, str], ...] = ()
    """Pairs (name of a module in the files, name under which the runtime looks up its settings), where the two differ. `{i}` is
    the index of a draft layer, and `{n}` the same counted on from the model's layers.
    """


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """One way in which checkpoints name the tensors of a draft head."""

    name: str
    model_types: frozenset[str]
    """The entries `model_type` of config.json of the models that have this layout."""
    layer: str
    """The module of a draft layer, without the modules above the head; `{i}` and `{n}` as in `Build.named`."""
    needed: tuple[str, ...]
    """The modules that the head can't do without, from the same module on as `layer`."""
    builds: Mapping[Runtime, Build]

    @property
    def numbered(self) -> bool:
        """Whether the draft layers have the numbers that follow those of the model's layers."""
        return "{n}" in self.layer


_NO_BUILDS: dict[Runtime, Build] = {}
_VLLM, _SGLANG = "vllm/model_executor/models", "python/sglang/srt/models"
# vLLM and SGLang create a draft head with the quantization settings of the model. They create some layers as plain nn.Linear, or
# without the settings. The name under which a layer's settings are looked up is what the constructor passes as `prefix`.
_DEEPSEEK: dict[Runtime, Build] = {
    "vllm": Build(f"{_VLLM}/deepseek_mtp.py: DeepSeekMultiTokenPredictorLayer", ("eh_proj", "shared_head.head")),
    "sglang": Build(
        f"{_SGLANG}/deepseek_nextn.py: DeepseekModelNextN",
        ("eh_proj",),
        (("model.layers.{n}", "model.decoder"),),
    ),
}
_QWEN: dict[Runtime, Build] = {
    "vllm": Build(f"{_VLLM}/qwen3_next_mtp.py: Qwen3NextMultiTokenPredictor"),
    "sglang": Build(
        f"{_SGLANG}/qwen3_next_mtp.py: Qwen3NextForCausalLMMTP", ("mtp.fc",), (("mtp.layers.{i}", "model.layers.{i}"),)
    ),
}
_MIMO: dict[Runtime, Build] = {
    "vllm": Build(
        f"{_VLLM}/mimo_mtp.py: MiMoMultiTokenPredictor",
        ("input_proj",),
        (("model.mtp_layers.{i}", "model.layers.{n}"),),
    ),
}
_ERNIE: dict[Runtime, Build] = {
    "vllm": Build(
        f"{_VLLM}/ernie_mtp.py: ErnieMultiTokenPredictor",
        ("mtp_linear_proj.0",),
        (("model.mtp_block.{i}", "model.layers.{n}"),),
    ),
}
_OF_LAYERS = ("layers.{n}.enorm", "layers.{n}.hnorm", "layers.{n}.eh_proj")
LAYOUTS: dict[str, DraftLayout] = {
    layout.name: layout
    for layout in (
        DraftLayout(
            "DeepSeek-V3",
            frozenset({"deepseek_v3", "deepseek_v32"}),
            "layers.{n}",
            _OF_LAYERS,
            _DEEPSEEK,
        ),
        DraftLayout(
            "GLM-4.5",
            frozenset({"glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "glm_moe_dsa"}),
            "layers.{n}",
            _OF_LAYERS,
            {
                "vllm": Build(
                    f"{_VLLM}/glm4_moe_mtp.py: Glm4MoeMultiTokenPredictorLayer", ("eh_proj", "shared_head.head")
                )
            },
        ),
        DraftLayout(
            "Qwen3-Next",
            frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}),
            "mtp.layers.{i}",
            ("mtp.fc", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
            _QWEN,
        ),
        DraftLayout(
            "MiMo",
            frozenset({"mimo"}),
            "mtp_layers.{i}",
            tuple(
                f"mtp_layers.{{i}}.{part}"
                for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
            ),
            _MIMO,
        ),
        DraftLayout(
            "ERNIE-4.5",
            frozenset({"ernie4_5_moe", "ernie4_5"}),
            "mtp_block.{i}",
            ("mtp_emb_norm.{i}", "mtp_hidden_norm.{i}", "mtp_linear_proj.{i}"),
            _ERNIE,
        ),
        # Heads of other models are found by their names alone.
        DraftLayout("numbered", frozenset(), "layers.{n}", (), _NO_BUILDS),
        DraftLayout("named", frozenset(), "", (), _NO_BUILDS),
    )
}


class DraftHead(msgspec.Struct, frozen=True):
    """The draft head of a checkpoint. It is false if there is none."""

    layout: str = ""
    """A key of `LAYOUTS`."""
    modules: tuple[Name, ...] = ()
    """The names of its topmost modules, in the files' order."""
    first: int = 0
    """The number of the model's layers, which is the number of the first draft layer where these are counted on."""
    declared: int | None = None
    """The number of draft layers by config.json, or None if it says none."""
    entry: str = ""
    """The entry of config.json that says so."""

    def __bool__(self) -> bool:
        return bool(self.modules)

    def holds(self, name: str) -> bool:
        """Return whether a module or a tensor belongs to the head."""
        return any(name == module or name.startswith(f"{module}.") for module in self.modules)

    def build(self, runtime: Runtime) -> Build | None:
        """Return how a runtime builds the head, or None if this is not known."""
        return LAYOUTS[self.layout].builds.get(runtime) if self.layout else None

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the modules that the head needs and that have no tensor among `names`, those of its files. A layer that has none
        is one module. The result is empty for a head that has no tensors at all.
        """
        if not self.modules:
            return ()
        layout, held = LAYOUTS[self.layout], [name for name in names if self.holds(name)]
        parts = self.modules[0].split(".")
        above = "".join(f"{part}." for part in parts[: -2 if layout.numbered else -1])
        found: dict[str, None] = {}
        for index in range(self.declared or 1):
            layer = above + self._numbers(layout.layer, index)
            if layout.layer and not _any_below(layer, held):
                found[layer] = None
                continue
            wanted = (above + self._numbers(part, index) for part in layout.needed)
            found |= {module: None for module in wanted if not _any_below(module, held)}
        return tuple(found)

    def _numbers(self, template: str, index: int) -> str:
        return template.replace("{i}", str(index)).replace("{n}", str(self.first + index))

    def stems(self, runtime: Runtime) -> dict[str, str]:
        """Return the name under which a runtime looks up the settings of a module of the head and of those below it, by the
        module's name, where the two differ.
        """
        build = self.build(runtime)
        return {
            self._numbers(ours, index): self._numbers(theirs, index)
            for ours, theirs in (build.named if build is not None else ())
            for index in range(self.declared or 1)
        }


NO_DRAFT = DraftHead()


def _any_below(module: str, names: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for name in names)


def draft_head(names: Iterable[str], config: Mapping[str, Any] | None) -> DraftHead:
    """Return the draft head among the tensors of a checkpoint.

    names: the tensors' names, except those that a forward pass uses, if these are known. config: the contents of config.json. The
    result has no modules, and the declared number of draft layers, if config.json declares some and no tensor belongs to them.
    """
    if not config:  # nothing says what runs these tensors
        return NO_DRAFT
    names = tuple(names)
    texts = [config, *(nested for key in _TEXT_CONFIGS if isinstance(nested := config.get(key), Mapping))]
    types = {str(text.get("model_type")) for text in texts}
    layout = next((row for row in LAYOUTS.values() if row.model_types & types), None)
    entry, declared = _declared(texts)
    counts = (text.get("num_hidden_layers") for text in texts)
    first = next((count for count in counts if type(count) is int and 0 < count <= _MOST_BEFORE), 0)
    found = dict.fromkeys(match[1] for name in names if "mtp" in name and (match := _NAMED.match(name)))
    if found and (layout is None or layout.numbered):
        layout = LAYOUTS["named"]
    if not found and declared and first and (layout is None or layout.numbered):
        layout = layout or LAYOUTS["numbered"]
        found = {}
        for number in range(first, first + declared):
            inside, below = f"layers.{number}.", re.compile(rf"((?:[^.]+\.)*?layers\.{number})\.")
            # A model may have 90,000 tensors, of which few are in the head.
            found |= dict.fromkeys(match[1] for name in names if inside in name and (match := below.match(name)))
    if not 0 < len(found) <= MOST_LAYERS:
        return DraftHead(layout.name if layout is not None else "", (), first, declared, entry)
    assert layout is not None
    return DraftHead(layout.name, tuple(found), first, declared, entry)


def _declared(texts: Iterable[Mapping[str, Any]]) -> tuple[str, int | None]:
    """Return (the entry of a configuration that gives the number of draft layers, this number), or ("", None)."""
    for text in texts:
        for key in COUNTS:
            if type(count := text.get(key)) is int and 0 <= count <= MOST_LAYERS:
                return key, count
    return "", None
