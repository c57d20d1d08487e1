"""Records the casts that `torch.autocast` makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dtype_engine.runtime.libraries.torch_private import TO_COPY, TorchDispatchMode
from dtype_engine.runtime.modes.op_tables import Arguments
from dtype_engine.runtime.modes.promotion import cast_of
from dtype_engine.runtime.modes.weight_mode import WeightMode


class AutocastCastRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the casts of `torch.autocast`. These are made inside torch's operations, where no torch-function
    mode sees them. mode: the mode of the forward pass, whose `record` is called with each cast.
    """

    def __init__(self, mode: WeightMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mode, target = self.mode, kwargs.get("dtype")
        if func is TO_COPY and mode.operation and mode.record is not None:
            source = args[0]
            if (
                target is not None
                and target != source.dtype
                and source.is_floating_point()
                and target.is_floating_point
            ):
                mode.record(cast_of(source, target, mode.operation, mode, torch_raises=False))
        return func(*args, **kwargs)
