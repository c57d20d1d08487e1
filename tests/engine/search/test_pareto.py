"""Search: the knapsack against trying everything, constraints, and rules that stand for exactly the plan."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import architectures

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.core import dtypes
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.recipe import dtype_given, make_plan
from dtype_engine.recipe.file import read_recipe_file, write_recipe
from dtype_engine.recipe.minimize import minimize
from dtype_engine.search.pareto import Choice, Constraints, Item, ParetoFront, make_front, make_items

CHOICES = st.lists(
    st.tuples(st.integers(1, 60), st.floats(1e-9, 1e3)), min_size=1, max_size=4, unique_by=lambda choice: choice[0]
)


def items_of(table: list[list[tuple[int, float]]]) -> list[Item]:
    """Make items as `make_items` does, without dominated choices."""
    items = []
    for place, row in enumerate(table):
        kept: list[tuple[int, float]] = []
        for size, score in sorted(row):
            if not kept or score < kept[-1][1]:
                kept.append((size, score))
        items.append(Item((f"w{place}",), tuple(Choice("int8", size, score) for size, score in kept)))
    return items


def everything(items: list[Item]) -> list[tuple[int, float]]:
    """(bytes, score) of every combination there is."""
    return [
        (sum(choice.bytes for choice in mix), math.fsum(choice.score for choice in mix))
        for mix in itertools.product(*(item.choices for item in items))
    ]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(CHOICES, min_size=1, max_size=6), st.integers(0, 320))
def test_best_recipe_within_a_byte_budget_is_found(table: list[list[tuple[int, float]]], budget: int) -> None:
    items = items_of(table)
    best = min((score for size, score in everything(items) if size <= budget), default=None)
    found = ParetoFront(items).best_within(budget)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.bytes <= budget
        assert found.score == pytest.approx(best, rel=1e-9, abs=1e-300)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(CHOICES, min_size=1, max_size=6), st.floats(1e-9, 3e3))
def test_smallest_recipe_within_a_drift_limit_is_found(table: list[list[tuple[int, float]]], most: float) -> None:
    items = items_of(table)
    best = min((size for size, score in everything(items) if score <= most), default=None)
    found = ParetoFront(items).smallest_reaching(most)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.score <= most
        assert found.bytes == best


@settings(max_examples=80, deadline=None)
@given(st.lists(CHOICES, min_size=1, max_size=5))
def test_no_combination_of_dtypes_beats_the_pareto_front(table: list[list[tuple[int, float]]]) -> None:
    items = items_of(table)
    front = ParetoFront(items)
    sizes = [point.bytes for point in front.points]
    assert sizes == sorted(set(sizes))
    for point in front.points:
        best = min(score for size, score in everything(items) if size <= point.bytes)
        assert point.predicted == pytest.approx(best, rel=1e-6, abs=1e-9)


KINDS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"),
    *("norm", "experts.0", "experts.1"),
)
LAYERS = 4
NAMES = [f"model.layers.{layer}.{kind}.weight" for layer in range(LAYERS) for kind in KINDS] + [
    "model.embed.weight", "model.norm.weight", "head.weight", "odd[name].w{1}", "model.layers.10.norm.weight",
]  # fmt: skip


def tree_of() -> Tree:
    infos = [
        TensorInfo(name, (16, 16), "float32", aliases=("tied.weight",) if name == "model.embed.weight" else ())
        for name in NAMES
    ]
    scratch = TensorInfo("model.rotary.inv_freq", (4,), "float32", "non-persistent buffer")
    counts = TensorInfo("model.norm.steps", (1,), "int64", "buffer")
    classes = {name.rpartition(".")[0]: "RMSNorm" if "norm" in name else "Linear" for name in NAMES}
    return Tree([*infos, scratch, counts], {"": "Model", **classes})


WANTED = st.one_of(
    st.lists(st.sampled_from(dtypes.CASTABLE_DTYPES), min_size=len(NAMES), max_size=len(NAMES)),
    st.tuples(
        st.lists(st.sampled_from(dtypes.CASTABLE_DTYPES[1:4]), min_size=len(KINDS), max_size=len(KINDS)),
        st.integers(0, LAYERS),
    ).map(
        lambda drawn: [
            drawn[0][place % len(KINDS)] if place // len(KINDS) < drawn[1] else "float32" for place in range(len(NAMES))
        ]
    ),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(WANTED)
def test_minimized_rules_give_exactly_the_plan(wanted: list[str]) -> None:
    tree = tree_of()
    asked = dict(zip(NAMES, wanted, strict=True))
    recipe = minimize(tree, asked)
    plan = make_plan(tree, recipe)
    assert {name: plan.dtypes[name] for name in NAMES} == {
        name: dtype_given(tree.tensors[name], dtype) for name, dtype in asked.items()
    }
    assert plan.dtypes["model.rotary.inv_freq"] == "float32"
    assert not plan.unmatched
    assert len(recipe) <= len(NAMES)


def test_minimized_rules_are_few_and_unchanged_by_writing_and_reading_a_recipe_file(tmp_path: Path) -> None:
    tree = tree_of()
    wanted = dict.fromkeys(NAMES, "float32")
    wanted |= {name: "int8" for name in NAMES if ".mlp." in name and name.split(".")[2] in "123"}
    recipe = minimize(tree, wanted)
    assert list(map(str, recipe.rules)) == ["model.layers.{1..3}.mlp=int8"]
    wanted |= {name: "bfloat16" for name in NAMES if "norm" in name}
    recipe = minimize(tree, wanted)
    assert len(recipe) == 2
    file = tmp_path / "recipe.yaml"
    file.write_text(write_recipe(recipe))
    assert read_recipe_file(file).recipe == recipe
    assert len(minimize(tree, dict.fromkeys(NAMES, "float16"))) == 1
    assert len(minimize(tree, dict.fromkeys(NAMES, "float32"))) == 0


def test_minimized_rules_keep_weights_that_other_programs_quantized_as_stored() -> None:
    stored = "gptq:int4@g32"
    kept = {name for name in NAMES if ".1.mlp." in name}
    tensors = tree_of().tensors | {
        name: replace(tree_of().tensors[name], dtype=stored, packed_bytes=160) for name in kept
    }
    tree = Tree(tensors.values())
    wanted = dict.fromkeys(NAMES, "bfloat16") | dict.fromkeys(kept, stored)
    recipe = minimize(tree, wanted)
    assert list(map(str, recipe.rules)) == ["*=bfloat16", "model.layers.1.mlp=stored"]
    assert make_plan(tree, recipe).dtypes.items() >= wanted.items()


def combine_scores(tree: Tree, kinds: tuple[str, ...] = ("bfloat16", "int8")) -> dict[tuple[str, str], float]:
    return {
        (name, kind): 0.0 if kind == "float32" else (place + 1) * (1e-6 if kind == "bfloat16" else 1e-5)
        for place, name in enumerate(NAMES)
        for kind in ("float32", *kinds)
    }


def test_search_constraints_keep_weights_as_stored_and_give_each_group_one_dtype() -> None:
    tree = tree_of()
    constraints = Constraints(
        keep=("type:RMSNorm",), groups=("*.{q,k,v}_proj", "*.experts"), only=(("head", ("bfloat16",)),)
    )
    items = make_items(tree, combine_scores(tree), constraints)
    front = ParetoFront(items)
    groups = {item.weights for item in items if len(item.weights) > 1}
    assert groups == {
        tuple(f"model.layers.{layer}.{kind}.weight" for kind in kinds)
        for layer in range(LAYERS)
        for kinds in (KINDS[:3], KINDS[6:])
    }
    tight = front.best_within(front.points[0].bytes)
    assert tight is not None
    assert {tight.dtypes[name] for name in NAMES if "norm" in name} == {"float32"}
    assert tight.dtypes["head.weight"] == "bfloat16"
    assert {tight.dtypes[name] for name in NAMES if "mlp" in name} == {"int8"}
    middle = front.best_within((front.points[0].bytes + front.points[-1].bytes) // 2)
    assert middle is not None
    assert all(len({middle.dtypes[name] for name in group}) == 1 for group in groups)


def test_weights_of_a_group_may_have_one_format_in_different_roundings() -> None:
    tree = tree_of()
    q, k, v = (f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv")
    scores = {(name, dtype): score for name in NAMES for dtype, score in (("int4@g32", 0.3), ("int4@g32:gptq", 0.1))}
    scores |= {(name, "float32"): 0.0 for name in NAMES} | {(k, "int4@g32"): 0.05}
    constraints = Constraints(groups=("*.{q,k,v}_proj",))
    item = next(item for item in make_items(tree, scores, constraints) if q in item.weights)
    smallest, widest = item.choices
    assert item.weights == (q, k, v)
    assert (smallest.dtype, smallest.roundings) == ("int4@g32", ("int4@g32:gptq", "int4@g32", "int4@g32:gptq"))
    assert smallest.score == pytest.approx(0.25)
    assert (widest.dtype, widest.roundings) == ("float32", ())
    front = make_front(tree, scores, constraints)
    assert [front.solution_at(0).dtypes[name] for name in (q, k, v)] == list(smallest.roundings)
    only = replace(constraints, dtypes=("int4@g32:gptq",))
    (item,) = [item for item in make_items(tree, scores, only) if q in item.weights]
    assert [(choice.dtype, choice.roundings) for choice in item.choices] == [("int4@g32:gptq", ()), ("float32", ())]


def test_contradictory_constraints_are_refused() -> None:
    tree = tree_of()
    apart = (("*.q_proj", ("int8",)), ("*.k_proj", ("bfloat16",)))
    for constraints, says in (
        (Constraints(keep=("*.missing",)), "matches nothing"),
        (Constraints(groups=("*.missing",)), "matches nothing"),
        (Constraints(dtypes=("float16",)), "was not scanned"),
        (Constraints(groups=("*.{q,k}_proj",), only=apart), "no dtype is left"),
    ):
        with pytest.raises(de.UserError, match=says):
            make_items(tree, combine_scores(tree), constraints)


def test_search_does_not_choose_dtypes_with_infinite_scores() -> None:
    tree = tree_of()
    scores = combine_scores(tree) | {(name, "int8"): math.inf for name in NAMES}
    found = ParetoFront(make_items(tree, scores)).best_within(10**9)
    assert found is not None
    assert "int8" not in found.dtypes.values()


@pytest.fixture(scope="module")
def scanned() -> Any:
    module, inputs = architectures.make("llama")
    session = de.open(module, inputs=inputs)
    session.scan(draws=16)
    return session


def test_recipe_found_by_a_search_meets_the_budget_and_the_predicted_drift(scanned: Any) -> None:
    for share in (0.3, 0.45, 0.7):
        budget = int(share * scanned.tree.stored_bytes)
        report = scanned.search(budget, measure=True)
        recipe = Recipe.of(map(Rule.parse, report.rules))
        assert make_plan(scanned.tree, recipe).planned_bytes == report.planned_bytes <= budget
        assert scanned.predict(recipe).value == pytest.approx(report.predicted)
        assert scanned.recipe == recipe
        assert report.predicted / 3 < report.measured < report.predicted * 3
    most = scanned.search(max_drift=1e-6)
    assert most.predicted <= 1e-6
    assert most.planned_bytes < scanned.tree.stored_bytes


def test_unreachable_byte_budget_is_refused(scanned: Any) -> None:
    with pytest.raises(de.UserError, match="nothing fits in 10 bytes"):
        scanned.search(10)
    with pytest.raises(de.UserError, match=r"weights in int4@g128 would fit, which were not scanned"):
        scanned.search("20%", constraints=Constraints(formats="own"))
    with pytest.raises(de.UserError, match="either a budget"):
        scanned.search()
    assert scanned.search(max_drift=0.0).predicted == 0.0


def test_scan_and_search_commands_print_scores_and_the_pareto_front(
    make_llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dtype_engine.cli import cli
    from dtype_engine.cli.program import run

    folder, file, saved = str(make_llama()), tmp_path / "recipe.yaml", str(tmp_path / "scan.json")
    common = ["--dtypes", "bf16,int8", "--draws", "4", "--save", saved]
    assert run(cli, "dtype-engine", ["scan", folder, *common, "--json"]) == 0
    scan = json.loads(capsys.readouterr().out)
    assert scan["unit"] == "nats per token"
    assert scan["forward_seconds"] > 0 < scan["scan_seconds"]
    assert {entry["dtype"] for entry in scan["weights"]} == {"float32", "bfloat16", "int8"}
    assert {"name", "dtype", "bytes", "score"} <= set(scan["weights"][0])
    again = ["search", folder, *common, "--budget", "50%", "-o", str(file)]
    assert run(cli, "dtype-engine", [*again, "--keep", "*.norm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["met"]
    assert found["planned_bytes"] <= found["stored_bytes"] // 2
    assert list(map(str, read_recipe_file(file).recipe.rules)) == found["rules"]
    assert found["measured"] > 0
    kept = read_recipe_file(file).settings
    assert kept is not None
    assert kept.autocast is None
    assert run(cli, "dtype-engine", again) == 2
    assert "exists; name another file, or replace it with --force" in capsys.readouterr().err
    assert run(cli, "dtype-engine", [*again, "--force", "--no-measure", "--autocast", "bf16"]) == 0
    capsys.readouterr()
    kept = read_recipe_file(file).settings
    assert kept is not None
    assert kept.autocast == "bfloat16", "it was found under it, and is true under it alone"
    assert run(cli, "dtype-engine", ["search", folder, *common, "--budget", "1KB"]) == 1
    said = capsys.readouterr().err
    assert "nothing that transformers loads fits in 1,000 bytes" in said
    assert said.rstrip().endswith("or allow those that only this program loads with --formats own")
    assert run(cli, "dtype-engine", ["search", folder, *common, "--budget", "1KB", "--formats", "own"]) == 1
    assert "nothing fits in 1,000 bytes" in capsys.readouterr().err
    assert run(cli, "dtype-engine", ["search", folder, *common, "--budget", "much"]) == 2
    assert run(cli, "dtype-engine", ["search", folder, *common]) == 2
    assert run(cli, "dtype-engine", ["scan", folder, "--dtypes", "stored"]) == 2
    capsys.readouterr()
    assert run(cli, "dtype-engine", ["scan", folder, *common]) == 0
    text = capsys.readouterr().out
    assert "what matters most" in text
    assert run(cli, "dtype-engine", ["search", folder, *common, "--max-predicted", "1e-6"]) == 0
    assert "Pareto front" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 * 2**30), ("500MB", 500 * 10**6), ("1.5k", 1536), ("45%", 450), ("7", 7), ("2 b", 2)],
)
def test_byte_sizes_are_parsed(text: str, size: int) -> None:
    from dtype_engine.search.constraints import parse_bytes

    assert parse_bytes(text, 1000) == size


def test_search_gives_norms_and_routers_scales_only_if_asked_to() -> None:
    tree = from_tensors(
        [
            TensorInfo("mlp.gate.weight", (4, 64), "bfloat16"),
            TensorInfo("mlp.gate_proj.weight", (64, 64), "bfloat16"),
            TensorInfo("norm.weight", (64,), "bfloat16"),
        ]
    )
    scores = {(name, dtype): 1e-6 for name in tree.tensors for dtype in ("int8", "nvfp4")}

    def smallest(constraints: Constraints) -> dict[str, str]:
        return {item.weights[0]: item.choices[0].dtype for item in make_items(tree, scores, constraints)}

    wide = {"mlp.gate.weight": "bfloat16", "mlp.gate_proj.weight": "nvfp4", "norm.weight": "bfloat16"}
    assert smallest(Constraints()) == wide
    assert smallest(Constraints(only=(("*norm", ("int8",)),))) == wide | {"norm.weight": "int8"}


def test_pareto_front_is_made_for_weights_stored_in_gguf_blocks() -> None:
    """An engine on another machine may send a scan of such a model."""
    blocks = TensorInfo("a.weight", (64, 256), "q4_k", packed_bytes=64 * 144)
    front = make_front(from_tensors([blocks]), {("a.weight", "bfloat16"): 0.1})
    assert [(point.bytes, point.predicted) for point in front.points] == [(2 * 64 * 256, 0.1)]


def test_stored_format_of_one_weight_is_not_offered_for_other_weights() -> None:
    tree = from_tensors(
        [
            TensorInfo("a.weight", (64, 256), "fp8:e4m3@128x128", packed_bytes=64 * 256 + 8),
            TensorInfo("b.weight", (64, 256), "bfloat16"),
        ]
    )
    scores = {
        ("a.weight", "fp8:e4m3@128x128"): 1e-9,
        ("a.weight", "float8_e4m3fn"): 0.1,
        ("b.weight", "float8_e4m3fn"): 0.2,
        ("b.weight", "bfloat16"): 1e-4,
    }
    choices = {item.weights[0]: {choice.dtype for choice in item.choices} for item in make_items(tree, scores)}
    assert choices == {"a.weight": {"fp8:e4m3@128x128"}, "b.weight": {"bfloat16", "float8_e4m3fn"}}
