"""Presets: ready-made recipes for many models. Their rules are computed for a tree, and each rule matches something in it.

A preset with formats that take a rounding (`core.roundings`) also exists with each of them, as `w4a16:gptq`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_cache import KV_CACHE
from dtype_engine.core.kv_formats import KV_FORMATS
from dtype_engine.core.roundings import ROUNDINGS
from dtype_engine.core.suggest import nearest
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Module, Tree, ancestors, numbered_parts
from dtype_engine.recipe.llama_mixes import MIXES, Mix, mixed_rules
from dtype_engine.recipe.pattern import compile_pattern, generalisations
from dtype_engine.recipe.plan import NO_CLASSES, Plan, make_plan, select
from dtype_engine.recipe.rules import Recipe, Rule

LOW = "float8_e4m3fn"
LINEAR = ("Linear", "Conv1D")
"""Class names of linear layers. GPT-2 uses `Conv1D` as its linear layer."""
HEADS = frozenset(
    {
        "lm_head", "head", "heads", "score", "classifier", "output_layer", "embed_out", "qa_outputs", "cls", "proj_out",
        "out_proj_head", "fc", "prediction_head", "logits_head",
    }
)  # fmt: skip
"""Names of modules outside the numbered layers that compute the model's output."""
KEPT_BY_MODELOPT = (
    "*block_sparse_moe.gate*", "*linear_attn.conv1d*", "*self_attention.conv1d*", "*linear_attn.in_proj_a*",
    "*linear_attn.in_proj_b*", "*lm_head*", "*mixer.conv1d*", "*mlp.gate.*", "*mlp.shared_expert_gate.*", "*output_layer*",
    "*proj_out.*", "*router*", "mtp.*", "output.*", "*embed_vision*", "*vision_tower*", "*visual*", "*vision_model*",
    "*multi_modal_projector*",
)  # fmt: skip
"""Patterns for `fnmatch` of modules that ModelOpt 0.47 does not quantize by default (`default_disabled_quantizers`)."""
KEPT_CLASSES = ("Embedding", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


@dataclass(frozen=True, slots=True)
class Preset:
    """A named recipe that can be computed for any model."""

    name: str
    sentence: str
    _make: Callable[[Tree], Iterable[Rule]]
    needs_classes: bool = True
    """Whether the preset works only if the classes of the modules are known."""
    _declared: str = ""
    """What the model's files must declare for the preset, in words for the user, or ""."""

    def recipe(self, tree: Tree) -> Recipe:
        """Return the rules for a tree. Raises UserError if module classes are needed and unknown, or if no rule matches."""
        if self.needs_classes and not tree.has_classes:
            raise UserError(f"preset {self.name!r} matches module classes, {NO_CLASSES}")
        recipe = Recipe.of(rule for rule in self._make(tree) if select(tree, rule.pattern))
        if not recipe.rules:
            why = f"it declares no {self._declared}" if self._declared else "it has no weights that the preset casts"
            raise UserError(f"preset {self.name!r} has nothing to do in this model: {why}")
        return recipe

    @property
    def casts_to(self) -> tuple[str, ...]:
        """The dtypes to which the preset casts in every model. Empty if the model's files decide."""
        return self._make.casts_to if isinstance(self._make, (_Casts, _Mixed)) else ()

    def rounded(self, rounding: str) -> Preset | None:
        """Return this preset with a rounding of all formats that take it, or None if there are none. rounding: a key of
        `roundings.ROUNDINGS`.
        """
        taken = [dtype for dtype in self.casts_to if dtypes.rounded(dtype, rounding)]
        if not taken:
            return None
        words = f"{self.sentence.removesuffix('.')}; {', '.join(map(dtypes.short_name, taken))} rounded by {rounding}."
        return replace(
            self,
            name=f"{self.name}:{rounding}",
            sentence=words,
            _make=lambda tree: with_rounding(self._make(tree), rounding),
        )


def with_rounding(rules: Iterable[Rule], rounding: str) -> list[Rule]:
    """Return rules with each format that takes a rounding rounded so. rounding: a key of `roundings.ROUNDINGS`."""
    return [Rule(rule.pattern, dtypes.rounded(rule.dtype, rounding) or rule.dtype) for rule in rules]


def norms(tree: Tree) -> list[str]:
    """Return patterns of the normalization layers."""
    return _by_class(tree, lambda module: "norm" in (module.class_name or "").lower() and not module.children)


def linears(tree: Tree) -> list[str]:
    """Return patterns of the linear layers, and of experts that are packed into one tensor."""
    return _by_class(tree, lambda module: module.class_name in LINEAR or _packed_experts(module))


def experts(tree: Tree) -> list[str]:
    """Return patterns of the experts, whether they are packed into one tensor or separate modules below `experts`."""
    inside = [
        name
        for name, module in tree.modules.items()
        if _packed_experts(module) or (module.class_name in LINEAR and "experts" in name.split("."))
    ]
    return covering(tree, inside)


def heads(tree: Tree) -> list[str]:
    """Return patterns of the modules that compute the model's output, such as `lm_head`."""
    named = [name for name in tree.modules if name.rpartition(".")[2] in HEADS and not tree.draft.holds(name)]
    return covering(tree, [name for name in named if not numbered_parts(name)])


def _packed_experts(module: Module) -> bool:
    packed = any(len(tensor.shape) == 3 for tensor in module.tensors.values())
    return packed and "expert" in (module.class_name or "").lower()


def _by_class(tree: Tree, wanted: Callable[[Module], bool]) -> list[str]:
    """Return patterns for the modules for which `wanted` is true: `type:CLASS` if all of a class are wanted, otherwise names."""
    chosen: dict[str, list[str]] = {}
    every: dict[str, int] = {}
    for name, module in tree.modules.items():
        if module.class_name:
            every[module.class_name] = every.get(module.class_name, 0) + 1
            if wanted(module):
                chosen.setdefault(module.class_name, []).append(name)
    patterns: list[str] = []
    for class_name, names in chosen.items():
        patterns += [f"type:{class_name}"] if len(names) == every[class_name] else covering(tree, names)
    return patterns


def covering(tree: Tree, modules: Iterable[str]) -> list[str]:
    """Return patterns, as general as possible, that match the modules or tensors with these names and no other tensors."""
    waiting = list(modules)
    allowed = {tensor.name for name in waiting if name in tree.modules for tensor in tree.below(name)}
    allowed |= tree.tensors.keys() & waiting
    patterns: list[str] = []
    while waiting:
        name = waiting[0]
        for pattern in reversed(generalisations(name)):
            if set(select(tree, pattern).tensors) <= allowed:
                break
        patterns.append(pattern)
        matches = compile_pattern(pattern).matches
        waiting = [other for other in waiting[1:] if not matches(other)]
    return patterns


def _everything(tree: Tree) -> list[str]:
    return ["*"]


def _islands(tree: Tree) -> list[str]:
    declared = {name for name, module in tree.modules.items() if module.keep_in_fp32}
    outermost = [name for name in tree.modules if name in declared and declared.isdisjoint(ancestors(name))]
    return covering(tree, [*outermost, *tree.kept_in_fp32])


def _draft_head(tree: Tree) -> list[str]:
    return covering(tree, tree.draft.modules)


def _kept_by_modelopt(tree: Tree) -> Iterable[str]:
    kept = (*KEPT_BY_MODELOPT, *(f"type:{name}" for name in KEPT_CLASSES), *norms(tree), *_draft_head(tree))
    return dict.fromkeys(kept)


def _kept_wide(tree: Tree) -> Iterable[str]:
    """Return patterns of modules that published checkpoints in block formats keep in 16 bits: head, routers, vision, mixers."""
    return dict.fromkeys((*KEPT_BY_MODELOPT, *heads(tree), *_draft_head(tree)))


def _declared_caches(tree: Tree) -> Iterator[Rule]:
    for module, part, form in tree.kv_cache.declared:
        if form not in KV_FORMATS:
            raise UserError(f"config.json declares KV caches in {printable(form, 40)}, which can't be measured")
        caches = generalisations(f"{module}.{KV_CACHE}")[0] if module else f"*.{KV_CACHE}"
        yield Rule(f"{caches}.{part}" if part else caches, form)


@dataclass(frozen=True, slots=True)
class _Casts:
    """Makes the rules of a preset for a tree."""

    steps: tuple[tuple[Callable[[Tree], Iterable[str]], str], ...]
    """Pairs (function from tree to patterns, dtype). Later steps win."""

    @property
    def casts_to(self) -> tuple[str, ...]:
        return tuple(dtype for _, dtype in self.steps)

    def __call__(self, tree: Tree) -> list[Rule]:
        return [Rule(pattern, dtype) for patterns, dtype in self.steps for pattern in patterns(tree)]


@dataclass(frozen=True, slots=True)
class _Mixed:
    """Makes the rules of a mix of llama-quantize for a tree."""

    mix: Mix

    @property
    def casts_to(self) -> tuple[str, ...]:
        return self.mix.casts_to

    def __call__(self, tree: Tree) -> list[Rule]:
        return mixed_rules(self.mix, tree)


def _casts(*steps: tuple[Callable[[Tree], Iterable[str]], str]) -> _Casts:
    return _Casts(steps)


_TO_BF16 = (_everything, "bfloat16")
_WIDE = (_kept_wide, "bfloat16")
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("all-bf16", "Everything in bfloat16.", _casts(_TO_BF16), needs_classes=False),
        Preset(
            "fp16-but-norms",
            "Everything in float16, the norms in float32.",
            _casts((_everything, "float16"), (norms, "float32")),
        ),
        Preset(
            "fp8-linears",
            "Linear layers and experts stored in fp8 with a scale per output channel, the rest in bfloat16.",
            _casts(_TO_BF16, (linears, LOW), (_draft_head, "bfloat16")),
        ),
        Preset(
            "norms-head-fp32",
            "Norms and output head in float32, the rest as stored.",
            _casts((norms, "float32"), (heads, "float32")),
        ),
        Preset(
            "islands-fp32",
            "In float32 what the model's own code keeps in float32, the rest as stored.",
            _casts((_islands, "float32")),
            _declared="islands",
        ),
        Preset(
            "modelopt",
            "Linear layers in fp8; norms, embeddings and the layers that ModelOpt does not quantize (head, routers, "
            "convolutional mixers, vision towers) in bfloat16.",
            _casts(_TO_BF16, (linears, LOW), (_kept_by_modelopt, "bfloat16")),
        ),
        Preset(
            "nvfp4",
            "Linear layers in NVFP4; head, routers, vision towers and the rest in bfloat16.",
            _casts(_TO_BF16, (linears, "nvfp4"), _WIDE),
        ),
        Preset(
            "mxfp4-experts",
            "Experts in MXFP4, other linear layers in MXFP8; head, routers and the rest in bfloat16.",
            _casts(_TO_BF16, (linears, "mxfp8"), (experts, "mxfp4"), _WIDE),
        ),
        Preset(
            "fp8-block",
            "Linear layers in fp8 with a scale for each 128 x 128 block (FP8_BLOCK); head, routers and the rest in bfloat16.",
            _casts(_TO_BF16, (linears, "fp8@128x128"), _WIDE),
        ),
        Preset(
            "w4a16",
            "Linear layers in int4 in groups of 128 (W4A16); head, routers and the rest in bfloat16.",
            _casts(_TO_BF16, (linears, "int4@g128"), _WIDE),
        ),
        *(Preset(mix.preset, mix.sentence, _Mixed(mix)) for mix in MIXES),
        Preset(
            "kv-declared",
            "KV caches in the formats that config.json declares for them, the rest as stored.",
            _declared_caches,
            needs_classes=False,
            _declared="formats of KV caches",
        ),
    )
}


def preset(name: str) -> Preset:
    """Return the preset with this name, such as `w4a16` or `w4a16:gptq`. Raises UserError for an unknown name, and suggests the
    nearest one; and for a preset that has no format which takes the rounding.
    """
    if name in PRESETS:
        return PRESETS[name]
    plain, _, rounding = name.rpartition(":")
    if plain in PRESETS and rounding in ROUNDINGS:
        if (found := PRESETS[plain].rounded(rounding)) is not None:
            return found
        takes = ", ".join(each for each, row in PRESETS.items() if row.rounded(rounding))
        raise UserError(f"preset {plain!r} has no format that takes the rounding :{rounding}: it is for {takes}")
    near = nearest(name, preset_names())
    hint = f"did you mean {near}?" if near else f"use one of {', '.join(PRESETS)}"
    raise UserError(f"unknown preset {name!r}: {hint}")


def preset_names() -> list[str]:
    """Return the names of all presets, and after them those with a rounding."""
    with_roundings = (each.rounded(rounding) for each in PRESETS.values() for rounding in ROUNDINGS)
    return [*PRESETS, *(each.name for each in with_roundings if each is not None)]


def rounding_words() -> str:
    """Return a sentence for the user about the presets that also exist with a rounding."""
    takes = [name for name, each in PRESETS.items() if any(map(each.rounded, ROUNDINGS))]
    added = " or ".join(f":{rounding}" for rounding in ROUNDINGS)
    return f"{', '.join(takes)}: add {added} to round by calibration inputs, in the same bytes"


@dataclass(frozen=True, slots=True)
class PresetEffect:
    """The effect of a preset on one model."""

    preset: Preset
    recipe: Recipe | None
    """The preset's recipe, or None if the preset does not apply to the model."""
    reason: str = ""
    """Why the preset does not apply to the model, in words for the user; otherwise ""."""
    tensors: int = 0
    """How many tensors get a dtype other than their stored dtype."""
    stored_bytes: int = 0
    """Bytes of the whole model as stored."""
    planned_bytes: int = 0
    """Bytes of the whole model under the preset."""
    needed_bytes: int = 0
    """Bytes of memory that the model needs under the preset."""
    needs_classes: bool = False
    """Whether the preset fails to apply only because the classes of modules are unknown."""
    active_bytes: int | None = None
    """The bytes of weights that a token is expected to read under the preset, or None if they are unknown."""


def preset_effects(
    tree: Tree, needed: Callable[[Plan], int] = lambda plan: plan.planned_bytes
) -> Iterator[PresetEffect]:
    """Yield the effect of every preset on the tree, in the order of `PRESETS`. On a very large model, each effect takes a while.
    needed: returns the bytes of memory that the model needs under a plan; by default, the bytes of its weights.
    """
    for preset in PRESETS.values():
        try:
            recipe = preset.recipe(tree)
        except UserError as error:
            unknown = preset.needs_classes and not tree.has_classes
            yield PresetEffect(preset, None, str(error), needs_classes=unknown)
            continue
        plan = make_plan(tree, recipe)
        changed = sum(plan.dtypes[name] != tensor.dtype for name, tensor in tree.tensors.items()) + len(plan.caches)
        yield PresetEffect(
            preset,
            recipe,
            "",
            changed,
            plan.stored_bytes,
            plan.planned_bytes,
            needed(plan),
            active_bytes=tree.active_bytes(plan.dtypes),
        )
