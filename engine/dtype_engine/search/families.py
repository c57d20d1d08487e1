"""Defines which formats a search may choose from, by the program that is to load the export: transformers, an inference runtime
(vLLM, SGLang, llama.cpp), or this program alone ("own").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.fused import FUSED_LAYERS
from dtype_engine.core.hints import hint
from dtype_engine.core.kv_formats import SCANNED
from dtype_engine.core.llama_types import LLAMA_DTYPES, fitted
from dtype_engine.core.text import printable
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.core.units import plural
from dtype_engine.recipe import select, tensor_bytes
from dtype_engine.recipe.loader_facts import EXPERTS_ALONE, why_not_loaded
from dtype_engine.recipe.loading import LLAMA_CPP, OWN, TRANSFORMERS
from dtype_engine.recipe.serving import no_layout, packed_experts, whole_when_fused
from dtype_engine.results.scan import ScanReport, WeightScore

_ROUTERS = ("router", "gate", "wg", "shared_expert_gate")
_MOST_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class Family:
    """The formats that a program can load side by side in one export."""

    name: str
    dtypes: tuple[str, ...]
    """The dtypes that are scanned for the program if the user names none."""
    only_these: bool
    """Whether the program loads no other dtypes than `dtypes` and `more`, with any rounding, apart from the stored ones."""
    refusal: Callable[[Loadable, str, str], str | None] = lambda loadable, name, dtype: None
    """A function of (model, weight's name, format with scales) that returns why the program can't load it, or None."""
    fuses: bool = False
    """Whether the program fuses sibling layers, such as q, k and v, into one, so that they must have one format."""
    more: tuple[str, ...] = ()
    """Further dtypes that the program loads, which are scanned only if the user names them."""
    nbytes: Callable[[TensorInfo, str], int] = tensor_bytes
    """A function of (tensor, dtype) that returns the bytes of the tensor in the program's files."""
    packs_experts: bool = False
    """Whether the program packs all experts, so that it reads some formats only if all experts of a model have the same one."""


def _by_transformers(loadable: Loadable, name: str, dtype: str) -> str | None:
    if (reason := no_layout(loadable.tree, name, dtype, experts=True)) is not None:
        return reason
    expert = packed_experts(loadable.tree, name)
    return why_not_loaded(dtype, expert, bool(loadable.experts) and not expert, loadable.wide)


def _by_runtime(loadable: Loadable, name: str, dtype: str) -> str | None:
    if stays_wide(loadable.tree, name):
        return "runtimes keep norms, biases and routers in 16 bits"
    if (reason := no_layout(loadable.tree, name, dtype)) is not None:
        return reason
    if not whole_when_fused(loadable.tree, name, dtype):
        return "a block would span two of the weights that the runtime fuses"
    return None


def _by_llama_cpp(loadable: Loadable, name: str, dtype: str) -> str | None:
    given = fitted(dtype, loadable.tree.tensors[name].shape, name)
    return None if given == dtype else f"llama-quantize would make it {given}"


def _gguf_bytes(tensor: TensorInfo, dtype: str) -> int:
    """Return the bytes of a tensor in a GGUF file, where vectors and the matrices that are never quantized are in float32."""
    wide = tensor.castable and fitted("q8_0", tensor.shape, tensor.name) == "float32"
    return tensor_bytes(tensor, "float32" if wide else dtype)


_LLAMA = tuple(name for name in LLAMA_DTYPES if name in dtypes.UNROUNDED_DTYPES)
_SCANNED = ("bfloat16", "float16", "float8_e4m3fn", "int8")
_VLLM = ("bfloat16", "float8_e4m3fn", "fp8@128x128", "mxfp8", "int8@g128", "nvfp4", "mxfp4", "int4@g128")
_SGLANG = ("bfloat16", "float8_e4m3fn", "fp8@128x128")
FAMILIES = {
    family.name: family
    for family in (
        Family(TRANSFORMERS, _SCANNED, only_these=False, refusal=_by_transformers, packs_experts=True),
        # vLLM can read each layer in a different format. SGLang reads one storage layout for the whole checkpoint, so its only
        # quantized formats are the two fp8 formats that share a layout.
        Family("vllm", _VLLM, only_these=True, refusal=_by_runtime, fuses=True),
        Family("sglang", _SGLANG, only_these=True, refusal=_by_runtime, fuses=True),
        # llama.cpp has only the formats that `recipe convert` can write exactly. Its own types need a package, and take long.
        Family("llama.cpp", LLAMA_CPP, only_these=True, refusal=_by_llama_cpp, nbytes=_gguf_bytes, more=_LLAMA),
        Family(OWN, _SCANNED, only_these=False),
    )
}
"""The programs to whose formats a search can be limited, by name."""


class Loadable:
    """Tells in which dtypes a program loads a model's weights. family: a name in `FAMILIES`. scanned: the dtypes that an export may
    have besides the stored ones.
    """

    def __init__(self, tree: Tree, family: str, scanned: Iterable[str]) -> None:
        self.tree = tree
        self.family = FAMILIES[family]
        self.scanned = [dtype for dtype in scanned if not dtype.startswith(SCANNED)]
        self.experts = tuple(name for name in tree.tensors if packed_experts(tree, name))
        """The names of weights that pack experts. The files store each expert by itself."""
        self.wide = dtypes.widest({*self.scanned, *(tensor.dtype for tensor in tree.tensors.values())})
        """The widest dtype that `config.json` of the export can name."""

    def refusal(self, name: str, dtype: str) -> str | None:
        """Return why the program does not load the weight `name` in `dtype`, or None if it does. A rounding changes nothing."""
        if dtype == self.tree.tensors[name].dtype:
            return None
        dtype = dtypes.unrounded(dtype)
        if self.family.only_these and dtype not in (*self.family.dtypes, *map(dtypes.unrounded, self.family.more)):
            return f"it is not among {', '.join(map(dtypes.short_name, self.family.dtypes))}"
        return self.family.refusal(self, name, dtype) if dtype in dtypes.STORAGE_DTYPES else None

    def nbytes(self, planned: Mapping[str, str]) -> int:
        """Return the bytes of all tensors in the program's files. planned: the dtypes of weights by name; others are as stored."""
        return sum(
            self.family.nbytes(tensor, planned.get(name, dtypes.STORED))
            for name, tensor in self.tree.tensors.items()
            if tensor.counted
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """Patterns for weights that need the same format, with any rounding, if they are in the same parent module."""
        if not self.family.fuses:
            return ()
        return tuple(pattern for names in FUSED_LAYERS if select(self.tree, pattern := f"*.{{{','.join(names)}}}"))

    @property
    def alike(self) -> tuple[str, ...]:
        """The names of weights that all need the same format, with any rounding, in the whole model."""
        if not self.family.packs_experts or not set(EXPERTS_ALONE).intersection(map(dtypes.unrounded, self.scanned)):
            return ()
        return self.experts

    def require(self, dtype: str, names: Collection[str], asked: str) -> None:
        """Raise UserError if the program loads none of the weights `names` in `dtype`. asked: the user's words, for the message."""
        if not names or any(self.refusal(name, dtype) is None for name in names):
            return
        first = next(iter(names))
        raise UserError(
            f"{asked}: {self.family.name} loads no such weight, first {printable(first)}: {self.refusal(first, dtype)}; "
            f"{hint('own-formats')}"
        )


def require_loadable(tree: Tree, family: str, scanned: Collection[str]) -> None:
    """Raise UserError for the first of the dtypes `scanned` in which the program `family` loads no weight of a model."""
    loadable = Loadable(tree, family, scanned)
    for dtype in loadable.scanned:
        loadable.require(dtype, tree.searched, dtypes.short_name(dtype))


def stays_wide(tree: Tree, name: str) -> bool:
    """Return whether runtimes keep this weight in at least 16 bits, because it is a small and sensitive norm, bias or router."""
    shape = tree.tensors[name].shape
    module = name.rpartition(".")[0]
    local = module.rpartition(".")[2]
    return len(shape) < 2 or (
        local in _ROUTERS and len(shape) == 2 and shape[0] <= _MOST_EXPERTS and shape[0] < shape[1]
    )


def loaded_scores(tree: Tree, report: ScanReport, family: str) -> tuple[ScanReport, str]:
    """Remove the scores of weights in dtypes in which the program `family` can't load them. Returns (the remaining scan, a sentence
    about the removed scores or "" if there are none).
    """
    loadable = Loadable(tree, family, report.dtypes)
    kept: list[WeightScore] = []
    left_out: list[WeightScore] = []
    for score in report.weights:
        refused = score.name in tree.tensors and loadable.refusal(score.name, score.dtype) is not None
        (left_out if refused else kept).append(score)
    if not left_out:
        return report, ""
    first, weights = left_out[0], len({score.name for score in left_out})
    sentence = (
        f"{plural(len(left_out), 'score')} of {plural(weights, 'weight')} left out, first {printable(first.name)} in "
        f"{dtypes.short_name(first.dtype)}, because {family} does not load them so: "
        f"{loadable.refusal(first.name, first.dtype)}; {hint('own-formats')}"
    )
    return dataclasses.replace(report, weights=tuple(kept)), sentence
