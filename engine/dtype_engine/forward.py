"""One forward pass of a live model, watched module by module, and stopped between two of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .errors import Cancelled, NoForward, UserError
from .execution import MixedDtypes, Widened, recurrent_arguments
from .inputs import Batch
from .model.live import LiveModel
from .storage import dtype_name

Watcher = Callable[[str, int, torch.Tensor], None]
"""Hears every module's output as the pass goes by: its name, the number of the call from 0, its first float tensor."""


def run_candidate(
    model: LiveModel, batch: Batch, compute: torch.dtype, watcher: Watcher, cancelled: Callable[[], bool]
) -> tuple[Any, float]:
    """Run the model as it is cast now. Returns its output and the seconds it took, those of the watcher left out.

    Where every weight has the same computed dtype the module runs plainly, with no mode in between. Raises
    NoForward, KernelError, Cancelled, and `RunsOtherwise` when plain running fails where the four rules may help.
    """
    batch = batch.on(model.device)
    uniform = model.uniform_dtype()
    if uniform is not None and uniform not in model.needs_rules:
        try:
            return _run(model, batch, None, watcher, cancelled)
        except (Cancelled, UserError):
            raise
        except Exception:
            model.needs_rules.add(uniform)
            raise RunsOtherwise from None
    return _run(model, batch, MixedDtypes(model.by_id, compute, model.device), watcher, cancelled)


class RunsOtherwise(Exception):
    """A plain run failed half-way: forget what the watcher heard and run once more, now under the rules."""


def run_reference(model: LiveModel, batch: Batch, watcher: Watcher, cancelled: Callable[[], bool]) -> tuple[Any, float]:
    """Run the weights as stored, in float32 (float64 where they are stored in it). Returns output and seconds.

    A model stored in float32 runs plainly on its stored tensors; any other under `Widened`. Neither makes a second
    set of weights. Raises as `run_candidate` does.
    """
    stored = {weight.info.dtype for weight in model.weights.values() if weight.info.castable}
    floats = torch.float64 if stored == {"float64"} else torch.float32
    batch = batch.on(model.device, floats)
    in_place = model.device.type == "cpu" or not any(weight.changed for weight in model.weights.values())
    if stored <= {"float32"} and in_place and "reference" not in model.needs_rules:
        try:
            with _originals(model):
                return _run(model, batch, None, watcher, cancelled)
        except (Cancelled, UserError):
            raise
        except Exception:
            model.needs_rules.add("reference")
            raise RunsOtherwise from None
    return _run(model, batch, Widened(model.by_id, model.device), watcher, cancelled)


@contextmanager
def _originals(model: LiveModel) -> Iterator[None]:
    """The stored data in place of the cast one, for a while. Only pointers move."""
    changed = [weight for weight in model.weights.values() if weight.changed]
    cast = [weight.tensor.data for weight in changed]
    try:
        for weight in changed:
            weight.tensor.data = weight.original.to(model.device)
        yield
    finally:
        for weight, data in zip(changed, cast, strict=True):
            weight.tensor.data = data


def _run(
    model: LiveModel,
    batch: Batch,
    mode: MixedDtypes | Widened | None,
    watcher: Watcher,
    cancelled: Callable[[], bool],
) -> tuple[Any, float]:
    calls: Counter[str] = Counter()
    inside: list[str] = []
    aside = 0.0

    def before(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any) -> Any:
            if cancelled():
                raise Cancelled
            inside.append(name)
            if mode is None:
                return None
            mode.module = name
            if isinstance(mode, MixedDtypes) and isinstance(module, nn.RNNBase):
                return recurrent_arguments(module, args, mode.compute)
            return None

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal aside
            inside.pop()
            if mode is not None:
                mode.module = inside[-1] if inside else ""
            tensor = first_tensor(output)
            if tensor is not None:
                started = time.perf_counter()
                with torch._C.DisableTorchFunction():
                    watcher(name, calls[name], tensor)
                aside += time.perf_counter() - started
            calls[name] += 1

        return hook

    handles = []
    for name, module in model.module.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(before(name)))
            handles.append(module.register_forward_hook(after(name)))
    started = time.perf_counter()
    try:
        with torch.no_grad(), mode if mode is not None else nullcontext():
            output = model.module(*batch.args, **batch.kwargs)
    except (Cancelled, UserError):
        raise
    except torch.OutOfMemoryError as error:
        raise NoForward(
            f"{_where(inside)}: not enough memory on {model.device} ({str(error).split('. ')[0]})"
        ) from error
    except Exception as error:
        if mode is None:
            raise
        raise NoForward(f"the forward pass failed in {_where(inside)}: {_one_line(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return output, time.perf_counter() - started - aside


def _where(inside: list[str]) -> str:
    return inside[-1] if inside else "the model"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def first_tensor(output: Any) -> torch.Tensor | None:
    """The first float tensor in a module's output: itself, or in a tuple, list, dict or model output."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    for value in values:
        found = first_tensor(value)
        if found is not None:
            return found
    return None


_MAIN_OUTPUTS = ("logits", "logits_per_image", "start_logits", "prediction_logits", "last_hidden_state", "image_embeds")


def main_output(output: Any) -> tuple[str, torch.Tensor]:
    """The output that drift is measured on: logits, else the last hidden state, else the first float tensor.

    Raises NoForward when the model returned no float tensor at all.
    """
    if isinstance(output, dict):
        for name in _MAIN_OUTPUTS:
            if isinstance(output.get(name), torch.Tensor):
                return name, output[name]
        for name, value in output.items():
            found = first_tensor(value)
            if found is not None:
                return str(name), found
    found = first_tensor(output)
    if found is None:
        raise NoForward(
            f"the model returned a {type(output).__name__} without any float tensor in it, so there is nothing to compare"
        )
    return "output", found


def reference_name(model: LiveModel) -> str:
    """The dtype that the reference computes in, for the report."""
    stored = {weight.original.dtype for weight in model.weights.values() if weight.info.castable}
    return dtype_name(torch.float64 if torch.float64 in stored else torch.float32)
