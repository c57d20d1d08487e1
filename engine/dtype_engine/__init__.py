"""dtype-engine: cast a model's weights by pattern, run it in mixed dtypes, and measure what that did.

    import dtype_engine as de
    session = de.open("path/to/model")        # or a live nn.Module, with inputs={...} or (...,)
    session.cast("*.mlp", "bfloat16")
    session.drift().output.max_abs
    session.undo()
    session.export("folder")                  # a checkpoint in these dtypes
    model = de.load_pretrained("folder")      # and back, every weight in the dtype it is stored in

Importing this package does not import torch; opening a model does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import Cancelled, KernelError, NoForward, PatternError, UserError
from .options import Options, RunSettings
from .recipe import Recipe, Rule

if TYPE_CHECKING:
    from torch import nn

    from .model.source import Source
    from .session import Session

__version__ = "0.1.0"

__all__ = [
    "Cancelled",
    "KernelError",
    "NoForward",
    "Options",
    "PatternError",
    "Recipe",
    "Rule",
    "RunSettings",
    "UserError",
    "load_pretrained",
    "open",
]


def open(
    model: str | Source | nn.Module | None = None, *, options: Options | None = None, inputs: Any = None
) -> Session:
    """Open a model for casting and measuring; see `dtype_engine.session.open_session`."""
    from .session import open_session

    return open_session(model, options, inputs)


def load_pretrained(
    folder: str | Path, *, module: nn.Module | None = None, options: Options | None = None
) -> nn.Module:
    """A model with every weight in the dtype that its checkpoint stores; see `dtype_engine.model.load.load_pretrained`."""
    from .model.load import load_pretrained

    return load_pretrained(Path(folder), module, options)
