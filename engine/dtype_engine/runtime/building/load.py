"""Loads a model from a source and makes it ready to run: a model of transformers or diffusers, or the module of the user's code."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint import ByteRange, Checkpoint, is_adapter, open_checkpoint
from dtype_engine.checkpoint.memory_fit import usable_memory, why_no_pass
from dtype_engine.checkpoint.pickle_zip import is_compressed
from dtype_engine.checkpoint.pickles import load_pickle
from dtype_engine.checkpoint.source import Source, locate_by
from dtype_engine.checkpoint.weight_sets import is_diffusers
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.system_memory import free_memory, trim_heap
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.building.architecture import architecture, make, reason
from dtype_engine.runtime.building.diffusers_models import (
    import_diffusers,
    make_diffusers,
    run_decoder,
    with_placeholders,
)
from dtype_engine.runtime.building.diffusers_pipeline import (
    PipelineModule,
    conversions,
    is_inside_sound_pipeline,
    make_pipeline,
)
from dtype_engine.runtime.building.filling import Loaded, load_into, loading_dtype
from dtype_engine.runtime.building.python_source import load_python
from dtype_engine.runtime.building.shapes import refuse_misshapen
from dtype_engine.runtime.building.single_file import load_single_file
from dtype_engine.runtime.building.transformers_models import load_transformers
from dtype_engine.runtime.device import has_streams, pick_device
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.libraries.hub import offline
from dtype_engine.runtime.libraries.silence_libraries import quiet, silence_transformers
from dtype_engine.runtime.model.device_map import limit_of, places_of, require_fit
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.module_tree import collect_tensors
from dtype_engine.runtime.model.name_mapping import Placement
from dtype_engine.runtime.weights.blockwise import BlockwiseSource
from dtype_engine.runtime.weights.budget import BLOCKS, MemoryBudget, blocks_of
from dtype_engine.runtime.weights.copies_ahead import CopiesAhead

OnStep = Callable[[str], None]


def load(source: Source, options: ModelOptions, on_step: OnStep = lambda step: None) -> LiveModel:
    """Load the model that `source` names onto the device that `options` name. Raises NoForward if the source has tensors but no
    known architecture, and UserError for any other problem. on_step: called with each step, such as "importing transformers".
    """
    device = pick_device(options.device)
    if source.kind == "python":
        return load_python(source, options, device, on_step)
    if source.kind == "single file":
        return _load_single_file(source, options, device, on_step)
    if options.weights is not None:
        raise UserError("--weights goes with the code of a model, as in file.py:Name --weights model.pth")
    checkpoint = source.open()
    assert checkpoint is not None
    if reason := why_no_pass(checkpoint, options):
        raise NoForward(reason)
    memory = _budget(checkpoint, device, options)
    if checkpoint.form == "pickle" and source.trust_pickle and checkpoint.path.is_file():
        whole = load_pickle(checkpoint.path, trust=True)
        if isinstance(whole, nn.Module):
            require_fit(whole, source.title, device, options)
            places = places_of(whole, device, options)
            code = sys.modules.get(type(whole).__module__)
            return LiveModel.wrap(
                whole, source.title, device, example_inputs=getattr(code, "example_inputs", None), places=places
            )
    return _from_checkpoint(checkpoint, source, options, device, on_step, memory)


def _load_single_file(source: Source, options: ModelOptions, device: torch.device, on_step: OnStep) -> LiveModel:
    """Load a model or pipeline of diffusers from a single file. What its configuration names and the file lacks is read from the
    folder of the configuration.
    """

    def in_folder(folder: Path) -> Loaded:
        return load_module(open_checkpoint(folder), folder.name, options, on_step)

    loaded, checkpoint = load_single_file(source, options, on_step, in_folder)
    if not isinstance(loaded.module, PipelineModule):
        run_decoder(loaded.module, is_inside_sound_pipeline(source.need_config()))
    require_fit(loaded.module, source.title, device, options)
    return LiveModel.wrap(
        loaded.module,
        source.title,
        device,
        files=checkpoint.files,
        folder=source.config,
        notices=loaded.notices,
        coverage=loaded.coverage,
        identities=checkpoint.identities,
        places=places_of(loaded.module, device, options),
    )


def _budget(checkpoint: Checkpoint, device: torch.device, options: ModelOptions) -> MemoryBudget:
    """Return the memory that the weights of a checkpoint may take, without a limit if they fit into memory and on the device.

    A model larger than memory may take three quarters of the free memory, because activations, and weights while they are decoded
    and cast, need memory, too. A limit that the user sets for the CPU is not reduced, so that several jobs divide the model into
    the same blocks.
    """
    usable = usable_memory(options.max_memory)
    if checkpoint.stored_bytes > usable:
        return MemoryBudget((usable if "cpu" in options.max_memory else min(usable, free_memory() * 3 // 4)) // BLOCKS)
    most = limit_of(device, options.max_memory) if device.type != "cpu" and not options.device_map else None
    if most is None or checkpoint.stored_bytes <= most:
        return MemoryBudget()
    copies = CopiesAhead(device) if has_streams(device) else None
    return MemoryBudget(most // BLOCKS, keeps_pages=True, copies=copies)


_NO_ARCHITECTURE = {
    "gguf": "the architecture of this GGUF file is not known here, or its header lacks what every such model has; open the "
    "checkpoint that it was made from to run it",
    "adapter": "an adapter alone is no model",
}


_OF_SINGLE_FILES = ("model.diffusion_model.", "double_blocks.", "first_stage_model.")
"""How names begin in single files of diffusion models."""


def _from_checkpoint(
    checkpoint: Checkpoint,
    source: Source,
    options: ModelOptions,
    device: torch.device,
    on_step: OnStep,
    memory: MemoryBudget,
) -> LiveModel:
    loaded = load_module(checkpoint, source.title, options, on_step, memory)
    if is_diffusers(checkpoint.config):
        run_decoder(loaded.module, is_inside_sound_pipeline(checkpoint.folder))
    on_step("listing the weights")
    live = LiveModel.wrap(
        loaded.module,
        source.title,
        device,
        sources=loaded.sources,
        files=checkpoint.files,
        folder=checkpoint.folder,
        notices=loaded.notices,
        checkpoint=checkpoint,
        placements=loaded.placements,
        coverage=loaded.coverage,
        trust_remote_code=options.trust_remote_code,
        identities=checkpoint.identities,
        memory=memory,
        places=places_of(loaded.module, device, options),
    )
    if memory.limited:
        memory.use_blocks(blocks(live, memory.most))
        stacks = (weight for weight in live.weights.values() if isinstance(weight.stored, BlockwiseSource))
        large = any(len(weight.info.shape) > 2 and 4 * weight.info.numel > memory.most for weight in stacks)
        choose: Any = getattr(live.module, "set_experts_implementation", None)
        if large and choose is not None:
            choose("eager")  # this implementation reads only the experts to which tokens are sent
            live.notices += ("experts are computed one by one, which rounds results differently from grouped products",)
    return live


def blocks(live: LiveModel, most: int) -> dict[str, tuple[ByteRange, ...]]:
    """Return the blocks of a model that is larger than memory (see `blocks_of`). most: the maximum number of bytes of a block in
    float32. If another checkpoint is the reference model, its files may be what is larger than memory.
    """
    in_files = {key: weight.stored.in_files or weight.reference.in_files for key, weight in live.by_id.items()}
    return blocks_of(live.module, {key: tensors for key, tensors in in_files.items() if tensors}, most)


def load_module(
    checkpoint: Checkpoint,
    title: str,
    options: ModelOptions,
    on_step: OnStep = lambda step: None,
    memory: MemoryBudget | None = None,
) -> Loaded:
    """Load the module of a checkpoint on the CPU, with every tensor in the dtype of its file.

    memory: keeps the weights that a forward pass is using; by default, the model fits into memory. Raises NoForward if the
    architecture is unknown or the module can't be loaded.
    """
    memory = MemoryBudget() if memory is None else memory
    if why := _why_not_loaded(checkpoint, memory):
        raise NoForward(f"{title}: no forward pass{why}")
    if checkpoint.form == "diffusers":
        return _load_pipeline(checkpoint, title, options, on_step)
    if is_diffusers(checkpoint.config):
        on_step(f"loading {printable(str((checkpoint.config or {})['_class_name']))}")
        return _load_diffusers(checkpoint, title)
    return load_transformers(checkpoint, title, options, on_step, memory)


def _why_not_loaded(checkpoint: Checkpoint, memory: MemoryBudget) -> str:
    """Return why no module can be loaded from a checkpoint with this much memory, as words that continue a sentence, or ""."""
    if memory.limited and (checkpoint.form == "diffusers" or is_diffusers(checkpoint.config)):
        return (
            ": it is larger than the memory to use, and models of diffusers can't be run in parts. Planning, patterns, weights and "
            "export work"
        )
    if memory.limited and checkpoint.form == "pickle" and checkpoint.config is not None:
        return (
            ": it is larger than the memory to use, and a model with pickled weights can't be run in parts; dtype-engine export "
            "writes them as safetensors, which can"
        )
    if checkpoint.form == "diffusers":
        return ""
    if checkpoint.config is None and any(name.startswith(_OF_SINGLE_FILES) for name in checkpoint.weights):
        return (
            ": it is a single file of a diffusion model. Name the folder of its configuration with --config, or in Options.config; "
            "planning works"
        )
    if checkpoint.form in _NO_ARCHITECTURE and (checkpoint.form != "gguf" or checkpoint.config is None):
        more = f": {checkpoint.alone}" if checkpoint.alone else ""
        return f": {_NO_ARCHITECTURE[checkpoint.form]}{more}; planning works"
    if checkpoint.config is None:
        return (
            ": no config.json next to the weights says which architecture they belong to. Open the model's own code with "
            f"file.py:Name --weights {printable(checkpoint.path.name)} to run it; planning works"
        )
    if checkpoint.lost:
        return f": {checkpoint.why_another_model}; open the checkpoint that it was made from to run it. Planning and weights work"
    if checkpoint.form == "pickle" and any(map(is_compressed, checkpoint.files)):
        return (
            ", because its weights are in a compressed archive, which transformers would map as if it were not; save them again "
            "with torch.save. Planning, weights and export work"
        )
    return ""


def _load_diffusers(checkpoint: Checkpoint, title: str) -> Loaded:
    module, placements = make_diffusers(checkpoint, title)
    refuse_misshapen(module, checkpoint, placements, checkpoint.path)
    with_placeholders(module)
    with failures_as(NoForward, f"{title}: no forward pass", reason):
        loaded = load_into(module, checkpoint, placements)
    coverage = Coverage(sum(info.persistent for info in collect_tensors(module)[0]))
    return dataclasses.replace(loaded, notices=checkpoint.notices, placements=placements, coverage=coverage)


def _load_pipeline(checkpoint: Checkpoint, title: str, options: ModelOptions, on_step: OnStep) -> Loaded:
    import_diffusers(f"{title}: a pipeline has several models")
    parts: dict[str, Loaded] = {}
    for component in checkpoint.components:
        try:
            parts[component.name] = load_module(open_checkpoint(component.folder), component.name, options, on_step)
        except UserError as error:
            raise NoForward(f"{title}: a pipeline has several models, and one of them does not run: {error}") from None
    on_step(f"making the pipeline of {plural(len(parts), 'model')}")
    module = make_pipeline(checkpoint.path, {name: part.module for name, part in parts.items()}, title)
    notices = [f"{name}: {notice}" for name, part in parts.items() for notice in part.notices]
    missing = [f"{name}.{each}" for name, part in parts.items() for each in (part.coverage or Coverage(0)).missing]
    return Loaded(
        module,
        {f"{name}.{weight}": source for name, part in parts.items() for weight, source in part.sources.items()},
        (*checkpoint.notices, *notices, *conversions(module)),
        {
            f"{name}.{stored}": dataclasses.replace(placement, name=f"{name}.{placement.name}")
            for name, part in parts.items()
            for stored, placement in part.placements.items()
        },
        Coverage(sum(info.persistent for info in collect_tensors(module)[0]), tuple(missing)),
    )


def load_pretrained(folder: Path, module: nn.Module | None = None, options: ModelOptions | None = None) -> nn.Module:
    """Load a model as `dtype_engine.load_pretrained` does."""
    options = options or ModelOptions()
    checkpoint = locate_by(str(folder), options).open() if is_adapter(folder) else open_checkpoint(folder)
    assert checkpoint is not None
    loaded = load_into(module, checkpoint) if module is not None else load_module(checkpoint, folder.name, options)
    module = loaded.module
    state = dict(collect_tensors(module)[1])
    compute = torch_dtype(loading_dtype(checkpoint))
    for name, source in loaded.sources.items():
        state[name].data = source.read_in(compute if source.own else state[name].dtype)
    trim_heap()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return module.eval()


def build_on_meta(checkpoint: Checkpoint, options: ModelOptions) -> tuple[nn.Module, Mapping[str, Placement]]:
    """Build a checkpoint's architecture on the meta device. Returns the module, and where each tensor of the checkpoint is loaded
    in it. Shapes in the module and in the files may differ (see `shapes.py`).

    Raises UserError if transformers does not have the architecture that `options` name, Misfit if the checkpoint's tensors are not
    those of the architecture, ImpossibleConfig if no model can be made of the configuration, and NoForward if the architecture is
    unknown.
    """
    if checkpoint.config is None:
        raise NoForward("there is no config.json, which would name the architecture")
    if is_diffusers(checkpoint.config):
        return make_diffusers(checkpoint, checkpoint.path.name)
    with quiet():
        import transformers

        silence_transformers()
        with offline(options):
            return make(architecture(transformers, checkpoint, options), checkpoint)
