"""Finds the options that tell an inference runtime which formats a plan gives to KV caches, and formats that a runtime lacks.

The sources are vLLM 0.33 (`vllm/config/cache.py`, `CacheDType` and `kv_cache_dtype_skip_layers`), SGLang (`server_args.py`,
`kv_cache_dtype`) and llama.cpp (`common/arg.cpp`, `--cache-type-k` and `--cache-type-v`). For the states of recurrent layers they
are vLLM's `MambaDType` and `layers/mamba/mamba_utils.py`, SGLang's `mamba_ssm_dtype`, and llama.cpp's `llama_memory_recurrent`.

Queries: vLLM rounds them in `Attention.forward` (`model_executor/layers/attention/attention.py`) if the format begins with fp8 or
nvfp4 and has no scales for each token, and if the kernel computes in fp8: FlashAttention 3 and 4, FlashInfer on Blackwell, and
Triton on NVIDIA GPUs. The scale is the checkpoint's `q_scale`, or 1. SGLang's FlashAttention rounds them without a scale
(`layers/attention/flashattention_backend.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.kv_cache import STATES
from dtype_engine.core.kv_formats import KV_FORMATS, OF_VLLM, STOCHASTIC, stored_as, with_queries
from dtype_engine.core.tree import Tree

_FP8 = "float8_e4m3fn"
_VLLM = {
    _FP8: "fp8", "float8_e5m2": "fp8_e5m2", _FP8 + dtypes.PER_TENSOR: "fp8", "fp8@head": "fp8",
    "nvfp4": "nvfp4", "bfloat16": "bfloat16", "float16": "float16", **{name: theirs for theirs, name in OF_VLLM.items()},
}  # fmt: skip
_KEPT_WIDE = 2
_BOUNDARY = "vllm/model_executor/layers/quantization/turboquant/config.py: get_boundary_skip_layers"
"""How many layers at each end of a model vLLM leaves unrounded with TurboQuant, but at most half of them, and where it says so."""
_ROUNDS_QUERIES = {
    "vLLM": "vllm/model_executor/layers/attention/attention.py: Attention.forward",
    "SGLang": "python/sglang/srt/layers/attention/flashattention_backend.py: forward_decode",
}
"""Where each runtime rounds queries, by its title."""
_SGLANG = {_FP8: "fp8_e4m3", _FP8 + dtypes.PER_TENSOR: "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "bfloat16": "bf16"}
_LLAMA_CPP = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8@token": "q8_0", "int4@g32": "q4_0"}
_SSM_OPTION = {"vllm": "--mamba-ssm-cache-dtype", "sglang": "--mamba-ssm-dtype"}
_MODELOPT = {_FP8 + dtypes.PER_TENSOR: "FP8", "nvfp4": "NVFP4"}


@dataclass(frozen=True, slots=True)
class CacheProblem:
    """One way in which a runtime departs from the formats that a plan gives to KV caches."""

    why: str
    refused: bool
    """Whether the runtime lacks the format or the mix of formats. If False, the runtime has it, but computes other values."""
    tensors: tuple[str, ...]
    source: str = ""
    """The file and the function in the runtime's source code that has the limitation, or "" if it is the one with the option."""

    @property
    def effect(self) -> Literal["refused", "other values"]:
        return "refused" if self.refused else "other values"


@dataclass(frozen=True, slots=True)
class CacheServing:
    """How to tell one runtime the formats of KV caches, and how the runtime would depart from them."""

    flags: tuple[str, ...] = ()
    """The words of the runtime's command line, such as `--kv-cache-dtype` and `fp8`. Empty if no option can set the formats."""
    problems: tuple[CacheProblem, ...] = ()


def cache_serving(tree: Tree, caches: Mapping[str, str], runtime: str) -> CacheServing:
    """Return how to tell a runtime the formats of KV caches. caches: the rules' formats, by tensor name. runtime: "vllm", "sglang"
    or "llama.cpp".
    """
    states = {name: form for name, form in caches.items() if name.endswith(STATES)}
    tokens = {name: form for name, form in caches.items() if name not in states}
    found = [_of_states(tree, states, runtime)] if states else []
    if tokens:
        found.insert(0, _llama_cpp(tree, tokens) if runtime == "llama.cpp" else _with_one_dtype(tree, tokens, runtime))
    problems = tuple(problem for served in found for problem in served.problems)
    if any(problem.refused for problem in problems):
        return CacheServing((), problems)
    return CacheServing(tuple(flag for served in found for flag in served.flags), problems)


def _of_states(tree: Tree, caches: Mapping[str, str], runtime: str) -> CacheServing:
    """Return how to tell a runtime the formats of recurrent states, which have one dtype in all layers. caches: the rules' formats,
    by the names of states.
    """
    if runtime == "llama.cpp":
        other = tuple(name for name, form in caches.items() if form != "float32")
        return _refused("llama.cpp keeps recurrent states in float32", other) if other else CacheServing()
    title, forms = "vLLM" if runtime == "vllm" else "SGLang", dict[str, str | None]()
    for part, what in (("conv_state", "convolutions"), ("ssm_state", "recurrences")):
        states = [state for state in tree.kv_cache.states if state.part == part]
        of_part = {caches.get(state.name, state.state_dtype) for state in states}
        if len(of_part) > 1:
            return _refused(f"{title} has one dtype for the {what} of all layers", tuple(caches))
        if of_part:
            forms[part] = of_part.pop()
    recurrence, problems = forms.get("ssm_state"), list[CacheProblem]()
    flags: list[str] = []
    if recurrence is not None:
        flags = [_SSM_OPTION[runtime], "float16" if recurrence == STOCHASTIC else recurrence]
    if recurrence == STOCHASTIC:
        flags.append("--enable-mamba-cache-stochastic-rounding")
        why = "it draws other random numbers, and does so on NVIDIA GPUs alone: from compute capability 10.0 on, or by FlashInfer"
        problems.append(CacheProblem(why, False, tuple(name for name in caches if name.endswith("ssm_state"))))
    if (convolution := forms.get("conv_state")) is not None:
        if runtime == "vllm":
            flags = ["--mamba-cache-dtype", convolution, *flags]
        elif any(name.endswith("conv_state") for name in caches):
            why = f"it reads the dtype of convolutions from the environment: set SGLANG_MAMBA_CONV_DTYPE={convolution}"
            problems.append(CacheProblem(why, False, tuple(name for name in caches if name.endswith("conv_state"))))
    elif runtime == "vllm" and "conv_state" not in forms:
        flags = [
            "--mamba-cache-dtype",
            *flags[1:],
        ]  # MiniMax's lightning attention, whose state is all that a layer keeps
    return CacheServing(tuple(flags), tuple(problems))


def _with_one_dtype(tree: Tree, caches: Mapping[str, str], runtime: str) -> CacheServing:
    names, title = (_VLLM, "vLLM") if runtime == "vllm" else (_SGLANG, "SGLang")
    planned, caches = caches, {name: stored_as(form) for name, form in caches.items()}
    if problem := _unknown(caches, names, title):
        return problem
    of_layer: dict[int, set[str | None]] = {}
    for tensor in tree.kv_cache.of_tokens:
        of_layer.setdefault(tensor.layer, set()).add(caches.get(tensor.name))
    mixed = tuple(
        tensor.name for tensor in tree.kv_cache.tensors if tensor.name in caches and len(of_layer[tensor.layer]) > 1
    )
    if mixed:
        return _refused(f"{title} has one format for the keys and the values of a layer", mixed)
    layers = {layer: next(iter(forms)) for layer, forms in of_layer.items()}
    wide = [layer for layer, form in layers.items() if form is None or form in dtypes.COMPUTE_DTYPES]
    low = {form for form in layers.values() if form is not None and form not in dtypes.COMPUTE_DTYPES}
    if len(low) > 1 or (wide and low and runtime != "vllm"):
        why = f"{title} has one format for all layers" + (", but those that stay wide" if runtime == "vllm" else "")
        return _refused(why, tuple(caches))
    form = next(iter(low), None) or next(form for form in layers.values() if form is not None)
    flags: tuple[str, ...] = ("--kv-cache-dtype", names[form])
    if wide and low:
        flags += ("--kv-cache-dtype-skip-layers", *map(str, sorted(wide)))
    rounded = tuple(name for name, each in caches.items() if each == form)
    problems: list[CacheProblem] = []
    if KV_FORMATS[form].calibrated and form != "nvfp4":
        why = "its scales are read from a checkpoint: export the model with this rule"
        problems.append(CacheProblem(why, False, rounded))
    problems += _of_queries(tree, {name: planned[name] for name in rounded}, title)
    if KV_FORMATS[form].scales == "turboquant":
        problems += _of_turboquant(tree, layers)
    return CacheServing(flags, tuple(problems))


def _of_queries(tree: Tree, planned: Mapping[str, str], title: str) -> Iterator[CacheProblem]:
    """Yield a problem if the runtime also rounds queries, and the plan does not. planned: the formats by the names of the cache
    tensors.
    """
    keys = [tensor for tensor in tree.kv_cache.tensors if tensor.part in ("k", "latent") and tensor.name in planned]
    left = {tensor.name: form for tensor in keys if (form := with_queries(planned[tensor.name])) is not None}
    if left:
        form = next(iter(left.values()))
        latent = any(tensor.part == "latent" for tensor in keys)
        how = "that of latent attention is not measured" if latent else f"{form} measures it"
        why = f"{title} also rounds queries where its attention computes in fp8, as on Hopper and Blackwell GPUs: {how}"
        yield CacheProblem(why, False, tuple(left), _ROUNDS_QUERIES[title])


def _of_turboquant(tree: Tree, layers: Mapping[int, str | None]) -> Iterator[CacheProblem]:
    """Yield the problems of TurboQuant's formats in vLLM. layers: the planned format of each layer."""
    rounded = {layer for layer, form in layers.items() if form is not None and form not in dtypes.COMPUTE_DTYPES}
    names = tuple(tensor.name for tensor in tree.kv_cache.of_tokens if tensor.layer in rounded)
    why = "vLLM attends to unrounded keys and values while it processes the first part of a prompt, so it drifts less"
    yield CacheProblem(why, False, names, "vllm/v1/attention/backends/turboquant_attn.py: _prefill_attention")
    if tree.kv_cache.states:
        return  # vLLM rounds all layers with attention of a model that also has recurrent ones
    order = sorted({tensor.layer for tensor in tree.kv_cache.tensors})
    count = min(_KEPT_WIDE, len(order) // 2)
    ends = {*order[:count], *order[len(order) - count :]} & rounded
    if ends:
        at_ends = tuple(tensor.name for tensor in tree.kv_cache.of_tokens if tensor.layer in ends)
        which = "first and the last layer" if count == 1 else f"first {count} and the last {count} layers"
        why = f"vLLM leaves the {which} unrounded: give their caches bf16"
        yield CacheProblem(why, False, at_ends, _BOUNDARY)


def _llama_cpp(tree: Tree, caches: Mapping[str, str]) -> CacheServing:
    if problem := _unknown(caches, _LLAMA_CPP, "llama.cpp"):
        return problem
    flags: list[str] = []
    problems: list[CacheProblem] = []
    for option, parts in (("-ctk", ("k", "latent")), ("-ctv", ("v", "rope"))):
        names = [tensor.name for tensor in tree.kv_cache.tensors if tensor.castable and tensor.part in parts]
        forms = {caches.get(name) for name in names}
        if len(forms) > 1:
            what = "keys" if option == "-ctk" else "values"
            problems.append(CacheProblem(f"llama.cpp has one format for the {what} of all layers", True, tuple(names)))
        elif (form := next(iter(forms), None)) is not None:
            flags += [option, _LLAMA_CPP[form]]
            if form in ("int8@token", "int4@g32"):
                why = f"llama.cpp's {_LLAMA_CPP[form]} has a float16 scale for 32 values"
                problems.append(CacheProblem(why, False, tuple(names)))
    return CacheServing(() if any(problem.refused for problem in problems) else tuple(flags), tuple(problems))


def _refused(why: str, tensors: tuple[str, ...]) -> CacheServing:
    return CacheServing((), (CacheProblem(why, True, tensors),))


def _unknown(caches: Mapping[str, str], names: Mapping[str, str], title: str) -> CacheServing | None:
    unknown = tuple(name for name, form in caches.items() if form not in names)
    if not unknown:
        return None
    forms = ", ".join(sorted({caches[name].replace(_FP8, "fp8") for name in unknown}))
    return _refused(f"{title} has no KV cache in {forms}", unknown)


def modelopt_layers(tree: Tree, caches: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], tuple[str, ...]]:
    """Return ModelOpt's `kv_cache_quantized_layers`, which maps attention modules to formats, and the names of the cache tensors
    whose format ModelOpt does not have. caches: the planned formats, keyed by the name of the cache tensor.
    """
    of_module: dict[str, list[str | None]] = {}
    for tensor in tree.kv_cache.of_tokens:
        of_module.setdefault(tensor.module, []).append(_MODELOPT.get(stored_as(caches.get(tensor.name, ""))))
    layers = {}
    for module, parts in of_module.items():
        name = parts[0] if parts[0] == parts[-1] else f"{parts[0]}_K_{parts[-1]}_V"
        if None not in parts and name in ("FP8", "NVFP4", "FP8_K_NVFP4_V"):
            layers[module] = {"quant_algo": str(name)}
    wide = (*dtypes.COMPUTE_DTYPES, None)
    left = tuple(
        name
        for name, form in caches.items()
        if name.endswith(STATES) or (name.rsplit(".", 2)[0] not in layers and form not in wide)
    )
    return layers, left
