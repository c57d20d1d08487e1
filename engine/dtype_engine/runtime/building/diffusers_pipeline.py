"""Wraps a whole diffusers pipeline as one module. Its children are the pipeline's models, under the names of their folders."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint.components import index_around
from dtype_engine.checkpoint.plausible import refuse_large_tables
from dtype_engine.checkpoint.weight_files import PIPELINE_INDEX, read_json, refuse_links_out, resolve_inside
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.hints import hint
from dtype_engine.core.text import printable
from dtype_engine.runtime.building.architecture import reason
from dtype_engine.runtime.building.diffusers_models import import_diffusers, sampling_rate
from dtype_engine.runtime.libraries.hf_private import install_output_hooks
from dtype_engine.runtime.libraries.hub import offline
from dtype_engine.runtime.libraries.silence_libraries import no_stderr, quiet

_LONGEST_PROMPT = 2_048
"""Maximum number of tokens to which a pipeline may pad a prompt if no argument sets the length. CLIP has 77, T5 in these pipelines
512.
"""
_LONGEST_OF_LANGUAGE_MODELS = 2_000_000
"""The same maximum for a pipeline with an argument for the length. Its tokenizers may name a language model's context length."""
_NO_LENGTH = 1e29


class PipelineModule(nn.Module):
    """Runs a pipeline. `forward(seed, **call)` returns its pictures or its video as a tensor with values from 0 to 1, or its
    sounds as waves, [batch, channels, samples] or [batch, samples]. `call` holds the pipeline's arguments, such as `prompt`.
    `image`, uint8 [height, width, 3], is the picture that it starts from, which the pipeline gets as an image of Pillow.
    Afterwards, `forward` restores all tensors that the pipeline has converted, as SDXL's does with a VAE in float16
    (`force_upcast`).
    """

    picture_range: tuple[float, float] | None = (0.0, 1.0)
    """The pixel values of black and of full brightness. None: the pipeline makes sounds."""
    sound_rate: int | None = None
    """The values per second of its sounds, if it makes any and its models say so."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        self.__dict__["pipeline"] = pipeline  # no module, and so no child
        for name, part in pipeline.components.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
        if _makes_sounds(type(pipeline)):
            rates = (sampling_rate(pipeline.components.get(name)) for name in ("vocoder", "vae", "unet"))
            self.picture_range, self.sound_rate = None, next((rate for rate in rates if rate), None)

    def pipeline_for(self, pictures: bool) -> Any:
        """Return the pipeline that runs. pictures: whether it starts from a picture. For a pipeline that takes none, this is then
        the one for image-to-image that diffusers makes of the same models. Raises UserError if it makes none.
        """
        own = self.__dict__["pipeline"]
        if not pictures or "image" in inspect.signature(own.__call__).parameters:
            return own
        if "from_pictures" not in self.__dict__:
            self.__dict__["from_pictures"] = _from_pictures(own)
        return self.__dict__["from_pictures"]

    def forward(self, seed: torch.Tensor, image: torch.Tensor | None = None, **call: Any) -> torch.Tensor:
        pipeline = self.pipeline_for(image is not None)
        if image is not None:
            from PIL import Image

            call["image"] = Image.fromarray(image.cpu().numpy(), "RGB")
        held = [(tensor, tensor.data) for tensor in (*self.parameters(), *self.buffers())]
        generator = torch.Generator().manual_seed(int(seed))
        try:
            with quiet():  # schedulers divide by numbers of their configuration, and numpy warns
                output = pipeline(**call, generator=generator, output_type="pt")
        finally:
            for tensor, data in held:
                tensor.data = data
        picture = output[0]
        if isinstance(picture, torch.Tensor):
            return picture
        values = torch.as_tensor(picture)
        return values.movedim(-1, -3) if values.ndim > 3 else values  # NumPy pictures have their channels last


def _from_pictures(pipeline: Any) -> Any:
    """Return the pipeline that starts from a picture and has the models of `pipeline`. Raises UserError if diffusers has none."""
    diffusers = import_diffusers(name := type(pipeline).__name__)
    with quiet(), no_stderr(), failures_as(UserError, f"diffusers can't let {name} start from a picture"):
        try:
            made = diffusers.AutoPipelineForImage2Image.from_pipe(pipeline)
        except ValueError:
            raise UserError(f"{name} starts from no picture; {hint('no-picture')}") from None
    made.set_progress_bar_config(disable=True)
    return made


def _makes_sounds(pipeline_class: type) -> bool:
    """Return whether the main output of a pipeline is sound. If so, its Python module imports `AudioPipelineOutput`."""
    modules = {base.__module__ for base in pipeline_class.__mro__} - {"diffusers.pipelines.pipeline_utils"}
    return any(hasattr(sys.modules.get(name), "AudioPipelineOutput") for name in modules)


def is_inside_sound_pipeline(folder: Path) -> bool:
    """Return whether a folder is that of a component of a pipeline that makes sounds."""
    if not (index := index_around(folder)):
        return False
    made: Any = None
    with suppress(Exception), quiet():  # the name is unknown, or the class needs a package that is not installed
        made = getattr(import_diffusers(folder.name), str(index.get("_class_name")))
    return isinstance(made, type) and _makes_sounds(made)


def make_pipeline(folder: Path, parts: Mapping[str, nn.Module], title: str) -> PipelineModule:
    """Construct the pipeline in a folder from its loaded models, keyed by the names of their folders. Tokenizers and schedulers are
    read from the folder. Raises NoForward if diffusers is not installed or can't construct the pipeline.
    """
    diffusers = import_diffusers(title)
    index = read_json(folder / PIPELINE_INDEX)
    why = f"{title}: no forward pass: diffusers can't make the pipeline"
    with failures_as(NoForward, why, reason), quiet(), no_stderr(), offline():
        pipeline_class = getattr(diffusers, str(index.get("_class_name")), None)
        if not (isinstance(pipeline_class, type) and issubclass(pipeline_class, diffusers.DiffusionPipeline)):
            raise NoForward(f"{why}: it has no {printable(str(index.get('_class_name')), 100)}")
        refuse_large_tables(index, f"{folder / PIPELINE_INDEX}")
        settings = {
            name: value for name, value in index.items() if not name.startswith("_") and not isinstance(value, list)
        }
        others = {
            name: None if None in named else _read_component(diffusers, folder, name, named)
            for name, named in index.items()
            if isinstance(named, list) and name not in parts
        }
        longest = _LONGEST_PROMPT
        if "max_sequence_length" in inspect.signature(pipeline_class.__call__).parameters:
            longest = _LONGEST_OF_LANGUAGE_MODELS
        for name, part in others.items():
            _refuse_long_prompts(folder, name, part, longest)
        pipeline = pipeline_class(**settings, **others, **parts)
        pipeline.set_progress_bar_config(disable=True)
    for part in parts.values():
        install_output_hooks(part)

    class Named(PipelineModule):
        """A class with the name of the pipeline's class, which the tree shows."""

    Named.__name__ = Named.__qualname__ = type(pipeline).__name__
    return Named(pipeline)


def _read_component(diffusers: Any, folder: Path, name: str, named: list[Any]) -> Any:
    """Read a component of a pipeline that has no weights: a scheduler, a tokenizer or a processor. folder: the pipeline's folder.
    named: the component's entry in `model_index.json`: [package, name of the class].
    """
    import transformers

    shown = printable(name, 100)
    if len(named) != 2 or not all(isinstance(part, str) for part in named):
        raise NoForward(f"{folder.name}: {PIPELINE_INDEX} gives {shown} no package and class")
    library, class_name = named
    libraries = {"diffusers": diffusers, "transformers": transformers}
    if library not in libraries:
        raise NoForward(f"{shown} is of the package {printable(library, 100)}, whose code is not run")
    if not (folder / name).is_dir():
        raise NoForward(
            f"{folder.name}: there is no folder {shown}, which {PIPELINE_INDEX} names; fetch the whole pipeline"
        )
    made_by: Any = getattr(libraries[library], class_name, None)
    if made_by is None and name.startswith("tokenizer"):
        made_by = transformers.AutoTokenizer
    if not hasattr(made_by, "from_pretrained"):
        raise NoForward(f"{shown}: {library} has no {printable(class_name, 100)} that could be read")
    try:
        own_folder = resolve_inside(folder, name, PIPELINE_INDEX)
        refuse_links_out(own_folder)
    except UserError as error:
        raise NoForward(f"{folder.name}: no forward pass: {error}") from None
    settings_file = own_folder / str(getattr(made_by, "config_name", ""))
    if library == "diffusers" and settings_file.is_file():
        refuse_large_tables(read_json(settings_file), str(settings_file))
    return made_by.from_pretrained(own_folder, local_files_only=True)


def _refuse_long_prompts(folder: Path, name: str, part: Any, most: int) -> None:
    """Raise NoForward if a component (`part`) of a pipeline is a tokenizer that would pad every prompt to more than `most` tokens.
    A length of 1e30 in its settings means that there is no limit, and is allowed.
    """
    length = getattr(part, "model_max_length", 0)
    if isinstance(length, (int, float)) and most < length < _NO_LENGTH:
        raise NoForward(
            f"{folder / name / 'tokenizer_config.json'}: model_max_length is {length:,}, and prompts are padded to at most "
            f"{most:,} tokens"
        )


def conversions(module: PipelineModule) -> tuple[str, ...]:
    """Return a notice for the user if the pipeline converts its VAE to float32 while it runs, and otherwise an empty tuple."""
    config = getattr(getattr(module, "vae", None), "config", None) or {}
    if not config.get("force_upcast") or not hasattr(module.__dict__["pipeline"], "upcast_vae"):
        return ()
    return ("the pipeline itself runs a VAE that is in float16 in float32 (force_upcast in its config.json)",)
