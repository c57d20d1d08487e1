"""Finds the cast weights that a forward pass used in no call that its torch-function mode intercepted. Either the pass does not
reach them, or it uses them in another thread or in a function of TorchScript, which no mode intercepts.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch
from torch import nn

from dtype_engine.core.errors import NoForward
from dtype_engine.runtime.model.live import LiveModel


def unseen_casts(model: LiveModel, used: Collection[str], called: Collection[str]) -> frozenset[str]:
    """Return the names of the cast weights that a forward pass did not use in an intercepted call.

    used: the names of those that it used. called: the names of the submodules that it called. Raises NoForward if the model has
    functions of TorchScript, and a module that was called has an unseen weight.
    """
    unseen = frozenset(name for name, weight in model.weights.items() if weight.cast and name not in used)
    owned = [name for name in sorted(unseen) if "." not in name or name.rpartition(".")[0] in called]
    if owned and (function := _scripted(model.module)) is not None:
        raise NoForward(
            f"casts have no effect in functions of TorchScript such as {function}, and the pass uses {owned[0]} in no other call: "
            f"leave {owned[0]} as stored, or let the model call {function} as a plain Python function"
        )
    return unseen


def _scripted(module: nn.Module) -> str | None:
    """Return the name of a function of TorchScript that a module of a model, or the Python module that defines its class, holds in
    an attribute. Returns None if there is none.
    """
    parts = list(module.modules())
    namespaces = {name: vars(sys.modules[name]) for part in parts if (name := type(part).__module__) in sys.modules}
    held = (value for holder in (*map(vars, parts), *namespaces.values()) for value in list(holder.values()))
    return next((str(value.name) for value in held if isinstance(value, torch.jit.ScriptFunction)), None)
