"""Raises an error if a model uses weights in another thread than that of its forward pass. A torch-function mode acts only on its
own thread, so casts would have no effect there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from dtype_engine.core.errors import NoForward
from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.modes.op_tables import tensors_in


class _RefusesWeights(TorchFunctionMode):
    """A torch-function mode that raises NoForward for a torch call with a weight, and appends the error to `refused`."""

    def __init__(self, weights: Mapping[int, Weight], refused: list[NoForward]) -> None:
        super().__init__()
        self._weights = weights
        self._refused = refused

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_in(args, kwargs or {}):
            if (weight := self._weights.get(id(tensor))) is not None:
                self._refused.append(
                    NoForward(
                        f"the model uses {weight.info.name} in another thread ({threading.current_thread().name}) than that of its "
                        "forward pass, where casts have no effect: let forward call the layers itself, one after the other"
                    )
                )
                raise self._refused[-1]
        return func(*args, **kwargs or {})


@contextmanager
def weights_in_one_thread(weights: Mapping[int, Weight], own: Container[int] = ()) -> Iterator[None]:
    """During the `with` block, refuse torch calls with weights in threads that the forward pass starts, and in pools to which it
    submits work.

    weights: the model's weights, keyed by the `id` of the tensor. own: the idents of the threads that run forward passes; by
    default, that of the current thread. Raises NoForward, which names the weight, even if the block raises another error.
    """
    own, refused = own or {threading.get_ident()}, list[NoForward]()
    threads: Any = threading.Thread
    pools: Any = ThreadPoolExecutor
    start, submit = threads.start, pools.submit

    def guarded(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _RefusesWeights(weights, refused):
                return work(*args, **kwargs)

        return run

    submitting: list[ThreadPoolExecutor] = []
    """The pool to which the forward pass is submitting work, if any. A thread that this pool starts meanwhile is not checked, since
    it outlives the pass.
    """

    def start_guarded(thread: threading.Thread) -> None:
        run = thread.run

        def quietly() -> None:
            try:
                guarded(run)()
            except NoForward:  # the block raises it
                return

        if threading.get_ident() in own and not submitting:
            thread.run = quietly  # type: ignore[method-assign]
        start(thread)

    def submit_guarded(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() not in own:
            return submit(pool, work, *args, **kwargs)
        submitting.append(pool)
        try:
            return submit(pool, guarded(work), *args, **kwargs)
        finally:
            submitting.pop()

    threads.start, pools.submit = start_guarded, submit_guarded
    try:
        yield
    except Exception:
        if refused:
            raise refused[0] from None
        raise
    finally:
        threads.start, pools.submit = start, submit
    if refused:
        raise refused[0]
