"""Constructs models of diffusers, such as a UNet or a VAE, from a `config.json` that names their class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from types import MethodType
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.plausible import ImpossibleConfig, refuse_impossible, refuse_large_tables
from dtype_engine.core.errors import NoForward, one_line
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.text import printable
from dtype_engine.runtime.building.architecture import few_modules, reason, refuse_misfit
from dtype_engine.runtime.building.constructed_buffers import parameters_without_data
from dtype_engine.runtime.libraries.hf_private import renamed_on_load
from dtype_engine.runtime.libraries.silence_libraries import quiet
from dtype_engine.runtime.libraries.torch_private import tensor_slots
from dtype_engine.runtime.model.name_mapping import Placement


def make_diffusers(checkpoint: Checkpoint, title: str) -> tuple[nn.Module, Mapping[str, Placement]]:
    """Construct a diffusers model with parameters on the meta device. Buffers have the values that the constructor computes.
    Returns the module, and where each tensor of the checkpoint is loaded in it.

    Raises NoForward if diffusers is not installed, lacks the class or can't construct it, and Misfit if the checkpoint's tensors
    are not the module's. Shapes are not compared (see `shapes.py`).
    """
    module = construct(checkpoint, checkpoint.config or {}, str(checkpoint.path / "config.json"), title)
    renamed, own = renamed_on_load(module, checkpoint.weights), module.state_dict()
    names = {name: renamed.get(name, name) for name in checkpoint.weights}
    placements = {stored: Placement(name, False) for stored, name in names.items() if name in own}
    refuse_misfit(module, checkpoint, placements, checkpoint.path)
    return module, placements


def construct(checkpoint: Checkpoint, config: Mapping[str, Any], where: str, title: str) -> Any:
    """Construct the diffusers model of a configuration with parameters on the meta device, if the tensors of a checkpoint can be
    its own. where: the file of the configuration. Raises NoForward.
    """
    name = str(config.get("_class_name"))
    diffusers = import_diffusers(title)
    refuse_impossible(config, checkpoint, where)
    weights = checkpoint.weights.values()
    largest = max((math.prod(each.shape) for each in weights), default=0)
    refuse_large_tables(config, where, largest, sum(each.nbytes for each in weights))
    model_class: Any = None
    with suppress(Exception):  # the name is unknown, or the class needs a package that is not installed
        model_class = getattr(diffusers, name) if name.isidentifier() else None
    is_model = isinstance(model_class, type) and issubclass(model_class, diffusers.ModelMixin)
    if not is_model:
        raise NoForward(
            f"{title}: no forward pass, because diffusers {diffusers.__version__} has no model {printable(name, 100)}"
        )
    with (
        few_modules(len(checkpoint.weights)),
        failures_as(ImpossibleConfig, f"{where}: diffusers can't make this model of it", reason),
        quiet(),
        parameters_without_data(),
    ):
        return model_class.from_config(dict(config))


def import_diffusers(title: str) -> Any:
    """Return the package diffusers. Raises NoForward if it can't be imported."""
    try:
        with quiet():
            import diffusers
    except ImportError as error:
        raise NoForward(
            f"{title}: no forward pass without diffusers: pip install 'dtype-tui[diffusers]' ({one_line(error, 200)}); "
            "planning works"
        ) from None
    diffusers.utils.logging.set_verbosity(50)  # critical: warnings would be drawn over the app
    return diffusers


def with_placeholders(module: nn.Module) -> None:
    """Replace each parameter on the meta device by zeros on the CPU, which share the memory of a single number."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.is_meta:
                empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                tensor_slots(part, name)[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)


def run_decoder(module: nn.Module, of_sound: bool) -> None:
    """If a module is an autoencoder, make its forward pass run only the decoder, which turns latents into a picture, a wave of
    sound or a spectrogram. of_sound: whether the pipeline around it makes sounds.
    """
    if hasattr(module, "decode") and hasattr(module, "encode"):
        autoencoder: Any = module
        autoencoder.forward = MethodType(_decode, module)
        autoencoder.sound_rate = rate = sampling_rate(module)
        autoencoder.picture_range = None if of_sound or rate is not None else (-1.0, 1.0)


def sampling_rate(part: Any) -> int | None:
    """Return the values per second of the sounds that a model makes, as its configuration says, or None."""
    config = getattr(part, "config", None)
    rates = [getattr(config, name, None) for name in ("sampling_rate", "sample_rate")]
    return next((rate for rate in rates if type(rate) is int and rate > 0), None)


def _decode(autoencoder: Any, z: torch.Tensor, **settings: Any) -> Any:
    return autoencoder.decode(z, **settings)
