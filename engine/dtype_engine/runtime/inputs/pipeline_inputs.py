"""Creates the calls of a whole pipeline of diffusers: its prompts, the pictures that it starts from, and its settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.options import InputOptions
from dtype_engine.core.pipeline_settings import PipelineSettings
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.runtime.building.diffusers_pipeline import PipelineModule
from dtype_engine.runtime.inputs.batch import Batch, Inputs
from dtype_engine.runtime.inputs.images import open_picture, synthetic_image
from dtype_engine.runtime.inputs.text import prompt_texts
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.compare.pictures import picture_range

_PICTURE = 256
"""The largest height and width, in pixels, of the pictures that a pipeline is asked for by default."""
_PICTURE_LATENTS = 32
"""The largest height and width of the latents of such a picture: those of 256 pixels with the usual 8 pixels for each."""
_VIDEO = 64
"""The largest height and width, in pixels, of the video frames that a pipeline is asked for by default."""
_PIPELINE_STEPS = 4
_FRAMES = 9
_PROMPT = "a photograph of a cat"
_ARGUMENTS = {
    "guidance": ("guidance_scale", "guidance scale"),
    "true_cfg": ("true_cfg_scale", "true_cfg_scale"),
    "negative_prompt": ("negative_prompt", "negative prompt"),
    "strength": ("strength", "strength"),
}
"""By the name of a setting: the argument of a pipeline's call, and its name for the user."""


@dataclass(frozen=True, slots=True)
class _Start:
    """The picture that a call starts from."""

    pixels: torch.Tensor
    """uint8 [height, width, 3]."""
    about: str

    @property
    def size(self) -> tuple[int, int]:
        """The width and height in pixels."""
        return self.pixels.shape[1], self.pixels.shape[0]


def pipeline_inputs(model: LiveModel, options: InputOptions) -> Inputs:
    """Return inputs with one call of a diffusers pipeline for each prompt and each picture that it starts from. Raises NoForward
    for a pipeline that needs more than these, and UserError for what the user gave and the pipeline does not take.
    """
    sounds = picture_range(model.module) is None
    if options.audio or (options.images and sounds):
        makes = f"{model.title} makes {'sounds' if sounds else 'pictures'} of prompts"
        raise UserError(f"{makes}; {hint('no-sound')}" if options.audio else f"{makes}; {hint('no-picture')}")
    pipeline: Any = cast(PipelineModule, model.module).pipeline_for(bool(options.images))
    arguments = inspect.signature(pipeline.__call__).parameters
    call, settings = _arguments(pipeline, arguments, options.pipeline), options.pipeline
    if not settings.size:
        size = min(_VIDEO if "num_frames" in arguments else _PICTURE, _default_size(pipeline))
    width, height = settings.size or (size, size)
    starts = _starts(pipeline, arguments, options, (width, height))
    calls, what = _calls(model, pipeline, options, bool(starts))
    batches = []
    for number, (each, start) in enumerate(product(calls, starts or (None,))):
        sides = start.size if start is not None else (width, height)
        call |= {name: side for name, side in zip(("width", "height"), sides, strict=True) if name in arguments}
        picture = {"image": start.pixels} if start is not None else {}
        kwargs = {"seed": torch.tensor(settings.seed + number), **each, **picture, **call}
        text = str(next(iter(each.values()), "")) or None
        batches.append(Batch(kwargs=kwargs, text=text, about=start.about if start is not None else None))
    if starts:
        what += f" with {starts[0].about}" if len(starts) == 1 else f" with each of {len(starts)} pictures"
    how = f"{call['num_inference_steps']} steps"
    how += f", {width} x {height} pixels" if "height" in arguments and not starts else ""
    how += "".join(f", {words} {_quoted(call[name])}" for name, words in _ARGUMENTS.values() if name in call)
    seeds = ", ".join(str(settings.seed + number) for number in range(2))
    seed = f", seed {settings.seed}" if settings.seed else ""
    return Inputs(tuple(batches), f"{what}, {how}{seed}", made_of=(f"{what} with the seeds {seeds}, ...; {how}",))


def _quoted(value: object) -> str:
    return f'"{printable(value, 60)}"' if isinstance(value, str) else str(value)


def _calls(
    model: LiveModel, pipeline: Any, options: InputOptions, from_pictures: bool
) -> tuple[list[dict[str, Any]], str]:
    """Return (the arguments that differ between the calls, a description of these). Raises NoForward. from_pictures: whether each
    call has a picture, too.
    """
    arguments = inspect.signature(pipeline.__call__).parameters
    texts, given = prompt_texts(options, (_PROMPT,))
    if "prompt" in arguments:
        texts = texts[: options.sequences]
        return [{"prompt": text} for text in texts], plural(len(texts), "prompt" if given else "default prompt")
    if not given:
        count = options.sequences or 1
        if "class_labels" in arguments:
            return [{"class_labels": [label]} for label in range(1, 1 + count)], plural(count, "class label")
        if all(
            (name == "image" and from_pictures) or each.default is not each.empty for name, each in arguments.items()
        ):
            return [{}] * count, plural(count, "call" if from_pictures else "unconditional call")
    raise NoForward(f"{model.title}: no forward pass: nothing says what to run a {type(pipeline).__name__} on")


def _arguments(pipeline: Any, arguments: Mapping[str, Any], settings: PipelineSettings) -> dict[str, Any]:
    """Return the arguments that all calls have. Raises UserError for a setting without effect on this pipeline."""
    name = type(pipeline).__name__
    given: dict[str, Any] = {key: value for key, value in settings.given().items() if key in _ARGUMENTS}
    for key in given:
        argument, words = _ARGUMENTS[key]
        if argument not in arguments:
            raise UserError(f"{name} takes no {words}: leave it out")
    call = {"num_inference_steps": settings.steps or _PIPELINE_STEPS}
    call |= {"use_resolution_binning": False} if "use_resolution_binning" in arguments else {}  # keeps the size
    call |= {"num_frames": _FRAMES} if "num_frames" in arguments else {}
    call |= {_ARGUMENTS[key][0]: value for key, value in given.items()}
    if settings.steps is not None and "num_inference_steps" not in arguments:
        raise UserError(f"{name} takes no number of steps: leave it out")
    strength = call.get("strength", arguments["strength"].default) if "strength" in arguments else None
    if isinstance(strength, (int, float)) and call["num_inference_steps"] * strength < 1:
        steps = call["num_inference_steps"]
        raise UserError(f"{steps} steps with a strength of {strength} are less than one step: give more of one of them")
    scale = "true_cfg_scale" if "true_cfg_scale" in arguments else "guidance_scale"
    if settings.negative_prompt is not None and scale in arguments:
        value = call.get(scale, arguments[scale].default)
        if isinstance(value, (int, float)) and value <= 1:
            raise UserError(f"{name} uses a negative prompt only with a {scale} above 1, and it is {value}")
    if settings.guidance is not None and _ignores_guidance(pipeline):
        raise UserError(f"{name} has no effect of a guidance scale: guidance_embeds in its config.json is false")
    return call


def _ignores_guidance(pipeline: Any) -> bool:
    """Return whether the transformer of a pipeline such as Flux's gets no guidance scale."""
    config = getattr(getattr(pipeline, "transformer", None), "config", None) or {}
    return config.get("guidance_embeds") is False


def _starts(pipeline: Any, arguments: Mapping[str, Any], options: InputOptions, size: tuple[int, int]) -> list[_Start]:
    """Return the pictures that the calls start from: the user's, or a synthetic one for a pipeline that needs one. Each is resized
    to `size` (width and height in pixels) if the user gave a size, and is else made to fit into it. Raises UserError for a size
    that the pipeline would change.
    """
    from PIL.Image import Resampling

    multiple = _multiple(pipeline)
    wanted = options.pipeline.size
    sized = "height" in arguments or "image" in arguments
    if wanted is not None and not sized:
        raise UserError(f"{type(pipeline).__name__} takes no size: leave it out")
    if wanted is not None and any(side % multiple for side in wanted):
        sides = " x ".join(map(str, wanted))
        raise UserError(
            f"{type(pipeline).__name__} makes pictures with sides of multiples of {multiple} pixels, not {sides}"
        )
    needed = "image" in arguments and ("strength" in arguments or "prompt" not in arguments)
    if not options.images and not needed:
        return []
    given = [(open_picture(path, options.limits), printable(path.name, 60)) for path in options.images]
    starts = []
    for image, name in given or [(synthetic_image(*size), "a synthetic picture")]:
        width, height = wanted or _fitted(image.size, size, multiple)
        pixels = bytearray(image.resize((width, height), Resampling.LANCZOS).tobytes())
        about = f"{name}, {image.width} x {image.height}"
        about += f", resized to {width} x {height}" if (width, height) != image.size else ""
        starts.append(_Start(torch.frombuffer(pixels, dtype=torch.uint8).view(height, width, 3), about))
    return starts


def _fitted(size: tuple[int, int], most: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Return a width and height with about the same ratio as `size`, at most those of `most`, and multiples of `multiple`."""
    scale = min(1.0, most[0] / size[0], most[1] / size[1])
    width, height = (max(multiple, int(side * scale) // multiple * multiple) for side in size)
    return width, height


def _multiple(pipeline: Any) -> int:
    """Return the number of pixels of which the sides of a pipeline's pictures are multiples."""
    processor = getattr(pipeline, "image_processor", None) or getattr(pipeline, "video_processor", None)
    return int(getattr(getattr(processor, "config", None), "vae_scale_factor", None) or 1)


def _default_size(pipeline: Any) -> int:
    """Return the default height and width, in pixels, of the pictures that a pipeline makes, but at most `_PICTURE` and
    `_PICTURE_LATENTS`.
    """
    part = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    size = part.config.get("sample_size") if part is not None else None
    scale = getattr(pipeline, "vae_scale_factor", None) or 8
    most = min(_PICTURE, _PICTURE_LATENTS * int(scale))
    return min(most, int(size) * int(scale)) if isinstance(size, int) else most
