"""Measures the memory that a forward pass needs in addition to the weights, or estimates it without computing anything.

A measurement adds up what torch's allocator hands out and gets back, workspace inside kernels included. An estimate counts the live
bytes of all storages that operations create. It does not see the workspace of a kernel, whose size depends on the machine: for
example, attention on a CPU uses some hundred KiB for each thread, and a product in bfloat16 may use its result in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.errors import NoForward
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.replaced import replaced
from dtype_engine.recipe.serving_memory import interpolated
from dtype_engine.results.serving_memory import ActivationMemory
from dtype_engine.runtime.building.constructed_buffers import default_dtype
from dtype_engine.runtime.building.load import build_on_meta
from dtype_engine.runtime.building.shapes import refuse_misshapen
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.libraries.torch_private import (
    GROUPED_PRODUCT,
    SAFE_SOFTMAX,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    own_tensors,
    storage_id,
)
from dtype_engine.runtime.modes.kv_cache import CACHE_FIELDS

_LOOPED = (64, 128, 256)
"""Context lengths in tokens. If a model loops over tokens, as Mamba does without its kernels, estimates for longer contexts are
extrapolated from these, because following such a loop takes milliseconds per token.
"""
_MODULE = "dtype_engine.module:"
"""The prefix of the marks in the profiler's record that name the module which begins to run."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the live bytes of the storages that operations create, and their peak. known: the tensors that exist beforehand, whose
    storages do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = {storage_id(tensor): 0 for tensor in known}
        self._now = self.peak = self.operations = 0
        self.running = self.module = ""
        """`running` is the name of the module that is running, and `module` the name of the module that ran at the peak."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SAFE_SOFTMAX:
            with self:
                return _safe_softmax(*args)
        if func is GROUPED_PRODUCT and isinstance(args[0], FakeTensor) and args[0].dim() == 2 < args[1].dim():
            # Torch describes it in bfloat16 only, and kernels of CPUs know it in every dtype.
            result = args[0].new_empty(len(args[0]), args[1].shape[-1])
        else:
            result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and (key := storage_id(tensor)) not in self._counted:
                storage = tensor.untyped_storage()
                self._counted[key] = storage.nbytes()
                self._now += storage.nbytes()
                weakref.finalize(storage, self._forget, key)
        if self._now > self.peak:
            self.peak, self.module = self._now, self.running
        return result

    def _forget(self, key: int) -> None:
        self._now -= self._counted.pop(key, 0)

    def enter(self, module: str) -> None:
        """Note that the module named `module` begins to run."""
        self.running = module


def _safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute `SAFE_SOFTMAX` by separate operations, as its kernel in torch does, so that `LiveBytes` sees each of them."""
    found = torch.softmax(scores, dim, dtype)
    masked = scores.isneginf()
    return found.masked_fill_(masked.all(dim, keepdim=True), 0.0)


@contextmanager
def _naming_modules(module: nn.Module, on_module: Callable[[str], None]) -> Iterator[None]:
    """In the `with` block, call `on_module` with the name of each submodule of `module` that begins to run."""
    with ExitStack() as hooks:
        for name, child in module.named_modules():
            hooks.enter_context(child.register_forward_pre_hook(lambda *_, name=name: on_module(name)))
        yield


def measured(module: nn.Module, context: int, batch: int) -> ActivationMemory:
    """Run the model, as it is cast now, over `batch` sequences of `context` random tokens, and return the peak of the memory that
    the pass needs. Raises NoForward if the pass fails, or if it is not known how to make inputs of this size for the model.
    """
    return _pass(module, _inputs(module, context, batch), context, batch, estimated=False)[0]


class ActivationEstimator:
    """Estimates the peak of the memory of forward passes of any size, without computing values or allocating this memory. It is an
    upper bound: a real pass may leave out work that depends on values, such as applying a mask that masks nothing. Every tensor
    counts in the dtype that the pass gives it: norms, softmax and routers are mostly in float32.

    module: a model without data, on the meta device, whose parameters and buffers this object replaces. dtype: the dtype in which
    the passes compute.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module.eval()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:  # replaces the tensors by fake ones on the CPU
            for child in self._module.modules():
                for name, tensor, kind in list(own_tensors(child)):
                    # A buffer that no file holds, such as the angles of a rotary embedding, keeps its dtype under every recipe.
                    cast = tensor.is_floating_point() and kind != "non-persistent buffer"
                    fake = torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    setattr(child, name, nn.Parameter(fake, requires_grad=False) if is_parameter else fake)

    def estimate(self, context: int, batch: int) -> ActivationMemory:
        """Return an upper bound for a pass over `batch` sequences of `context` tokens. Raises NoForward if the operations of a pass
        depend on values, which are unknown without running it, or if it is not known how to make inputs of this size for the model.
        """
        if context > _LOOPED[-1] and self._loops:
            known = {length: self.estimate(length, batch) for length in _LOOPED}
            nbytes = interpolated({length: found.nbytes for length, found in known.items()}, context)
            return dataclasses.replace(known[_LOOPED[-1]], nbytes=round(nbytes), context=context)
        return self._estimate(context, batch)[0]

    @functools.cached_property
    def _loops(self) -> bool:
        """Whether the model loops over tokens, so that the number of operations of a pass grows with the context."""
        with suppress(NoForward):
            few, more = (self._estimate(context, 1)[1] for context in _LOOPED[:2])
            return more > 1.5 * few
        return False

    def _estimate(self, context: int, batch: int) -> tuple[ActivationMemory, int]:
        """Return the estimate, and the number of operations of the pass."""
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        with replaced(logger, "disabled", True), self._mode:  # what it would log of a failure is also in the exception
            return _pass(self._module, _inputs(self._module, context, batch), context, batch, estimated=True)


def estimator_of(checkpoint: Checkpoint, options: ModelOptions, dtype: str) -> ActivationEstimator:
    """Return an estimator for passes of a checkpoint's model that compute in `dtype`. Only headers are read. Raises NoForward if
    the architecture is unknown or its tensors have other shapes.
    """
    with default_dtype(torch_dtype(dtype)):
        module, placements = build_on_meta(checkpoint, options)
    refuse_misshapen(module, checkpoint, placements, checkpoint.path)
    return ActivationEstimator(module, torch_dtype(dtype))


def _pass(
    module: nn.Module, inputs: Mapping[str, Any], context: int, batch: int, estimated: bool
) -> tuple[ActivationMemory, int]:
    """Run a pass, or follow it without data if `estimated`. Returns (the memory that the pass needs, the number of its operations).
    If torch's profiler measures the pass, operations are not counted, and the number is 0.
    """
    operations = 0
    known = [*module.parameters(), *module.buffers(), *filter(torch.is_tensor, inputs.values())]
    what = f"the memory of a pass over {context:,} tokens can't be {'estimated' if estimated else 'measured'}"
    with failures_as(NoForward, what), torch.no_grad():
        if estimated or known[0].device.type not in ("cpu", "cuda"):
            live = LiveBytes(known)
            with _naming_modules(module, live.enter), live:
                output = module(**inputs)
            peak, at, operations = live.peak, live.module, live.operations
        else:
            if known[0].device.type == "cuda":
                module(**_inputs(module, 1, 1))  # cuBLAS keeps the workspace that its first product allocates
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise, torch's profiler writes to standard error
            with (
                _naming_modules(module, _mark),
                profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
            ):
                output = module(**inputs)
            peak, at = _peak_of(profiler)
    # A view, such as the last tokens of a window, keeps its whole storage: the rest counts as activations.
    before = set(map(storage_id, known))
    cache = sum(tensor.nbytes for tensor in _cache_tensors(output) if storage_id(tensor) not in before)
    return ActivationMemory(peak - cache, at, context, batch, estimated), operations


def _mark(module: str) -> None:
    with record_function(_MODULE + module):
        pass


def _peak_of(profiler: profile) -> tuple[int, str]:
    """Return (the peak of the bytes that torch's allocators handed out, the name of the module that ran at the peak), from the
    profiler's trace file: no other public interface reports every allocation, including the workspace inside kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    held: dict[tuple[int, int], int] = {}
    """The bytes that the pass has allocated, keyed by (number of the device type, address)."""
    now = peak = 0
    running = at_peak = ""
    for event in sorted(events, key=lambda event: event.get("ts", 0.0)):
        if event["name"].startswith(_MODULE):
            running = event["name"].removeprefix(_MODULE)
        elif event["name"] == "[memory]":
            block, nbytes = (event["args"]["Device Type"], event["args"]["Addr"]), event["args"]["Bytes"]
            if nbytes > 0:
                held[block] = nbytes
                now += nbytes
            else:
                now -= held.pop(block, 0)
        if now > peak:
            peak, at_peak = now, running
    return peak, at_peak


def _cache_tensors(output: Any) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()

    def collect(value: Any) -> None:
        if id(value) in seen:
            return
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
            return
        seen.add(id(value))
        if type(value).__module__.startswith("transformers") and hasattr(value, "__dict__"):
            value = vars(value)
        for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
            collect(item)

    fields = getattr(output, "__dict__", {})  # as attributes, transformers warns of the names that it no longer uses
    for name in (*CACHE_FIELDS, "state"):  # RWKV's
        collect(fields.get(name))
    return list(found.values())


def _inputs(module: nn.Module, context: int, batch: int) -> dict[str, Any]:
    """Return arguments for one pass of a transformers model. Raises NoForward if the size of an argument is unknown."""
    config: Any = getattr(module, "config", None)
    like = next((tensor for tensor in module.parameters() if tensor.is_floating_point()), torch.empty(0))
    names = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", "input_ids")
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    words = getattr(text, "vocab_size", None)
    given: dict[str, Any] = {}
    if words is not None and ("input_ids" in names or "decoder_input_ids" in names):
        tokens = torch.randint(0, words, (batch, context), device=like.device)
        given |= {name: tokens for name in ("input_ids", "decoder_input_ids") if name in names}
        if "decoder_input_ids" in names and not getattr(config, "is_encoder_decoder", False):
            del given["decoder_input_ids"]
    if main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        given.pop("input_ids", None)
        given[main] = like.new_zeros(batch, config.num_mel_bins, 2 * config.max_source_positions)
    elif main == "pixel_values" and isinstance(size := getattr(config, "image_size", None), int):
        given[main] = like.new_zeros(batch, getattr(config, "num_channels", 3), size, size)
    elif not given or main not in given:
        raise NoForward(f"nothing says how large the inputs {main!r} of {type(module).__name__} are")
    if "use_cache" in names:
        given["use_cache"] = True
    if "logits_to_keep" in names:
        given["logits_to_keep"] = 1  # as `generate` does: only the last token's logits are needed
    return given
