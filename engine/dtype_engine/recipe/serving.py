"""Predicts how a runtime would treat an export of a plan. Each check names the file in the runtime's source code on which it is
based.

The runtimes are vLLM (main branch, 2026) and SGLang (a version that supports a single compressed-tensors format per checkpoint).
Both read an export in the layout in which it was written: compressed-tensors, or DeepSeek's fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.fused import fused_groups, siblings, split_groups
from dtype_engine.core.tree import Tree
from dtype_engine.recipe.fused_words import layer_name
from dtype_engine.recipe.kv_serving import cache_serving
from dtype_engine.recipe.schemes import layout
from dtype_engine.recipe.targets.base import Context

Runtime = Literal["vllm", "sglang"]
RUNTIMES: tuple[Runtime, ...] = ("vllm", "sglang")
Effect = Literal["refused", "other values", "stays wide", "slower"]

_VLLM = "vllm/model_executor/layers/quantization"
_SGLANG = "python/sglang/srt/layers/quantization"
_ROUTERS = ("gate", "router", "shared_expert_gate")
_MARLIN_OUT, _MARLIN_IN = 64, 128


@dataclass(frozen=True, slots=True)
class Finding:
    """One limitation of a runtime that affects an export of a plan, and the tensors that it affects."""

    effect: Effect
    """What the runtime does with the affected tensors. "refused": it refuses to load them. "other values": it computes with other
    values. "stays wide": it leaves them unquantized. "slower": it runs slower.
    """
    why: str
    source: str
    """The file and the function in the runtime's source code from which the limitation is known."""
    tensors: tuple[str, ...]
    """Canonical names of the affected tensors."""


@dataclass(frozen=True, slots=True)
class ServingLint:
    """How one runtime would treat an export of a plan: the limitations that affect it, and the options for its KV caches."""

    runtime: str
    quantised: int
    """Number of weights that the plan casts to a format with scales."""
    findings: tuple[Finding, ...]
    flags: tuple[str, ...] = ()
    """The options of the runtime's command line that give KV caches the plan's formats."""

    @property
    def loads(self) -> bool:
        """Whether the runtime loads the export without refusing a weight, as far as these checks can predict."""
        return not any(finding.effect == "refused" for finding in self.findings)


def lint_serving(context: Context, runtime: Runtime, activations: Literal["none", "weights"] = "none") -> ServingLint:
    """Predict why a runtime would refuse, change or slow down an export of the context's plan, and return the reasons. activations:
    the run setting `quantize_activations`.
    """
    quantised = {
        name: dtype for name, dtype in context.plan.dtypes.items()
        if dtype in dtypes.STORAGE_DTYPES and context.tree.tensors[name].castable
    }  # fmt: skip
    rules: tuple[Callable[[Context, Runtime, dict[str, str]], Iterator[Finding]], ...] = (
        _not_written, _routers, _split, _experts, _missing, _one_scale, _blocks_of_merged, _marlin, _whole_format, _asymmetric,
    )  # fmt: skip
    findings = [finding for rule in rules for finding in rule(context, runtime, quantised)]
    if activations == "none":
        findings += [*_int8(context, runtime, quantised), *_always_quantised(runtime, quantised)]
    served = cache_serving(context.tree, context.plan.caches, runtime)
    source = "vllm/config/cache.py: CacheConfig" if runtime == "vllm" else "python/sglang/srt/server_args.py"
    for problem in served.problems:
        findings.append(Finding(problem.effect, problem.why, source, problem.tensors))
    return ServingLint(runtime, len(quantised), tuple(findings), served.flags)


def _source(runtime: Runtime, file: str) -> str:
    return f"{_VLLM if runtime == 'vllm' else _SGLANG}/{file}"


def _not_written(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield findings for weights in formats for which no public layout exists. An export stores such weights in a layout that only
    this program reads, so the runtime refuses them.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    by_reason: dict[str, list[str]] = {}
    for name, dtype in quantised.items():
        if (reason := no_layout(context.tree, name, dtype, experts=True)) is not None:
            by_reason.setdefault(reason, []).append(name)
    source = _source(runtime, "compressed_tensors/compressed_tensors.py: get_quant_method")
    for reason, names in by_reason.items():
        yield Finding("refused", reason, source, tuple(names))


def no_layout(tree: Tree, name: str, dtype: str, experts: bool = False) -> str | None:
    """Return why no other program can read a weight of an export in the format `dtype`, or None if one can. name: the weight's
    name. dtype: a format with scales.

    experts: whether to treat experts that the model packs into one tensor as separate linear layers, as exports store them.
    """
    tensor, blocks = tree.tensors[name], dtypes.BY_NAME[dtype].blocks
    if not layout(dtype):
        return f"no checkpoint layout has {dtypes.short_name(dtype)}"
    if not (experts and packed_experts(tree, name)):
        if len(tensor.shape) == 2 and tensor.aliases:
            return "a tied weight is one tensor, and only linear layers are quantized"
        module = tree.modules[name.rpartition(".")[0]]
        if len(tensor.shape) != 2 or name.rpartition(".")[2] != "weight" or module.class_name != "Linear":
            return "only the weights of linear layers are quantized"
    if blocks is not None and blocks.rows == 1 and dtypes.padded(tensor.shape, dtype):
        return f"its rows are not a multiple of {blocks.columns} values"
    return None


def packed_experts(tree: Tree, name: str) -> bool:
    """Return whether the weight `name` packs all experts of a layer into one tensor, while the files store each expert
    separately.
    """
    tensor = tree.tensors[name]
    return (
        len(tensor.shape) == 3
        and "expert" in (tree.modules[name.rpartition(".")[0]].class_name or "").lower()
        and len(tensor.stored_as) > 1
        and all(stored.endswith(".weight") for stored in tensor.stored_as)
    )


def _written(context: Context, quantised: dict[str, str]) -> dict[str, str]:
    return {
        name: dtype for name, dtype in quantised.items() if no_layout(context.tree, name, dtype, experts=True) is None
    }


def _routers(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for quantized routers of mixture-of-experts models. The runtime refuses them, because it creates routers with
    `quant_config=None`, that is, without parameters for scales.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    names = tuple(name for name in quantised if layer_name(name) in _ROUTERS)
    if names:
        where = "vllm/model_executor/models/mixtral.py" if runtime == "vllm" else "python/sglang/srt/models/mixtral.py"
        yield Finding("refused", "routers are not quantized", f"{where}: ReplicatedLinear(quant_config=None)", names)


def _split(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for each group of layers that the runtime fuses, such as q, k and v, if the plan gives them different
    formats. The runtime refuses them: its `should_ignore_layer` raises if it ignores only some members of a group.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    for group in split_groups(context.plan.dtypes):
        formats = ", ".join(f"{layer_name(name)} {dtypes.short_name(context.plan.dtypes[name])}" for name in group)
        source = _source(runtime, "compressed_tensors/utils.py: should_ignore_layer, find_matched_target")
        yield Finding("refused", f"fused into one layer, and in several formats: {formats}", source, group)


def _experts(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for each layer whose experts' projections have different formats. The runtime refuses them: its
    `get_moe_method` raises.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    layers: dict[str, list[str]] = {}
    for name in context.plan.dtypes:
        if packed_experts(context.tree, name):
            layers.setdefault(name.rpartition(".")[0], []).append(name)
    for names in layers.values():
        planned = {name: context.plan.dtypes[name] for name in names}
        if len(set(planned.values())) > 1 and not quantised.keys().isdisjoint(names):
            formats = ", ".join(f"{layer_name(name)} {dtypes.short_name(dtype)}" for name, dtype in planned.items())
            source = _source(runtime, "compressed_tensors/compressed_tensors_moe.py: get_moe_method")
            yield Finding("refused", f"the experts of a layer are in several formats: {formats}", source, tuple(names))


def _missing(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for each group of quantized weights that the runtime fuses, such as q, k and v, if one of them is missing in
    the model. The runtime does not quantize such a fused layer, because its `_match_fused_layer` requires a match for every member.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    source = _source(runtime, "compressed_tensors/utils.py: _match_fused_layer")
    for group in fused_groups(quantised):
        expected = siblings(group[0])
        absent = [name for name in expected if name not in context.tree.tensors]
        if absent:
            words = ", ".join(map(layer_name, absent))
            yield Finding("stays wide", f"the model has no {words}, so the fused layer has no scheme", source, group)


def _int8(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for int8 weights whose layers have unquantized inputs. The runtime refuses them: its
    `_quantization_scheme_map_from_config` allows unquantized inputs only for float weights.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    names = tuple(name for name, dtype in _written(context, quantised).items() if layout(dtype) == "int-quantized")
    if names:
        why = "int-quantized is for W8A8, and the recipe leaves activations wide: set quantize_activations, or use int8@g128"
        source = _source(runtime, "compressed_tensors/compressed_tensors.py: _quantization_scheme_map_from_config")
        yield Finding("refused", why, source, names)


def _one_scale(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for each group of fp8 weights that the runtime fuses, if each weight has a single scale for the whole tensor.
    The runtime then quantizes all of them again with the largest scale, which changes values.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    written = _written(context, quantised)
    source = _source(runtime, "utils/w8a8_utils.py: requantize_with_max_scale" if runtime == "vllm" else "fp8_utils.py")
    for group in fused_groups(name for name, dtype in written.items() if dtype == "float8_e4m3fn@tensor"):
        yield Finding("other values", "fused, and quantized again with the largest scale of the members", source, group)


def _blocks_of_merged(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for each group of weights that the runtime fuses, if a block would span two of them: the number of rows of a
    weight is not a multiple of the number of rows of a block. The runtime refuses them: its `validate_fp8_block_shape` raises.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    written = _written(context, quantised)
    for group in fused_groups(name for name, dtype in written.items() if _block_rows(dtype) > 1):
        rows = _block_rows(written[group[0]])
        if not whole_when_fused(context.tree, group[0], written[group[0]]):
            outputs = ", ".join(f"{layer_name(name)} {context.tree.tensors[name].shape[0]}" for name in group)
            source = _source(
                runtime, "utils/fp8_utils.py: validate_fp8_block_shape" if runtime == "vllm" else "fp8_utils.py"
            )
            why = f"fused, and its outputs are not multiples of {rows}: {outputs}"
            yield Finding("refused", why, source, group)


def whole_when_fused(tree: Tree, name: str, dtype: str) -> bool:
    """Return whether no block of the format `dtype` would span two of the weights that runtimes fuse with the weight `name`: the
    number of rows of each weight is a multiple of the number of rows of a block. Returns True if the weight is not fused.
    """
    group = [member for member in siblings(name) if member in tree.tensors]
    rows = _block_rows(dtype)
    return len(group) < 2 or not any(tree.tensors[member].shape[0] % rows for member in group)


def _marlin(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for weights in group-quantized integers whose shapes Marlin, the usual kernel for this format, does not
    support. Marlin needs a multiple of 64 outputs and a multiple of 128 inputs. For other shapes, only few devices have another
    kernel.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    written = {name: dtype for name, dtype in _written(context, quantised).items() if layout(dtype) == "pack-quantized"}
    fused = {name: group for group in fused_groups(written) for name in group}
    shapes = context.tree.tensors
    names = tuple(
        name
        for name in written
        if sum(shapes[each].shape[-2] for each in fused.get(name, (name,))) % _MARLIN_OUT
        or shapes[name].shape[-1] % _MARLIN_IN
    )
    if names:
        why = f"Marlin needs outputs in multiples of {_MARLIN_OUT} and inputs in multiples of {_MARLIN_IN}: another kernel, or none"
        source = _source(
            runtime, "utils/marlin_utils.py: verify_marlin_supports_shape" if runtime == "vllm" else "marlin_utils.py"
        )
        yield Finding("slower", why, source, names)


def _whole_format(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding if the export needs several checkpoint layouts and the runtime is SGLang. SGLang supports only one layout per
    checkpoint, and not the layout `mixed-precision`.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    written = {name: layout(dtype) for name, dtype in _written(context, quantised).items()}
    if runtime == "sglang" and len(set(written.values())) > 1:
        source = _source(runtime, "compressed_tensors/compressed_tensors.py: _get_scheme_from_parts")
        why = f"several layouts in one checkpoint ({', '.join(sorted(set(written.values())))}): SGLang reads one format for all"
        yield Finding("refused", why, source, tuple(written))


def _asymmetric(context: Context, runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding for weights with zero points if the runtime is SGLang, whose `_is_wNa16_group_channel` requires symmetric
    quantization.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    names = tuple(
        name for name, dtype in _written(context, quantised).items()
        if (blocks := dtypes.BY_NAME[dtype].blocks) is not None and blocks.zero_points
    )  # fmt: skip
    if runtime == "sglang" and names:
        source = _source(runtime, "compressed_tensors/compressed_tensors.py: _is_wNa16_group_channel")
        yield Finding("refused", "zero points are not supported: int4@g128 has none", source, names)


def _always_quantised(runtime: Runtime, quantised: dict[str, str]) -> Iterator[Finding]:
    """Yield findings for weights in formats for which the runtime always quantizes activations, although the recipe does not:
    DeepSeek's fp8 layout requests this, and vLLM does so for MXFP4 and MXFP8 even without a request.

    quantised: the format of each weight that the plan quantizes, by weight name.
    """
    deepseek = tuple(name for name, dtype in quantised.items() if layout(dtype) == "fp8")
    if deepseek:
        source = _source(runtime, "fp8.py: Fp8Config, activation_scheme dynamic" if runtime == "vllm" else "fp8.py")
        why = "always served with quantized activations (W8A8): measure with --quantize-activations weights"
        yield Finding("other values", why, source, deepseek)
    names = tuple(name for name, dtype in quantised.items() if layout(dtype).startswith("mxfp"))
    if runtime == "vllm" and names:
        source = _source(runtime, "compressed_tensors/compressed_tensors.py: _get_scheme_from_parts")
        why = "always served with quantized activations (W4A4, W8A8): measure with --quantize-activations weights"
        yield Finding("other values", why, source, names)


def _block_rows(dtype: str) -> int:
    blocks = dtypes.BY_NAME[dtype].blocks
    return blocks.rows if blocks is not None else 1


def serving_lines(lint: ServingLint, shown: Callable[[Sequence[str]], str]) -> list[str]:
    """Return the findings as lines of text. shown: a function that abbreviates a list of tensor names."""
    lines = []
    for finding in lint.findings:
        lines += [f"! {finding.effect}: {finding.why}", f"    {shown(finding.tensors)}", f"    {finding.source}"]
    if not lint.findings:
        weights = "1 weight" if lint.quantised == 1 else f"{lint.quantised} weights"
        lines.append(f"no problem found: {weights} with scales, all others without")
    if lint.flags:
        lines.append(f"for the KV cache: {' '.join(lint.flags)}")
    return [f"{lint.runtime}: by its source", *lines]
