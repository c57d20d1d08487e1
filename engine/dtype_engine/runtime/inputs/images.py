"""Pictures for vision models: the user's files or a synthetic picture, processed by the model's image processor."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.hints import hint
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.options import InputOptions
from dtype_engine.core.text import printable
from dtype_engine.runtime.inputs.batch import Batch, Inputs
from dtype_engine.runtime.inputs.preprocessing import accepted, loaded_by, parameters, random_ids, running
from dtype_engine.runtime.inputs.processor_limits import made_values
from dtype_engine.runtime.libraries.silence_libraries import without_panic_message
from dtype_engine.runtime.model.live import LiveModel

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE = 224
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""The image formats that are accepted. For some other formats, such as PostScript, Pillow starts an external program."""
_PATCHES = 4
"""The width and height, in tokens, of a synthetic picture for models that accept pictures of any size."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture after the model's preprocessing, as arguments of the forward pass."""

    kwargs: dict[str, Any]
    """`pixel_values`, and further arguments that describe the same picture, such as `image_grid_thw`."""
    about: str
    """A short description, such as "cat.png, 640 x 480"."""
    image: Image | None = None
    """The picture before preprocessing, or None if the values were generated directly."""


def picture_inputs(model: LiveModel, options: InputOptions) -> Inputs:
    """Return inputs with one batch per picture, for a model that takes no text. Raises what `make_pictures` raises."""
    pictures, made_of = make_pictures(model, options)
    more, decoder = decoder_start(model)
    batches = tuple(Batch(kwargs=picture.kwargs | more, about=picture.about) for picture in pictures)
    return Inputs(batches, described(pictures, options), made_of=(*made_of, *decoder), prompts=bool(options.images))


def described(pictures: list[Picture], options: InputOptions) -> str:
    """Return a few words for the user that describe all pictures, such as "3 of your pictures"."""
    if not options.images:
        return pictures[0].about
    return f"your picture {pictures[0].about}" if len(pictures) == 1 else f"{len(pictures)} of your pictures"


def make_pictures(model: LiveModel, options: InputOptions) -> tuple[list[Picture], tuple[str, ...]]:
    """Return (the user's pictures or a synthetic one, preprocessed for the model; phrases which say how they were created).
    Raises UserError for a picture that can't be used, and NoForward if the model's processor returns no pixels.
    """
    processor = loaded_by(model, "AutoImageProcessor")
    vision = vision_config(model)
    limits = options.limits
    width, height = sides(model)
    values = channels(model) * width * height * max(1, _frames(vision, model.module))
    limits.refuse_model("values", model.title, f"a picture of {width} x {height}, the size in config.json,", values)
    if options.images and processor is None and "image_grid_thw" in parameters(model.module):
        raise UserError(
            f"{model.title} has no image processor that can be loaded, so {options.images[0]} can't be used"
        )
    opened = [(open_picture(path, limits), path.name) for path in options.images]
    if processor is not None:
        how = f"processed by the folder's own {type(processor).__name__}"
        pictures = [
            Picture(_processed(model, processor, image, name, limits), _about(image, name), image)
            for image, name in opened or [(synthetic_image(width, height), "")]
        ]
    elif "image_grid_thw" in parameters(model.module):
        how = "patches at random: no image processor can be loaded from the folder"
        pictures = [_random_patches(vision)]
    elif opened:
        how = (
            f"resized to {width} x {height}, values from -1 to 1: the folder has no image processor that can be loaded"
        )
        pictures = [
            Picture({"pixel_values": _plain_pixels(image, width, height, channels(model))}, _about(image, name), image)
            for image, name in opened
        ]
    else:
        how = "values around -1 to 1: the folder has no image processor that can be loaded"
        planes, frames = synthetic_planes(channels(model), width, height), _frames(vision, model.module)
        pixels = planes.expand(1, frames, *planes.shape) if frames else planes[None]
        about = f"a synthetic film of {frames} frames" if frames else "a synthetic picture"
        pictures = [Picture({"pixel_values": pixels}, f"{about}, {width} x {height}")]
    whose = "pictures: your files" if options.images else "picture: smooth waves and a little noise"
    return pictures, (f"{whose}, {how}",)


def vision_config(model: LiveModel) -> Any:
    """Return the part of the model's configuration that describes pictures, or all of it if it has no such part."""
    config = model.module.config
    for name in ("vision_config", "encoder"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return config


def sides(model: LiveModel) -> tuple[int, int]:
    """Return (width, height), in pixels, of the configuration's pictures, or 224 for both. Raises NoForward for an invalid size."""
    vision = vision_config(model)
    size = getattr(vision, "image_size", None) or getattr(vision, "input_size", None) or _SIDE
    edges = [size, size] if isinstance(size, int) else list(size)[-2:] if isinstance(size, (list, tuple)) else []
    if len(edges) != 2 or not all(isinstance(edge, int) and edge > 0 for edge in edges):
        raise NoForward(
            f"{model.title}: no forward pass: the size of a picture in config.json is {printable(repr(size), 40)}, not a width "
            f"and height in pixels; {hint('tensors')}"
        )
    return edges[1], edges[0]


def channels(model: LiveModel) -> int:
    """Return how many channels a picture must have for this model; 3 if its configuration does not say it."""
    return int(getattr(vision_config(model), "num_channels", 3) or 3)


def synthetic_planes(count: int, width: int, height: int) -> torch.Tensor:
    """Return smooth waves with a magnitude of about 1 and a little noise: float32 [count, height, width], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    planes = torch.stack([torch.sin((3 + channel) * x) * torch.cos((2 + channel) * y) for channel in range(count)])
    return planes + 0.1 * torch.randn(planes.shape, generator=generator)


def synthetic_image(width: int, height: int) -> Image:
    """Return a color image of smooth waves with a little noise, for an image processor."""
    from PIL import Image

    levels = (synthetic_planes(3, width, height) * 127.5 + 127.5).clamp(0, 255).to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy(), "RGB")


def open_picture(path: Path, limits: InputLimits) -> Image:
    """Return the image in a file, as RGB. Raises UserError if it can't be read, or has more pixels than `limits` allow."""
    from PIL import Image, ImageOps

    opening = failures_as(UserError, f"can't read the picture {path}", _why_no_picture)
    with opening, without_panic_message(drop=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(path, formats=_FORMATS) as image:
            limits.refuse_file("pixels", str(path), image.width * image.height)
            return ImageOps.exif_transpose(image).convert("RGB")


def _why_no_picture(error: BaseException) -> str:
    from PIL import Image

    if isinstance(error, Image.DecompressionBombError):
        return "it is too large for an input; make it smaller"
    if isinstance(error, OSError):
        return error.strerror or "no picture in a format that Pillow knows"
    return "the file is damaged"


def _processed(model: LiveModel, processor: Any, image: Image, name: str, limits: InputLimits) -> dict[str, Any]:
    what = f"the folder's {type(processor).__name__}, for {_about(image, name)},"
    limits.refuse_model("values", model.title, what, made_values(processor, image.width, image.height))
    with running(f"the image processor of {model.title} refuses the picture"):
        processed = accepted(model, processor(images=image, return_tensors="pt"))
    if "pixel_values" not in processed:
        raise NoForward(f"{model.title}: its {type(processor).__name__} makes no pixel_values for the forward pass")
    return processed


def _plain_pixels(image: Image, width: int, height: int, count: int) -> torch.Tensor:
    """Return an image, resized to `width` x `height` pixels, as float32 [1, count, height, width] with values from -1 to 1.
    Raises UserError for another number of channels (`count`) than 1 or 3.
    """
    from PIL import Image

    if count not in (1, 3):
        raise UserError(f"a picture has 3 channels and the model takes {count}; {hint('tensors')}")
    small = image.convert("L" if count == 1 else "RGB").resize((width, height), Image.Resampling.BICUBIC)
    levels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).reshape(height, width, count)
    return (levels.permute(2, 0, 1)[None].float() / 127.5 - 1).contiguous()


def _random_patches(vision: Any) -> Picture:
    """Return a random picture for a model whose input is rows of patches and a patch grid (Qwen2-VL and later)."""
    merge = int(getattr(vision, "spatial_merge_size", 2))
    side = _PATCHES * merge
    patch = int(vision.patch_size)
    width = int(getattr(vision, "in_channels", 3)) * patch * patch
    values = torch.randn(
        side * side,
        width * int(getattr(vision, "temporal_patch_size", 1)),
        generator=torch.Generator().manual_seed(0),
    )
    grid = torch.tensor([[1, side, side]])
    about = f"a synthetic picture, {side * patch} x {side * patch}"
    return Picture({"pixel_values": values, "image_grid_thw": grid}, about)


def _frames(vision: Any, module: Any) -> int:
    """Return the number of frames in one input of a video model, or 0 for a model of single pictures."""
    film = "Video" in type(module).__name__ or getattr(vision, "model_type", "") in ("videomae", "timesformer", "vivit")
    return int(getattr(vision, "num_frames", 0) or 0) if film else 0


def _about(image: Image, name: str) -> str:
    return f"{printable(name, 60) if name else 'a synthetic picture'}, {image.width} x {image.height}"


def decoder_start(model: LiveModel, tokens: torch.Tensor | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (the decoder's arguments, phrases that say how they were created) for a model that encodes pictures or audio. If the
    model has no decoder, both are empty. tokens: token ids [positions]; if None, the decoder gets its start token and random
    tokens.
    """
    config = model.module.config
    if not getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" not in parameters(model.module):
        return {}, ()
    keys = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    named = [getattr(source, key, None) for key in keys for source in (config, getattr(config, "decoder", None))]
    start = next((value for value in named if isinstance(value, int)), 0)
    if tokens is None:
        row = torch.cat([torch.tensor([[start]]), random_ids(model, 1, 7)], dim=1)
        how = f"decoder: its start token {start} and {row.shape[1] - 1} random token ids"
        return {"decoder_input_ids": row}, (how,)
    return {"decoder_input_ids": tokens[None]}, ()
