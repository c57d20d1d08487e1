"""How a pass is executed, apart from the dtypes of its weights: the attention kernel, the batch, the decoding, torch's settings.

The same weights give other outputs under another execution, since sums of rounded numbers depend on their order. An axis is a field
of `Execution`; `runtime/passes/execution.py` and `runtime/execution/` carry it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec

from dtype_engine.core.errors import UserError
from dtype_engine.core.number_ranges import Threads
from dtype_engine.core.typed_data import as_type, literals, refuse_unknown

_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}
EXCLUDE = {
    "decode": ("batch", "padding", "compile"),
    "batch": ("decode", "compile"),
    "compile": ("batch", "padding", "decode"),
}
"""Axes that exclude others: an execution has only one of the two."""


class Execution(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a pass is executed. The defaults are the execution of the model as it is loaded, one sequence at a time.

    Example:
        >>> print(de.Execution(attention="eager", batch=8))
        attention=eager batch=8
    """

    attention: Literal["eager", "sdpa", "math", "flash", "flex"] | None = None
    """The implementation of attention. eager, sdpa, flex: transformers' own choices. math, flash: that kernel of torch's
    `scaled_dot_product_attention`. None: as the model is loaded.
    """
    batch: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    """How many sequences run at once. They are taken in the order of the inputs, and shorter ones are padded."""
    padding: Literal["right", "left"] = "right"
    """On which side the shorter sequences of a batch are padded."""
    decode: bool = False
    """Whether the tokens of a sequence run one after another with a KV cache, as in decoding, instead of all at once."""
    compile: Literal["inductor", "aot_eager"] | None = None
    """The backend of `torch.compile` that compiles the whole model to one graph. None: it runs eagerly. aot_eager traces the model
    and runs torch's own kernels, so that it differs from inductor in what inductor's kernels do.
    """
    threads: Threads | None = None
    """The number of threads. None: that of the session."""
    mkldnn: bool = True
    """Whether torch may use oneDNN's kernels on the CPU."""
    matmul: Literal["highest", "high", "medium"] = "highest"
    """The precision of products of float32 matrices, as `torch.set_float32_matmul_precision` has it. high, medium: TF32 or bfloat16
    where the device has them.
    """

    def __str__(self) -> str:
        return " ".join(f"{name}={_word(value)}" for name, value in self.axes().items())

    def axes(self) -> dict[str, object]:
        """Return the fields that are not the defaults, by name."""
        # `omit_defaults` compares texts by identity, so that it keeps those that came from another process.
        found: dict[str, object] = msgspec.to_builtins(self)
        return {name: value for name, value in found.items() if value != getattr(PLAIN, name)}

    @property
    def regroups(self) -> bool:
        """Whether a sequence does not run in a plain pass of its own over all its tokens."""
        return self.batch > 1 or self.decode or self.compile is not None

    def check(self) -> Execution:
        """Return this execution. Raises UserError for axes that exclude each other."""
        if self.decode and self.batch > 1:
            raise UserError("decode=yes runs one sequence at a time: leave batch out")
        if self.compile is not None and (self.decode or self.batch > 1):
            raise UserError(f"compile={self.compile} runs whole sequences, one at a time: leave batch and decode out")
        if self.padding != "right" and self.batch == 1:
            raise UserError(f"padding={self.padding} needs a batch, as in batch=8")
        return self


PLAIN = Execution()


def parse_execution(texts: Iterable[str]) -> Execution:
    """Return the execution that texts such as "attention=eager" name. Raises UserError for an unknown axis or value."""
    given: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{text!r} is no axis of execution; write it as in attention=eager or batch=8")
        refuse_unknown("axis of execution", [name], Execution.__struct_fields__)
        given[name] = _BOOLEANS.get(value, int(value) if value.isdecimal() and len(value) < 9 else value)
    return execution_of(given)


def execution_of(given: Mapping[str, object]) -> Execution:
    """Return the execution with the given fields, such as {"attention": "eager"}. Raises UserError."""
    refuse_unknown("axis of execution", given, Execution.__struct_fields__)
    for field in msgspec.structs.fields(Execution):
        if (choices := literals(field.type)) and given.get(field.name, field.default) not in (*choices, field.default):
            raise UserError(f"{field.name}={given[field.name]}: choose one of {', '.join(map(str, choices))}")
    return as_type(dict(given), Execution).check()


def names_axis(settings: str) -> bool:
    """Return whether the text of `RunSettings` says that a pass is executed otherwise than by default."""
    return any(f"{name}=" in settings for name in Execution.__struct_fields__)


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
