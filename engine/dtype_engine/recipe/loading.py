"""Says which programs load an export of a plan, and why the others do not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import Runtime
from dtype_engine.core.llama_types import LLAMA_DTYPES, ONLY_GGUF, llama_type
from dtype_engine.recipe.loader_facts import Outcome as Values
from dtype_engine.recipe.loader_facts import loader_facts, misread_experts, why_not_loaded
from dtype_engine.recipe.schemes import layout
from dtype_engine.recipe.serving import lint_serving, no_layout, packed_experts
from dtype_engine.recipe.targets.base import Context

LLAMA_CPP = ("bfloat16", "float16", "mxfp4:floor")
"""The formats, besides llama.cpp's own types, that `recipe convert` writes for it without another rounding."""
OWN, TRANSFORMERS = "own", "transformers"
LOADERS = {
    TRANSFORMERS: "transformers",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    OWN: "dtype-engine",
}
"""The programs that load an export: the name in options, and the name in sentences."""

Outcome = Literal["same", "other values", "refused"]
_MARKS: dict[Outcome, str] = {"same": "✓", "other values": "≈", "refused": "✗"}
_FEW_WORDS = {
    Values.LAST_BITS: "but for the last bits",
    Values.COMPUTED_IN_BFLOAT16: "rounded to bfloat16",
}


@dataclass(frozen=True, slots=True)
class Loading:
    """How one program loads an export of a plan."""

    loader: str
    """A name in `LOADERS`."""
    outcome: Outcome
    why: str = ""
    """Why the program refuses the export, or computes with other values. "" if it does neither."""
    short: str = ""
    """`why` in a few words."""

    @property
    def words(self) -> str:
        """The program's name and a mark: `✓` (it loads the planned values), `≈` (other values), or `✗` (it refuses the export)."""
        return f"{LOADERS[self.loader]} {_MARKS[self.outcome]}"

    @property
    def words_and_reason(self) -> str:
        return f"{self.words} ({self.short})" if self.short else self.words


def loads_in(context: Context, of_transformers: bool) -> tuple[Loading, ...]:
    """Return how each program loads an export of the context's plan. of_transformers: whether the model is a checkpoint of
    transformers. An export of any other model is for this program alone.
    """
    return tuple(_BY_LOADER[name](context) for name in (LOADERS if of_transformers else (OWN,)))


def _quantised(context: Context) -> Iterator[tuple[str, str]]:
    """Yield (name, format) of each weight that the plan gives a format with scales."""
    for name, dtype in context.plan.dtypes.items():
        if dtype in dtypes.STORAGE_DTYPES and context.tree.tensors[name].castable:
            yield name, dtype


def _refused(loader: str, why: str, short: str = "") -> Loading:
    return Loading(loader, "refused", why, short or why.partition(":")[0])


def _transformers(context: Context) -> Loading:
    """Return how plain `from_pretrained` loads the export. It brings weights of several compute dtypes into the widest one, which
    keeps their values, and applies scales in it, which may round.
    """
    tree, planned, quantised = context.tree, context.plan.dtypes, dict(_quantised(context))
    if not quantised:
        return Loading(TRANSFORMERS, "same")
    experts = dict.fromkeys(name for name in planned if packed_experts(tree, name))
    wide = dtypes.widest(planned.values())
    one_layout = all(layout(dtype) == "fp8" for dtype in quantised.values())
    outcomes: list[Values] = []
    for name, dtype in quantised.items():
        if name in tree.of_draft:
            continue  # transformers does not load it
        why = no_layout(tree, name, dtype, experts=True)
        expert = name in experts
        if why is None and not one_layout:
            why = why_not_loaded(dtype, expert, bool(experts) and not expert, wide)
        if why is not None:
            return _refused(TRANSFORMERS, why)
        outcomes.append(loader_facts(dtype, expert).outcome(wide, dequantize=False))
    formats: dict[str, set[str]] = {}
    for name in experts:
        formats.setdefault(name.rpartition(".")[0], set()).add(planned[name])
    first = next(iter(quantised.values()))
    split = any(len(of_layer) > 1 for of_layer in formats.values())
    why = misread_experts({planned[name] for name in experts}, first, split)
    if why is not None:
        return _refused(TRANSFORMERS, why)
    for outcome in outcomes:
        if outcome != Values.SAME:
            words = str(outcome).format(wide=wide)
            return Loading(TRANSFORMERS, "other values", words, _FEW_WORDS.get(outcome, words))
    return Loading(TRANSFORMERS, "same")


def _runtime(context: Context, runtime: Runtime) -> Loading:
    """Return the worst finding of `lint_serving`. Layers that stay wide or run slower still have the planned values or better."""
    if not context.plan.caches and not any(True for _ in _quantised(context)):
        return Loading(runtime, "same")
    findings = lint_serving(context, runtime).findings
    outcomes: tuple[Outcome, ...] = ("refused", "other values")
    for outcome in outcomes:
        for finding in findings:
            if finding.effect == outcome:
                return Loading(runtime, outcome, finding.why, finding.few_words)
    return Loading(runtime, "same")


def _llama_cpp(context: Context) -> Loading:
    """Return whether a GGUF file that llama.cpp makes by the converted recipe has the planned values."""
    for name, dtype in context.plan.dtypes.items():
        tensor = context.tree.tensors[name]
        if tensor.castable and dtype not in (*LLAMA_CPP, *LLAMA_DTYPES, "float32", "float64", tensor.dtype):
            known = dtypes.short_name(dtype)
            why = f"a GGUF file has no {known} with these scales"
            return _refused("llama.cpp", why, short=f"no {known} in GGUF")
    return Loading("llama.cpp", "same")


def _own(context: Context) -> Loading:
    for _, dtype in _quantised(context):
        if llama_type(dtype) is not None:
            return _refused(OWN, f"no checkpoint layout has {dtype}: {ONLY_GGUF}")
        blocks = dtypes.BY_NAME[dtype].blocks
        if blocks is not None and not blocks.layout:
            return _refused(OWN, f"no checkpoint layout has {dtypes.short_name(dtype)}: it can only be measured")
    return Loading(OWN, "same")


_BY_LOADER: dict[str, Callable[[Context], Loading]] = {
    TRANSFORMERS: _transformers,
    "vllm": functools.partial(_runtime, runtime="vllm"),
    "sglang": functools.partial(_runtime, runtime="sglang"),
    "llama.cpp": _llama_cpp,
    OWN: _own,
}
