"""Creates inputs for models of diffusers, in the shapes that the configuration specifies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.hints import hint
from dtype_engine.core.options import InputOptions
from dtype_engine.core.units import plural
from dtype_engine.runtime.inputs.batch import Batch, Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.compare.pictures import picture_range

_STEPS = 2
_EARLIEST, _LATEST = 900.0, 100.0
"""The time steps of the first and last call, of 1,000: at 900 the latents are mostly noise, at 100 nearly the picture."""
_TOKENS = 16
_LARGEST = 64
_MOST_PATCHES = 128
"""The largest height and width of latents, in patches, as for pictures of 2,048 x 2,048 pixels."""
_TIME_IDS = 6
"""How many numbers SDXL takes that describe the sizes and the position of the picture."""


def is_diffusers_module(module: nn.Module) -> bool:
    """Return whether a module's class is a model class of diffusers."""
    return any(base.__module__.startswith("diffusers.models.") for base in type(module).__mro__)


def diffusers_inputs(model: LiveModel, options: InputOptions) -> Inputs:
    """Return inputs with one call of the model for each of a few time steps. Raises NoForward if the arguments are unknown, and
    UserError if the user provided texts, pictures or audio.
    """
    if options.prompts or options.texts or options.images or options.audio:
        raise UserError(f"{model.title} takes latents, and no text, picture or audio; {hint('tensors')}")
    name = type(model.module).__name__
    make = next((make for prefix, make in _MAKERS.items() if name.startswith(prefix)), None)
    if make is None:
        raise NoForward(f"{model.title}: no forward pass: nothing says what to run a {name} on; {hint('tensors')}")
    count = options.sequences or _STEPS
    steps = torch.linspace(_EARLIEST, _LATEST, count)
    with failures_as(NoForward, f"{model.title}: no forward pass: its config.json does not say what a {name} takes"):
        draws = [partial(torch.randn, generator=torch.Generator().manual_seed(number)) for number in range(count)]
        calls = [make(model.module.config, draw, steps[number : number + 1]) for number, draw in enumerate(draws)]
    of = "a picture" if picture_range(model.module) else "a sound"
    what = f"random latents of {of}" if "z" in calls[0] else "random latents, text embeddings and time steps"
    batches, made_of = tuple(Batch(kwargs=call) for call in calls), f"{what}, in the shapes that the configuration says"
    return Inputs(batches, f"{plural(count, 'call')} of {what}", made_of=(made_of,))


_Draw = Callable[..., torch.Tensor]
"""A function that returns a tensor of the given shape with normally distributed float32 numbers."""


def _size(config: Any) -> tuple[int, int]:
    """Return (height, width) of the latents, in latent pixels."""
    size = config.get("sample_size") or _LARGEST
    return (int(size), int(size)) if isinstance(size, (int, float)) else (int(size[0]), int(size[1]))


def _size_in_patches(config: Any) -> tuple[int, int]:
    """Return (height, width) of the latents of a transformer that has one token for each patch, with at most 128 x 128 patches."""
    most = _MOST_PATCHES * max(1, int(config.get("patch_size") or 1))
    height, width = _size(config)
    return min(height, most), min(width, most)


def _unet(config: Any, draw: _Draw, step: torch.Tensor) -> dict[str, Any]:
    height, width = (min(side, _LARGEST) for side in _size(config))
    cross = config.cross_attention_dim
    cross = config.get("encoder_hid_dim") or (cross[0] if isinstance(cross, (list, tuple)) else cross)
    inputs: dict[str, Any] = {
        "sample": draw(1, config.in_channels, height, width),
        "timestep": step.long(),
        "encoder_hidden_states": draw(1, _TOKENS, cross),
    }
    if added := _added_conditions(config, draw, height, width):
        inputs["added_cond_kwargs"] = added
    if config.get("class_embed_type") in ("projection", "simple_projection"):
        inputs["class_labels"] = draw(1, config.projection_class_embeddings_input_dim)
    elif config.get("num_class_embeds"):
        inputs["class_labels"] = torch.tensor([1])
    if config.get("time_cond_proj_dim"):
        inputs["timestep_cond"] = draw(1, config.time_cond_proj_dim)
    return inputs


def _added_conditions(config: Any, draw: _Draw, height: int, width: int) -> dict[str, torch.Tensor]:
    """Return the conditions that a UNet takes besides text, such as the sizes for SDXL, or a picture's embedding for Kandinsky.
    height, width: of the latents.
    """
    kind, projection = config.get("addition_embed_type") or "", config.get("encoder_hid_dim_type") or ""
    added: dict[str, torch.Tensor] = {}
    if kind == "text_time":
        pooled = config.projection_class_embeddings_input_dim - _TIME_IDS * config.addition_time_embed_dim
        sizes = torch.tensor([[8.0 * height, 8.0 * width, 0, 0, 8.0 * height, 8.0 * width]])
        added |= {"text_embeds": draw(1, pooled), "time_ids": sizes}
    elif kind == "text_image":
        added["text_embeds"] = draw(1, config.cross_attention_dim)
    if "image" in kind or "image" in projection:
        of_text = kind == "text_image" or projection == "text_image_proj"
        added["image_embeds"] = draw(1, config.cross_attention_dim if of_text else config.encoder_hid_dim)
    return added


def _autoencoder(config: Any, draw: _Draw, step: torch.Tensor) -> dict[str, Any]:
    """Return random latents for the decoder, with the mean and scale that the configuration specifies. step: ignored."""
    channels = config.get("latent_channels") or config.get("z_dim")
    means, scales = config.get("latents_mean"), config.get("latents_std")
    video = any("temporal" in key for key in config) or means is not None
    latents = draw(1, channels, *((2,) if video else ()), 16, 16)
    if means is not None and scales is not None:
        shape = (1, channels, *(1,) * (latents.ndim - 2))
        return {"z": latents * torch.tensor(scales).view(shape) + torch.tensor(means).view(shape)}
    scale, shift = config.get("scaling_factor") or 1.0, config.get("shift_factor") or 0.0
    return {"z": latents / scale + shift}


def _sd3(config: Any, draw: _Draw, step: torch.Tensor) -> dict[str, Any]:
    height, width = (min(side, _LARGEST) for side in _size(config))
    return {
        "hidden_states": draw(1, config.in_channels, height, width),
        "encoder_hidden_states": draw(1, _TOKENS, config.joint_attention_dim),
        "pooled_projections": draw(1, config.pooled_projection_dim),
        "timestep": step,
    }


def _flux(config: Any, draw: _Draw, step: torch.Tensor) -> dict[str, Any]:
    side = 8
    positions = torch.zeros(side, side, 3)
    positions[..., 1] += torch.arange(side)[:, None]
    positions[..., 2] += torch.arange(side)[None]
    inputs = {
        "hidden_states": draw(1, side * side, config.in_channels),
        "encoder_hidden_states": draw(1, _TOKENS, config.joint_attention_dim),
        "pooled_projections": draw(1, config.pooled_projection_dim),
        "timestep": step / 1000,
        "img_ids": positions.view(-1, 3),
        "txt_ids": torch.zeros(_TOKENS, 3),
    }
    return inputs | ({"guidance": torch.full((1,), 3.5)} if config.get("guidance_embeds") else {})


def _wan(config: Any, draw: _Draw, step: torch.Tensor) -> dict[str, Any]:
    inputs = {
        "hidden_states": draw(1, config.in_channels, 2, 16, 16),
        "timestep": step.long(),
        "encoder_hidden_states": draw(1, _TOKENS, config.text_dim),
    }
    return inputs | ({"encoder_hidden_states_image": draw(1, 257, config.image_dim)} if config.get("image_dim") else {})


def _ltx(config: Any, draw: _Draw, step: torch.Tensor) -> dict[str, Any]:
    frames, side = 2, 8
    return {
        "hidden_states": draw(1, frames * side * side, config.in_channels),
        "encoder_hidden_states": draw(1, _TOKENS, config.caption_channels),
        "timestep": step.long(),
        "encoder_attention_mask": torch.ones(1, _TOKENS, dtype=torch.bool),
        "num_frames": frames,
        "height": side,
        "width": side,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def _dit(config: Any, draw: _Draw, step: torch.Tensor) -> dict[str, Any]:
    height, width = _size_in_patches(config)
    return {
        "hidden_states": draw(1, config.in_channels, height, width),
        "timestep": step.long(),
        "class_labels": torch.tensor([1]),
    }


def _pixart(config: Any, draw: _Draw, step: torch.Tensor) -> dict[str, Any]:
    height, width = _size_in_patches(config)
    return {
        "hidden_states": draw(1, config.in_channels, height, width),
        "encoder_hidden_states": draw(1, _TOKENS, config.get("caption_channels") or config.cross_attention_dim),
        "timestep": step.long(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


_MAKERS: dict[str, Callable[[Any, _Draw, torch.Tensor], dict[str, Any]]] = {
    "UNet2DCondition": _unet,
    "Autoencoder": _autoencoder,
    "SD3": _sd3,
    "FluxTransformer": _flux,
    "WanTransformer": _wan,
    "LTXVideoTransformer": _ltx,
    "DiTTransformer": _dit,
    "PixArt": _pixart,
}
"""By the beginning of the name of the model's class: the function that makes the arguments of one call of the model."""
