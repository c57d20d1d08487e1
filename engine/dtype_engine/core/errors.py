"""Exceptions whose messages are written for the user. Each message is one sentence: what went wrong, where, and what to do."""

from __future__ import annotations

import re

from dtype_engine.core.hints import ON_THE_COMMAND_LINE, fill_hints
from dtype_engine.core.text import printable


def one_line(error: BaseException, most: int = 200, with_type: bool = False) -> str:
    """Return an exception's message as one printable line of at most `most` characters, or its type's name if the message is empty.
    with_type: put the type's name before the message, as in "KeyError: 'weight'".
    """
    name = type(error).__name__
    text = printable(" ".join(str(error).split()), most)
    return f"{name}: {text}" if text and with_type else text or name


_NO_MEMORY = "there is not enough memory for this"
_LIMITS = {
    r"can(no|')t allocate memory|failed to map segment|bad_alloc": _NO_MEMORY,
    "too many open files": "Too many open files: raise the limit, as by `ulimit -n 1024`",
    "no usable temporary directory": "no folder for temporary files can be written: set TMPDIR to one that can",
    "can't start new thread": "no more threads can be started: raise the limit, `ulimit -u`",
    "no space left on device": "No space left on device: free some space there, or write elsewhere",
    "disk quota exceeded": "Disk quota exceeded: free some space there, or write elsewhere",
    "file too large": "File too large: raise the limit, `ulimit -f`",
}
"""What an exception's message is matched with, whatever its type is, and a sentence. Libraries wrap the system's errors in types of
their own, and torch has RuntimeError for most.
"""


def exhausted(error: BaseException) -> str:
    """Return a sentence if an exception says that memory, on the CPU or an accelerator, or another resource ran out, or ""."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return _NO_MEMORY
    said = str(error)
    return next((sentence for words, sentence in _LIMITS.items() if re.search(words, said, re.IGNORECASE)), "")


def lacks_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out, on the CPU or on torch's accelerator."""
    return exhausted(error) == _NO_MEMORY


class UserError(Exception):
    """Raised for bad input. The message is shown to the user unchanged; on the command line the exit status is 2.

    Example:
        >>> try:
        ...     de.Rule.parse("*.mlp")
        ... except de.UserError as error:
        ...     print(error)
        can't read the cast '*.mlp': write PATTERN=DTYPE, for example '*.mlp=bfloat16'
    """

    @property
    def sentence(self) -> str:
        """The message, with placeholders for what the user can do. The app replaces them by keys, the command line by options."""
        return super().__str__()

    def __str__(self) -> str:
        return fill_hints(self.sentence, ON_THE_COMMAND_LINE)


class PatternError(UserError):
    """Raised if a pattern can't be parsed.

    Attributes:
        position: Index (from 0) of the character that caused the error; None if no single character did.

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
    """Raised if a pattern is valid, but matching it takes too long."""


class NoForward(UserError):
    """Raised if a model's forward pass can't be run. The message says why, and what would make a forward pass possible.

    Example:
        >>> import torch
        >>> try:
        ...     de.open(torch.nn.Linear(2, 2)).drift()
        ... except de.NoForward as error:
        ...     print(str(error)[:23])
        Linear: no forward pass
    """


class KernelError(UserError):
    """Raised if an operation has no kernel for a dtype on this device.

    Attributes:
        module, operation: The module that was running, and torch's name for the operation that it called.
        dtype, device: The dtype and device for which the kernel is missing.
        nearest: A dtype for which the operation works on this device; None if none was found.

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
        self._arguments = module, operation, dtype, device, nearest, reason

    def __reduce__(self) -> tuple[type[KernelError], tuple[str | None, ...]]:
        return type(self), self._arguments  # an error that comes from another process keeps its attributes


class OutOfReach(UserError):
    """Raised if a limit or target of the user can't be met. The command line then exits with status 1."""


class Cancelled(Exception):
    """Raised if the user or a newer command cancelled the running work.

    Example:
        >>> try:
        ...     session.drift(cancelled=lambda: True)
        ... except de.Cancelled:
        ...     print("stopped")
        stopped
    """
