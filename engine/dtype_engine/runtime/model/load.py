"""Loads a model from a source and makes it ready to run, with transformers' loading code if there is a `config.json`.

`from_pretrained` memory-maps the weights of Hugging Face folders. It changes some stored dtypes: it converts a checkpoint of
several dtypes to one, and the modules in `_keep_in_fp32_modules` to float32. In these cases the stored tensors are restored
afterwards, so that every weight has the dtype of its file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint import ByteRange, Checkpoint, open_checkpoint
from dtype_engine.checkpoint.completeness import what_is_missing
from dtype_engine.checkpoint.kv_settings import declared_formats, is_cache_scale
from dtype_engine.checkpoint.memory_fit import usable_memory, why_no_pass
from dtype_engine.checkpoint.pickle_zip import is_compressed
from dtype_engine.checkpoint.pickles import load_pickle
from dtype_engine.checkpoint.prequantized import OWN_SUFFIX
from dtype_engine.checkpoint.source import Source
from dtype_engine.checkpoint.weight_sets import is_diffusers
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.heap import trim_heap
from dtype_engine.core.options import Options
from dtype_engine.core.system_memory import free_memory
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.device import pick_device
from dtype_engine.runtime.model.architecture import architecture, make, reason, without_quantization
from dtype_engine.runtime.model.constructed_buffers import construct_buffers
from dtype_engine.runtime.model.copies_ahead import copies_ahead
from dtype_engine.runtime.model.device_limits import limit_of, require_fit
from dtype_engine.runtime.model.device_map import places_of
from dtype_engine.runtime.model.diffusers_models import (
    import_diffusers,
    make_diffusers,
    run_decoder,
    with_placeholders,
)
from dtype_engine.runtime.model.diffusers_pipeline import conversions, make_pipeline
from dtype_engine.runtime.model.encoded_loading import encoded_values, inputs_notice, state_to_load
from dtype_engine.runtime.model.hf_private import loading_names, with_dtypes
from dtype_engine.runtime.model.hub import offline
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.mmap_reader import read_quantized, read_stored
from dtype_engine.runtime.model.module_tree import collect_tensors
from dtype_engine.runtime.model.name_mapping import Placement, map_names, restorable, stored_dtypes, without_place
from dtype_engine.runtime.model.packed_parts import pack
from dtype_engine.runtime.model.python_source import load_python
from dtype_engine.runtime.model.quantized_loading import refuse_unread
from dtype_engine.runtime.model.shapes import refuse_misshapen
from dtype_engine.runtime.model.silence_libraries import no_stderr, quiet, silence_transformers
from dtype_engine.runtime.model.stored_values import EncodedValues, StoredValues, VisitedValues
from dtype_engine.runtime.model.visits import BLOCKS, BlockVisits, blocks_of
from dtype_engine.runtime.numerics.quantize import dequantize, dtype_name, torch_dtype

OnStep = Callable[[str], None]


def load(source: Source, options: Options, on_step: OnStep = lambda step: None) -> LiveModel:
    """Load the model that `source` names onto the device that `options` name.

    on_step: called with a description of each step, such as "importing transformers". Raises NoForward if the source has tensors
    but no known architecture, and UserError for any other problem.
    """
    device = pick_device(options.device)
    if source.kind == "python":
        return load_python(source, options, device, on_step)
    if options.weights is not None:
        raise UserError("--weights goes with the code of a model, as in file.py:Name --weights model.pth")
    checkpoint = source.open()
    assert checkpoint is not None
    visits = None
    if reason := why_no_pass(checkpoint, options):
        raise NoForward(reason)
    if checkpoint.stored_bytes > usable_memory(options.max_memory):
        visits = BlockVisits(_memory_for(options) // BLOCKS)
    elif (
        device.type != "cpu"
        and not options.device_map
        and (most := limit_of(device, options.max_memory)) is not None
        and checkpoint.stored_bytes > most
    ):
        visits = BlockVisits(most // BLOCKS, keeps_pages=True, copies=copies_ahead(device))
    if checkpoint.form == "pickle" and source.trust_pickle and checkpoint.path.is_file():
        whole = load_pickle(checkpoint.path, trust=True)
        if isinstance(whole, nn.Module):
            wanted, limits = options.device_map, options.max_memory
            require_fit(whole, source.title, device, options)
            places = places_of(whole, wanted, device, limits) if wanted else None
            code = sys.modules.get(type(whole).__module__)
            return LiveModel.wrap(
                whole, source.title, device, example_inputs=getattr(code, "example_inputs", None), places=places
            )
    return _from_checkpoint(checkpoint, source, options, device, on_step, visits)


def _memory_for(options: Options) -> int:
    """Return how many bytes a model that is larger than memory may take. Without a limit for the CPU, these are three quarters of
    the free memory, because activations, and weights while they are decoded and cast, come on top.

    A limit that the user sets stays as it is, so that several jobs divide the model into the same blocks.
    """
    usable = usable_memory(options.max_memory)
    return usable if "cpu" in options.max_memory else min(usable, free_memory() * 3 // 4)


_NO_ARCHITECTURE = {
    "gguf": "the architecture of this GGUF file is not known here, or its header lacks what every such model has; open the "
    "checkpoint that it was made from to run it",
    "adapter": "an adapter alone is no model; merge it into its base model and open that to run it here",
}


def _from_checkpoint(
    checkpoint: Checkpoint,
    source: Source,
    options: Options,
    device: torch.device,
    on_step: OnStep,
    visits: BlockVisits | None,
) -> LiveModel:
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    loaded = load_module(checkpoint, source.title, options, on_step, visits)
    if is_diffusers(checkpoint.config):
        run_decoder(loaded.module)
    on_step("listing the weights")
    wanted = options.device_map
    live = LiveModel.wrap(
        loaded.module,
        source.title,
        device,
        quantized=loaded.quantized,
        encoded=loaded.encoded,
        files=checkpoint.files,
        folder=folder,
        notices=loaded.notices,
        checkpoint=checkpoint,
        placements=loaded.placements,
        coverage=loaded.coverage,
        trust_remote_code=options.trust_remote_code,
        identities=checkpoint.identities,
        visits=visits,
        places=places_of(loaded.module, wanted, device, options.max_memory) if wanted else None,
    )
    if visits is not None:
        visits.use_blocks(blocks(live, visits.most))
        stacks = (weight for weight in live.weights.values() if isinstance(weight.stored, VisitedValues))
        large = any(len(weight.info.shape) > 2 and 4 * weight.info.numel > visits.most for weight in stacks)
        choose: Any = getattr(live.module, "set_experts_implementation", None)
        if large and choose is not None:
            choose("eager")  # this implementation reads only the experts to which tokens are sent
            live.notices += ("experts are computed one by one, which rounds results differently from grouped products",)
    return live


def blocks(live: LiveModel, most: int) -> dict[str, tuple[ByteRange, ...]]:
    """Divide a model that is larger than memory into blocks: modules whose weights take at most `most` bytes in float32, where
    possible. Returns the byte ranges of each block's weights in the files, keyed by the module's name (see `blocks_of`).

    If another checkpoint serves as the reference model, its files may be the ones that are larger than memory.
    """
    in_files = {key: weight.stored.in_files or weight.reference.in_files for key, weight in live.by_id.items()}
    return blocks_of(live.module, {key: tensors for key, tensors in in_files.items() if tensors}, most)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module loaded from a checkpoint, with every weight in its stored dtype."""

    module: nn.Module
    quantized: dict[str, tuple[str, torch.Tensor]]
    """The dtype and scales of each weight that is stored with scales, keyed by the weight's name in the module."""
    encoded: Mapping[str, StoredValues] = field(default_factory=dict)
    """The values of each weight that another program quantized, keyed by the weight's name in the module."""
    notices: tuple[str, ...] = ()
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Maps the name of each tensor of the files to where it is loaded in the module."""
    coverage: Coverage | None = None
    """Which tensors of the module the files have, or None for a module that `load_into` filled."""


def load_module(
    checkpoint: Checkpoint,
    title: str,
    options: Options,
    on_step: OnStep = lambda step: None,
    visits: BlockVisits | None = None,
) -> Loaded:
    """Load the module of a checkpoint with `from_pretrained`, on the CPU, with every tensor in the dtype of its file.

    title: the model's name, for errors. on_step: called with a description of each step. visits: for a model that is larger than
    memory, the cache of the weights that a forward pass is using. Raises NoForward if the architecture is unknown or transformers
    can't load the module.
    """
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if visits is not None and (checkpoint.form == "diffusers" or is_diffusers(checkpoint.config)):
        raise NoForward(
            f"{title}: no forward pass: it is larger than the memory to use, and models of diffusers can't be run in parts. "
            "Planning, patterns, weights and export work"
        )
    if visits is not None and checkpoint.form == "pickle" and checkpoint.config is not None:
        raise NoForward(
            f"{title}: no forward pass: it is larger than the memory to use, and a model with pickled weights can't be run in "
            "parts; dtype-engine export writes them as safetensors, which can"
        )
    if checkpoint.form == "diffusers":
        return _load_pipeline(checkpoint, title, options, on_step)
    if checkpoint.form in _NO_ARCHITECTURE and (checkpoint.form != "gguf" or checkpoint.config is None):
        raise NoForward(f"{title}: no forward pass: {_NO_ARCHITECTURE[checkpoint.form]}; planning works")
    if checkpoint.config is None:
        raise NoForward(
            f"{title}: no forward pass: no config.json next to the weights says which architecture they belong to. Open the "
            f"model's own code with file.py:Name --weights {printable(checkpoint.path.name)} to run it; planning works"
        )
    if checkpoint.lost:
        raise NoForward(
            f"{title}: no forward pass: {checkpoint.why_another_model}; open the checkpoint that it was made from to run it. "
            "Planning and weights work"
        )
    if checkpoint.form == "pickle" and any(map(is_compressed, checkpoint.files)):
        raise NoForward(
            f"{title}: no forward pass, because its weights are in a compressed archive, which transformers would map as if it "
            "were not; save them again with torch.save. Planning, weights and export work"
        )
    if is_diffusers(checkpoint.config):
        on_step(f"loading {printable(str((checkpoint.config or {})['_class_name']))}")
        return _load_diffusers(checkpoint, title)
    on_step("importing transformers")
    with quiet(), ExitStack() as meanwhile:
        import transformers

        meanwhile.enter_context(offline(options))
        silence_transformers()
        on_step("reading the configuration")
        chosen = architecture(transformers, checkpoint, options)
        # On the meta device: what can't be loaded is refused before memory is taken for it.
        made, places = make(chosen, checkpoint)
        refuse_misshapen(made, checkpoint, places, folder)
        refuse_unread(title, checkpoint, made, places)
        if not options.architecture and (strange := without_place(checkpoint, places)):
            raise NoForward(
                f"{title}: no forward pass: the tensor {printable(strange[0])} has no place in {type(made).__name__}"
            )
        encoded = encoded_values(title, checkpoint, made, places, visits)
        by_state = bool(encoded) or checkpoint.form == "gguf"
        model_class = type(made) if by_state else chosen.model_class
        on_step(f"loading {model_class.__name__}")
        more: dict[str, Any] = {"config": chosen.config}
        if checkpoint.quantized or by_state or declared_formats(checkpoint.config):
            # This program dequantizes weights with scales itself, and rounds KV caches only by rules, so transformers must not use
            # another package for it.
            more["config"] = without_quantization(chosen.config)
        if checkpoint.quantized:
            more["key_mapping"] = {rf"^(.+){OWN_SUFFIX}$": r"\1"}
        if by_state:
            more["state_dict"] = state_to_load(checkpoint, places, encoded, over_memory=visits is not None)
        placements: dict[str, Placement] = {}
        with failures_as(NoForward, f"{title}: transformers can't load {model_class.__name__}", reason), no_stderr():
            module, loading_info = as_stored(model_class, checkpoint, placements, encoded).from_pretrained(
                None if by_state else folder,
                dtype=torch_dtype(loading_dtype(checkpoint)),
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=checkpoint.form == "safetensors",
                variant=checkpoint.read_by.variant if checkpoint.read_by is not None else None,
                trust_remote_code=options.trust_remote_code,
                **more,
            )
            if by_state:  # transformers reads other files of a folder only if it also reads its weights
                module.config.name_or_path = str(folder)
                if module.can_generate() and (folder / "generation_config.json").is_file():
                    module.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        if isinstance(model_class, type) and type(module).__mro__[1:2] == (model_class,):
            module.__class__ = model_class
        of_buffers = construct_buffers(module, torch_dtype(loading_dtype(checkpoint)))
    module.requires_grad_(False)
    placements = placements or map_names(module, checkpoint.weights)
    held = module.state_dict(keep_vars=True)
    for name, values in encoded.items():
        held[name].data = values.held(torch.device("cpu"))
    others = {name: place for name, place in restorable(checkpoint, placements).items() if place.name not in encoded}
    _restore_stored(module, checkpoint, others)
    own = {name: place for name, place in placements.items() if place.name not in encoded}
    quantized, packed = _restore_quantized(module, checkpoint, own)
    notices = [*checkpoint.notices, *chosen.notices, *of_buffers, *inputs_notice(checkpoint)]
    persistent = sum(info.persistent for info in collect_tensors(module)[0])
    coverage = Coverage(persistent, tuple(sorted(set(loading_info.get("missing_keys") or ()) - packed)))
    if coverage.missing:
        first = printable(coverage.missing[0])
        if not options.random_weights:
            why = "".join(f"{sentence}; " for sentence in what_is_missing(checkpoint.index, None, ""))
            raise NoForward(
                f"{title}: no forward pass: {coverage}: {why}{plural(len(coverage.missing), 'weight')} would be made at random, "
                f"first {first}; --random-weights runs the model so (in Python: Options(random_weights=True))"
            )
        notices.append(
            f"{plural(len(coverage.missing), 'weight')} not in the checkpoint, made at random, first {first}"
        )
    parts = {part.name for weight in checkpoint.quantized.values() for part in weight.tensors}
    parts |= loading_names(module, parts)
    unexpected = {name for name in loading_info.get("unexpected_keys") or () if not is_cache_scale(name)}
    if unused := sorted(unexpected - parts):
        notices.append(
            f"{plural(len(unused), 'tensor')} of the checkpoint not used by {type(module).__name__}, first {unused[0]}"
        )
    return Loaded(module, quantized, encoded, tuple(notices), placements, coverage)


def _load_diffusers(checkpoint: Checkpoint, title: str) -> Loaded:
    """Load a diffusers model, memory-mapped, with every tensor in the dtype of its file. title: its name, for errors. Raises
    NoForward if diffusers can't construct the model or the tensors do not match it.
    """
    module, placements = make_diffusers(checkpoint, title)
    refuse_misshapen(module, checkpoint, placements, checkpoint.path)
    with_placeholders(module)
    with failures_as(NoForward, f"{title}: no forward pass", reason):
        loaded = load_into(module, checkpoint, placements)
    coverage = Coverage(sum(info.persistent for info in collect_tensors(module)[0]))
    return dataclasses.replace(loaded, notices=checkpoint.notices, placements=placements, coverage=coverage)


def _load_pipeline(checkpoint: Checkpoint, title: str, options: Options, on_step: OnStep) -> Loaded:
    """Load a diffusers pipeline: each of its models with every tensor in the dtype of its file, then tokenizers and schedulers.
    title: its name, for errors. Raises NoForward if one of them can't be loaded.
    """
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
        {f"{name}.{weight}": held for name, part in parts.items() for weight, held in part.quantized.items()},
        {f"{name}.{weight}": held for name, part in parts.items() for weight, held in part.encoded.items()},
        (*checkpoint.notices, *notices, *conversions(module)),
        {
            f"{name}.{stored}": dataclasses.replace(placement, name=f"{name}.{placement.name}")
            for name, part in parts.items()
            for stored, placement in part.placements.items()
        },
        Coverage(sum(info.persistent for info in collect_tensors(module)[0]), tuple(missing)),
    )


def load_pretrained(folder: Path, module: nn.Module | None = None, options: Options | None = None) -> nn.Module:
    """Load a model with every weight in exactly the dtype that its checkpoint stores, on the CPU, memory-mapped from the files.

    By contrast, `from_pretrained` of transformers 5 converts a checkpoint of several dtypes to one. A plain module can't hold
    scales, so weights that are stored with scales become values in the dtype that `config.json` names; `dtype_engine.open` keeps
    their codes and scales. module: for a checkpoint without `config.json`, the model that receives the weights. It is changed in
    place. Raises UserError if the checkpoint can't be read or does not fit the module.
    """
    checkpoint = open_checkpoint(folder)
    loaded = (
        load_into(module, checkpoint)
        if module is not None
        else load_module(checkpoint, folder.name, options or Options())
    )
    module = loaded.module
    state = dict(collect_tensors(module)[1])
    compute = torch_dtype(loading_dtype(checkpoint))
    for name, (dtype, scale) in loaded.quantized.items():
        state[name].data = dequantize(state[name].data, scale, compute, dtypes.BY_NAME[dtype].blocks)
    for name, values in loaded.encoded.items():
        state[name].data = values.read().to(state[name].dtype)
    trim_heap()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return module.eval()


def load_into(
    module: nn.Module, checkpoint: Checkpoint, placements: Mapping[str, Placement] = MappingProxyType({})
) -> Loaded:
    """Fill a given module with the tensors of a checkpoint, memory-mapped from the files and in their stored dtypes. The result
    holds the module and, for each weight that is stored with scales, its dtype and scales.

    placements: maps names of tensors of the files to where they are loaded in the module. A tensor without an entry is loaded into
    the tensor of the same name. Raises UserError unless the checkpoint and the module have tensors of the same names and shapes.
    """
    module.requires_grad_(False)
    infos, tensors = collect_tensors(module)
    by_any_name = {name: info for info in infos for name in info.names if info.persistent}
    quantized, encoded = {}, {}
    filled = set()
    for name, stored in checkpoint.weights.items():
        info = by_any_name.get(placements[name].name if name in placements else name)
        if info is None or info.shape != stored.shape:
            problem = "is not in this model" if info is None else f"has the shape {list(info.shape)} in this model"
            raise UserError(f"{checkpoint.path}: tensor {printable(name)} {problem}")
        filled.add(info.name)
        if name in checkpoint.encoded:
            values = encoded[info.name] = EncodedValues(checkpoint.encoded[name], tensors[info.name].dtype)
            tensors[info.name].data = values.held(torch.device("cpu"))
        elif (weight := checkpoint.quantized.get(name)) is None:
            tensors[info.name].data = read_stored(checkpoint, stored)
        else:
            tensors[info.name].data, scale = read_quantized(weight)
            quantized[info.name] = (weight.dtype, scale)
    if missing := [info.name for info in infos if info.persistent and info.name not in filled]:
        raise UserError(f"{checkpoint.path} lacks {len(missing)} tensors of this model, first {missing[0]}")
    return Loaded(module, quantized, encoded)


def build_on_meta(checkpoint: Checkpoint, options: Options) -> tuple[nn.Module, Mapping[str, Placement]]:
    """Build a checkpoint's architecture on the meta device, without data. Returns the module, and a mapping from the name of each
    tensor of the checkpoint to where it is loaded in the module. The shapes of the two may differ (see `shapes.py`).

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

        with offline(options):
            return make(architecture(transformers, checkpoint, options), checkpoint)


def loading_dtype(checkpoint: Checkpoint) -> str:
    """Return the name of the widest float dtype that a checkpoint stores. Loading in this dtype rounds no value."""
    return dtypes.widest(checkpoint.dtype(name) for name in checkpoint.weights)


def as_stored(
    model_class: Any, checkpoint: Checkpoint, placements: dict[str, Placement], encoded: Mapping[str, StoredValues]
) -> Any:
    """Return a subclass of `model_class` that loads every tensor in its stored dtype, if the installed transformers supports this.
    If it does not, return `model_class` itself, which loads all tensors in one dtype.

    placements: an empty dictionary, which loading fills with the place of each tensor of the files in the module. encoded: the
    values of the weights for which the module gets placeholders, keyed by their names in the module.
    """

    def stored(module: nn.Module) -> dict[str, torch.dtype]:
        placements.update(map_names(module, checkpoint.weights))
        wanted = stored_dtypes(checkpoint, restorable(checkpoint, placements))
        # Packed codes are not the weight's values. transformers finds no such weight and initialises it as a missing one.
        found = {name: torch_dtype(dtype) for name, dtype in wanted.items() if not _is_packed(dtype)}
        return found | {name: values.holds for name, values in encoded.items()}

    return with_dtypes(model_class, stored)


def _is_packed(dtype: str) -> bool:
    row = dtypes.BY_NAME.get(dtype)
    return row is not None and row.blocks is not None and row.blocks.packing != "none"


def _restore_quantized(
    module: nn.Module, checkpoint: Checkpoint, placements: Mapping[str, Placement]
) -> tuple[dict[str, tuple[str, torch.Tensor]], set[str]]:
    """Load the weights that this program stored with scales and that transformers can't load: those with several codes in a byte
    or word, and those that the module joins with others into one tensor, such as all experts of a layer. Their codes become the
    data of the module's tensors.

    placements: maps the name of each tensor of the files to where it is loaded in the module. Returns two results: the dtype and
    scales of each weight that is stored with scales, keyed by the weight's name in the module; and the names of the weights that
    this function has loaded.
    """
    state = module.state_dict(keep_vars=True)
    quantized: dict[str, tuple[str, torch.Tensor]] = {}
    packed: set[str] = set()
    parts: dict[str, dict[str, Placement]] = {}
    for name, weight in checkpoint.quantized.items():
        if name not in placements:
            continue
        live = placements[name].name
        if placements[name].part:
            parts.setdefault(live, {})[name] = placements[name]
            continue
        codes, scale = read_quantized(weight)
        quantized[live] = (weight.dtype, scale)
        if _is_packed(weight.dtype):
            held = state[live]
            held.data = codes
            packed |= {other for other, tensor in state.items() if tensor is held}
    for live, places in parts.items():
        among = {name: checkpoint.quantized[name] for name in places}
        dtype, state[live].data, scale = pack(live, among, places, tuple(state[live].shape))
        quantized[live] = dtype, scale
        packed.add(live)
    return quantized, packed


def _restore_stored(module: nn.Module, checkpoint: Checkpoint, placements: Mapping[str, Placement]) -> None:
    """Give every tensor of a loaded module whose dtype changed on loading its stored data again, memory-mapped from the file.

    A tensor that loading packed from several stored tensors is cast back to their dtype instead. This is exact, since loading only
    widened it. placements: maps the name of each tensor of the files to where it is loaded in the module.
    """
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    wanted = stored_dtypes(checkpoint, placements)
    for name, placement in placements.items():
        tensor, dtype = tensors.get(placement.name), wanted[placement.name]
        if tensor is None or _is_packed(dtype) or dtype_name(tensor.dtype) == dtypes.BY_NAME[dtype].torch_name:
            continue
        stored = checkpoint.weights[name]
        if not placement.part and stored.shape == tuple(tensor.shape):
            tensor.data = read_stored(checkpoint, stored)
        elif dtype in dtypes.COMPUTE_DTYPES:
            tensor.data = tensor.data.to(torch_dtype(dtype))
