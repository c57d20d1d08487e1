"""The casts that `torch.autocast` makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dtype_engine.runtime.model.torch_private import TO_COPY, TorchDispatchMode
from dtype_engine.runtime.modes.mixed import MixedDtypeMode, implicit_cast
from dtype_engine.runtime.modes.op_tables import Arguments


class AutocastCastRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the casts that `torch.autocast` makes inside an operation, which no function mode can see."""

    def __init__(self, rules: MixedDtypeMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rules = rules

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rules, target = self.rules, kwargs.get("dtype")
        if func is TO_COPY and rules.operation and rules.record is not None:
            source = args[0]
            if (
                target is not None
                and target != source.dtype
                and source.is_floating_point()
                and target.is_floating_point
            ):
                rules.record(implicit_cast(rules.module, rules.operation, source, target, False))
        return func(*args, **kwargs)
