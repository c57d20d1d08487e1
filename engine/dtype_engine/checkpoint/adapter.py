"""Opens a PEFT adapter onto its base model: the checkpoint of the base, in which each adapted weight is base and adapter together.

The names and shapes of an adapter's tensors are those that `PeftModel.save_pretrained` of peft 0.21 writes. The order in which
parameters of one module are adapted, which the names do not tell, follows from the shapes.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.adapter_names import BaseNames, LoraNames, lora_names
from dtype_engine.checkpoint.checkpoint import Checkpoint, Merged
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes import CODES, CodedWeight, lora
from dtype_engine.checkpoint.schemes.configuration import mapping
from dtype_engine.checkpoint.weight_files import ADAPTER_CONFIG, read_json
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.regexes import compile_regex, time_limit
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural

_SECONDS = 10.0
"""Limit on the seconds in which the patterns of an adapter's configuration are matched with the names of all modules."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""The values of `init_lora_weights` with which PEFT changes the base's weights when it loads the adapter."""
_REFUSED = (
    "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens", "trainable_token_indices", "kasa_config",
    "velora_config", "monteclora_config", "arrow_config",
)  # fmt: skip
"""Entries of an adapter's configuration that make it more than LoRA."""
_STORED = ("float32", "bfloat16", "float16")
_TRANSPOSED_EXPERTS = ("gpt_oss", "openai_privacy_filter", "aria")
"""The model types whose experts are [experts, in, out] (`is_transposed` in transformers 5), needed where `in` equals `out`."""
_EXPERT_NAMES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""For each parameter that transformers packs from the layers of single experts: the names of these layers in the files."""


def base_named(folder: Path) -> str | None:
    """Return the model that an adapter's folder names as its base, or None if it names none. Raises UserError."""
    named = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    return named if isinstance(named, str) and named else None


def onto_base(adapter: Checkpoint, base: Checkpoint, base_title: str) -> Checkpoint:
    """Return the checkpoint of the base model in which the weights that the adapter changes have their merged values.

    base_title: what the base is called in notices. Raises UserError if the adapter is of a kind that is not merged here, or
    does not fit the base.
    """
    config = read_json(adapter.path / ADAPTER_CONFIG)
    _refuse_kind(adapter, base, config)
    with time_limit(_SECONDS):
        merge = _Merge(adapter, base, config)
        merge.add_all()
    kinds = Counter("changed" if lora.SCALE in each.settings else "replaced" for each in merge.weights.values())
    words = " and ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items()))
    notice = (
        f"the PEFT adapter {printable(adapter.path.resolve().name, 200)} is merged into {printable(base_title, 200)}: "
        f"{words} of its {plural(len(base.weights), 'weight')}"
    )
    return dataclasses.replace(
        base,
        files=(*base.files, *adapter.files),
        tensors={
            name: tensor for name, tensor in base.tensors.items() if name not in merge.replaced
        } | adapter.tensors,
        config=merge.config,
        identities=(*base.identities, *adapter.identities),
        notices=(*base.notices, *adapter.notices[:-1], notice, *merge.notices),
        base=base_title,
        merged=Merged(adapter, merge.weights),
    )  # fmt: skip


def _refuse_kind(adapter: Checkpoint, base: Checkpoint, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(
            f"it is an adapter of the kind {printable(str(kind), 60)}, and only LORA is merged here; merge it with PEFT"
        )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise UserError(
            f"init_lora_weights is {printable(init, 60)}, with which PEFT changes the weights of the base; convert the adapter "
            "with path_initial_model_for_weight_conversion of PEFT"
        )
    if more := [name for name in _REFUSED if config.get(name)]:
        raise UserError(f"{ADAPTER_CONFIG} sets {', '.join(more)}, which is not merged here; merge it with PEFT")
    if adapter.form != "adapter" or adapter.values is not None:
        raise UserError("its weights are a pickle; save it with safetensors")
    if base.merged is not None or base.form == "adapter":
        raise UserError("its base is an adapter, too; export that as a whole model first")
    if base.form != "safetensors":
        raise UserError(
            f"its base is {printable(base.path.name)}, and only safetensors take an adapter; `dtype-engine export` writes them"
        )


class _Merge:
    """Collects the merged weights. weights: by their names in the base. replaced: the base's tensors that the adapter stores anew.
    config: the base's configuration, changed if the adapter unties the head.
    """

    def __init__(self, adapter: Checkpoint, base: Checkpoint, config: Mapping[str, Any]) -> None:
        self.weights: dict[str, CodedWeight] = {}
        self.replaced: set[str] = set()
        self.notices: list[str] = []
        self.config = base.config
        self._base, self._of_adapter = base, config
        self._names = BaseNames(base.weights)
        self._loras, self._full = lora_names(adapter)
        targets = config.get("target_parameters")
        self._parameters = [each for each in targets if isinstance(each, str)] if isinstance(targets, list) else []

    def add_all(self) -> None:
        """Merge all tensors of the adapter. Raises UserError for the first that doesn't fit."""
        bases: dict[str, CheckpointTensor] = {}
        for name, tensor in self._full.items():
            found = self._names.find(name)
            if found is None and not self._unties(name):
                raise UserError(f"{printable(tensor.name)} has no place in the base")
            bases[found or name] = tensor
        for each in self._loras:
            self._add(each, bases)
        for name, tensor in bases.items():
            self._replace(name, tensor)

    def _unties(self, name: str) -> bool:
        """Return whether a tensor is the head of a base that ties it to the embedding. From then on, they are two weights."""
        tied = self.config is not None and self.config.get("tie_word_embeddings", True)
        if name != "lm_head.weight" or not tied:
            return False
        self.config = {**(self.config or {}), "tie_word_embeddings": False}
        return True

    def _replace(self, name: str, tensor: CheckpointTensor) -> None:
        before = self._base.weights.get(name)
        as_before = (
            before if before is not None else self._base.weights.get(self._names.find("embed_tokens.weight") or "")
        )
        if as_before is not None and as_before.shape != tensor.shape:
            raise UserError(_other_shape(tensor.name, tensor.shape, as_before))
        dtype = self._dtype(name, tensor.dtype)
        self._drop(name)
        form = f"lora:{dtypes.short_name(tensor.dtype)}"
        self.weights[name] = CodedWeight(name, tensor.shape, lora.SCHEME, form, {CODES: tensor}, values_as=dtype)

    def _drop(self, name: str) -> None:
        coded = self._base.coded.get(name)
        self.replaced |= {part.name for part in coded.tensors} if coded is not None else {name}

    def _dtype(self, name: str, otherwise: str) -> str:
        """Return the dtype of a weight of the base, or `otherwise` if the base lacks it."""
        if name in self._base.coded:
            return self._base.decoded_dtype
        return self._base.weights[name].dtype if name in self._base.weights else otherwise

    def _add(self, each: LoraNames, bases: dict[str, CheckpointTensor]) -> None:
        down, up = each.pair()
        weight = self._names.find(f"{each.module}.weight")
        if weight is None and each.module.endswith("lm_head") and (self.config or {}).get("tie_word_embeddings", True):
            raise UserError(
                f"it adapts {printable(each.module)}, whose weight is that of the embedding: merged, both would change"
            )
        if weight is None:
            name, targets = self._parameter(each, down, up)
            for target, settings in targets:
                self._put(
                    target, each, settings | {lora.SCALE: self._scale(name, each, settings.get(lora.EXPERTS, 1))}, None
                )
            return
        self._say_if_tied(each)
        shape = self._base.weights[weight].shape
        of_adapter = bases.pop(weight, None)
        if of_adapter is not None and of_adapter.shape != shape:
            raise UserError(_other_shape(of_adapter.name, of_adapter.shape, self._base.weights[weight]))
        settings = {lora.SCALE: self._scale(each.module, each, 1), lora.TRANSPOSED: self._turned(each, shape)}
        self._put(weight, each, settings, of_adapter)
        if each.bias is not None:
            bias = self._names.find(f"{each.module}.bias")
            if bias is None or self._base.weights[bias].shape != each.bias.shape:
                raise UserError(
                    f"{printable(each.bias.name)} belongs to a layer that has no bias of its size in the base"
                )
            self._put(bias, each, {lora.SCALE: settings[lora.SCALE]}, bases.pop(bias, None))

    def _say_if_tied(self, each: LoraNames) -> None:
        headless = self._names.find("lm_head.weight") is None and "lm_head.weight" not in self._full
        if each.embedding and headless and (self.config or {}).get("tie_word_embeddings", True):
            self.notices.append(
                f"{printable(each.module)} is also the head's weight: merged, as PEFT does it, both change, and before only the "
                "embedding"
            )

    def _turned(self, each: LoraNames, shape: tuple[int, ...]) -> bool:
        """Return whether the product is transposed. Raises UserError if it doesn't fit a weight of this shape."""
        down, up = each.pair()
        inputs, outputs = math.prod(down.shape[1:]), up.shape[0]
        plain = math.prod(up.shape[2:]) == 1  # B of a convolution is [out, rank, 1, 1]
        straight = plain and len(shape) > 1 and (shape[0], math.prod(shape[1:])) == (outputs, inputs)
        turned = len(down.shape) == len(up.shape) == 2 and shape == (inputs, outputs)
        scaled = straight and len(shape) == 2 and not each.embedding and not self._of_adapter.get("fan_in_fan_out")
        if each.magnitude is not None and (not scaled or math.prod(each.magnitude.shape) != outputs):
            raise UserError(
                f"{printable(each.module)} has DoRA, which is merged here for linear layers alone; merge it with PEFT"
            )
        if not turned and (each.embedding or not straight):
            raise UserError(
                f"it adapts {printable(each.module)} from {inputs} to {outputs} values, and the weight of the base is {list(shape)}"
            )
        if each.embedding or straight != turned:
            return each.embedding or turned
        return bool(self._of_adapter.get("fan_in_fan_out"))

    def _parameter(
        self, each: LoraNames, down: CheckpointTensor, up: CheckpointTensor
    ) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Return (the name of an adapted parameter in the module, a pair of name and settings for each weight that holds a part of
        it in the base).
        """
        parent = f".{each.module}."
        for target in self._parameters:
            module, _, parameter = target.rpartition(".")
            if not parent.endswith(f".{module}." if module else "."):
                continue
            name = f"{each.module}.{parameter}"
            found = self._packed(name, down, up) or [*self._single_experts(each.module, parameter, down, up)]
            if found:
                return name, found
        raise UserError(f"it adapts {printable(each.module)}, which has no weight in the base that its matrices fit")

    def _packed(self, name: str, down: CheckpointTensor, up: CheckpointTensor) -> list[tuple[str, dict[str, Any]]]:
        found = self._names.find(name)
        shape = self._base.weights[found].shape if found is not None else ()
        inputs, outputs = down.shape[1], up.shape[0]
        if found is None or len(shape) not in (2, 3) or sorted(shape[-2:]) != sorted((inputs, outputs)):
            return []
        if len(shape) == 2:
            return [(found, {lora.TRANSPOSED: False})] if shape == (outputs, inputs) else []
        turned = shape[1:] == (inputs, outputs)
        if inputs == outputs:
            turned = (self._base.config or {}).get("model_type") in _TRANSPOSED_EXPERTS
        return [(found, {lora.EXPERTS: shape[0], lora.TRANSPOSED: turned})]

    def _single_experts(
        self, module: str, parameter: str, down: CheckpointTensor, up: CheckpointTensor
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the weights of single experts that loading packs into a parameter, one below the other."""
        for layers in _EXPERT_NAMES.get(parameter, ()):
            first = self._names.find(f"{module}.0.{layers[0]}.weight")
            if first is None:
                continue
            prefix = first.removesuffix(f"0.{layers[0]}.weight")
            shape = self._base.weights[first].shape
            if len(shape) != 2 or (len(layers) * shape[0], shape[1]) != (up.shape[0], down.shape[1]):
                continue
            high, wide = shape
            names = (f"{prefix}{number}.{layers[0]}.weight" for number in count())
            experts = sum(1 for _ in takewhile(self._base.weights.__contains__, names))
            for expert in range(experts):
                for place, layer in enumerate(layers):
                    name = f"{prefix}{expert}.{layer}.weight"
                    stored = self._base.weights.get(name)
                    if stored is None or stored.shape != (high, wide):
                        raise UserError(f"it adapts {printable(name)}, which is not [{high}, {wide}] in the base")
                    rows = (expert, place * high, (place + 1) * high)
                    yield name, {lora.EXPERTS: experts, lora.EXPERT: rows}

    def _put(self, name: str, each: LoraNames, settings: dict[str, Any], of_adapter: CheckpointTensor | None) -> None:
        """Add a merged weight. of_adapter: the adapter's own copy of the base's values, or None."""
        stored, coded = self._base.weights[name], None if of_adapter is not None else self._base.coded.get(name)
        if name in self.weights:
            raise UserError(f"it adapts {printable(name)} twice")
        if coded is None and stored.dtype not in _STORED:
            raise UserError(f"it adapts {printable(name)}, which the base stores as {printable(stored.dtype, 60)}")
        parts = {CODES: of_adapter or stored}
        if coded is not None:
            parts, settings = dict(coded.parts), settings | {lora.BASE: coded}
        if of_adapter is not None:
            self._drop(name)
        is_bias = lora.TRANSPOSED not in settings and lora.EXPERTS not in settings
        down, up = each.pair()
        mine = {lora.BIAS: each.bias} if is_bias else {lora.A: down, lora.B: up, lora.MAGNITUDE: each.magnitude}
        parts |= {role: tensor for role, tensor in mine.items() if tensor is not None}
        for tensor in mine.values():
            if tensor is not None and tensor.dtype not in _STORED:
                raise UserError(
                    f"{printable(tensor.name)} is stored as {printable(tensor.dtype, 60)}, which PEFT never does"
                )
        before = coded.format if coded is not None else dtypes.short_name(parts[CODES].dtype)
        form = f"lora:{before}+r{down.shape[0] // settings.get(lora.EXPERTS, 1)}"
        beside = coded.beside if coded is not None else ()
        self.weights[name] = CodedWeight(
            name, stored.shape, lora.SCHEME, form, parts, settings, beside, self._dtype(name, "")
        )

    def _scale(self, name: str, each: LoraNames, experts: int) -> float:
        """Return the factor of B @ A. name: the module or parameter, as patterns name it. Raises UserError."""
        down, up = each.pair()
        rank, left = divmod(down.shape[0], experts)
        if left or rank * experts != up.shape[1] or not rank:
            raise UserError(
                f"the matrices of {printable(name)} are {list(down.shape)} and {list(up.shape)}: their ranks differ"
            )
        declared = self._of_pattern("rank_pattern", name, self._of_adapter.get("r"))
        if declared != rank:
            raise UserError(
                f"{printable(name)} has rank {rank}, and {ADAPTER_CONFIG} declares {printable(str(declared), 40)}"
            )
        alpha = self._of_pattern("alpha_pattern", name, self._of_adapter.get("lora_alpha"))
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise UserError(f"{ADAPTER_CONFIG} has no number as lora_alpha of {printable(name)}")
        return float(alpha) / (math.sqrt(rank) if self._of_adapter.get("use_rslora") else rank)

    def _of_pattern(self, key: str, name: str, otherwise: Any) -> Any:
        """Return the first entry of a table of regular expressions whose key matches the end of a name, as PEFT does."""
        for pattern, value in mapping(self._of_adapter.get(key)).items():
            if compile_regex(rf"(.*\.)?({pattern})$", pattern, "match", dotall=False)(name):
                return value
        return otherwise


def _other_shape(name: str, shape: tuple[int, ...], stored: CheckpointTensor) -> str:
    return (
        f"{printable(name)} is {list(shape)}, and {list(stored.shape)} in the base; if tokens were added, save the base with its "
        "resized embedding first"
    )
