"""`inspect`'s texts: folded layers, depth, order, the largest modules and the kinds of layers."""

from __future__ import annotations

import pytest
from tests.engine.runtime.model.test_same_plan import refusal

from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.text import Name
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.reports.text_inspect import TreeView, kinds_text, largest_text, tree_text


def _tree(layers: int = 6, odd: int | None = 4) -> Tree:
    """Return a model of `layers` layers. The layer `odd` has an additional bias."""
    tensors = [TensorInfo(Name("embed.weight"), (256, 4), "float32")]
    for layer in range(layers):
        tensors.append(TensorInfo(Name(f"layers.{layer}.mlp.weight"), (4, 4), "float32"))
        tensors.append(TensorInfo(Name(f"layers.{layer}.norm.weight"), (4,), "float32"))
        if layer == odd:
            tensors.append(TensorInfo(Name(f"layers.{layer}.mlp.bias"), (4,), "float32"))
    return Tree(tensors)


def _labels(text: str) -> list[str]:
    return [
        line.split("  [")[0].strip() if "[" in line else line.strip().split("  ")[0] for line in text.splitlines()[1:]
    ]


def test_inspect_folds_alike_layers() -> None:
    tree = _tree()
    text = tree_text(tree, make_plan(tree, Recipe()), "net", TreeView(fold=True))
    lines = [line.strip() for line in text.splitlines()]
    (folded,) = [line for line in lines if "like" in line]
    assert folded.split() == ["1", "…", "3", "3", "like", "0", "f32", "60", "240", "B"]
    assert _labels(text).count("mlp") == 3  # of the layers 0, 4 and 5


def test_inspect_does_not_fold_a_layer_that_is_cast_differently() -> None:
    tree = _tree(odd=None)
    plan = make_plan(tree, Recipe((Rule("layers.2", "bfloat16"),)))
    text = tree_text(tree, plan, "net", TreeView(fold=True))
    assert "3 … 5  3 like 3" not in text
    assert [line.split("  ")[2] for line in text.splitlines() if "like" in line] == ["4 … 5"]
    assert "like" not in tree_text(tree, plan, "net", TreeView())


def test_inspect_text_can_be_limited_in_depth_and_sorted_by_bytes() -> None:
    tree = _tree(layers=2)
    plan = make_plan(tree, Recipe())
    assert _labels(tree_text(tree, plan, "net", TreeView(depth=0))) == ["net"]
    assert _labels(tree_text(tree, plan, "net", TreeView(depth=1))) == ["net", "embed", "layers"]
    big = Tree([*tree.order, TensorInfo(Name("head.weight"), (1000, 4), "float32")])
    text = tree_text(big, make_plan(big, Recipe()), "net", TreeView(depth=1, by_bytes=True))
    assert _labels(text) == ["net", "head", "embed", "layers"]


def test_inspect_lists_the_largest_modules_and_sums_the_rest() -> None:
    tree = _tree()
    text = largest_text(tree, make_plan(tree, Recipe()), 2).splitlines()
    assert text[1].split()[0] == "embed"
    assert text[1].split()[-2:] == ["89", "%"]
    assert text[2].split()[0] == "layers.4.mlp"
    assert text[3] == f"{5 * 64 + 6 * 16} B more in 11 modules"


def test_inspect_sums_bytes_by_layer_kind_in_planned_dtypes() -> None:
    tree = _tree()
    text = kinds_text(tree, make_plan(tree, Recipe((Rule("*.mlp", "bfloat16"),)))).splitlines()
    assert [line.split()[0] for line in text[1:]] == ["embeddings", "MLP", "norms"]
    assert text[2].split()[:5] == ["MLP", "bf16", "100", "200", "B"]


def test_options_for_views_of_inspect_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "exclude each other" in refusal(capsys, "inspect", "demo", "--top", "3", "--by", "kind")
    assert "--json always prints everything" in refusal(capsys, "inspect", "demo", "--json", "--top", "3")
    assert run(cli, "dtype-engine", ["inspect", "demo", "--depth", "1"]) == 0
    assert "like" not in capsys.readouterr().out  # a pipe gets each layer
