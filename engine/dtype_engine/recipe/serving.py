"""Predicts how a runtime would treat an export of a plan. Each check names the file in the runtime's source code that it follows.

The runtimes are vLLM (main branch, 2026) and SGLang (a version that supports a single compressed-tensors format per checkpoint).
Both read an export in the layout in which it was written: compressed-tensors, or DeepSeek's fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import Runtime
from dtype_engine.core.fused import fused_groups, siblings, split_groups
from dtype_engine.core.llama_types import ONLY_GGUF, llama_type
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import plural
from dtype_engine.recipe.draft_serving import draft_notes, draft_problems
from dtype_engine.recipe.fused_words import layer_name
from dtype_engine.recipe.kv_serving import cache_serving
from dtype_engine.recipe.schemes import layout
from dtype_engine.recipe.targets.base import Context

RUNTIMES: tuple[Runtime, ...] = ("vllm", "sglang")
Effect = Literal["refused", "other values", "stays wide", "slower"]

_VLLM = "vllm/model_executor/layers/quantization"
_SGLANG = "python/sglang/srt/layers/quantization"
ROUTERS = ("gate", "router", "shared_expert_gate")
"""The names of layers that choose experts."""
_MARLIN_OUT, _MARLIN_IN = 64, 128


@dataclass(frozen=True, slots=True)
class Finding:
    """One limitation of a runtime that affects an export of a plan."""

    effect: Effect
    """What the runtime does: it refuses to load the tensors, computes with other values, does not quantize them, or runs slower."""
    why: str
    source: str
    """The file and the function in the runtime's source code that has the limitation."""
    tensors: tuple[str, ...]
    """Canonical names of the affected tensors."""
    short: str = ""
    """`why` in a few words, if these are not its words before the colon."""

    @property
    def few_words(self) -> str:
        return self.short or self.why.partition(":")[0]


@dataclass(frozen=True, slots=True)
class ServingLint:
    """How one runtime would treat an export of a plan."""

    runtime: str
    quantised: int
    """Number of weights that the plan casts to a format with scales."""
    findings: tuple[Finding, ...]
    flags: tuple[str, ...] = ()
    """The options of the runtime's command line that give KV caches the plan's formats."""
    notes: tuple[str, ...] = ()
    """Sentences for the user on what the runtime does with the export's draft head."""

    @property
    def loads(self) -> bool:
        """Whether the runtime loads the export without refusing a weight, as far as can be predicted."""
        return not any(finding.effect == "refused" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class _Export:
    """An export of a plan, and the runtime that is to load it."""

    context: Context
    runtime: Runtime
    quantised: Mapping[str, str]
    """The format of each weight that the plan quantizes, by weight name."""
    written: Mapping[str, str]
    """The entries of `quantised` that the export stores in a layout that other programs read."""

    def source(self, vllm: str, sglang: str = "") -> str:
        """Return the path of a file in the runtime's source code. vllm: its path in vLLM. sglang: its path in SGLang if it
        differs.
        """
        return f"{_VLLM}/{vllm}" if self.runtime == "vllm" else f"{_SGLANG}/{sglang or vllm}"


def lint_serving(context: Context, runtime: Runtime) -> ServingLint:
    """Predict why a runtime would refuse, change or slow down an export of the context's plan, and return the reasons."""
    quantised = {
        name: dtype for name, dtype in context.plan.dtypes.items()
        if dtype in dtypes.STORAGE_DTYPES and context.tree.tensors[name].castable
    }  # fmt: skip
    refused = {name: no_layout(context.tree, name, dtype, experts=True) for name, dtype in quantised.items()}
    export = _Export(
        context, runtime, quantised, {name: quantised[name] for name in quantised if refused[name] is None}
    )
    findings = list(_not_written(export, refused))
    for check in (
        _routers, _split, _experts, _missing, _one_scale, _blocks_of_merged, _marlin, _whole_format, _asymmetric, _int8,
        _always_quantised, _draft_head,
    ):  # fmt: skip
        findings += check(export)
    served = cache_serving(context.tree, context.plan.caches, runtime)
    source = "vllm/config/cache.py: CacheConfig" if runtime == "vllm" else "python/sglang/srt/server_args.py"
    findings += [
        Finding(problem.effect, problem.why, problem.source or source, problem.tensors) for problem in served.problems
    ]
    notes = draft_notes(context.tree, runtime, context.plan.dtypes)
    return ServingLint(runtime, len(quantised), tuple(findings), served.flags, notes)


def _not_written(export: _Export, refused: Mapping[str, str | None]) -> Iterator[Finding]:
    """Yield findings for weights that no other program reads. refused: why a weight has no public layout, or None, by name."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        if reason is not None:
            by_reason.setdefault(reason, []).append(name)
    source = export.source("compressed_tensors/compressed_tensors.py: get_quant_method")
    for reason, names in by_reason.items():
        yield Finding("refused", reason, source, tuple(names))


def _routers(export: _Export) -> Iterator[Finding]:
    """Yield a finding if routers of experts are quantized: runtimes create routers without parameters for scales."""
    names = tuple(name for name in export.quantised if layer_name(name) in ROUTERS)
    if names:
        models = "vllm/model_executor" if export.runtime == "vllm" else "python/sglang/srt"
        source = f"{models}/models/mixtral.py: ReplicatedLinear(quant_config=None)"
        yield Finding("refused", "routers are not quantized", source, names)


def _split(export: _Export) -> Iterator[Finding]:
    """Yield a finding for each group of weights that runtimes fuse, such as q, k and v, if its members have different formats."""
    planned = export.context.plan.dtypes
    for group in split_groups(planned):
        why = f"fused into one layer, and in several formats: {_listed(group, planned)}"
        yield Finding(
            "refused",
            why,
            export.source("compressed_tensors/utils.py: should_ignore_layer, find_matched_target"),
            group,
            f"{', '.join(layer_name(name).removesuffix('_proj') for name in group)} differ",
        )


def _experts(export: _Export) -> Iterator[Finding]:
    """Yield a finding for each layer whose packed experts have several formats, because `get_moe_method` raises for it."""
    planned = export.context.plan.dtypes
    layers: dict[str, list[str]] = {}
    for name in planned:
        if packed_experts(export.context.tree, name):
            layers.setdefault(name.rpartition(".")[0], []).append(name)
    for names in layers.values():
        if len({planned[name] for name in names}) > 1 and not export.quantised.keys().isdisjoint(names):
            why = f"the experts of a layer are in several formats: {_listed(names, planned)}"
            source = export.source("compressed_tensors/compressed_tensors_moe.py: get_moe_method")
            yield Finding("refused", why, source, tuple(names), "experts differ")


def _listed(names: Sequence[str], planned: Mapping[str, str]) -> str:
    return ", ".join(f"{layer_name(name)} {dtypes.short_name(planned[name])}" for name in names)


def _missing(export: _Export) -> Iterator[Finding]:
    """Yield a finding for each group of fused weights if the model lacks a member, because `_match_fused_layer` requires all."""
    source = export.source("compressed_tensors/utils.py: _match_fused_layer")
    for group in fused_groups(export.quantised):
        absent = [name for name in siblings(group[0]) if name not in export.context.tree.tensors]
        if absent:
            words = ", ".join(map(layer_name, absent))
            yield Finding("stays wide", f"the model has no {words}, so the fused layer has no scheme", source, group)


def _one_scale(export: _Export) -> Iterator[Finding]:
    """Yield a finding for each group of fused fp8 weights with one scale each: runtimes requantize them with the largest."""
    source = export.source("utils/w8a8_utils.py: requantize_with_max_scale", "fp8_utils.py")
    for group in fused_groups(name for name, dtype in export.written.items() if dtype == "float8_e4m3fn@tensor"):
        why = "fused, and quantized again with the largest scale of the members"
        yield Finding("other values", why, source, group, "one scale for fused weights")


def _blocks_of_merged(export: _Export) -> Iterator[Finding]:
    """Yield a finding for each group of fused weights if a block spans two of them, because `validate_fp8_block_shape` raises."""
    tree, source = export.context.tree, export.source("utils/fp8_utils.py: validate_fp8_block_shape", "fp8_utils.py")
    for group in fused_groups(name for name, dtype in export.written.items() if _block_rows(dtype) > 1):
        dtype = export.written[group[0]]
        if not whole_when_fused(tree, group[0], dtype):
            outputs = ", ".join(f"{layer_name(name)} {tree.tensors[name].shape[0]}" for name in group)
            why = f"fused, and its outputs are not multiples of {_block_rows(dtype)}: {outputs}"
            yield Finding("refused", why, source, group)


def whole_when_fused(tree: Tree, name: str, dtype: str) -> bool:
    """Return whether no block of the format `dtype` would span two of the weights that runtimes fuse with the weight `name`."""
    group = [member for member in siblings(name) if member in tree.tensors]
    rows = _block_rows(dtype)
    return len(group) < 2 or not any(tree.tensors[member].shape[0] % rows for member in group)


def _marlin(export: _Export) -> Iterator[Finding]:
    """Yield a finding if weights have shapes that Marlin, the usual kernel for group-quantized integers, does not support."""
    written = [name for name, dtype in export.written.items() if layout(dtype) == "pack-quantized"]
    fused = {name: group for group in fused_groups(written) for name in group}
    tensors = export.context.tree.tensors
    names = tuple(
        name
        for name in written
        if sum(tensors[each].shape[-2] for each in fused.get(name, (name,))) % _MARLIN_OUT
        or tensors[name].shape[-1] % _MARLIN_IN
    )
    if names:
        why = f"Marlin needs outputs in multiples of {_MARLIN_OUT} and inputs in multiples of {_MARLIN_IN}: another kernel, or none"
        source = export.source("utils/marlin_utils.py: verify_marlin_supports_shape", "marlin_utils.py")
        yield Finding("slower", why, source, names)


def _whole_format(export: _Export) -> Iterator[Finding]:
    """Yield a finding if the export has several layouts, and the runtime is SGLang, which supports one layout per checkpoint."""
    layouts = sorted({layout(dtype) for dtype in export.written.values()})
    if export.runtime == "sglang" and len(layouts) > 1:
        source = export.source("compressed_tensors/compressed_tensors.py: _get_scheme_from_parts")
        why = f"several layouts in one checkpoint ({', '.join(layouts)}): SGLang reads one format for all"
        yield Finding("refused", why, source, tuple(export.written), "several layouts")


def _asymmetric(export: _Export) -> Iterator[Finding]:
    """Yield a finding if weights have zero points, and the runtime is SGLang, whose `_is_wNa16_group_channel` refuses them."""
    names = tuple(
        name for name, dtype in export.written.items()
        if (blocks := dtypes.BY_NAME[dtype].blocks) is not None and blocks.zero_points
    )  # fmt: skip
    if export.runtime == "sglang" and names:
        source = export.source("compressed_tensors/compressed_tensors.py: _is_wNa16_group_channel")
        yield Finding("refused", "zero points are not supported: int4@g128 has none", source, names)


def _int8(export: _Export) -> Iterator[Finding]:
    """Yield a finding if the layout `int-quantized` is used without quantized activations, which runtimes refuse."""
    names = tuple(name for name, dtype in export.written.items() if layout(dtype) == "int-quantized")
    if export.context.activations == "none" and names:
        why = "int-quantized is for W8A8, and the recipe leaves activations wide: set quantize_activations, or use int8@g128"
        source = export.source("compressed_tensors/compressed_tensors.py: _quantization_scheme_map_from_config")
        yield Finding("refused", why, source, names, "int8 needs quantized activations")


def _always_quantised(export: _Export) -> Iterator[Finding]:
    """Yield findings for formats whose activations the runtime always quantizes: DeepSeek's fp8 and, in vLLM, MX."""
    if export.context.activations != "none":
        return
    deepseek = tuple(name for name, dtype in export.quantised.items() if layout(dtype) == "fp8")
    if deepseek:
        source = export.source("fp8.py: Fp8Config, activation_scheme dynamic", "fp8.py")
        why = "always served with quantized activations (W8A8): measure with --quantize-activations weights"
        yield Finding("other values", why, source, deepseek, "activations are quantized")
    names = tuple(name for name, dtype in export.quantised.items() if layout(dtype).startswith("mxfp"))
    if export.runtime == "vllm" and names:
        source = export.source("compressed_tensors/compressed_tensors.py: _get_scheme_from_parts")
        why = "always served with quantized activations (W4A4, W8A8): measure with --quantize-activations weights"
        yield Finding("other values", why, source, names, "activations are quantized")


def _draft_head(export: _Export) -> Iterator[Finding]:
    """Yield a finding for each group of layers of a draft head that the runtime builds in another format than the export has."""
    for each in draft_problems(export.context.tree, export.runtime, export.quantised):
        yield Finding("refused", each.why, each.source, each.tensors, each.short)


def _block_rows(dtype: str) -> int:
    blocks = dtypes.BY_NAME[dtype].blocks
    return blocks.rows if blocks is not None else 1


def no_layout(tree: Tree, name: str, dtype: str, experts: bool = False) -> str | None:
    """Return why no other program can read the weight `name` in `dtype` (a format with scales), or None if another one can.
    experts: whether to treat experts that the model packs into one tensor as separate linear layers, as exports store them.
    """
    tensor, blocks = tree.tensors[name], dtypes.BY_NAME[dtype].blocks
    if llama_type(dtype) is not None:
        return f"no checkpoint layout has {dtype}: {ONLY_GGUF}"
    if not layout(dtype):
        return f"no checkpoint layout has {dtypes.short_name(dtype)}"
    if not (experts and packed_experts(tree, name)):
        if len(tensor.shape) == 2 and tensor.aliases:
            return "a tied weight can't have scales: only linear layers are quantized"
        module = tree.modules[name.rpartition(".")[0]]
        if len(tensor.shape) != 2 or name.rpartition(".")[2] != "weight" or module.class_name != "Linear":
            return "only the weights of linear layers are quantized"
    if blocks is not None and blocks.rows == 1 and dtypes.padded(tensor.shape, dtype):
        return f"its rows are not a multiple of {blocks.columns} values"
    return None


def packed_experts(tree: Tree, name: str) -> bool:
    """Return whether the weight `name` packs all experts of a layer into one tensor, while the files store each separately."""
    tensor = tree.tensors[name]
    return (
        len(tensor.shape) == 3
        and "expert" in (tree.modules[name.rpartition(".")[0]].class_name or "").lower()
        and len(tensor.stored_as) > 1
        and all(stored.endswith(".weight") for stored in tensor.stored_as)
    )


def serving_lines(lint: ServingLint, shown: Callable[[Sequence[str]], str]) -> list[str]:
    """Return the findings as lines of text. shown: returns a short text for a list of tensor names."""
    lines = [f"{lint.runtime}: by its source"]
    for finding in lint.findings:
        lines += [f"! {finding.effect}: {finding.why}", f"    {shown(finding.tensors)}", f"    {finding.source}"]
    if not lint.findings:
        lines.append(f"no problem found: {plural(lint.quantised, 'weight')} with scales, all others without")
    lines += lint.notes
    if lint.flags:
        lines.append(f"for the KV cache: {' '.join(lint.flags)}")
    return lines
