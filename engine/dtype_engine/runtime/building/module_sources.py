"""Makes the sources of the weights that a loaded module does not hold: those that the files store as codes and, in a model that is
larger than memory, all large ones. The module holds a placeholder for each such weight, and each use reads or decodes its values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.schemes.configuration import config_groups, declared
from dtype_engine.checkpoint.schemes.registry import input_format
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward
from dtype_engine.core.text import printable
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.libraries.hf_private import turned_names
from dtype_engine.runtime.model.name_mapping import Placement
from dtype_engine.runtime.model.packed_parts import in_rows
from dtype_engine.runtime.weights.blockwise import BlockwiseSource
from dtype_engine.runtime.weights.budget import SMALLEST, MemoryBudget
from dtype_engine.runtime.weights.checkpoint_weights import source_of
from dtype_engine.runtime.weights.coded import CodedSource
from dtype_engine.runtime.weights.source import PlainSource, WeightSource
from dtype_engine.runtime.weights.stacked import StackedSource


def sources_of_module(
    title: str,
    checkpoint: Checkpoint,
    module: nn.Module,
    placements: Mapping[str, Placement],
    memory: MemoryBudget,
) -> dict[str, WeightSource]:
    """Return the sources of the weights for which a module holds placeholders, keyed by their names in it. If the model is larger
    than memory, these are all large weights. Otherwise, they are the weights of which the files store any part as codes.

    placements: where each tensor of the files is loaded in the module, which may be on the meta device. memory: keeps the weights
    that a forward pass is using. Raises NoForward if a weight has another shape in the module than in the files, or if its tensors
    in the files are not simply stacked along its rows.
    """
    turned = turned_names(module, checkpoint.weights if memory.limited else checkpoint.coded)
    if not memory.limited:
        names = set(checkpoint.coded)
    else:
        names = {name for name in checkpoint.weights if _stays_in_file(checkpoint, name, turned)}
    live = {placements[name].name for name in names if name in placements}
    if not live:
        return {}
    places: dict[str, dict[str, Placement]] = {}
    for name, place in placements.items():
        if place.name in live:
            places.setdefault(place.name, {})[name] = place
    state, holds = module.state_dict(), torch_dtype(checkpoint.decoded_dtype)
    found: dict[str, WeightSource] = {}

    def source(stored: str) -> WeightSource:
        if (weight := checkpoint.coded.get(stored)) is None:
            plain = source_of(checkpoint, stored)
            return plain if memory.limited else PlainSource(plain.read())
        dtype = torch_dtype(weight.values_as) if weight.values_as else holds
        return CodedSource(weight, dtype, stored in turned, input_format(weight, checkpoint.config))

    for name, parts in places.items():
        shape = tuple(state[name].shape)
        if any(part.part for part in parts.values()):
            rows = in_rows(parts, {part: checkpoint.weights[part].shape for part in parts}, shape)
            if rows is None:
                raise NoForward(f"{title}: no forward pass: {name} is not its parts in the files, one below the other")
            among = [source(part) for names in rows for part in names]
            coded = any(part.format for part in among)
            found[name] = StackedSource(among, shape, holds if coded else among[0].dtype)
            continue
        stored = next(iter(parts))
        own = checkpoint.weights[stored].shape
        if shape != ((*own[:-2], *own[:-3:-1]) if stored in turned else own):
            raise NoForward(
                f"{title}: no forward pass: config.json makes {printable(stored)} {list(shape)}, and the files have {list(own)}"
            )
        found[name] = source(stored)
    return {name: BlockwiseSource(source, memory) for name, source in found.items()} if memory.limited else found


def _stays_in_file(checkpoint: Checkpoint, name: str, turned: Collection[str]) -> bool:
    """Return whether a weight is read from its file each time that a forward pass reaches it, instead of being kept in memory. The
    model is larger than memory. turned: the weights that loading transposes, which are kept unless they are quantized.
    """
    if name in checkpoint.coded:
        return True
    stored = checkpoint.weights[name]
    plain = stored.dtype in dtypes.COMPUTE_DTYPES and stored.bytes is not None
    return plain and name not in turned and stored.nbytes >= SMALLEST


def inputs_notice(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a notice if runtimes round the inputs of quantized layers, as the checkpoint says or llama.cpp does, otherwise (). The
    notice says whether measurements can round these inputs on request, which is not possible for every format.
    """
    others = [weight for weight in checkpoint.coded.values() if not weight.own]
    if any(input_format(weight, checkpoint.config) for weight in others):
        return (
            "runtimes round the inputs of this checkpoint's quantized layers; --quantize-activations weights rounds them here, too",
        )
    settings = declared(checkpoint.config or {})
    rounded = any(arguments for _, arguments in config_groups(settings, "input_activations"))
    scaled = any(weight.input_scale is not None for weight in others)
    if not others or not (rounded or scaled or settings.get("activation_scheme") is not None):
        return ()
    return ("the inputs of quantized layers, which the checkpoint declares as rounded, are not rounded here",)
