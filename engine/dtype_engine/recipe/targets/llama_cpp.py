"""Converts recipes for llama.cpp: lines for `llama-quantize --tensor-type-file`, with the names that tensors have in GGUF.

llama-quantize searches for a pattern anywhere in a name (`std::regex_search`), so the patterns written here are anchored. It
applies the lines only if the requested type is a quantized one, so Q8_0 is requested. There is a line for every tensor that can be
quantized, because Q8_0 applies to tensors without a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import IMATRIX, LLAMA_DTYPES, LLAMA_TYPES, fitted, llama_type
from dtype_engine.core.tree import TensorInfo, is_number
from dtype_engine.recipe.kv_serving import cache_serving
from dtype_engine.recipe.targets.base import Context, Conversion, Match, Part, Target, UnsupportedList, tool_regex
from dtype_engine.recipe.targets.name_patterns import regexes

_TYPES = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0", "int8@tensor": "q8_0",
    "mxfp4:floor": "mxfp4", "mxfp4": "mxfp4", "mxfp4:rceil": "mxfp4", "mxfp4:even": "mxfp4",
    **{name: name for name in LLAMA_TYPES},
}  # fmt: skip
_READABLE = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_DEFAULT = "q8_0"
_BLOCKED = (_DEFAULT, "mxfp4")
_BLOCK = 32
"""How many values share a scale in the types of `_BLOCKED`. The length of a row must be a multiple of this number."""
_ODD_ROWS = "f16"
"""The type that replaces a type in `_BLOCKED` if the rows have another length."""
_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv\.weight"
    r"|indexer\.[kq]_proj\.weight|time_mix_\w+\.weight|attn_rel_b\.weight|\.position_embd|^position_embd|^token_types"
    r"|\.rel_pos|\.patch_embd|\.patch_merger"
)
"""Matches the GGUF names of matrices that llama-quantize never quantizes (`tensor_allows_quantization`)."""
_ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "deepseek_v3": "deepseek2", "deepseek_v2": "deepseek2", "gpt_neox": "gptneox",
}  # fmt: skip
"""Maps the `model_type` in config.json to the gguf package's name of the architecture if the two differ."""


NEEDS_IMATRIX = (
    "the recipe rounds by an imatrix: give llama-quantize --imatrix, and the file that --imatrix of this command writes"
)


class LlamaCpp(Target):
    name = "llama.cpp"
    matcher = "regex_search in GGUF tensor names, in lower case"
    precedence = "first"
    writes_caches = True
    roundings = (IMATRIX,)

    def write(self, context: Context) -> Conversion:
        losses = UnsupportedList()
        lines: dict[str, set[str]] = {}
        sources = _sources(context, losses)
        for name, infos in sources.items():
            if _quantisable(name, infos):
                lines.setdefault(_type_of(context, infos, losses), set()).add(name)
            else:
                why = "GGUF files keep vectors, norms, routers and positions in float32"
                _add(losses, context, infos, "float32", why)
        patterns = [
            (f"^{regex}$", type_)
            for type_ in dict.fromkeys(_TYPES.values())
            for regex in regexes(sorted(lines.get(type_, ()), key=list(sources).index), set(sources))
        ]
        text = "".join(f"{pattern}={type_}\n" for pattern, type_ in patterns)
        notes = (
            "llama-quantize --tensor-type-file FILE in.gguf out.gguf Q8_0, where in.gguf was made with --outtype f32",
            *self.wide_inputs_note(context, LLAMA_DTYPES),
        )
        if any(llama_type(context.given.dtypes[name]) is not None for name in context.roundings):
            notes += (NEEDS_IMATRIX,)
        for type_ in ("iq2_xs", "iq2_xxs"):
            if "token_embd.weight" in lines.get(type_, ()) and "output.weight" in sources:
                notes += (
                    f"llama-quantize stops at token_embd.weight in {type_}, for which no imatrix has anything: give it another "
                    "type",
                )
        served = cache_serving(context.tree, context.plan.caches, self.name)
        for problem in served.problems:
            for name in problem.tensors if problem.refused else ():
                losses.add(name, context.plan.caches.get(name, dtypes.STORED), dtypes.STORED, problem.why)
        if served.flags:
            notes += (
                f"start llama-server with {' '.join(served.flags)}",
                *(problem.why for problem in served.problems),
            )
        return Conversion(text, tuple(patterns), None, losses.result(), notes)

    def given_to_draft(self, tensor: TensorInfo) -> str:
        return fitted(_DEFAULT, tensor.shape, tensor.name)

    def matchable(self, context: Context) -> frozenset[str]:
        return frozenset(
            tensor
            for tensor, names in gguf_tensors(context).items()
            if names and all(_quantisable(name, [context.tree.tensors[tensor]]) for name in names)
        )

    def match(self, context: Context, pattern: str) -> Match:
        if pattern.startswith("type:"):
            return Match(problem="classes are not known")
        if re.search(r"\s", pattern):
            return Match(problem="a pattern in this file ends at the first space")
        search = tool_regex(pattern.removeprefix("re:").lower(), pattern, "search")
        tensors = gguf_tensors(context)
        taken = frozenset(tensor for tensor, names in tensors.items() if any(map(search, names)))
        return Match(taken, None if taken else "the pattern must match GGUF names, such as blk.0.attn_q.weight")


def _sources(context: Context, losses: UnsupportedList) -> dict[str, list[TensorInfo]]:
    """Return the tensors that are packed into each GGUF tensor, by its name. Tensors without a GGUF name are added to `losses`."""
    sources: dict[str, list[TensorInfo]] = {}
    for tensor, names in gguf_tensors(context).items():
        info = context.tree.tensors[tensor]
        if not names and info.persistent:
            losses.add(tensor, context.plan.dtypes[tensor], _DEFAULT, "no GGUF name is known for it")
        elif not names:
            _add(losses, context, [info], info.dtype, "non-persistent buffers are not in a GGUF file")
        for name in names:
            sources.setdefault(name, []).append(info)
    return sources


def _type_of(context: Context, infos: list[TensorInfo], losses: UnsupportedList) -> str:
    """Return the llama.cpp type of the GGUF tensor that holds the tensors `infos`, and add to `losses` those whose dtype or scales
    then differ from the plan.
    """
    types = {_TYPES.get(context.plan.dtypes[info.name]) for info in infos}
    type_ = types.pop() if len(types) == 1 else None
    odd = infos[0].shape[-1] % _BLOCK != 0
    fallback = _ODD_ROWS if odd else _DEFAULT
    if type_ is None:
        mixed = "it becomes part of a GGUF tensor with weights of other planned dtypes"
        _add(losses, context, infos, _READABLE.get(fallback, fallback), mixed if types else "GGUF has no such type")
        return fallback
    if odd and type_ in _BLOCKED:
        _add(losses, context, infos, _READABLE[_ODD_ROWS], f"{type_} needs rows of a multiple of {_BLOCK} values")
        return _ODD_ROWS
    if llama_type(type_) is not None and {type_} == {context.plan.dtypes[each.name] for each in infos}:
        return type_  # the plan knows which rows a type needs
    if type_ == _DEFAULT:
        _add(losses, context, infos, _DEFAULT, f"{_DEFAULT} has a float16 scale for every {_BLOCK} values", "scale")
    elif type_ in _BLOCKED:
        _add(losses, context, infos, "mxfp4:floor", "llama.cpp rounds the exponent down", "scale")
    return type_


def _add(
    losses: UnsupportedList, context: Context, infos: Iterable[TensorInfo], instead: str, why: str, part: Part = "dtype"
) -> None:
    for info in infos:
        if (planned := context.plan.dtypes[info.name]) != instead:
            losses.add(info.name, planned, instead, why, part)


def _quantisable(name: str, infos: list[TensorInfo]) -> bool:
    matrix = all(any(size > 1 for size in info.shape[:-1]) for info in infos)
    return matrix and name.endswith(".weight") and not _KEPT.search(name)


def gguf_tensors(context: Context) -> dict[str, tuple[str, ...]]:
    """Return the GGUF names of each tensor that rules can change, or () if GGUF lacks the tensor. Raises UserError for an unknown
    architecture.
    """
    blocks = 1 + max(
        (int(part) for name in context.tree.modules for part in name.split(".") if is_number(part)), default=0
    )
    lookup = name_map(context.title, context.model_type, blocks)
    return {tensor.name: names_in_gguf(tensor, lookup) if tensor.persistent else () for tensor in context.in_scope()}


def name_map(title: str, model_type: str | None, blocks: int) -> Callable[[str], str | None]:
    """Return a function that takes a module's name in transformers and returns its name in GGUF, or None if GGUF has none. Both
    names are without `.weight`.

    title: the model's name, for errors. blocks: the number of its layers. Raises UserError for an unknown architecture.
    """
    import gguf

    if model_type is None:
        raise UserError(f"{title}: GGUF names depend on the architecture, and there is no model_type in a config.json")
    spelled = model_type.removesuffix("_text")
    wanted = {_ARCHITECTURES.get(spelled, spelled), spelled.replace("_", ""), spelled.replace("_", "-")}
    for architecture, name in gguf.MODEL_ARCH_NAMES.items():
        if name in wanted:
            return gguf.get_tensor_name_map(architecture, blocks).get_name
    raise UserError(
        f"{title}: no GGUF names are known for model type {model_type!r}; a newer gguf package may have them"
    )


def names_in_gguf(tensor: TensorInfo, lookup: Callable[[str], str | None]) -> tuple[str, ...]:
    """Return the names of the GGUF tensors that hold a tensor's values, or () if there are none. There are two names if
    transformers packs a gate and an up projection into the tensor. All experts of a layer have the same name, because GGUF packs
    them into one tensor. lookup: from `name_map`.
    """
    module, _, local = tensor.name.rpartition(".")
    keys: tuple[str, ...]
    if local in ("weight", "bias"):
        keys, suffix = (re.sub(r"\.experts\.\d+\.", ".experts.", module),), f".{local}"
    elif module.endswith(".experts"):
        keys = tuple(f"{module}.{part}" for part in (("gate_proj", "up_proj") if local == "gate_up_proj" else (local,)))
        suffix = ".weight"
    else:
        keys, suffix = (tensor.name,), ""
    looked_up = [lookup(key) for key in keys]
    return tuple(name + suffix for name in looked_up if name) if all(looked_up) else ()


TARGET = LlamaCpp()
