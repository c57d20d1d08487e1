from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import llama_type
from dtype_engine.core.tree import TensorInfo, Tree, ancestors
from dtype_engine.recipe import History, Recipe, Rule, compile_pattern, dtype_given, make_plan, require_matches, select

CLASSES = dict.fromkeys(("a.0", "a.1", "b.0", "head"), "Linear") | {
    "": "Net",
    "a": "Block",
    "a.10": "Norm",
    "b": "Block",
}
TREE = Tree(
    [
        TensorInfo("a.0.weight", (4, 3), "float32", aliases=("head.weight",)),
        TensorInfo("a.0.bias", (4,), "float32"),
        TensorInfo("a.1.weight", (2, 2), "bfloat16"),
        TensorInfo("a.10.weight", (5,), "float32"),
        TensorInfo("a.10.running_mean", (5,), "float32", "buffer"),
        TensorInfo("a.10.steps", (), "int64", "buffer"),
        TensorInfo("b.0.weight", (3, 3), "float16"),
        TensorInfo("b.0.inv_freq", (3,), "float32", "non-persistent buffer"),
    ],
    CLASSES,
)
PATTERNS = st.sampled_from(
    [
        *("*", "a", "a.1", "a.1*", "*.weight", "*.bias", "head", "b.0", "*.inv_freq", "b.0.*"),
        *("type:Linear", "type:Norm", "a.{0..1}", "re:.*0"),
    ]
)
RULES = st.builds(Rule, PATTERNS, st.sampled_from([*dtypes.CASTABLE_DTYPES, dtypes.STORED]))
RECIPES = st.lists(RULES, max_size=6).map(tuple).map(Recipe)


def taken_by_definition(pattern: str, tensor: TensorInfo) -> bool:
    """Whether a pattern selects a tensor by definition: it matches the name of the tensor or of a module above it, under any of the
    tied names.
    """
    compiled = compile_pattern(pattern)
    if not tensor.castable:
        return False
    for name in tensor.names:
        above = list(ancestors(name))
        own = compiled.matches(name)
        by_module = any(
            (module and compiled.matches(module)) or compiled.matches_class(CLASSES.get(module)) for module in above
        )
        if tensor.persistent and (own or by_module):
            return True
        if not tensor.persistent and compiled.matches_exactly(name):
            return True
    return False


@given(RECIPES)
def test_last_rule_that_matches_a_tensor_decides_its_dtype(recipe: Recipe) -> None:
    plan = make_plan(TREE, recipe)
    deciders: list[int | None] = []
    for tensor in TREE.tensors.values():
        expected, decider = tensor.dtype, None
        for index, rule in enumerate(recipe.rules):
            if taken_by_definition(rule.pattern, tensor):
                expected, decider = dtype_given(tensor, rule.dtype), index
        assert plan.dtypes[tensor.name] == expected
        assert plan.decided_by.get(tensor.name) == decider
        deciders.append(decider)
        effects = list(plan.effects(TREE, {tensor.name}))
        assert [effect.index for effect in effects if effect.decides] == ([decider] if decider is not None else [])
    for effect, rule in zip(plan.effects(TREE), recipe.rules, strict=True):
        taken = [tensor for tensor in TREE.tensors.values() if taken_by_definition(rule.pattern, tensor)]
        assert (effect.rule, set(effect.tensors)) == (rule, set(taken))
        assert effect.decides == deciders.count(effect.index)
        assert effect.bytes_before == sum(tensor.nbytes for tensor in taken)
        if rule.dtype not in dtypes.STORAGE_DTYPES:  # those have scales besides
            width = None if rule.dtype == dtypes.STORED else dtypes.BY_NAME[rule.dtype].bits // 8
            assert effect.bytes_after == sum(tensor.numel * width if width else tensor.nbytes for tensor in taken)


@given(RECIPES)
def test_planned_bytes_are_the_sum_over_saved_tensors(recipe: Recipe) -> None:
    plan = make_plan(TREE, recipe)
    total = 0
    for tensor in TREE.tensors.values():
        if not tensor.persistent:
            continue
        dtype = plan.dtypes[tensor.name]
        if dtype in dtypes.BLOCK_FORMATS or llama_type(dtype):  # checked where codes and scales are
            total += dtypes.nbytes_in(tensor.shape, dtype)
            continue
        total += tensor.numel * dtypes.BY_NAME[dtype].bits // 8
        if dtype != tensor.dtype and dtype in dtypes.STORAGE_DTYPES:
            of_all = len(tensor.shape) < 2 or dtype.endswith(("@tensor", "@fused"))
            total += 4 * (1 if of_all else prod(tensor.shape[:-1] if dtype.endswith("@row") else tensor.shape[:1]))
    assert plan.planned_bytes == total
    assert TREE.totals(plan.dtypes)[""].total_bytes == total


@given(RECIPES, RULES)
def test_dropping_overruled_rules_does_not_change_the_plan(recipe: Recipe, rule: Rule) -> None:
    assert make_plan(TREE, recipe.then(rule)).dtypes == make_plan(TREE, Recipe((*recipe.rules, rule))).dtypes


@given(st.lists(st.one_of(RECIPES, st.sampled_from(["undo", "redo"])), max_size=20))
def test_undo_and_redo_step_through_the_pushed_recipes(steps: list[Recipe | str]) -> None:
    history, model, at = History(Recipe()), [Recipe()], 0
    for step in steps:
        if step == "undo":
            assert history.undo() == (at > 0)
            at = max(0, at - 1)
        elif step == "redo":
            assert history.redo() == (at + 1 < len(model))
            at = min(at + 1, len(model) - 1)
        elif isinstance(step, Recipe) and history.push(step):
            model[at + 1 :] = [step]
            at += 1
        assert history.current == model[at]


def test_rule_that_names_any_tied_name_casts_the_tensor() -> None:
    plan = make_plan(TREE, Recipe((Rule("head", "float16"),)))
    assert plan.dtypes["a.0.weight"] == "float16"
    assert plan.planned_bytes == plan.stored_bytes - 4 * 3 * 2


def test_rule_without_matches_suggests_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"'a\.2' matches nothing in this model; the nearest is a\."):
        require_matches(TREE, Recipe((Rule("a.2", "float16"),)))
    with pytest.raises(UserError, match="never cast"):
        require_matches(TREE, Recipe((Rule("*.steps", "float16"),)))
    with pytest.raises(UserError, match="nearest is type:Linear"):
        require_matches(TREE, Recipe((Rule("type:Linaer", "float16"),)))


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (TensorInfo("a", (2,), "complex64"), "is stored as complex64, which is never cast"),
        (TensorInfo("a", (2,), "bool"), "is stored as bool, which is never cast"),
        (TensorInfo("a", (2,), "float16", uncastable_reason="part of a weight that is packed by MLX"), "packed by MLX"),
        (TensorInfo("m.a", (2,), "float32", "non-persistent buffer"), "only a rule with its own name casts"),
    ],
)
def test_rule_that_matches_only_uncastable_tensors_is_refused_with_the_reason(tensor: TensorInfo, why: str) -> None:
    with pytest.raises(UserError, match=rf"matches only tensors that it does not cast \(first {tensor.name}: .*{why}"):
        require_matches(Tree([tensor]), Recipe((Rule("*", "bfloat16"),)))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("*.mpl", "*.mlp"), ("*.MLP", "*.mlp"), ("Model.Layers.0.mlp", "model.layers.0.mlp"), ("model.layers.*.mpl", "")],
)
def test_error_for_a_mistyped_pattern_suggests_the_nearest_name(typed: str, meant: str) -> None:
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(3) for part in ("mlp.up", "mlp.down", "norm")]
    tree = Tree([TensorInfo(name, (4, 4), "float32") for name in names])
    with pytest.raises(UserError) as refused:
        require_matches(tree, Recipe((Rule(typed, "float16"),)))
    assert str(refused.value).endswith(f"the nearest is {meant or 'model.layers.*.mlp'}")


def test_error_for_a_range_with_a_hyphen_shows_the_right_syntax() -> None:
    tree = Tree([TensorInfo(f"layers.{layer}.weight", (4, 4), "float32") for layer in range(3)])
    with pytest.raises(UserError, match=r"a range is written with two dots: layers\.\{0\.\.1\}$"):
        require_matches(tree, Recipe((Rule("layers.{0-1}", "float16"),)))


def test_leading_star_dot_matches_a_top_level_module() -> None:
    tree = Tree([TensorInfo(name, (4, 4), "float32") for name in ("lin.weight", "head.weight", "blocks.0.up.weight")])
    require_matches(tree, Recipe((Rule("*.lin", "float16"),)))
    assert select(tree, "*.lin").tensors == ("lin.weight",)
    with pytest.raises(UserError, match=r"'\*\.haed' matches nothing in this model; the nearest is head$"):
        require_matches(tree, Recipe((Rule("*.haed", "float16"),)))


def test_class_rules_are_pending_until_classes_are_known() -> None:
    plan = make_plan(Tree(TREE.tensors.values()), Recipe((Rule("type:Linear", "float16"),)))
    assert plan.pending_classes == (0,)
    assert plan.unmatched == []


@pytest.mark.parametrize(
    ("text", "rule"), [("*.mlp=bf16", Rule("*.mlp", "bfloat16")), ("re:a=b.*=half", Rule("re:a=b.*", "float16"))]
)
def test_rules_are_parsed_from_text(text: str, rule: Rule) -> None:
    assert Rule.parse(text) == rule


@pytest.mark.parametrize("text", ["*.mlp", "=bf16", "a=", "a=foo", "{a=bf16"])
def test_invalid_rules_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        Rule.parse(text)


def test_equal_recipes_on_the_same_tree_give_the_same_cached_plan() -> None:
    tree, recipe = Tree(TREE.tensors.values(), CLASSES), Recipe.of([Rule("type:Linear", "bfloat16")])
    made = make_plan(tree, recipe)
    assert make_plan(tree, Recipe.of([Rule("type:Linear", "bfloat16")])) is made
    other = make_plan(tree, recipe.then(Rule("*", "float16")))
    assert other.dtypes != made.dtypes
    assert make_plan(tree, recipe) == made  # of another recipe in between: made anew, and the same
    assert make_plan(TREE, recipe) is not made


def test_rule_accepts_every_spelling_of_a_dtype() -> None:
    assert Rule("a.0", "bf16") == Rule("a.0", "torch.bfloat16") == Rule.parse("a.0=bf16")
    assert make_plan(TREE, Recipe.of([Rule("a.0", "bf16")])).dtypes["a.0.weight"] == "bfloat16"
    with pytest.raises(UserError, match=r"unknown dtype 'blfoat16': did you mean bfloat16\?"):
        Rule("a.0", "blfoat16")
