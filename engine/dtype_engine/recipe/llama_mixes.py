"""The mixes of types in which llama-quantize stores a model, such as Q4_K_M, as recipes.

The rules are those of `llama_tensor_get_type_impl` in llama.cpp's `llama-quant.cpp`, for the mixes in `MIXES`. They depend on the
names that tensors have in GGUF, on the numbers of layers and experts, and on how many heads share a key. What llama.cpp reads from
the header of a GGUF file is read from the shapes of the weights here.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.llama_types import IMATRIX, LLAMA_DTYPES, fitted
from dtype_engine.core.tree import TensorInfo, Tree, is_number, numbered_parts
from dtype_engine.recipe.minimize import minimize, numbers_pattern
from dtype_engine.recipe.pattern import generalisations
from dtype_engine.recipe.plan import make_plan
from dtype_engine.recipe.rules import Recipe, Rule

_LARGE = 80
"""The number of layers of the models that llama.cpp calls 70B."""
_FEW_EXPERTS = 8
_IN_BLOCK = re.compile(r"blk\.(\d+)\.")
_ATTN_V = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")


@dataclass(frozen=True, slots=True)
class Mix:
    """One of llama-quantize's mixes."""

    name: str
    base: str
    """The type of all tensors that the rules do not name."""
    other_with_imatrix: bool = False
    """Whether llama-quantize gives some tensors another type if it has an imatrix, so that there are two mixes."""
    with_imatrix: bool = False

    @property
    def preset(self) -> str:
        """The name of the preset that is this mix."""
        return f"{self.name}:{IMATRIX}" if self.with_imatrix else self.name

    @property
    def casts_to(self) -> tuple[str, ...]:
        """The types of the mix that any preset may have in a rounding instead."""
        return () if self.other_with_imatrix else (self.base,)

    @property
    def sentence(self) -> str:
        """What the mix is, for the user."""
        given = " with an imatrix of the calibration inputs" if self.with_imatrix else ""
        return f"llama-quantize's mix {self.name}{given}: {self.base}, and more bits for what matters most."


MIXES = (
    Mix("Q5_K_M", "q5_k"),
    Mix("Q4_K_M", "q4_k"),
    Mix("IQ4_XS", "iq4_xs", other_with_imatrix=True),
    Mix("IQ4_XS", "iq4_xs", other_with_imatrix=True, with_imatrix=True),
    Mix("Q3_K_M", "q3_k"),
)


@dataclass(frozen=True, slots=True)
class _Model:
    """What the rules of a mix need to know of a model."""

    layers: int
    values: int
    """The number of tensors that hold attention's values, alone or with queries and keys."""
    experts: int
    heads_per_key: float
    tied: bool
    falcon: bool


def mixed_rules(mix: Mix, tree: Tree) -> list[Rule]:
    """Return rules that give every tensor of a tree the type that it has in a mix."""
    sources = _gguf_sources(tree)
    model = _model_of(tree, sources)
    wanted = {
        tensor.name: fitted(_rounded(mix, mix.base), tensor.shape, tensor.name)
        for tensor in tree.tensors.values()
        if tensor.castable and tensor.persistent and tensor.name not in tree.of_draft
    }
    values = 0
    for name in sorted(sources, key=_in_order):
        type_ = _type_of(mix, name, model, values, sources[name][0].shape[-1])
        values += name.endswith(_ATTN_V)
        for tensor in sources[name]:
            wanted[tensor.name] = fitted(_rounded(mix, type_), tensor.shape, tensor.name)
    rules = _rules_by_layer(tree, wanted, _rounded(mix, mix.base))
    # What llama-quantize gives to a draft head is not known.
    rules += [Rule.make(generalisations(module)[0], dtypes.STORED) for module in tree.draft.modules]
    planned = make_plan(tree, Recipe.of(rules)).dtypes
    if any(planned[name] != dtype for name, dtype in wanted.items()):  # such as a name with a wildcard
        rules = list(minimize(tree, wanted).rules)
    return rules


def _rules_by_layer(tree: Tree, wanted: Mapping[str, str], base: str) -> list[Rule]:
    """Return rules that give most tensors their dtypes in `wanted`: one for all, and some for each layer of a block that needs
    other dtypes. They are found much faster than those of `minimize`, since the app makes all presets at once.
    """
    rules = [Rule("*", base)]
    kinds: dict[tuple[str, str], dict[int, str]] = {}
    usual: dict[tuple[str, str], str] = {}
    for name, dtype in wanted.items():
        as_base, numbered = fitted(base, tree.tensors[name].shape, name), numbered_parts(name)
        parts = name.removesuffix(".weight").split(".")
        if not numbered:
            rules += [Rule(".".join(parts), dtype)] if dtype != as_base else []
            continue
        first, rest = numbered[0], parts[numbered[0] + 1 :]
        kind = ".".join(parts[:first]), ".".join("*" if is_number(part) else part for part in rest)
        kinds.setdefault(kind, {})[int(parts[first])] = dtype
        usual[kind] = as_base
    for kind, by_number in kinds.items():
        found = Counter(by_number.values())
        most = usual[kind] if usual[kind] in found else found.most_common(1)[0][0]
        if most != usual[kind]:
            rules.append(Rule(".".join(filter(None, (kind[0], "*", kind[1]))), most))
        for dtype in dict.fromkeys(by_number.values()):
            if dtype != most:
                numbers = numbers_pattern(sorted(number for number, each in by_number.items() if each == dtype))
                rules.append(Rule(".".join(filter(None, (kind[0], numbers, kind[1]))), dtype))
    return rules


def _rounded(mix: Mix, type_: str) -> str:
    rounded = f"{type_}:{IMATRIX}"
    return rounded if mix.with_imatrix and rounded in LLAMA_DTYPES else type_


def _type_of(mix: Mix, name: str, model: _Model, number: int, width: int) -> str:
    """Return the type of a GGUF tensor before any fallback. number: how many tensors in `_ATTN_V` come before it. width: the length
    of its rows.
    """
    if name == "output.weight" or (model.tied and name == "token_embd.weight"):
        return "q8_0" if model.falcon or width % 256 else "q6_k"
    if name.endswith(_ATTN_V):
        return _of_values(mix, model, number)
    few_experts = model.experts == _FEW_EXPERTS
    if "attn_k.weight" in name and few_experts:
        return "q8_0"
    if "ffn_down" in name:
        return _of_ffn_down(mix, model, int(found[1]) if (found := _IN_BLOCK.search(name)) else 0)
    if "attn_output.weight" in name and not model.falcon:
        if few_experts:
            return mix.base if mix.name == "Q5_K_M" else "q5_k"
        return "q4_k" if mix.name == "Q3_K_M" else mix.base
    return mix.base


def _of_values(mix: Mix, model: _Model, number: int) -> str:
    type_ = mix.base
    if mix.name == "Q3_K_M":
        type_ = "q5_k" if number < 2 else "q4_k"
    elif mix.name == "IQ4_XS":
        type_ = "q5_k" if model.heads_per_key >= 4 else type_
    elif _more_bits(number, model.values):
        type_ = "q6_k"
    if model.layers == _LARGE and model.heads_per_key > 1 and type_ in ("q3_k", "q4_k"):
        type_ = "q5_k"
    return "q8_0" if model.experts == _FEW_EXPERTS else type_


def _of_ffn_down(mix: Mix, model: _Model, layer: int) -> str:
    more = _more_bits(layer, model.layers)
    if mix.name == "Q3_K_M":
        if layer < model.layers // 16:
            return "q5_k"
        return "q4_k" if more or not model.falcon else mix.base
    if mix.name == "IQ4_XS":
        return "q5_k" if layer < model.layers // 8 and not mix.with_imatrix else mix.base
    if mix.name == "Q4_K_M" and model.falcon:
        return "q6_k" if layer < model.layers // 16 else "q5_k" if more else mix.base
    return "q6_k" if more else mix.base


def _more_bits(number: int, count: int) -> bool:
    """Return whether llama.cpp gives more bits to the tensor with this number (`use_more_bits`): the first and last eighth of
    `count`, and every third between them.
    """
    return number < count // 8 or number >= 7 * count // 8 or (number - count // 8) % 3 == 2


def _model_of(tree: Tree, sources: Mapping[str, list[TensorInfo]]) -> _Model:
    blocks = [int(found[1]) for name in sources if (found := _IN_BLOCK.match(name))]
    experts = [
        tensors[0].shape[0] if len(tensors[0].shape) == 3 else len(tensors)
        for name, tensors in sources.items()
        if "ffn_down_exps" in name
    ]
    return _Model(
        layers=max(blocks, default=-1) + 1,
        values=sum(name.endswith(_ATTN_V) for name in sources),
        experts=max(experts, default=0),
        heads_per_key=_heads_per_key(sources),
        tied="output.weight" not in sources,
        falcon=(tree.root.class_name or "").startswith("Falcon"),
    )


def _heads_per_key(sources: Mapping[str, list[TensorInfo]]) -> float:
    """Return how many heads of queries share a head of keys in the first layer, or 1 if the shapes do not tell."""

    def shape_of(part: str) -> tuple[int, ...] | None:
        tensors = sources.get(f"blk.0.{part}.weight")
        return tensors[0].shape if tensors else None

    queries, keys, fused, output = map(shape_of, ("attn_q", "attn_k", "attn_qkv", "attn_output"))
    if queries and keys:
        return queries[0] / max(1, keys[0])
    if fused and output:
        of_queries = output[-1]
        return 2 * of_queries / max(1, fused[0] - of_queries)
    return 1.0


def _in_order(name: str) -> tuple[int, str]:
    """Return the key by which llama.cpp sorts tensors: those outside the blocks first, then by block."""
    found = _IN_BLOCK.match(name)
    return (int(found[1]) if found else -1), name


def _gguf_sources(tree: Tree) -> dict[str, list[TensorInfo]]:
    """Return the tensors that are packed into each GGUF tensor, by its name, with the names that any architecture may have."""
    from dtype_engine.recipe.targets.llama_cpp import names_in_gguf

    names = _any_name_map()
    found: dict[str, list[TensorInfo]] = {}
    for tensor in tree.tensors.values():
        if tensor.castable and tensor.persistent and tensor.name not in tree.of_draft:
            for name in names_in_gguf(tensor, lambda module: _looked_up(names, module)):
                found.setdefault(name, []).append(tensor)
    return found


def _looked_up(names: Mapping[str, str], module: str) -> str | None:
    parts = module.split(".")
    for index, part in enumerate(parts):
        if is_number(part):
            of_block = names.get(".".join((*parts[:index], "{bid}", *parts[index + 1 :])))
            if of_block is not None:
                return of_block.format(bid=part)
    return names.get(module)


@functools.cache
def _any_name_map() -> dict[str, str]:
    """Return the GGUF name of each module of any architecture, as the gguf package has it, with `{bid}` for the block's number."""
    import gguf
    from gguf.tensor_mapping import TensorNameMap

    found: dict[str, str] = {}
    for table in (TensorNameMap.mappings_cfg, TensorNameMap.block_mappings_cfg):
        for tensor, modules in table.items():
            for module in modules:
                found.setdefault(module, gguf.TENSOR_NAMES[tensor])  # those of text models come first
    return found
