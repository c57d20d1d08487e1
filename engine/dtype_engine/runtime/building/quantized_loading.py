"""Refuses a checkpoint if one of its quantized weights can't be decoded, because the scheme is unknown or one of the weight's
tensors is missing. Loading would treat codes as values, ignore scales, or initialize the weight randomly, all without an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.packed_weights import quantized_parts
from dtype_engine.checkpoint.schemes import CODES
from dtype_engine.checkpoint.schemes.fp8_blocks import LAYOUT
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward
from dtype_engine.core.text import printable
from dtype_engine.runtime.model.name_mapping import Placement


def refuse_unread(title: str, checkpoint: Checkpoint, module: nn.Module, placements: Mapping[str, Placement]) -> None:
    """Raise NoForward if the files have codes or scales of a weight that can't be decoded.

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
