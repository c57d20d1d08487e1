"""KV caches in the tree and the Memory pane: their nodes, badges and bytes at a context."""

from __future__ import annotations

import pytest
from tests.helpers.recording_engine import engine, make_app, say
from tests.helpers.screen_text import lines, notices, screen
from textual.pilot import Pilot
from textual.widgets import Input

from dtype_engine.checkpoint.kv_cache import kv_cache
from dtype_engine.core.kv_cache import KVCache, KVCacheTensor
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.results.serving_memory import ActivationMemory
from dtype_engine.service import events
from dtype_engine.service.jobs import ACTIVATIONS, PassSizes
from dtype_tui.app import DtypeApp
from dtype_tui.state.served import add_cache_nodes
from dtype_tui.widgets.command_line import CommandLine
from dtype_tui.widgets.module_tree import ModuleTree
from dtype_tui.widgets.prompts import CastPrompt

# The demo: 2 heads of keys with 24 values each, float32, made for 1,024 tokens, 6 layers.
CACHE = "model.layers.0.self_attn.kv_cache"


async def enter(app: DtypeApp, pilot: Pilot[None], line: str) -> None:
    await pilot.press("colon")
    app.query_one(CommandLine).query_one(Input).value = line
    await pilot.press("enter")
    await pilot.pause()


def row_of(app: DtypeApp, label: str) -> str:
    return next(line for line in lines(app) if line.strip(" ▌│").removeprefix("▾ ").startswith(label))


@pytest.mark.slow
async def test_kv_cache_nodes_show_formats_and_bytes_at_the_context() -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await enter(app, pilot, f"go {CACHE}.k")
        assert f"{1024 * 48 * 4 / 1024:.1f} KiB" in row_of(app, "k  [2 × 24]")
        await enter(app, pilot, "context 512 3")
        assert f"{3 * 512 * 48 * 4 / 1024:.1f} KiB" in row_of(app, "k  [2 × 24]")
        await enter(app, pilot, "cast *.kv_cache.v fp8")
        assert "fp8" in row_of(app, "v  [2 × 24]")
        assert f"{3 * 512 * 48 * 5 / 1024:.1f} KiB" in row_of(app, "kv_cache")
        assert f"{6 * 3 * 512 * 48 * 5 / 2**20:.2f} MiB 512 tokens × 3" in screen(app)
        await pilot.press("u")
        assert "fp8" not in row_of(app, "v  [2 × 24]")
        await pilot.press("enter")  # the details
        await pilot.pause()
        assert "none: as stored" in screen(app)
        size = f"{3 * 512 * 48 * 4 / 1024:.2f} KiB  f32, for 3 sequences of 512 tokens"
        assert "none: tensors of the KV cache" in screen(app)
        assert size in screen(app)


async def test_dtype_keys_give_a_kv_cache_only_possible_formats() -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await enter(app, pilot, f"go {CACHE}.k")
        await pilot.press("4")
        assert "a KV cache can't be 'float64'" in " ".join(notices(app))
        assert not app.controller.experiment.plan.caches
        await pilot.press("5")
        assert app.controller.experiment.plan.caches == {f"{CACHE}.k": "float8_e4m3fn"}
        app.controller.put_back(f"{CACHE}.k")
        assert not app.controller.experiment.plan.caches
        app.controller.put_back(f"{CACHE}.k")
        await pilot.pause()
        assert f"{CACHE}.k is as stored again; " in " ".join(notices(app))
        assert f"{CACHE}.k already has the reference's dtype" in " ".join(notices(app))


@pytest.mark.slow
async def test_dtype_keys_and_cast_prompt_set_kv_cache_formats() -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await enter(app, pilot, f"go {CACHE}.k")
        for key, form in (("1", "float32"), ("2", "bfloat16"), ("3", "float16"), ("5", "float8_e4m3fn"),
                          ("6", "float8_e5m2"), ("7", "int8@token")):  # fmt: skip
            await pilot.press(key)
            assert app.controller.experiment.plan.caches == {f"{CACHE}.k": form}
        await pilot.press("8")
        assert not app.controller.experiment.plan.caches
        await pilot.press("x")
        assert not app.controller.experiment.recipe.rules
        await pilot.press("x", "c")
        assert notices(app)[-1] == "no rule matches this node"
        line = app.query_one(CastPrompt).query_one(Input)
        assert line.value == f"{CACHE}.k=bf16"
        line.value = f"{CACHE}=int4@kivi"
        await pilot.press("enter")
        assert set(app.controller.experiment.plan.caches.values()) == {"int4@kivi"}


def hybrid_tree() -> Tree:
    """A layer of attention and one of Mamba 2, in bfloat16."""
    mixer = {"conv1d.weight": (64, 1, 4), "A_log": (4,), "in_proj.weight": (128, 32), "out_proj.weight": (32, 64)}
    tree = Tree(
        [TensorInfo(f"model.layers.0.self_attn.{part}_proj.weight", (32, 32), "bfloat16") for part in "qkvo"]
        + [TensorInfo(f"model.layers.1.mixer.{name}", shape, "bfloat16") for name, shape in mixer.items()]
    )
    config = {
        "architectures": ["NemotronHForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32,
        "num_hidden_layers": 2, "ssm_state_size": 8, "dtype": "bfloat16",
    }  # fmt: skip
    tree.kv_cache = kv_cache(tree, config)
    return tree


@pytest.mark.slow
async def test_dtype_keys_give_recurrent_states_only_possible_formats() -> None:
    app = make_app(hybrid_tree(), "hybrid")
    conv, ssm = (f"model.layers.1.mixer.kv_cache.{part}" for part in ("conv_state", "ssm_state"))
    async with app.run_test(size=(120, 36)) as pilot:
        await enter(app, pilot, f"go {ssm}")
        assert "f32" in row_of(app, "ssm_state  [512]")
        assert "2.0 KiB" in row_of(app, "ssm_state  [512]")
        for key, form in (("1", "float32"), ("2", "bfloat16"), ("3", "float16")):
            await pilot.press(key)
            assert app.controller.experiment.plan.caches == {ssm: form}
        assert "1.0 KiB" in row_of(app, "ssm_state  [512]")
        for key in "4567":
            await pilot.press(key)
            assert (
                "recurrent states can't be " in notices(app)[-1] or "a KV cache can't be 'float64'" in notices(app)[-1]
            )
            assert app.controller.experiment.plan.caches == {ssm: "float16"}
        await pilot.press("8")
        assert not app.controller.experiment.plan.caches
        await pilot.press("x", "c")
        line = app.query_one(CastPrompt).query_one(Input)
        line.value = f"{ssm}=f16@s"
        await pilot.press("tab")
        assert line.value == f"{ssm}=f16@stochastic"
        await pilot.press("enter")
        assert app.controller.experiment.plan.caches == {ssm: "float16@stochastic"}
        await enter(app, pilot, "go model.layers.1.mixer.kv_cache")
        await pilot.press("5")
        assert "matches only 2 recurrent states: recurrent states can't be fp8" in " ".join(notices(app)[-1].split())
        await pilot.press("2")
        assert app.controller.experiment.plan.caches == {conv: "bfloat16", ssm: "bfloat16"}


@pytest.mark.slow
async def test_memory_pane_says_which_context_fits_the_budget() -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await enter(app, pilot, "budget 4MiB")
        assert "fits 4.00 MiB up to 591 tokens" in screen(app)
        assert "has room for" in screen(app)
        await enter(app, pilot, "context 100 2")
        assert "fits 4.00 MiB up to 295 tokens" in screen(app)
        await enter(app, pilot, "budget")
        assert "fits" not in screen(app)
        for wrong in ("context many", "context 0", "context 10 0", "budget much"):
            await enter(app, pilot, wrong)
            assert notices(app)[-1].startswith(("write the number", "can't read the budget"))


@pytest.mark.slow
async def test_activation_memory_at_a_context_is_interpolated() -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await enter(app, pilot, "activations")
        assert engine(app).commands[-1:] == ["activations"]
        experiment = app.controller.experiment
        peaks = tuple(ActivationMemory(tokens * 1000, "mlp", tokens, 1, True) for tokens in (1024, 2048, 4096))
        await say(app, pilot, events.JobDone(experiment.recipe, ACTIVATIONS.ask(PassSizes((), 1)), peaks))
        assert "together 5.93 MiB, a pass 1000 KiB" in screen(app)
        await enter(app, pilot, "context 300")
        assert experiment.serving().activations == ActivationMemory(300_000, "mlp", 300, 1, True)
        await enter(app, pilot, "context 300 2")
        assert experiment.serving().activations is None


@pytest.mark.slow
async def test_layers_with_different_kv_cache_formats_are_not_folded_together() -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause()
        assert "0 … 5  6 alike" in screen(app)
        await enter(app, pilot, "cast *.0.*.kv_cache.k bf16")
        assert "1 … 5  5 alike" in screen(app)
        await enter(app, pilot, "filter kv_cache.k")
        assert app.query_one(ModuleTree).current.name == f"{CACHE}.k"


def test_kv_cache_nodes_are_added_only_once_and_count_as_0_bytes_in_the_tree() -> None:
    tree = Tree([TensorInfo("a.k_proj.weight", (4, 4), "float32"), TensorInfo("b.kv_cache.weight", (4,), "float32")])
    parts = [f"{name}.kv_cache.{part}" for name in ("a", "b", "missing") for part in "kv"]
    tree.kv_cache = KVCache(tuple(KVCacheTensor(name, 0, per_token=4) for name in parts))
    before = tree.totals()["a"].total_bytes
    found = add_cache_nodes(tree)
    assert list(found) == ["a.kv_cache", "a.kv_cache.k", "a.kv_cache.v"]
    assert add_cache_nodes(tree) == found
    assert list(tree.modules["a"].children) == ["k_proj", "kv_cache"]
    assert tree.totals()["a.kv_cache"].total_bytes == 0
    assert tree.totals()["a"].total_bytes == before
    assert not list(tree.below("a.kv_cache.k"))
