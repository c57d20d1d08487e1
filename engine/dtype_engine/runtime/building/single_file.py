"""Loads a diffusion model from a single file, such as those of Stable Diffusion, SDXL, Flux or a GGUF file of a transformer.

Such a file has the tensors of one model or of a whole pipeline, under the names of its first authors. Its configuration is a folder
in the layout of diffusers. diffusers' own converters, those of `from_single_file`, give each tensor its place in the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint, open_checkpoint, read_json
from dtype_engine.checkpoint.components import component_names
from dtype_engine.checkpoint.memory_fit import why_no_pass
from dtype_engine.checkpoint.plausible import ImpossibleConfig, refuse_impossible
from dtype_engine.checkpoint.source import Source
from dtype_engine.checkpoint.weight_files import PIPELINE_INDEX, NoWeights, refuse_links_out, resolve_inside
from dtype_engine.core.errors import NoForward
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.building.architecture import few_modules, reason
from dtype_engine.runtime.building.constructed_buffers import default_dtype, parameters_without_data
from dtype_engine.runtime.building.diffusers_models import construct, import_diffusers
from dtype_engine.runtime.building.diffusers_pipeline import conversions, make_pipeline
from dtype_engine.runtime.building.filling import Loaded, fill
from dtype_engine.runtime.libraries.hub import offline
from dtype_engine.runtime.libraries.silence_libraries import no_stderr, quiet
from dtype_engine.runtime.libraries.torch_private import tensor_slots
from dtype_engine.runtime.model.module_tree import collect_tensors
from dtype_engine.runtime.weights.checkpoint_weights import read_stored
from dtype_engine.runtime.weights.coded import CodedSource

_OF_TEXT = ("cond_stage_model.", "conditioner.", "text_encoders.")
"""How the names of a text encoder's tensors begin in a single file."""


class NotInFile(NoForward):
    """Raised if a single file lacks a component of the pipeline."""


class SingleFile:
    """The tensors of a single file, and the converters that diffusers has for them. title: the model's name for the user.

    Raises NoForward if diffusers is not installed, or the file's values can't be read into memory.
    """

    def __init__(self, checkpoint: Checkpoint, title: str) -> None:
        self.checkpoint, self.title = checkpoint, title
        self.diffusers = import_diffusers(title)
        plain = (name for name in checkpoint.weights if name not in checkpoint.coded)
        self.tensors = {name: read_stored(checkpoint, checkpoint.weights[name]) for name in plain}
        self.decoded = len(checkpoint.coded)
        for name, weight in checkpoint.coded.items():
            self.tensors[name] = CodedSource(weight).read_in(torch.float32)

    def component(self, folder: Path) -> nn.Module:
        """Return the model whose configuration is in a folder, with the file's tensors. Raises NotInFile if the file lacks it."""
        config = read_json(folder / "config.json")
        refuse_links_out(folder)
        with quiet(), no_stderr(), offline():
            if "_class_name" in config:
                return self._of_diffusers(config, folder)
            return self._of_transformers(config, folder)

    def _of_diffusers(self, config: Mapping[str, Any], folder: Path) -> nn.Module:
        from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

        module = construct(self.checkpoint, config, str(folder / "config.json"), self.title)
        known = (each.__name__ for each in type(module).__mro__ if each.__name__ in SINGLE_FILE_LOADABLE_CLASSES)
        name = next(known, None)
        if name is None:
            raise NotInFile(f"{self.title}: diffusers reads no {type(module).__name__} from a single file")
        own = module.state_dict()
        held = {key: tensor for key, tensor in self.tensors.items() if key in own}
        if len(held) < len(own):
            convert: Any = SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]
            with failures_as(NotInFile, f"{self.title} has no {name} that diffusers' converter knows", reason):
                held = convert(config=dict(config), checkpoint=dict(self.tensors))
        return self._filled(module, held)

    def _of_transformers(self, config: Mapping[str, Any], folder: Path) -> nn.Module:
        import transformers
        from diffusers.loaders import single_file_utils as utils

        name = next(iter(config.get("architectures") or ()), None)
        model_class: Any = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
        if model_class is None or not issubclass(model_class, transformers.PreTrainedModel):
            raise NotInFile(f"{self.title}: {folder / 'config.json'} names no model of transformers")
        made: Any = None
        if utils.is_clip_model_in_single_file(model_class, self.tensors):
            made = utils.create_diffusers_clip_model_from_ldm
        elif utils.is_t5_in_single_file(self.tensors) and issubclass(model_class, transformers.T5EncoderModel):
            made = utils.create_diffusers_t5_model_from_checkpoint
        if made is None:
            raise NotInFile(f"{self.title} has no {name}")
        where = str(folder / "config.json")
        refuse_impossible(config, self.checkpoint, where)
        with few_modules(len(self.tensors)), failures_as(ImpossibleConfig, f"{where} makes no {name}", reason):
            with parameters_without_data():
                module: nn.Module = model_class(model_class.config_class.from_pretrained(folder, local_files_only=True))
            of_text = [tensor.dtype for key, tensor in self.tensors.items() if key.startswith(_OF_TEXT)]
            with (
                failures_as(NotInFile, f"{self.title} has no {name} that diffusers' converter knows", reason),
                default_dtype(_widest(of_text)),
            ):
                recording, held = _recording(model_class)
                filled = made(recording, dict(self.tensors), config=str(folder), subfolder="", local_files_only=True)
        return self._filled(
            module, held or {key: each for key, each in filled.state_dict().items() if not each.is_meta}
        )

    def _filled(self, module: nn.Module, held: Mapping[str, torch.Tensor]) -> nn.Module:
        """Fill a module without data with tensors by the names in the module. Raises NotInFile if it lacks one of them."""
        infos, tensors = collect_tensors(module)
        name, missing = type(module).__name__, []
        for info in infos:
            found = next((held[each] for each in info.names if each in held), None)
            if found is None:
                missing += [info.name] if info.persistent else []
                continue
            if tuple(found.shape) != info.shape:
                raise NotInFile(
                    f"{self.title} has another {name} than its configuration: {printable(info.name)} is {list(found.shape)}, not "
                    f"{list(info.shape)}"
                )
            if not tensors[info.name].is_meta:
                fill(tensors[info.name], found.detach())
                continue
            parameter = nn.Parameter(found.detach(), requires_grad=False)
            for each in info.names:
                owner, _, own = each.rpartition(".")
                tensor_slots(module.get_submodule(owner), own)[own] = parameter
        if missing:
            lacks = plural(len(missing), "tensor")
            raise NotInFile(f"{self.title} lacks {lacks} of the {name}, first {printable(missing[0])}")
        return module


def _recording(model_class: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return (a subclass of a model class, the tensors that were loaded into an instance of it, which is filled later)."""
    held: dict[str, torch.Tensor] = {}

    class Recording(model_class):  # type: ignore[misc]
        """A model that keeps what it is given to load."""

        def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
            held.update(state_dict)
            return super().load_state_dict({}, strict=False)

    Recording.__name__ = model_class.__name__  # by which diffusers tells text encoders apart
    return Recording, held


def _widest(found: list[torch.dtype]) -> torch.dtype:
    """Return the widest of some dtypes, if torch can compute in it, and else float32."""
    usual = [each for each in (torch.float64, torch.float32, torch.bfloat16, torch.float16) if each in found]
    halves = {torch.bfloat16, torch.float16} <= set(found)
    return torch.float32 if halves or not usual else usual[0]


def load_single_file(
    source: Source, options: ModelOptions, on_step: Callable[[str], None], in_folder: Callable[[Path], Loaded]
) -> tuple[Loaded, Checkpoint]:
    """Load the model or pipeline that `source`, a single file, holds by the configuration in the folder `source.config`. Returns it
    with the headers of the file. in_folder: loads a component that the file lacks from its folder in that of the configuration.
    Raises NoForward and UserError.
    """
    assert source.path is not None
    folder = source.need_config()
    checkpoint = open_checkpoint(source.path, source.trust_pickle)
    if why := why_no_pass(checkpoint, options):
        raise NoForward(f"{source.title}: {why}")
    on_step(f"reading {printable(source.title)}")
    file = SingleFile(checkpoint, source.title)
    decoded = (f"{plural(file.decoded, 'tensor')} decoded to float32, which takes more memory than the file",)
    notices = decoded if file.decoded else ()
    if not (folder / PIPELINE_INDEX).is_file():
        module = file.component(folder)
    else:
        parts: dict[str, nn.Module] = {}
        from_folder, read = [], 0
        for name in component_names(read_json(folder / PIPELINE_INDEX)):
            if not (folder / name / "config.json").is_file():
                continue  # a scheduler or tokenizer
            resolve_inside(folder, name, PIPELINE_INDEX)
            on_step(f"loading {printable(name)}")
            try:
                parts[name] = file.component(folder / name)
                read += sum(parameter.numel() for parameter in parts[name].parameters())
            except NotInFile as error:
                parts[name] = _from_folder(folder / name, in_folder, error)
                from_folder.append(name)
        held = sum(tensor.numel() for tensor in file.tensors.values())
        if 2 * read < held:
            raise NoForward(
                f"{source.title}: most of its {held:,} parameters have no place in the pipeline in {folder}, which took {read:,}"
            )
        module = make_pipeline(folder, parts, source.title)
        if from_folder:
            notices = (*notices, f"read from {folder}, not from the file: {', '.join(map(printable, from_folder))}")
        notices = (*notices, *conversions(module))
    coverage = Coverage(sum(info.persistent for info in collect_tensors(module)[0]))
    return Loaded(module, notices=(*checkpoint.notices, *notices), coverage=coverage), checkpoint


def _from_folder(folder: Path, in_folder: Callable[[Path], Loaded], error: NotInFile) -> nn.Module:
    """Return a component of a pipeline with the weights in its folder. Raises NoForward, with `error` if there are none."""
    try:
        loaded = in_folder(folder)
    except NoWeights:
        raise NoForward(f"{error.sentence}; nor are there weights in {folder}") from None
    if loaded.sources:
        raise NoForward(f"{folder}: its weights are quantized, which can't be combined with a single file")
    return loaded.module
