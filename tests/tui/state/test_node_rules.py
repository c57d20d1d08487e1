"""What the prompt and the Recipe pane say of a rule over weights that another program quantized."""

from __future__ import annotations

from tests.helpers.recording_engine import demo_tree

from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_tui.state.node_rules import counts_by_rule, effects_on, never_cast_count
from dtype_tui.state.preview import preview
from dtype_tui.widgets.prompts import preview_words

WHY = "part of a weight that is quantized by gptq, 4 bit"
PARTS = {"qweight": "int32", "scales": "float16", "qzeros": "int32"}
TREE = Tree(
    [
        TensorInfo("norm.weight", (8,), "bfloat16"),
        *(TensorInfo(f"mlp.up.{name}", (8,), dtype, uncastable_reason=WHY) for name, dtype in PARTS.items()),
        TensorInfo("ids", (8,), "int64"),
    ]
)


def test_preview_of_a_rule_says_why_quantized_weights_are_not_cast() -> None:
    planned = make_plan(TREE, Recipe())
    words = preview_words(preview(TREE, planned, Rule("mlp", "float16")))
    assert words == f"casts nothing: leaves 3 tensors as stored (first mlp.up.qweight: {WHY})"
    assert preview_words(preview(TREE, planned, Rule("*", "float16"))).startswith("matches 1 tensor ")


def test_tensors_below_a_module_that_can_never_be_cast_are_counted() -> None:
    plan = make_plan(TREE, Recipe((Rule("*", "float16"),)))
    assert [never_cast_count(TREE, node) for node in ("", "mlp", "mlp.up.scales", "norm", "ids")] == [3, 3, 1, 0, 0]
    assert effects_on(TREE, plan, "mlp") == []
    assert [effect.decides for effect in effects_on(TREE, plan, "")] == [1]


def test_tensors_of_a_node_are_counted_by_the_rule_that_decides_them() -> None:
    assert counts_by_rule(TREE, make_plan(TREE, Recipe((Rule("*", "float16"),))), "") == [
        "1 tensor by rule 1",
        "1 as stored",
        "3 never cast",
    ]
    tree = demo_tree()
    plan = make_plan(tree, Recipe((Rule("*.mlp", "float16"), Rule("*.down_proj", "bfloat16"))))
    assert counts_by_rule(tree, plan, "") == ["12 tensors by rule 1", "6 by rule 2", "38 as stored"]
    assert counts_by_rule(tree, plan, "model.layers.0.mlp.down_proj") == ["1 tensor by rule 2"], (
        "rule 1 matches it, too"
    )
    assert counts_by_rule(tree, plan, "model.norm.weight") == ["1 tensor as stored"]


def test_preview_of_a_rule_counts_tensors_and_lists_overridden_rules() -> None:
    tree = demo_tree()
    plan = make_plan(tree, Recipe((Rule("*.self_attn", "float16"), Rule("*.{gate,up}_proj", "bfloat16"))))
    shown = preview(tree, plan, Rule("model.layers.{0..1}", "bfloat16"))
    assert [shown.count_below(tree.modules[name]) for name in ("", "model.layers", "model.layers.0.mlp")] == [18, 18, 3]
    assert shown.count_below(tree.modules["model.layers.2"]) == 0
    assert shown.overrides == "8 tensors of rule 1", "the other rule's dtype is the same"
    assert " · overrides 8 tensors of rule 1" in preview_words(shown)
    assert preview(tree, plan, Rule("model.norm", "int8")).overrides == ""
    assert preview(tree, plan, Rule("model.layers.0", "int8")).overrides == "4 tensors of rule 1, 2 of rule 2"
    assert preview(tree, plan, Rule("model.layers.0.self_attn.q_proj", "stored")).overrides == "1 tensor of rule 1"
