"""Roundings in a model that is run from the disk: values, figures and files are those of the model in memory, bit for bit."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engine.runtime.test_over_memory import cast, opened

import dtype_engine as de
from dtype_engine.core.cancellation import never
from dtype_engine.runtime.numerics.roundings import WeightStatistics
from dtype_engine.runtime.scan.scanned_roundings import ScannedRoundings
from dtype_engine.runtime.weights import temporary_file
from dtype_engine.runtime.weights.kept_codes import KeptCodes
from dtype_engine.runtime.weights.stacked import StackedSource

LENGTHS = (24, 16, 9)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
LIMITS = {"llama": 3 << 19, "albert": 1 << 19, "mixtral": 3 << 20}
"""Less than each model has, and enough for the statistics of a block. Each linear layer is a block."""
DENSE = ("*.self_attn=nvfp4:gptq", "*.gate_proj=int4@g32:gptq", "*.up_proj=int4@g128a:gptq", "*.down_proj=int8:imatrix")
EXPERTS = ("*.self_attn=mxfp4:imatrix", "*.gate_up_proj=nvfp4:gptq", "*.down_proj=int8:gptq", "*.norm=int8:gptq")


@pytest.fixture
def llama(make_llama: Callable[..., Path]) -> Path:
    return make_llama(**SIZES)


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES | {"intermediate_size": 192}, num_local_experts=5)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    return tmp_path / "mixtral"


def from_disk(folder: Path) -> de.Session:
    session = opened(folder, LIMITS[folder.name], LENGTHS)
    assert session.model.memory.limited
    return session


def passes_under_way() -> list[str]:
    """Return the names of the threads that run passes, or that wait for what is done with their statistics."""
    return [each.name for each in threading.enumerate() if each.name.startswith(("pass ", "produces "))]


def pair(folder: Path) -> tuple[de.Session, de.Session]:
    """Return a session in memory and one over memory, whose experts are computed in the same way."""
    inside, over = opened(folder, None, LENGTHS), from_disk(folder)
    if hasattr(inside.model.module, "set_experts_implementation"):
        inside.model.module.set_experts_implementation("eager")
    return inside, over


def assert_same_values(inside: de.Session, over: de.Session) -> None:
    on_disk = 0
    for name, weight in over.model.weights.items():
        other = inside.model.weights[name]
        assert (weight.rounded is None) == (other.rounded is None), name
        if weight.rounded is None or other.rounded is None:
            continue
        on_disk += isinstance(weight.rounded, KeptCodes)
        codes, scale = weight.current()
        assert torch.equal(codes.view(torch.uint8), other.tensor.data.view(torch.uint8)), name
        assert torch.equal(scale, other.scale), name
        assert weight.rounded.nearest == other.rounded.nearest
    assert on_disk >= 8


@pytest.mark.parametrize(("model", "rules"), [("llama", DENSE), ("mixtral", EXPERTS)])
def test_figures_and_files_equal_those_of_a_model_in_memory(
    model: str, rules: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, over = pair(request.getfixturevalue(model))
    # All experts of a layer may take more memory than the machine has.
    monkeypatch.setattr(StackedSource, "read", lambda *_: pytest.fail("all experts of a layer were read at once"))
    found = []
    for session, name in ((inside, "inside"), (over, "over")):
        cast(session, rules)
        report = session.drift()
        session.export(tmp_path / name)
        nearest = [notice for notice in report.notices if "nearest values" in notice]
        found.append((report.output, report.modules, report.lost, nearest, session.lost_values()))
    assert found[0] == found[1]
    assert_same_values(inside, over)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("inside", "over")]
    assert files[0] == files[1]
    assert over.verify(tmp_path / "over").differences == ()


@pytest.mark.parametrize(("model", "dtype"), [("llama", "nvfp4:gptq"), ("mixtral", "int8:imatrix")])
def test_scores_equal_those_of_a_model_in_memory(model: str, dtype: str, request: pytest.FixtureRequest) -> None:
    inside, over = pair(request.getfixturevalue(model))
    expected, found = (session.scan([dtype], draws=1) for session in (inside, over))
    assert found.scores() == expected.scores()
    gains = [[score.rounding_gain for score in scan.weights if score.rounding_gain] for scan in (expected, found)]
    assert gains[0] == pytest.approx(gains[1], rel=1e-12)
    assert len(gains[0]) >= 8


def test_files_are_read_once_to_round_and_codes_are_kept(llama: Path) -> None:
    over = from_disk(llama)
    memory, rounder, size = over.model.memory, over.model.rounder, over.tree.stored_bytes
    steps = list[tuple[int, int]]()
    over.apply(de.Recipe.of([de.Rule.parse("*.layers.*_proj=int4@g32:gptq")]), lambda *step: steps.append(step))
    assert memory.bytes_read <= 2 * size  # the first time, a run finds out which weights are used more than once
    assert steps == [(done, 28) for done in range(1, 29)]  # 14 weights are rounded and then cast
    before, kept = memory.bytes_read, rounder.file.nbytes
    assert kept >= sum(weight.stored.numel() for weight in over.model.weights.values() if weight.rounded is not None)
    over.undo()
    over.redo()
    over.cast("*.o_proj", "bfloat16")
    assert over.undo()
    assert (memory.bytes_read, rounder.file.nbytes) == (before, kept)
    over.cast("*.mlp", "int8:imatrix")
    assert memory.bytes_read - before <= size
    assert not passes_under_way()


def test_layers_that_run_several_times_have_the_inputs_of_all_runs(tmp_path: Path) -> None:
    """The sums over sequences and runs are added in another order, so their last bits may differ."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "embedding_size": 128, "hidden_size": 128, "num_hidden_layers": 3}
    config = transformers.AlbertConfig(**sizes, num_attention_heads=8, intermediate_size=320)
    transformers.AlbertForMaskedLM(config).save_pretrained(tmp_path / "albert")
    inside, over = pair(tmp_path / "albert")
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    wanted = {f"{layer}.{name}.weight": "int8:gptq" for name in ("attention.query", "ffn", "ffn_output")}
    wanted["predictions.dense.weight"] = "int8:gptq"
    found = dict[str, WeightStatistics]()
    for statistics in over.calibration.collect(wanted, lambda: None, never):
        assert not found.keys() & statistics.keys()
        found |= statistics
    (expected,) = inside.calibration.collect(wanted, lambda: None, never)
    assert found.keys() == wanted.keys()
    for name, statistics in expected.items():
        one, other = statistics.parts[None], found[name].parts[None]
        assert one.tokens == other.tokens == (1 if "predictions" in name else 3) * sum(LENGTHS)
        torch.testing.assert_close(one.products, other.products)
    cast(over, (f"{layer}=int8:gptq",))
    assert isinstance(over.model.weights[f"{layer}.ffn.weight"].rounded, KeptCodes)


def test_models_with_a_state_are_rounded_as_in_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
        last = getattr(self, "last", None)
        self.last = x.mean()
        result: torch.Tensor = forward(self, x if last is None else x + last)
        return result

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", counting)
    inside, over = pair(llama)
    for session in (inside, over):
        cast(session, ("*_proj=int8:imatrix",))
    assert_same_values(inside, over)


def test_rounding_continues_after_it_was_cancelled(llama: Path) -> None:
    over, done, asked = from_disk(llama), list[int](), list[int]()
    recipe = de.Recipe.of([de.Rule.parse("*_proj=int4@g32:gptq")])
    with pytest.raises(de.Cancelled):
        over.apply(recipe, lambda number, _: done.append(number), cancelled=lambda: len(done) >= 5)
    assert not passes_under_way()
    assert len(done) == 5
    over.apply(recipe, lambda _, total: asked.append(total))
    assert set(asked) == {14 + 14 - 5}
    inside = opened(llama, None, LENGTHS)
    inside.apply(recipe)
    assert_same_values(inside, over)


def test_disk_without_room_for_the_codes_is_named_with_the_bytes_needed(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = from_disk(llama)
    monkeypatch.setattr(temporary_file, "free_for_temporary_files", lambda: 1000)
    with pytest.raises(de.UserError, match=r"\(\d.* KiB are needed, and 1000 B are free\): set TMPDIR to"):
        over.cast("*_proj", "int8:imatrix")
    monkeypatch.undo()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(
            de.UserError, match=r"can't write its temporary file here \(File too large\): set TMPDIR to"
        ):
            over.cast("*_proj", "int8:imatrix")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not passes_under_way()
    assert not over.recipe.rules
    over.cast("*_proj", "int8:imatrix")
    assert over.model.weights["model.layers.0.mlp.up_proj.weight"].rounded is not None


def test_statistics_larger_than_the_memory_are_refused(mixtral: Path) -> None:
    over = opened(mixtral, 1 << 19, LENGTHS)
    with pytest.raises(
        de.UserError, match=r"the products of its inputs .* use int8:imatrix, or allow more with --max-m"
    ):
        over.cast("*.experts", "int8:gptq")
    over.cast("*.experts", "int8:imatrix")


def test_other_processes_read_the_codes_of_a_scan(mixtral: Path) -> None:
    name, dtype = "model.layers.1.mlp.experts.down_proj", "int8:gptq"
    first, second = (ScannedRoundings(from_disk(mixtral).model, {name: (dtype,)}) for _ in range(2))
    first.make(lambda done, total: None, never)
    shared = first.share()
    if shared is None:
        pytest.skip("this system has no path for a file without a name")
    second.use(shared)
    for rows in (None, slice(3, 4)):
        one, other = (each.values(name, dtype, rows, torch.float32) for each in (first, second))
        assert torch.equal(one, other)
    assert second.make(lambda done, total: pytest.fail("they are known"), never) == 0
