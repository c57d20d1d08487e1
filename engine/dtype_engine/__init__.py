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

from dtype_engine.core.errors import Cancelled, KernelError, NoForward, PatternError, UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.version import __version__
from dtype_engine.recipe import Recipe, Rule

if TYPE_CHECKING:
    from torch import nn

    from dtype_engine.checkpoint.source import Source
    from dtype_engine.runtime.session import Session

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
    "__version__",
    "load_pretrained",
    "open",
]


def open(
    model: str | Source | nn.Module | None = None, *, options: Options | None = None, inputs: Any = None
) -> Session:
    """Open a model for casting and measuring; see `dtype_engine.runtime.session.open_session`."""
    from dtype_engine.runtime.session import open_session

    return open_session(model, options, inputs)


def load_pretrained(
    folder: str | Path, *, module: nn.Module | None = None, options: Options | None = None
) -> nn.Module:
    """A model with every weight in the dtype that its checkpoint stores; see `dtype_engine.runtime.model.load.load_pretrained`."""
    from dtype_engine.runtime.model.load import load_pretrained

    return load_pretrained(Path(folder), module, options)
