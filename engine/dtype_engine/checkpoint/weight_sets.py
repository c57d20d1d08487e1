"""Decides, by the names of a folder's files, which of them are a model's weights: those that transformers or diffusers would load.

A folder may hold a model several times: in one file and in shards with an index, as safetensors and as pickles, in variants such as
fp16. Each is a set of weights. Both libraries look for the sets in a fixed order, and load the first one without mentioning the
others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dtype_engine.core.text import printable

OF_TRANSFORMERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The names by which transformers finds a model's weights, in its order (`from_pretrained` without `variant`)."""
OF_DIFFUSERS = (
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.bin.index.json",
)
"""The names by which diffusers finds a model's weights, in its order. It loads the last only with `use_safetensors=False`."""
NAMED_WEIGHTS = "transformers_weights"
"""The entry of `config.json` that names the file of weights which transformers loads. Other programs ignore it."""
NO_WEIGHTS = "not-for-transformers--see-README.md.safetensors"
"""The value of `transformers_weights` in an export that transformers would load with other values, such as random ones for weights
in our own layout. No file has this name, so `from_pretrained` raises an error with the name.
"""
OF_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_OF_MSMODELSLIM = re.compile(r"quant_model_weights?(_\w+)?\.safetensors(\.index\.json)?")
"""Matches the names of msModelSlim's weights, which only Ascend's runtimes find."""
_SHARD = re.compile(
    r"(?P<stem>model|pytorch_model|diffusion_pytorch_model|quant_model_weights?(_\w+)?)(?P<variant>\.\w+)?-\d+-of-\d+"
    r"(?P<late>\.\w+)?\.(?P<suffix>safetensors|bin)"
)
_STEMS = ("model.", "pytorch_model.", "diffusion_pytorch_model.", *OF_ADAPTERS)


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One set of weights in a folder: a model's weights in a single file, or in shards with an index."""

    name: str
    """The name of the single file, or of the index."""
    variant: str | None = None
    """The variant in the name, such as fp16, which a library loads only if it is asked for it."""

    @property
    def has_index(self) -> bool:
        """Whether the weights are in shards, which the file `name` lists."""
        return self.name.endswith(".json")

    @property
    def pickled(self) -> bool:
        return ".safetensors" not in self.name


def weight_sets(names: Collection[str], config: Mapping[str, Any] | None) -> tuple[WeightSet, ...]:
    """Return the sets of weights in a folder with files of these names: first the set that transformers or diffusers loads, last
    the sets of variants. config: the content of config.json. A weights file that config.json names is included even if `names`
    lacks it.
    """
    of_diffusers = is_diffusers(config)
    order = (OF_DIFFUSERS + OF_TRANSFORMERS if of_diffusers else OF_TRANSFORMERS + OF_DIFFUSERS) + OF_ADAPTERS
    named = None if of_diffusers else _named_by(config)
    plain = [WeightSet(name) for name in order if name in names and name != named]
    plain += [WeightSet(name) for name in sorted(names) if _OF_MSMODELSLIM.fullmatch(name) and name != named]
    found = [WeightSet(named), *plain] if named is not None else plain
    for usual in order[: -len(OF_ADAPTERS)]:
        stem, suffix = usual.rsplit(".", 1)  # model.fp16.safetensors, model.safetensors.index.fp16.json
        characters = r"[\w-]+" if suffix == "json" else r"\w+"
        pattern = re.compile(rf"{re.escape(stem)}\.(?P<variant>{characters})\.{suffix}")
        matches = filter(None, map(pattern.fullmatch, sorted(names)))
        found += [WeightSet(match[0], match["variant"]) for match in matches if match[0] != named]
    return tuple(found)


def is_diffusers(config: Mapping[str, Any] | None) -> bool:
    """Return whether the content of a `config.json` is that of a model of diffusers."""
    return config is not None and isinstance(config.get("_class_name"), str) and "model_type" not in config


def unread_weights(names: Collection[str], read: Collection[str], sets: Collection[WeightSet]) -> tuple[str, ...]:
    """Return the weights in a folder that are not read, in words for the user: sets, and other files. names: of all files in the
    folder. read: names of the files that are read. sets: all sets of the folder, the first of which is read.
    """
    first, *others = sets
    said = [each.name for each in others]
    indexed = {_group(each.name) for each in sets if each.has_index}
    shards: dict[str, list[str]] = {}
    for name in sorted(names):
        if name in read or name in said or name == first.name or not _is_weights(name):
            continue
        if _SHARD.fullmatch(name) is None:
            said.append(name)
        elif _group(name) not in indexed:
            shards.setdefault(_group(name), []).append(name)
    said += [f"{each[0]}{f' and {len(each) - 1} more' if len(each) > 1 else ''}" for each in shards.values()]
    return tuple(said)


def likely_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the files of a folder's first set of weights, judged by their names alone. config.json and the index are not read."""
    sets = weight_sets(names, None)
    if not sets or not sets[0].has_index:
        return tuple(each.name for each in sets[:1])
    return tuple(name for name in names if _SHARD.fullmatch(name) and _group(name) == _group(sets[0].name))


def is_second_set(name: str, first: WeightSet | None) -> bool:
    """Return whether an entry of `unread_weights` is a whole model in the format of `first`, which other programs may read."""
    if first is None:
        return False
    shard = _SHARD.fullmatch(name.partition(" and ")[0])
    of_shards = shard is not None and not (shard["variant"] or shard["late"])
    return (of_shards or name in OF_TRANSFORMERS + OF_DIFFUSERS) and WeightSet(name).pickled == first.pickled


def several_sets(first: WeightSet, unread: Collection[str], config: Mapping[str, Any] | None) -> str:
    """Return a sentence for the user that says which weights of a folder are read, and which are not (see `unread_weights`)."""
    library = "diffusers" if is_diffusers(config) else "transformers"
    shown = ", ".join(printable(name, 100) for name in list(unread)[:4])
    more = f" and {len(unread) - 4} more" if len(unread) > 4 else ""
    verb = "is" if len(unread) == 1 else "are"
    return (
        f"the folder has more than one set of weights: {printable(first.name, 100)} is read, as {library} does, and "
        f"{shown}{more} {verb} not"
    )


def _named_by(config: Mapping[str, Any] | None) -> str | None:
    named = (config or {}).get(NAMED_WEIGHTS)
    if not isinstance(named, str) or named == NO_WEIGHTS:
        return None
    return named if named.endswith((".safetensors", ".safetensors.index.json")) else None


def _group(name: str) -> str:
    """Return a text that is equal for an index and each of its shards."""
    shard = _SHARD.fullmatch(name)
    if shard is not None:
        return f"{shard['stem']}.{shard['suffix']}{shard['variant'] or shard['late'] or ''}"
    stem, _, variant = name.removesuffix(".json").partition(".index")
    return f"{stem}{variant}"


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") or (
        name.endswith(".bin") and (name.startswith(_STEMS) or bool(_SHARD.fullmatch(name)))
    )
