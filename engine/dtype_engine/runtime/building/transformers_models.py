"""Loads a model of transformers: `from_pretrained` places tensors, mostly memory-mapped, and placeholders in the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.completeness import what_is_missing
from dtype_engine.checkpoint.kv_cache import CACHE_SCALES
from dtype_engine.checkpoint.packed_weights import quantized_parts
from dtype_engine.checkpoint.schemes import CODES
from dtype_engine.checkpoint.schemes.fp8_blocks import LAYOUT
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.building.architecture import architecture, make, reason, without_quantization
from dtype_engine.runtime.building.constructed_buffers import construct_buffers
from dtype_engine.runtime.building.filling import Loaded, loading_dtype
from dtype_engine.runtime.building.module_sources import inputs_notice, sources_of_module
from dtype_engine.runtime.building.shapes import refuse_misshapen
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.libraries.hf_private import with_dtypes
from dtype_engine.runtime.libraries.hub import offline
from dtype_engine.runtime.libraries.silence_libraries import no_stderr, quiet, silence_transformers
from dtype_engine.runtime.model.module_tree import collect_tensors
from dtype_engine.runtime.model.name_mapping import Placement, stored_dtypes, without_place
from dtype_engine.runtime.weights.budget import SMALLEST, MemoryBudget
from dtype_engine.runtime.weights.checkpoint_weights import read_stored
from dtype_engine.runtime.weights.source import CPU, WeightSource


def load_transformers(
    checkpoint: Checkpoint, title: str, options: ModelOptions, on_step: Callable[[str], None], memory: MemoryBudget
) -> Loaded:
    """Load the module of a transformers checkpoint, as `load_module` does."""
    folder = checkpoint.folder
    on_step("importing transformers")
    with quiet(), ExitStack() as meanwhile:
        import transformers

        meanwhile.enter_context(offline(options))
        silence_transformers()
        on_step("reading the configuration")
        chosen = architecture(transformers, checkpoint, options)
        # On the meta device: what can't be loaded is refused before memory is taken for it.
        made, placements = make(chosen, checkpoint)
        refuse_misshapen(made, checkpoint, placements, folder)
        _refuse_unread(title, checkpoint, made, placements)
        if not options.architecture and (strange := without_place(checkpoint, placements)):
            raise NoForward(
                f"{title}: no forward pass: the tensor {printable(strange[0])} has no place in {type(made).__name__}"
            )
        sources = sources_of_module(title, checkpoint, made, placements, memory)
        on_step(f"loading {type(made).__name__}")
        with failures_as(NoForward, f"{title}: transformers can't load {type(made).__name__}", reason), no_stderr():
            module, missing, unexpected = _placed(made, chosen.config, checkpoint, placements, sources, memory.limited)
            module.config.name_or_path = str(folder)
            if module.can_generate() and (folder / "generation_config.json").is_file():
                module.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        of_buffers = construct_buffers(module, torch_dtype(loading_dtype(checkpoint)))
    held = module.state_dict(keep_vars=True)
    for name, source in sources.items():
        held[name].data = source.held(CPU)
    coverage = Coverage(sum(info.persistent for info in collect_tensors(module)[0]), tuple(sorted(missing)))
    notices = (
        *checkpoint.notices, *chosen.notices, *of_buffers, *inputs_notice(checkpoint),
        *_of_missing(coverage, checkpoint, title, options), *_of_unused(unexpected, checkpoint, type(module).__name__),
    )  # fmt: skip
    return Loaded(module, sources, notices, placements, coverage)


def _refuse_unread(title: str, checkpoint: Checkpoint, module: nn.Module, placements: Mapping[str, Placement]) -> None:
    """Raise NoForward if the files have codes or scales of a weight that can't be decoded. Loading would treat codes as values,
    ignore scales, or initialize the weight randomly, all without an error.

    module: the model on the meta device. placements: where each tensor of the files is loaded in it.
    """
    tensors = checkpoint.unread
    floats = {name for name, each in module.named_parameters(remove_duplicate=False) if each.is_floating_point()}
    into_floats = {
        name: each for name, each in tensors.items() if name in placements and placements[name].name in floats
    }
    integers = {
        name: f"holds {row.name}, where {type(module).__name__} has floating-point values"
        for name, tensor in into_floats.items()
        if (row := dtypes.BY_NAME.get(tensor.dtype)) is not None and row.kind == "int"
    }
    for name, why in (*quantized_parts(tensors, checkpoint.config).items(), *integers.items()):
        weight = name.removesuffix(LAYOUT.scale)
        codes = tensors[weight].dtype if weight in tensors else "not there"
        if weight != name and codes not in LAYOUT.dtypes:
            what = f"has no weight to scale: {printable(weight)} is {codes}"
        else:
            what = why if why.startswith(("holds", "belongs")) else f"is {why}"
        raise NoForward(
            f"{title}: no forward pass: {printable(name)} {what}, and it is incomplete or in a scheme that is not decoded here; "
            "`dtype-engine check` lists what is missing. Open the checkpoint that this one was made from to measure"
        )
    # A float dtype says nothing: bitsandbytes can store the bytes of codes as bfloat16 beside plain weights in bfloat16.
    others = [weight for weight in checkpoint.coded.values() if not weight.own]
    held = {weight.parts[CODES].dtype for weight in others} - set(dtypes.COMPUTE_DTYPES)
    for name, tensor in into_floats.items():
        if tensor.dtype in held and len(tensor.shape) > 1:
            raise NoForward(
                f"{title}: no forward pass: {printable(name)} holds {tensor.dtype} codes, and its scales are not there; "
                "`dtype-engine check` lists all such tensors"
            )


def _placed(
    made: nn.Module,
    config: Any,
    checkpoint: Checkpoint,
    placements: Mapping[str, Placement],
    sources: Mapping[str, WeightSource],
    over_memory: bool,
) -> tuple[Any, list[str], list[str]]:
    """Load a module with transformers. Returns (the module, the names of tensors that the checkpoint lacks and transformers
    initialized, the names of tensors that transformers did not use). The module has a placeholder for each weight in `sources`,
    and the checkpoint's other tensors. made: the module on the meta device. over_memory: whether the model is larger than memory.
    """
    state = {
        # What the system reads around a small tensor would leave a small memory before it is used, and be read again.
        name: read_stored(checkpoint, tensor, alone=over_memory and tensor.nbytes < SMALLEST)
        for name, tensor in checkpoint.weights.items()
        if name not in checkpoint.coded and (name not in placements or placements[name].name not in sources)
    }
    state |= {name: source.held(CPU) for name, source in sources.items()}
    # Tensors in other dtypes, such as integers, stay as transformers loads them.
    exact = {name: place for name, place in placements.items() if checkpoint.dtype(name) in dtypes.COMPUTE_DTYPES}
    wanted = {name: torch_dtype(dtype) for name, dtype in stored_dtypes(checkpoint, exact).items()}
    wanted |= {name: source.holds for name, source in sources.items()}
    module, info = with_dtypes(type(made), wanted).from_pretrained(
        None,
        # This program decodes weights itself, and rounds KV caches only by rules, so transformers must not use another package.
        config=without_quantization(config),
        state_dict=state,
        dtype=torch_dtype(loading_dtype(checkpoint)),
        output_loading_info=True,
    )
    module.__class__ = type(made)
    return module, list(info.get("missing_keys") or ()), list(info.get("unexpected_keys") or ())


def _of_missing(coverage: Coverage, checkpoint: Checkpoint, title: str, options: ModelOptions) -> tuple[str, ...]:
    """Return a notice that weights are made at random because the checkpoint lacks them, or (). Raises NoForward if the user has
    not allowed random weights.
    """
    if not coverage.missing:
        return ()
    first = printable(coverage.missing[0])
    if not options.random_weights:
        why = "".join(f"{sentence}; " for sentence in what_is_missing(checkpoint.index, None, ""))
        raise NoForward(
            f"{title}: no forward pass: {coverage}: {why}{plural(len(coverage.missing), 'weight')} would be made at random, "
            f"first {first}; --random-weights runs the model so (in Python: Options(random_weights=True))"
        )
    return (f"{plural(len(coverage.missing), 'weight')} not in the checkpoint, made at random, first {first}",)


def _of_unused(unexpected: list[str], checkpoint: Checkpoint, class_name: str) -> tuple[str, ...]:
    unused = sorted(name for name in unexpected if not name.endswith(CACHE_SCALES) and not checkpoint.draft.holds(name))
    if not unused:
        return ()
    return (f"{plural(len(unused), 'tensor')} of the checkpoint not used by {class_name}, first {unused[0]}",)
