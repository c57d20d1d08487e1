"""Presets: ready-made recipes that suit many models. The rules of a preset are computed for a given tree.

A preset contains only rules that match something in the tree, so the user can read and change them like those of any recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_cache import KV_CACHE
from dtype_engine.core.suggest import nearest
from dtype_engine.core.tree import Module, Tree, ancestors, numbered_parts
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
"""Names of modules that compute the model's output, such as `lm_head`. They are outside the numbered layers."""
KEPT_BY_MODELOPT = (
    "*block_sparse_moe.gate*", "*linear_attn.conv1d*", "*self_attention.conv1d*", "*linear_attn.in_proj_a*",
    "*linear_attn.in_proj_b*", "*lm_head*", "*mixer.conv1d*", "*mlp.gate.*", "*mlp.shared_expert_gate.*", "*output_layer*",
    "*proj_out.*", "*router*", "mtp.*", "output.*", "*embed_vision*", "*vision_tower*", "*visual*", "*vision_model*",
    "*multi_modal_projector*",
)  # fmt: skip
"""Patterns of modules that ModelOpt 0.47 does not quantize by default (`default_disabled_quantizers`). They are matched by
`fnmatch`, both in ModelOpt and here.
"""
KEPT_CLASSES = ("Embedding", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


@dataclass(frozen=True, slots=True)
class Preset:
    """A named recipe that can be computed for any model."""

    name: str
    sentence: str
    """A sentence that tells the user what the preset does."""
    needs_classes: bool
    """Whether the preset works only if the classes of the modules are known."""
    _make: Callable[[Tree], Iterable[Rule]]

    def recipe(self, tree: Tree) -> Recipe:
        """Return the preset's rules for a tree.

        Raises UserError if the preset needs module classes that are unknown, or if none of its rules matches.
        """
        if self.needs_classes and not tree.has_classes:
            raise UserError(f"preset {self.name!r} matches module classes, {NO_CLASSES}")
        recipe = Recipe.of(rule for rule in self._make(tree) if select(tree, rule.pattern))
        if not recipe.rules:
            declares = {"islands-fp32": "islands", "kv-declared": "formats of KV caches"}.get(self.name)
            why = f"it declares no {declares}" if declares else "it has no weights that the preset casts"
            raise UserError(f"preset {self.name!r} has nothing to do in this model: {why}")
        return recipe


def _all_bf16(tree: Tree) -> Iterator[Rule]:
    yield Rule("*", "bfloat16")


def _fp16_but_norms(tree: Tree) -> Iterator[Rule]:
    yield Rule("*", "float16")
    yield from (Rule(pattern, "float32") for pattern in norms(tree))


def _fp8_linears(tree: Tree) -> Iterator[Rule]:
    yield Rule("*", "bfloat16")
    yield from (Rule(pattern, LOW) for pattern in linears(tree))


def _norms_and_head(tree: Tree) -> Iterator[Rule]:
    yield from (Rule(pattern, "float32") for pattern in (*norms(tree), *heads(tree)))


def _islands(tree: Tree) -> Iterator[Rule]:
    declared = {name for name, module in tree.modules.items() if module.keep_in_fp32}
    outermost = [name for name in tree.modules if name in declared and declared.isdisjoint(ancestors(name))]
    yield from (Rule(pattern, "float32") for pattern in covering(tree, [*outermost, *tree.kept_in_fp32]))


def _modelopt(tree: Tree) -> Iterator[Rule]:
    yield from _fp8_linears(tree)
    kept = [*KEPT_BY_MODELOPT, *(f"type:{name}" for name in KEPT_CLASSES), *norms(tree)]
    yield from (Rule(pattern, "bfloat16") for pattern in dict.fromkeys(kept))


def _declared_caches(tree: Tree) -> Iterator[Rule]:
    for module, part, form in tree.kv_cache.declared:
        caches = generalisations(f"{module}.{KV_CACHE}")[0] if module else f"*.{KV_CACHE}"
        yield Rule(f"{caches}.{part}" if part else caches, form)


def _in_blocks(tree: Tree, of_linears: str, of_experts: str = "") -> Iterator[Rule]:
    """Yield rules that cast linear layers to the format `of_linears`, experts to `of_experts` (if given), and everything else to
    bfloat16.

    Also cast to bfloat16 are the layers that published checkpoints in these formats keep in 16 bits: the head, routers, vision
    towers and convolutional mixers.
    """
    yield Rule("*", "bfloat16")
    yield from (Rule(pattern, of_linears) for pattern in linears(tree))
    if of_experts:
        yield from (Rule(pattern, of_experts) for pattern in experts(tree))
    yield from (Rule(pattern, "bfloat16") for pattern in dict.fromkeys((*KEPT_BY_MODELOPT, *heads(tree))))


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("all-bf16", "Everything in bfloat16.", False, _all_bf16),
        Preset("fp16-but-norms", "Everything in float16, the norms in float32.", True, _fp16_but_norms),
        Preset(
            "fp8-linears",
            "Linear layers and experts stored in fp8 with a scale per output channel, the rest in bfloat16.",
            True,
            _fp8_linears,
        ),
        Preset("norms-head-fp32", "Norms and output head in float32, the rest as stored.", True, _norms_and_head),
        Preset("islands-fp32", "In float32 what the model's own code keeps in float32, the rest as stored.", True, _islands),
        Preset(
            "modelopt",
            "Linear layers in fp8; norms, embeddings and the layers that ModelOpt does not quantize (head, routers, "
            "convolutional mixers, vision towers) in bfloat16.",
            True,
            _modelopt,
        ),
        Preset(
            "nvfp4",
            "Linear layers in NVFP4; head, routers, vision towers and the rest in bfloat16.",
            True,
            partial(_in_blocks, of_linears="nvfp4"),
        ),
        Preset(
            "mxfp4-experts",
            "Experts in MXFP4, other linear layers in MXFP8; head, routers and the rest in bfloat16.",
            True,
            partial(_in_blocks, of_linears="mxfp8", of_experts="mxfp4"),
        ),
        Preset(
            "fp8-block",
            "Linear layers in fp8 with a scale for each 128 x 128 block (FP8_BLOCK); head, routers and the rest in bfloat16.",
            True,
            partial(_in_blocks, of_linears="fp8@128x128"),
        ),
        Preset(
            "w4a16",
            "Linear layers in int4 in groups of 128 (W4A16); head, routers and the rest in bfloat16.",
            True,
            partial(_in_blocks, of_linears="int4@g128"),
        ),
        Preset(
            "kv-declared",
            "KV caches in the formats that config.json declares for them, the rest as stored.",
            False,
            _declared_caches,
        ),
    )
}  # fmt: skip


def preset(name: str) -> Preset:
    """Return the preset with this name. For an unknown name, raises UserError, which suggests the nearest known name."""
    if name in PRESETS:
        return PRESETS[name]
    near = nearest(name, PRESETS)
    hint = f"did you mean {near}?" if near else f"use one of {', '.join(PRESETS)}"
    raise UserError(f"unknown preset {name!r}: {hint}")


def norms(tree: Tree) -> list[str]:
    """Return patterns that match the normalization layers of the tree."""
    return _by_class(tree, lambda module: "norm" in (module.class_name or "").lower() and not module.children)


def linears(tree: Tree) -> list[str]:
    """Return patterns that match the linear layers of the tree, and its experts if they are packed into one tensor."""
    return _by_class(tree, lambda module: module.class_name in LINEAR or _packed_experts(module))


def experts(tree: Tree) -> list[str]:
    """Return patterns that match the experts of the tree's mixtures of experts, whether they are packed into one tensor or separate
    modules below `experts`.
    """
    inside = [
        name
        for name, module in tree.modules.items()
        if _packed_experts(module) or (module.class_name in LINEAR and "experts" in name.split("."))
    ]
    return covering(tree, inside)


def heads(tree: Tree) -> list[str]:
    """Return patterns that match the modules of the tree which compute the model's output, such as `lm_head`."""
    return covering(
        tree,
        [name for name in tree.modules if name.rpartition(".")[2] in HEADS and not numbered_parts(name)],
    )


def _packed_experts(module: Module) -> bool:
    packed = any(len(tensor.shape) == 3 for tensor in module.tensors.values())
    return packed and "expert" in (module.class_name or "").lower()


def _by_class(tree: Tree, wanted: Callable[[Module], bool]) -> list[str]:
    """Return patterns for the modules for which `wanted` returns True: `type:CLASS` if all modules of a class are wanted, otherwise
    patterns by name.
    """
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
    """Return patterns that match the modules with these names, and no tensors outside of them. The patterns are as general as this
    allows. modules: names of modules or tensors.
    """
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


@dataclass(frozen=True, slots=True)
class PresetEffect:
    """The effect of a preset on one model, given by its module tree."""

    preset: Preset
    recipe: Recipe | None
    """The preset's recipe for the tree, or None if the preset does not apply to it."""
    reason: str = ""
    """If the preset does not apply to the tree: why, in words for the user. Otherwise ""."""
    tensors: int = 0
    """How many tensors get a dtype other than their stored dtype."""
    stored_bytes: int = 0
    """Bytes of the whole model as stored."""
    planned_bytes: int = 0
    """Bytes of the whole model under the preset."""
    needed_bytes: int = 0
    """Bytes of memory that the model needs under the preset, as computed by the function `needed` that `preset_effects` gets."""
    needs_classes: bool = False
    """Whether the preset fails to apply only because it selects modules by class and the classes are unknown."""


def preset_effects(
    tree: Tree, needed: Callable[[Plan], int] = lambda plan: plan.planned_bytes
) -> Iterator[PresetEffect]:
    """Yield the effect of every preset on the tree, in the order of `PRESETS`. On a very large model, each takes a while.

    needed: a function that returns the bytes of memory that the model needs under a plan. By default, it returns the bytes of the
    model's weights.
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
        yield PresetEffect(preset, recipe, "", changed, plan.stored_bytes, plan.planned_bytes, needed(plan))
