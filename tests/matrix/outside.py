"""What the figures ought to be, computed with torch, numpy and json alone: nothing here imports the program."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from scipy.stats import spearmanr
from tests.helpers.transformers_caches import cache_of
from torch import nn

from .forms import Made, Tensors


def main_output(found: Any) -> torch.Tensor:
    """The logits, else the last hidden state, else the tensor itself, in float64."""
    for name in ("logits", "last_hidden_state"):
        if hasattr(found, name):
            found = getattr(found, name)
            break
    assert isinstance(found, torch.Tensor)
    return found.to(torch.float64)


def call(module: nn.Module, inputs: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One forward pass without gradients, floating inputs in `dtype`."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    with torch.no_grad():
        if isinstance(inputs, dict):
            return main_output(module(**{name: cast(value) for name, value in inputs.items()}))
        return main_output(module(*map(cast, inputs)))


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters and persistent buffers are in `dtype`, as a checkpoint in that dtype would load."""
    twin = copy.deepcopy(module)
    kept = {id(tensor) for tensor in twin.state_dict(keep_vars=True).values()}
    for tensor in [*twin.parameters(), *twin.buffers()]:
        if tensor.is_floating_point() and id(tensor) in kept:
            tensor.data = tensor.data.to(dtype)
    return twin


def cache_bytes(made: Made, batch: int, tokens: int, itemsize: int) -> int | None:
    """Bytes of the cache after a pass over `tokens` tokens, with `itemsize` bytes for each key and value, and recurrent states as
    the model keeps them; or None where the model makes none.
    """
    config = getattr(made.module, "config", None)
    if made.module is None or not getattr(config, "use_cache", False) or config.is_encoder_decoder:
        return None
    with torch.no_grad():
        found = made.module(input_ids=torch.ones(batch, tokens, dtype=torch.int64), use_cache=True)
    cache = cache_of(found)
    return None if cache is None else sum(_layer_bytes(layer, itemsize) for layer in cache.layers)


def _layer_bytes(layer: Any, itemsize: int) -> int:
    parts = [getattr(layer, name, None) for name in ("keys", "values")]
    states = [state for name in ("conv_states", "recurrent_states") for state in getattr(layer, name, {}).values()]
    held = sum(itemsize * part.numel() for part in parts if part is not None)
    return held + sum(state.nbytes for state in states if state is not None)


def _fp8(values: torch.Tensor) -> torch.Tensor:
    """Rounded to float8_e4m3fn with a scale of 1; values beyond its largest are that one."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


def _int8_by_token(values: torch.Tensor) -> torch.Tensor:
    """Rounded to int8 with one scale for each token and head, the last dimension being the values of one."""
    scale = values.float().abs().amax(-1, keepdim=True) / 127
    scale[scale == 0] = 1
    return (torch.round(values.float() / scale).clamp(-127, 127) * scale).to(values.dtype)


_ROUNDED = {"fp8": _fp8, "int8@token": _int8_by_token}


def _with_caches(made: Made, formats: dict[str, str], layer: int | None = None) -> torch.Tensor:
    """The main output where transformers' cache keeps rounded keys or values, of one call of `Cache.update` or of all.

    formats: by "k" and "v", for those that are rounded.
    """
    from transformers.cache_utils import Cache

    plain, calls = Cache.update, 0

    def update(cache: Any, keys: torch.Tensor, values: torch.Tensor, *given: Any, **named: Any) -> Any:
        nonlocal calls
        if layer in (None, calls):
            keys = _ROUNDED[formats["k"]](keys) if "k" in formats else keys
            values = _ROUNDED[formats["v"]](values) if "v" in formats else values
        calls += 1
        return plain(cache, keys, values, *given, **named)

    with patch.object(Cache, "update", update):
        found = call(made.runs, made.inputs)
    assert calls, "the model has no cache of transformers"
    return found


def cache_drift(made: Made, formats: dict[str, str]) -> tuple[float, float]:
    """Largest and mean |Δ| of the main output with rounded caches, by "k" and "v", against the model without them."""
    return _largest_and_mean(_with_caches(made, formats) - call(made.runs, made.inputs))


def _largest_and_mean(delta: torch.Tensor) -> tuple[float, float]:
    return float(delta.abs().max()), float(delta.abs().mean())


def _decoded(made: Made, dtype: torch.dtype) -> torch.Tensor:
    """The main output token by token, where transformers' cache keeps recurrent states that are rounded to `dtype`."""
    assert isinstance(made.inputs, dict)
    cache, outputs = None, []
    for ids in made.inputs["input_ids"].split(1, dim=1):
        with torch.no_grad():
            found = made.runs(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = cache_of(found)
        assert cache is not None
        for layer in cache.layers:
            for state in getattr(layer, "recurrent_states", {}).values():
                state.copy_(state.to(dtype))
        outputs.append(main_output(found))
    return torch.cat(outputs, dim=1)


def state_drift(made: Made) -> tuple[float, float]:
    """Largest and mean |Δ| of the main output with recurrent states in bfloat16, against the model without that."""
    return _largest_and_mean(_decoded(made, torch.bfloat16) - _decoded(made, torch.float32))


def caches_alone(made: Made, form: str, distribution: bool) -> dict[str, list[float]]:
    """For "k" and "v" the drift with this part of each cache alone rounded, as `whole_drift` has it."""
    from transformers.cache_utils import Cache

    with patch.object(Cache, "update", autospec=True, side_effect=Cache.update) as update:
        reference = call(made.runs, made.inputs)
    layers = range(update.call_count)
    return {
        part: [_divergence(reference, _with_caches(made, {part: form}, layer), distribution) for layer in layers]
        for part in ("k", "v")
    }


def rows(made: Made) -> list[Any]:
    """The inputs one row of the batch at a time, whose outputs are those of the batch; a single row twice."""
    assert made.inputs is not None
    named = made.inputs if isinstance(made.inputs, dict) else dict(enumerate(made.inputs))
    batch = len(next(iter(named.values())))
    found = [{name: value[row : row + 1] for name, value in named.items()} for row in range(batch)] * (1 + (batch == 1))
    return found if isinstance(made.inputs, dict) else [tuple(row.values()) for row in found]


def drift(made: Made, dtype: torch.dtype) -> tuple[float, float]:
    """Largest and mean |Δ| of the main output, everything in `dtype` against everything in float32."""
    reference = call(made.runs, made.inputs)
    return _largest_and_mean(call(in_dtype(made.runs, dtype), made.inputs, dtype) - reference)


def whole_drift(made: Made, dtype: torch.dtype, distribution: bool) -> float:
    """Mean KL divergence in nats, or the relative squared error, of the main output with everything in `dtype`."""
    reference = call(made.runs, made.inputs)
    return _divergence(reference, call(in_dtype(made.runs, dtype), made.inputs, dtype), distribution)


def _divergence(reference: torch.Tensor, candidate: torch.Tensor, distribution: bool) -> float:
    if distribution:
        p, q = reference.log_softmax(-1), candidate.log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())
    return float((candidate - reference).square().sum() / reference.square().sum())


def module_sqnr(made: Made, dtype: torch.dtype, name: str) -> float:
    """SQNR in dB of the output of one module, everything in `dtype` against everything in float32."""
    outputs: list[torch.Tensor] = []
    twins = ((made.runs, torch.float32), (in_dtype(made.runs, dtype), dtype))
    for module, kind in twins:
        hook = module.get_submodule(name).register_forward_hook(
            lambda layer, given, output: outputs.append(first_tensor(output).double())
        )
        call(module, made.inputs, kind)
        hook.remove()
    half = len(outputs) // 2  # a module may be called several times in a pass
    reference, candidate = (torch.cat([each.flatten() for each in side]) for side in (outputs[:half], outputs[half:]))
    return 10 * math.log10(float(reference.square().sum() / (candidate - reference).square().sum()))


def first_tensor(output: Any) -> torch.Tensor:
    """The output of a module, or the first of its parts."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output


def generated(made: Made, tokens: int) -> list[int]:
    """The ids that the float32 model generates from its first input, greedily; those of the input may stand before them."""
    assert isinstance(made.inputs, dict)
    first = {name: value[:1].clone() for name, value in made.inputs.items()}  # BLIP writes its start token into them
    with torch.no_grad():
        found = made.runs.generate(**first, max_new_tokens=tokens, do_sample=False)  # type: ignore[operator]
    return list(map(int, found[0]))


def round_trip_errors(tensors: Tensors, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Largest and mean |Δ| of every tensor that a cast to `dtype` changes the dtype of."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            delta = (tensor.to(dtype).double() - tensor.double()).abs()
            found[name] = (float(delta.max()), float(delta.mean()))
    return found


def rounded_to_int8(tensor: torch.Tensor) -> torch.Tensor:
    """The values that int8 codes with one scale per output channel stand for: amax / 127, nearest, ties to even."""
    flat = tensor.reshape(tensor.shape[0], -1) if tensor.ndim > 1 else tensor.reshape(1, -1)
    scale = flat.abs().amax(dim=1, keepdim=True) / 127
    scale[scale == 0] = 1
    return (torch.round(flat / scale).clamp(-127, 127) * scale).reshape(tensor.shape)


def linears_in_int8(made: Made) -> tuple[float, float]:
    """Largest and mean |Δ| of the main output with what linear layers hold in int8, and everything computed in float32."""
    twin = copy.deepcopy(made.runs)
    held = {id(each): each for layer in twin.modules() if type(layer) is nn.Linear for each in layer.parameters()}
    for parameter in held.values():
        parameter.data = rounded_to_int8(parameter.data)
    return _largest_and_mean(call(twin, made.inputs) - call(made.runs, made.inputs))


def alone_in_int8(made: Made, distribution: bool) -> dict[str, float]:
    """For every parameter alone in int8: mean KL divergence in nats, or the relative squared error, of the main output."""
    reference = call(made.runs, made.inputs)
    found = {}
    for name, parameter in made.runs.named_parameters():
        kept = parameter.data
        parameter.data = rounded_to_int8(kept)
        candidate = call(made.runs, made.inputs)
        parameter.data = kept
        found[name] = _divergence(reference, candidate, distribution)
    return found


def rank_correlation(found: dict[str, float], truth: dict[str, float]) -> float:
    """Spearman's, over the weights that both have and that matter at all."""
    names = [name for name in truth if name in found and truth[name] > 1e-12]
    assert len(names) >= 4, (sorted(found), sorted(truth))
    return float(spearmanr([found[name] for name in names], [truth[name] for name in names]).statistic)


def first_linear(made: Made) -> str:
    """The name of the last linear layer of its own weight that a forward pass calls with floating values."""
    called: list[str] = []
    hooks = [
        child.register_forward_pre_hook(lambda module, given, name=name: called.append(name) if given else None)
        for name, child in made.runs.named_modules()
        if type(child) is nn.Linear
    ]
    call(made.runs, made.inputs)
    for hook in hooks:
        hook.remove()
    count = Counter(id(tensor) for _, tensor in made.runs.named_parameters(remove_duplicate=False))
    alone = [name for name in called if count[id(made.runs.get_submodule(name).weight)] == 1]
    return alone[-1]


def raises_in(made: Made, layer: str) -> tuple[bool, int]:
    """Whether plain torch refuses the model with one linear layer in bfloat16, and how many elements that layer is given."""
    twin = copy.deepcopy(made.runs)
    target = twin.get_submodule(layer)
    seen: list[int] = []
    target.register_forward_pre_hook(lambda module, given: seen.append(given[0].numel()))
    target.to(torch.bfloat16)
    try:
        call(twin, made.inputs)
    except RuntimeError:
        return True, seen[0]
    return False, seen[0]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
