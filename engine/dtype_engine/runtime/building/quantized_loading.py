"""Refuses a checkpoint if one of its quantized weights can't be decoded, because the scheme is unknown or one of the weight's
tensors is missing.

Without this check, loading would treat codes as values, ignore scales, or initialize the weight randomly, all without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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

    title: the name of the model, for the error. module: the model on the meta device. placements: maps the name of each tensor of
    the files to where it is loaded in the module.
    """
    tensors = checkpoint.unread
    for name, why in (
        *quantized_parts(tensors, checkpoint.config).items(),
        *_integers_for_floats(checkpoint, module, placements),
    ):
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
    floats = _floating_parameters(module)
    for name, tensor in tensors.items():
        if tensor.dtype in held and name in placements and placements[name].name in floats and len(tensor.shape) > 1:
            raise NoForward(
                f"{title}: no forward pass: {printable(name)} holds {tensor.dtype} codes, and its scales are not there; "
                "`dtype-engine check` lists all such tensors"
            )


def _integers_for_floats(
    checkpoint: Checkpoint, module: nn.Module, placements: Mapping[str, Placement]
) -> Iterator[tuple[str, str]]:
    """Yield (name, description) for each integer tensor of the files that transformers would load into a floating-point parameter.
    placements: maps the name of each tensor of the files to where it is loaded in the module.
    """
    floats = _floating_parameters(module)
    for name, tensor in checkpoint.unread.items():
        row = dtypes.BY_NAME.get(tensor.dtype)
        if row is not None and row.kind == "int" and name in placements and placements[name].name in floats:
            yield name, f"holds {row.name}, where {type(module).__name__} has floating-point values"


def _floating_parameters(module: nn.Module) -> set[str]:
    return {
        name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter.is_floating_point()
    }
