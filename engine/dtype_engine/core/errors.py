"""What can go wrong, said to the user in one sentence: what, where, what to do."""

from __future__ import annotations

from dtype_engine.core.hints import ON_THE_COMMAND_LINE, fill_hints
from dtype_engine.core.text import printable


def one_line(error: BaseException, most: int = 200, with_type: bool = False) -> str:
    """What an exception says, in one line of at most `most` characters that is safe to show; its type where it says nothing.

    with_type: the type comes before what it says, as in "KeyError: 'weight'".
    """
    name = type(error).__name__
    text = printable(" ".join(str(error).split()), most)
    return f"{name}: {text}" if text and with_type else text or name


class UserError(Exception):
    """Bad input. The message is shown as it is; on the command line the exit status is 2.

    Example:
        >>> try:
        ...     de.Rule.parse("*.mlp")
        ... except de.UserError as error:
        ...     print(error)
        can't read the cast '*.mlp': write PATTERN=DTYPE, for example '*.mlp=bfloat16'
    """

    @property
    def sentence(self) -> str:
        """The message with its hints as names, for what shows it to somebody who has keys and no options."""
        return super().__str__()

    def __str__(self) -> str:
        return fill_hints(self.sentence, ON_THE_COMMAND_LINE)


class PatternError(UserError):
    """A pattern that can't be read.

    Attributes:
        position: The character to blame, counted from 0; None where no single one is.

    Example:
        >>> try:
        ...     de.Rule.make("layers.{0", "bfloat16")
        ... except de.PatternError as error:
        ...     print(error.position)
        7
    """

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class TooSlow(PatternError):
    """A pattern that can be read and takes too long to match."""


class NoForward(UserError):
    """There is no forward pass for this model here; the message says why and what would give one.

    Example:
        >>> import torch
        >>> try:
        ...     de.open(torch.nn.Linear(2, 2)).drift()
        ... except de.NoForward as error:
        ...     print(str(error)[:23])
        Linear: no forward pass
    """


class KernelError(UserError):
    """An operation has no kernel for a dtype on this device.

    Attributes:
        module, operation: The module that was running, and torch's name of what it called.
        dtype, device: Those that have no kernel.
        nearest: A dtype that works there; None where none was found.

    Example:
        >>> print(de.KernelError("mlp", "linear", "float64", "mps", "float32", "not implemented"))
        mlp: linear has no float64 kernel on mps; float32 works there (not implemented)
    """

    def __init__(self, module: str, operation: str, dtype: str, device: str, nearest: str | None, reason: str) -> None:
        offer = f"{nearest} works there" if nearest else "no other dtype was found to work"
        super().__init__(f"{module or 'the model'}: {operation} has no {dtype} kernel on {device}; {offer} ({reason})")
        self.module = module
        self.operation = operation
        self.dtype = dtype
        self.device = device
        self.nearest = nearest
        self._made_of = module, operation, dtype, device, nearest, reason

    def __reduce__(self) -> tuple[type[KernelError], tuple[str | None, ...]]:
        return type(self), self._made_of  # it comes out of another process with all it says


class OutOfReach(UserError):
    """What was asked for can't be met. On the command line the exit status is 1: the answer is no."""


class Cancelled(Exception):
    """The user, or a newer command, stopped what was under way.

    Example:
        >>> try:
        ...     session.drift(cancelled=lambda: True)
        ... except de.Cancelled:
        ...     print("stopped")
        stopped
    """
