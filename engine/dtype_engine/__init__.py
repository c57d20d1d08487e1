"""dtype-engine: cast a model's weights by pattern, run it in mixed dtypes, and measure how that changes the output.

    import dtype_engine as de
    session = de.open("path/to/model")        # or a live nn.Module, with inputs={...} or (...,)
    session.cast("*.mlp", "bfloat16")
    session.drift().output.max_abs
    session.undo()
    session.export("folder")                  # a checkpoint in these dtypes
    model = de.load_pretrained("folder")      # load it with every weight in its stored dtype
    with de.mixed_dtypes(): model(**inputs)   # run it, as it was measured

Importing this package does not import torch, but opening a model does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtype_engine.core.errors import Cancelled, KernelError, NoForward, PatternError, UserError
from dtype_engine.core.execution import Execution
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.pipeline_settings import PipelineSettings
from dtype_engine.core.version import __version__
from dtype_engine.recipe import Recipe, Rule

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import nn

    from dtype_engine.checkpoint.source import Source
    from dtype_engine.runtime.session.session import Session

__all__ = [
    "Cancelled",
    "Execution",
    "InputLimits",
    "KernelError",
    "NoForward",
    "Options",
    "PatternError",
    "PipelineSettings",
    "Recipe",
    "Rule",
    "RunSettings",
    "Session",
    "UserError",
    "__version__",
    "load_pretrained",
    "mixed_dtypes",
    "open",
]


def open(
    model: str | Source | nn.Module | None = None, *, options: Options | None = None, inputs: Any = None
) -> Session:
    """Open a model for casting and measuring. Nothing is cast yet.

    Args:
        model: A path, a Hugging Face id, `file.py:Name` or `package.module:Name`; None for the built-in demo; or a live module,
            which is put in evaluation mode and cast in place.
        options: How to open and run the model: device, inputs, run settings.
        inputs: The inputs of one call: a dict (keyword arguments), a tuple (positional arguments) or a tensor; or a list of these,
            one for each call.

    Raises:
        NoForward: No architecture is known for the weights.
        UserError: The model, the options or the inputs are wrong in another way.

    Example:
        >>> session = de.open(options=de.Options(prompts=("one short prompt",)))
        >>> session.recipe
        Recipe(rules=())
    """
    from dtype_engine.runtime.session.opening import open_session

    return open_session(model, options, inputs)


def load_pretrained(
    folder: str | Path, *, module: nn.Module | None = None, options: Options | None = None
) -> nn.Module:
    """Load a model on the CPU with every weight in exactly the dtype that its checkpoint stores, mapped from the files.

    In contrast, `from_pretrained` converts all weights of a checkpoint to one dtype. Weights that are stored with scales are
    dequantized to the dtype that `config.json` names, because a plain module has no place for scales; `open` keeps them as stored.

    Args:
        folder: A checkpoint folder or file, such as `Session.export` writes.
        module: For a checkpoint without `config.json`: the model to load the weights into, which is changed in place.
        options: How to open the checkpoint: `trust_remote_code`, `architecture`, and the `base` of a PEFT adapter.

    Raises:
        UserError: The checkpoint can't be read, or does not fit the module.

    Example:
        >>> _ = session.cast("*.mlp", "bfloat16")
        >>> report = session.export(folder / "mixed")
        >>> model = de.load_pretrained(folder / "mixed")
        >>> sorted({str(weight.dtype) for weight in model.parameters()})
        ['torch.bfloat16', 'torch.float32']
    """
    from pathlib import Path

    from dtype_engine.runtime.building.load import load_pretrained

    return load_pretrained(Path(folder), module, options)


def mixed_dtypes(device: str = "cpu") -> AbstractContextManager[Any]:
    """Return a context manager in which a plain PyTorch model runs although its weights have several dtypes.

    Where torch raises because dtypes differ, as in a bfloat16 `linear` of float32 inputs, the inputs are cast to the weight's
    dtype, as in the measurements of `Session.drift`. All else is as in plain torch. `device` is the one on which the model runs.

    Example:
        >>> import torch
        >>> model = de.load_pretrained(folder / "mixed")
        >>> with de.mixed_dtypes():
        ...     logits = model(torch.tensor([[1, 2, 3]])).logits
        >>> logits.shape
        torch.Size([1, 3, 1024])
    """
    import torch

    from dtype_engine.runtime.modes.candidate import CandidateMode

    return CandidateMode({}, torch.float32, torch.device(device))


def __getattr__(name: str) -> Any:
    """Return the class `Session` for the name "Session". The class is imported on first use, because its module imports torch.
    Raises AttributeError for every other name.
    """
    if name == "Session":
        from dtype_engine.runtime.session.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
