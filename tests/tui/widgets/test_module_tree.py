"""Moving further than a line: parents, casts, the worst; opening and closing everything; orders of children; copying."""

from __future__ import annotations

import base64
import math
from dataclasses import replace

import pytest
from tests.helpers.recording_engine import demo_tree, make_app, report, say
from tests.helpers.screen_text import lines, notices, screen, until
from textual.pilot import Pilot

from dtype_engine.core.draft_heads import draft_head
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.state.node_rules import cast_nodes
from dtype_tui.widgets.module_tree import MOST_OPENED


async def measured(app: DtypeApp, pilot: Pilot[None], *readings: ModuleDrift) -> None:
    experiment = app.controller.experiment
    ready = events.ModelReady(experiment.tree, "LlamaForCausalLM", "cpu", 1.0, "prompts", ())
    done = events.Measured(experiment.recipe, report(experiment.recipe, modules=readings))
    await say(app, pilot, ready, done)


async def test_keys_go_to_parents_and_open_or_close_all_nodes() -> None:
    app = make_app()
    async with app.run_test() as pilot:
        tree = app.main.tree_view
        tree.go_to("model.layers.3.mlp.up_proj.weight")
        for above in ("model.layers.3.mlp.up_proj", "model.layers.3.mlp", "model.layers.3"):
            await pilot.press("P")
            assert tree.current.name == above
        rows = len(tree.rows)
        await pilot.press("E")
        assert len(tree.rows) > rows
        assert "model.layers.3.self_attn.q_proj.weight" in {row.name for row in tree.rows}
        await pilot.press("W")
        assert tree.current.name == "model.layers.3"
        assert not any(row.name.startswith("model.layers.3.") for row in tree.rows)
        await pilot.press("home", "E")
        names = {row.name for row in tree.rows}
        assert set(app.controller.experiment.tree.names[0]) <= names
        await pilot.press("W")
        assert [row.name for row in tree.rows] == ["", "model"]


@pytest.mark.slow
async def test_opening_all_of_too_many_nodes_is_refused() -> None:
    app = make_app(Tree(TensorInfo(f"layers.{i}.weight", (1,), "float32") for i in range(MOST_OPENED + 10)))
    async with app.run_test() as pilot:
        rows = len(app.main.tree_view.rows)
        await pilot.press("E")
        assert len(app.main.tree_view.rows) == rows
        assert "more than 20,000 nodes" in notices(app)[-1]


@pytest.mark.slow
async def test_brace_keys_jump_to_the_next_or_previous_cast_node() -> None:
    app = make_app()
    async with app.run_test() as pilot:
        tree = app.main.tree_view
        await pilot.press("right_curly_bracket")
        assert tree.current.name == ""  # nothing is cast: it stays
        for rule in ("model.layers.{1,4}.mlp=bf16", "model.layers.2.self_attn.q_proj=f16", "model.norm=f16"):
            app.controller.add_rule(Rule.parse(rule))
        expected = ["model.layers.1.mlp", "model.layers.2.self_attn.q_proj", "model.layers.4.mlp", "model.norm"]
        for name in (*expected, expected[0]):  # in the model's order, and round
            await pilot.press("right_curly_bracket")
            assert tree.current.name == name
        for name in (*reversed(expected), expected[-1]):
            await pilot.press("left_curly_bracket")
            assert tree.current.name == name


@pytest.mark.parametrize(
    ("rules", "nodes"),
    [
        ((), []),
        (("*=bf16",), [""]),
        (("model.layers.0=bf16",), ["model.layers.0"]),
        (("*.norm=bf16", "model.layers.1.mlp.up_proj=f16"), ["model.layers.1.mlp.up_proj", "model.norm"]),
        (("model.layers.0=bf16", "model.layers.0=stored"), []),
    ],
)
def test_topmost_cast_nodes_are_found(rules: tuple[str, ...], nodes: list[str]) -> None:
    tree = demo_tree()
    assert cast_nodes(tree, make_plan(tree, Recipe.of(map(Rule.parse, rules)))) == nodes


async def test_key_w_cycles_through_the_worst_modules() -> None:
    app = make_app()
    readings = (
        ModuleDrift("model.layers.0", 40.0, 0.1, 0),
        ModuleDrift("model.layers.1", 10.0, 0.1, 0),
        ModuleDrift("model.layers.2", 20.0, 0.1, 0),
    )
    async with app.run_test() as pilot:
        await measured(app, pilot, *readings)
        here = []
        for _ in range(4):
            await pilot.press("w")
            here.append(app.main.tree_view.current.name)
        assert here == ["model.layers.1", "model.layers.2", "model.layers.0", "model.layers.1"]


async def test_key_z_sorts_children_by_bytes_and_drift() -> None:
    app = make_app()
    readings = tuple(ModuleDrift(f"model.layers.{i}", float(20 + 10 * ((i * 3) % 5)), 0.1, 0) for i in range(5))
    async with app.run_test() as pilot:
        tree = app.main.tree_view
        await measured(app, pilot, *readings)

        def layers() -> list[str]:
            return [row.name.rpartition(".")[2] for row in tree.rows if row.name.startswith("model.layers.")]

        assert layers() == list("012345")
        await pilot.press("z")
        assert tree.order == "bytes"
        sizes = [app.controller.experiment.totals[row.name].total_bytes for row in tree.rows if row.depth == 1]
        assert sizes == sorted(sizes, reverse=True)
        await pilot.press("z")
        by_drift = sorted(readings, key=lambda reading: reading.sqnr_db or 0.0)
        assert layers() == [reading.name.rpartition(".")[2] for reading in by_drift] + ["5"]
        await pilot.press("z")
        assert layers() == list("012345")


def tree_with_lists() -> Tree:
    """A model whose first child is exact, and whose list of blocks holds all the drift."""
    names = ("embed.weight", *(f"net.{i}.{part}.weight" for i in range(3) for part in ("a", "b")), "tail.weight")
    classes = {"": "Net", "embed": "Embedding", "net": "ModuleList", "tail": "Linear"}
    classes |= {f"net.{i}": "ModuleList" for i in range(3)}
    return Tree([TensorInfo(name, (4, 4), "float32") for name in names], classes)


READINGS = (
    ModuleDrift("embed", math.inf, 0.0, 0),
    *(ModuleDrift(f"net.{i}.{part}", 50.0 - 10 * i, 0.1, 0) for i in range(3) for part in ("a", "b")),
    ModuleDrift("tail", 45.0, 0.1, 0),
)


async def test_lists_show_the_sqnr_of_their_worst_child_in_dim() -> None:
    app = make_app(tree_with_lists())
    async with app.run_test(size=(120, 36)) as pilot:
        tree = app.main.tree_view
        await measured(app, pilot, *READINGS)
        await pilot.press("E")
        strips = {row.name: tree.line(y) for y, row in enumerate(tree.rows, 1)}
        for name, sqnr in (
            ("net", "30.0"),
            ("net.0", "50.0"),
            ("net.2", "30.0"),
            ("net.2.a", "30.0"),
            ("embed", "exact"),
        ):
            (cell,) = [segment for segment in strips[name] if sqnr in segment.text]
            assert bool(cell.style and cell.style.dim) == (name in ("net", "net.0", "net.2")), name


async def test_details_of_a_list_name_its_worst_child() -> None:
    app = make_app(tree_with_lists())
    async with app.run_test(size=(120, 36)) as pilot:
        await measured(app, pilot, *READINGS)
        app.main.tree_view.go_to("net")
        await pilot.press("enter")
        await until(pilot, lambda: "the worst is net.2.a" in screen(app))
        assert "SQNR 30.00 dB" in screen(app)


async def test_order_by_drift_puts_a_list_by_its_worst_child_and_exact_nodes_last() -> None:
    app = make_app(tree_with_lists())
    async with app.run_test(size=(120, 36)) as pilot:
        tree = app.main.tree_view
        await measured(app, pilot, *READINGS)
        tree.sort_by("drift")
        assert [row.name for row in tree.rows if row.depth == 1] == ["net", "tail", "embed"]


@pytest.mark.parametrize(("width", "shown"), [(120, True), (60, False)])
async def test_shapes_of_linear_layers_and_embeddings_are_in_the_blank_cells_beside_the_class(
    width: int, shown: bool
) -> None:
    shapes = {"embed": (512, 96), "proj": (256, 96), "norm": (96,), "packed": (256, 12)}
    classes = {"": "Net", "embed": "Embedding", "proj": "Linear", "norm": "RMSNorm", "packed": "Linear"}
    tensors = [TensorInfo(f"{name}.weight", shape, "float32") for name, shape in shapes.items()]
    tensors[-1] = replace(tensors[-1], dtype="int32", logical_numel=256 * 96)
    app = make_app(Tree(tensors, {name: f"{kind:_>24}" if width < 80 else kind for name, kind in classes.items()}))
    async with app.run_test(size=(width, 36)):
        text = screen(app)
        assert ("Linear 96 → 256 " in text) == shown
        assert ("Embedding 512 × 96 " in text) == shown
        assert "12 →" not in text
        assert "RMSNorm 96" not in text


async def test_names_and_rules_are_copied_to_the_clipboard_of_the_terminal() -> None:
    app = make_app()
    async with app.run_test() as pilot:
        sent: list[str] = []
        assert app._driver is not None
        app._driver.write = lambda data: sent.append(data)  # type: ignore[method-assign]
        app.main.tree_view.go_to("model.layers.3.mlp")
        await pilot.press("j", "k")
        assert not any("\x1b]52" in data for data in sent)
        await pilot.press("y")
        encoded = base64.b64encode(b"model.layers.3.mlp").decode()
        assert any(f"\x1b]52;c;{encoded}" in data for data in sent)
        await pilot.press("Y")
        assert "no rules to copy" in notices(app)[-1]
        app.controller.add_rule(Rule.parse("*.{q,k}_proj=bf16"))
        await pilot.press("Y")
        assert app.clipboard == "--cast '*.{q,k}_proj=bfloat16'"


async def test_line_of_keys_suggests_the_next_actions() -> None:
    app = make_app()
    async with app.run_test() as pilot:
        assert "1-8 dtype  c cast  s scan" in screen(app)
        await pilot.press("2")
        await measured(app, pilot)
        assert "u undo  w worst" in screen(app)
        await pilot.press("slash", *"proj", "enter")
        await until(pilot, lambda: "n next match" in screen(app))


async def test_tree_names_the_weights_that_share_the_nvfp4_scale_of_a_weight() -> None:
    app = make_app()
    async with app.run_test(size=(140, 40)) as pilot:
        tree = app.main.tree_view
        controller = app.controller
        assert controller.experiment.tree is not None
        controller.add_rule(Rule("*.layers.0.self_attn.[qk]_proj", "nvfp4"))
        controller.add_rule(Rule("*.layers.0.mlp.*_proj", "mxfp4"))
        tree.go_to("model.layers.0.self_attn.q_proj.weight")
        await until(pilot, lambda: "nvfp4  scale with k" in screen(app))
        lines = screen(app).splitlines()
        found = {name: line for line in lines for name in line.split()[:3] if " with " in line and "_proj" in name}
        assert set(found) == {"q_proj", "k_proj"}, "nothing of v_proj or the MLP"
        assert "nvfp4  scale with q" in found["k_proj"]
        assert any("weight  [96 × 96]" in line and "f32→ nvfp4  scale with k" in line for line in lines)


async def test_draft_head_is_named_in_the_tree_and_in_the_details() -> None:
    tree = Tree(
        [TensorInfo(name, (4, 4), "float32") for name in ("model.up.weight", "mtp.fc.weight", "mtp.norm.weight")],
        {"": "Net", "model.up": "Linear", "mtp.fc": "Linear"},
    )
    tree.draft = draft_head(tree.tensors, {"model_type": "new"})
    app = make_app()
    async with app.run_test(size=(140, 30)) as pilot:
        await say(app, pilot, events.ModelReady(tree, "Net", "cpu", 1.0, "prompts", ()))
        marked = [line for line in lines(app) if "draft head (MTP)" in line]
        assert [line.split()[:2] for line in marked] == [["▸", "mtp"]]
        app.main.tree_view.go_to("mtp.fc.weight")
        await pilot.press("enter")
        await until(pilot, lambda: "no forward pass uses it" in screen(app))
        await pilot.press("escape")
        app.main.tree_view.go_to("model.up")
        await pilot.press("enter")
        await until(pilot, lambda: "Linear" in screen(app))
        assert "no forward pass uses it" not in screen(app)
