"""Constructs, without data, the model that a `config.json` names, and refuses a model that does not match the tensors."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.embedding_modules import MODULES, embedding_modules
from dtype_engine.checkpoint.modeling_source import foreign_prefix
from dtype_engine.checkpoint.packed_weights import quantized_parts
from dtype_engine.checkpoint.plausible import ImpossibleConfig, refuse_impossible
from dtype_engine.checkpoint.weight_files import refuse_link_out
from dtype_engine.checkpoint.weight_sets import NAMED_WEIGHTS, NO_WEIGHTS
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.suggest import nearest
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.libraries.hub import without_foreign_kernels
from dtype_engine.runtime.model.module_tree import collect_tensors
from dtype_engine.runtime.model.name_mapping import Placement, map_names

_MODULES_ALWAYS, _MODULES_PER_TENSOR = 2_000, 10
"""A model may have at most the first number of submodules, plus the second for each tensor in the files. Real models have fewer
than three per tensor, except small models that share layers or have many modules without tensors.
"""
_SPARE_ALWAYS, _SPARE_PER_BYTE = 1 << 30, 32
"""The tensors that the files lack may take at most the first number of bytes, plus the second for each byte of the files. A float32
model is 16 times as large as files with weights packed in two bits.
"""
_LONGEST_REASON = 300


class Misfit(NoForward):
    """Raised if the tensors of a checkpoint do not belong to the model class (`class_name`) that its configuration names."""

    def __init__(self, message: str, class_name: str = "", coverage: Coverage | None = None) -> None:
        super().__init__(message)
        self.class_name = class_name
        self.coverage = coverage


@dataclass(frozen=True, slots=True)
class Architecture:
    """A transformers model class and the configuration with which it is constructed."""

    model_class: Any
    """The model class or, if the model's code comes with the checkpoint, an auto class such as AutoModelForCausalLM."""
    config: Any
    notices: tuple[str, ...] = ()
    trust_remote_code: bool = False


_READ_WITH_WEIGHTS = ("generation_config.json", "adapter_config.json")
"""The files that transformers reads in a model's folder when it loads weights from there."""


def architecture(transformers: ModuleType, checkpoint: Checkpoint, options: ModelOptions) -> Architecture:
    """Return the architecture that `options` or a checkpoint's `config.json` names.

    Raises NoForward if the installed transformers lacks the architecture or rejects the configuration, and UserError if the name in
    `options` is not a model class.
    """
    folder = checkpoint.folder
    config = checkpoint.config or {}
    refuse_impossible(config, checkpoint, f"{folder / 'config.json'}")
    for name in _READ_WITH_WEIGHTS:
        try:
            refuse_link_out(folder, name)
        except UserError as error:
            raise NoForward(f"{printable(folder.name, 100)}: no forward pass: {error}") from None
    model_class, notices = _model_class(transformers, config, folder, options)
    made = _configuration(transformers, model_class, checkpoint, folder, options)
    if getattr(made, NAMED_WEIGHTS, None) == NO_WEIGHTS:  # for plain transformers; this program reads these weights
        delattr(made, NAMED_WEIGHTS)
    if not options.trust_remote_code:
        notices += without_foreign_kernels(made, config, printable(folder.name, 100))
    return Architecture(model_class, made, notices, options.trust_remote_code)


def make(chosen: Architecture, checkpoint: Checkpoint) -> tuple[nn.Module, Mapping[str, Placement]]:
    """Construct the model of an architecture (`chosen`) on the meta device. Returns the module, and where each tensor of the
    checkpoint is loaded in it. Raises NoForward if the module can't be constructed, and Misfit if the checkpoint's tensors are not
    the module's. Shapes are not compared (see `shapes.py`).
    """
    folder, auto = checkpoint.folder, getattr(chosen.model_class, "from_config", None)
    config = without_quantization(chosen.config)
    with few_modules(len(checkpoint.weights)), reasons(folder), torch.device("meta"):
        module = auto(config, trust_remote_code=chosen.trust_remote_code) if auto else chosen.model_class(config)
    if not isinstance(module, nn.Module):
        raise NoForward(f"{folder}: {chosen.model_class.__name__} is no model")
    placements = map_names(module, checkpoint.weights)
    refuse_misfit(module, checkpoint, placements, folder)
    return module, placements


def without_quantization(config: Any) -> Any:
    """Return a deep copy of a transformers configuration without its quantization settings."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def reasons(folder: Path) -> AbstractContextManager[None]:
    """Return a context manager that converts any exception of transformers or torch to ImpossibleConfig. Its message names
    `folder`.
    """
    return failures_as(ImpossibleConfig, f"{folder}: transformers can't make this model of its config.json", reason)


def reason(error: BaseException) -> str:
    """Return the message of an exception from transformers in one line, without Python syntax such as `<class '...'>`."""
    text = " ".join(str(error).split()).replace("`", "'")
    field = re.match(r"Validation error for field '(\w+)': \w+: (.*)", text)
    if field is not None:
        text = re.sub(rf"^Field '{field[1]}' ", "", field[2])
        text = f"{field[1]}: {text.partition('. Errors: ')[0]}"
    else:
        text = re.sub(r"^Class validation error for validator '\w+': \w+: ", "", text)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    text = printable(text, _LONGEST_REASON)
    plain = isinstance(error, (OSError, ValueError, RuntimeError)) or type(error).__module__.startswith(
        "huggingface_hub"
    )
    return text if text and plain else f"{type(error).__name__}: {text}" if text else type(error).__name__


def _model_class(
    transformers: ModuleType, config: Mapping[str, Any], folder: Path, options: ModelOptions
) -> tuple[Any, tuple[str, ...]]:
    if options.architecture is not None:
        return _asked_for(transformers, options.architecture), ()
    model_type = config.get("model_type")
    known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    auto_map = config.get("auto_map")
    if auto_map and not options.trust_remote_code and not known:
        raise NoForward(
            f"{folder}: this model brings its own Python code, which is not run unless you pass --trust-remote-code "
            "(in Python: Options(trust_remote_code=True))"
        )
    named, notices = _named(config)
    for name in named:
        if (model_class := _class_named(transformers, name)) is not None:
            if known and _has_head(name) and not config.get("is_encoder_decoder") and _is_embedder(folder):
                opened = f"opened as {_bare_class(str(model_type))}, not as {name}, as sentence-transformers does"
                return transformers.AutoModel, (*notices, f"{MODULES} describes an embedding: {opened}")
            return model_class, notices
    if auto_map and options.trust_remote_code:
        return getattr(transformers, _auto_class(transformers, auto_map, named)), notices
    if known:
        return transformers.AutoModel, (*notices, _backbone(transformers, str(model_type), named))
    unknown = ", ".join(map(printable, named)) or config.get("_class_name") or model_type or "none"
    raise NoForward(
        f"{folder}: no forward pass, because transformers {transformers.__version__} does not know the architecture "
        f"named in config.json ({printable(str(unknown), 200)})"
    )


def _auto_class(transformers: ModuleType, auto_map: Any, named: tuple[str, ...]) -> str:
    """Return the name of the auto class with which to load model code that comes with the checkpoint: preferably the key of
    `auto_map` whose class is in `named` (the `architectures` of `config.json`).
    """
    keys = auto_map if isinstance(auto_map, dict) else {}
    models = [key for key in keys if key.startswith("AutoModel") and hasattr(transformers, key)]
    by_name = [key for key in models if str(keys[key]).rpartition(".")[2] in named]
    usual = [key for key in ("AutoModelForCausalLM", "AutoModel") if key in models]
    return next(iter((*by_name, *usual, *models)), "AutoModel")


def _named(config: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    listed = config.get("architectures")
    if listed is None or (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
        return tuple(listed or ()), ()
    if isinstance(listed, str):
        return (listed,), (f"architectures in config.json is no list: taken as the name {printable(listed, 100)}",)
    names = tuple(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else ()
    return names, ("architectures in config.json is no list of names, so what it says is not followed",)


def _backbone(transformers: ModuleType, model_type: str, named: tuple[str, ...]) -> str:
    """Return the notice that a model is opened without its head, because its `config.json` names no class that transformers has.
    named: the classes that it names. model_type: its entry of this name.
    """
    from transformers.models.auto import modeling_auto

    with_head = next(
        (
            mapping[model_type]
            for kind in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION")
            if model_type in (mapping := getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}))
        ),
        None,
    )
    bare = _bare_class(model_type)
    why = (
        f"config.json names {', '.join(printable(name, 60) for name in named[:3])}, which is no model of transformers"
        if named
        else "config.json names no architecture"
    )
    hint = f"; --architecture {with_head} opens the model with its head" if with_head is not None else ""
    return f"{why}: opened as the bare {bare}, and what is measured is its last hidden state, not logits{hint}"


def _bare_class(model_type: str) -> str:
    """Return the name of the class without a head that `AutoModel` makes of a `model_type`."""
    from transformers.models.auto import modeling_auto

    bare = modeling_auto.MODEL_MAPPING_NAMES.get(model_type, "AutoModel")
    return str(bare if isinstance(bare, str) else bare[0])


def _has_head(name: str) -> bool:
    """Return whether a class of transformers, such as BertForMaskedLM or GPT2LMHeadModel, has a head, by its name."""
    return "For" in name or name.endswith("LMHeadModel")


def _is_embedder(folder: Path) -> bool:
    """Return whether sentence-transformers opens the folder's model without a head. An invalid file is said with the figures."""
    with suppress(UserError):
        modules = embedding_modules(folder)
        return modules is not None and modules.bare and bool(modules.poolings)
    return False


def _class_named(transformers: ModuleType, name: str) -> Any:
    if not name.isidentifier():
        return None
    try:
        member = getattr(transformers, name, None)
    except Exception:  # the class needs a package that is not installed
        return None
    return member if isinstance(member, type) and issubclass(member, transformers.PreTrainedModel) else None


def _asked_for(transformers: ModuleType, name: str) -> Any:
    model_class = _class_named(transformers, name)
    if (
        model_class is not None
        and model_class.config_class is not None
        and model_class.forward is not nn.Module.forward
    ):
        return model_class
    if name.startswith("AutoModel") and hasattr(getattr(transformers, name, None), "from_config"):
        return getattr(transformers, name)
    of = f"--architecture {printable(name, 100)}: transformers {transformers.__version__}"
    if model_class is not None or name in transformers.__all__:
        raise UserError(f"{of} can make no model of this class here; name one such as LlamaForCausalLM")
    near = nearest(name, (other for other in transformers.__all__ if "For" in other or other.endswith("Model")))
    hint = f"; did you mean {near}?" if near else ""
    raise UserError(f"{of} has no model class of that name{hint}")


def _configuration(
    transformers: ModuleType, model_class: Any, checkpoint: Checkpoint, folder: Path, options: ModelOptions
) -> Any:
    """Return the checkpoint's `config.json` as the configuration class that the model class requires, which may be the class for a
    part of a composite model, such as its text model. Raises NoForward if transformers rejects the configuration.
    """
    own = getattr(model_class, "config_class", None)
    with reasons(folder):
        if own is not None and checkpoint.form == "gguf":
            return own.from_dict(checkpoint.config)
        if own is not None:
            return own.from_pretrained(folder, local_files_only=True)
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=options.trust_remote_code
        )


@contextmanager
def few_modules(tensors: int) -> Iterator[None]:
    """In the `with` block, raise ImpossibleConfig as soon as a model has more submodules than `tensors` tensors allow."""
    from torch.nn.modules.module import register_module_module_registration_hook

    most = _MODULES_ALWAYS + _MODULES_PER_TENSOR * tensors
    made = 0

    def count(module: nn.Module, name: str, part: nn.Module | None) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise ImpossibleConfig(
                f"config.json describes a model of over {most} modules, and the files hold {tensors} tensors: "
                "these are not one model"
            )

    with register_module_module_registration_hook(count):
        yield


def refuse_misfit(module: nn.Module, checkpoint: Checkpoint, placements: Mapping[str, Placement], folder: Path) -> None:
    """Raise Misfit if a module does not belong to the files. Either most tensors of the files have no place in it, or the tensors
    that only the module has need far more memory than the files. placements: where each tensor of the files is loaded. folder: the
    checkpoint's folder.
    """
    name = type(module).__name__
    infos, tensors = collect_tensors(module)
    filled = {placement.name for placement in placements.values()}
    empty = [info.name for info in infos if info.persistent and not filled.intersection(info.names)]
    strange = [stored for stored in checkpoint.weights if stored not in placements]
    config = checkpoint.config or {}
    packed = quantized_parts(checkpoint.tensors, checkpoint.config) or "quantization_config" in config
    prefix = foreign_prefix(checkpoint.weights, checkpoint.config)
    coverage = Coverage(sum(info.persistent for info in infos), tuple(empty), tuple(strange))
    spare = sum(tensors[info.name].nbytes for info in infos if not filled.intersection(info.names))
    if 2 * len(strange) > len(checkpoint.weights) and 2 * len(empty) > len(infos) and (prefix or not packed):
        under = f"all names in the files begin with {printable(prefix)}, " if prefix else ""
        why = (
            f"these are not the weights of a {name}: {coverage}, {under}{len(strange)} of {len(checkpoint.weights)} tensors have "
            f"no place in it, first {printable(strange[0])}; --architecture names another class"
        )
    elif spare > _SPARE_ALWAYS + _SPARE_PER_BYTE * checkpoint.stored_bytes:
        held = f"{human_bytes(spare)} of tensors that the files do not hold"
        why = f"a {name} by its config.json has {held}: these are not one model"
    else:
        return
    raise Misfit(f"{folder}: {why}", name, coverage)
