"""Roundings in a session: cast, measured, exported, read by transformers, and verified."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from tests.helpers.exporting import engine
from tests.helpers.file_edits import change_tensors
from tests.helpers.paths import DEMO

import dtype_engine as de
from dtype_engine.checkpoint.source import locate
from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import never
from dtype_engine.recipe.file import read_recipe_file
from dtype_engine.results.export import VerifyReport
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.measure import input_statistics
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.numerics.quantize import values_in
from dtype_engine.runtime.numerics.roundings import output_error
from dtype_engine.runtime.session.verify import verify

TEXT = (
    "Scales follow from the largest value of a block. Another text says what the layers get, word by word, line by line. "
    * 12
)
LINEARS = "model.layers.{0,1}.*_proj"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "fit.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text("0 1 2 3 4 5 6 7 8 9 " * 40)
    return tmp_path


def opened(texts: Path, model: Path = DEMO) -> de.Session:
    return de.open(
        str(model), options=de.Options(device="cpu", prompts=("one short prompt",), calibration=(texts / "fit.txt",))
    )


def unchecked(report: VerifyReport) -> list[str]:
    """Return what was not checked of the weights."""
    return [sentence for sentence in report.unchecked if "roundings" in sentence or "calibration" in sentence]


def test_gptq_drifts_less_and_undo_needs_no_further_pass(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, runs = de.open(options=de.Options(device="cpu", texts=(texts / "fit.txt",))), list[int]()
    collect = input_statistics._StatisticsMode.__init__
    monkeypatch.setattr(input_statistics._StatisticsMode, "__init__", lambda *args: (runs.append(1), collect(*args))[1])
    drifts = {}
    for dtype in ("int4@g32", "int4@g32:gptq"):  # no matrix product uses the norms
        session.apply(de.Recipe.of([de.Rule.make(LINEARS, dtype), de.Rule.make("model.norm", dtype)]))
        drifts[dtype] = session.drift().output.kl_mean
    first = len(runs)
    assert first >= 1
    assert drifts["int4@g32:gptq"] < 0.7 * drifts["int4@g32"]
    assert session.undo()
    assert session.redo()
    assert len(runs) == first
    assert session.drift().output.kl_mean == drifts["int4@g32:gptq"]


def test_progress_counts_calibration_runs_and_casts(texts: Path) -> None:
    session, steps = opened(texts), list[tuple[int, int]]()
    session.apply(de.Recipe.of([de.Rule.make(LINEARS, "nvfp4:gptq")]), lambda done, total: steps.append((done, total)))
    runs = len(session.calibration.inputs.batches) if session.calibration is not None else 0
    casts = sum(name.endswith("_proj.weight") and name[13] in "01" for name in session.model.weights)
    assert steps == [(number, runs + casts) for number in range(1, runs + casts + 1)]


def test_drift_says_to_what_roundings_were_fitted(texts: Path) -> None:
    session = opened(texts)
    session.cast("*.mlp", "int4@g32:imatrix")
    assert any("fitted to" in notice and "fit.txt" in notice for notice in session.drift().notices)
    assert session.fitted_to is not None
    same = de.open(str(DEMO), options=de.Options(device="cpu", prompts=("one short prompt",)))
    same.cast("*.mlp", "int4@g32:imatrix")
    assert any("same inputs" in notice for notice in same.drift().notices)
    same.cast("*.mlp", "int4@g32")
    assert not any("fitted" in notice for notice in same.drift().notices)
    assert same.fitted_to is None


def test_weights_that_no_product_uses_keep_the_nearest_values_and_say_so() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(40, 32), torch.nn.Linear(32, 8))
    session = de.open(module, inputs=torch.randint(0, 40, (2, 30)))
    session.apply(de.Recipe.of(map(de.Rule.parse, ("0=int8:gptq", "1.weight=int8:gptq"))))
    rounded = session.model.weights["0.weight"].tensor.clone()
    (notice,) = (each for each in session.drift().notices if "nearest values" in each)
    assert notice.startswith("1 weight has the nearest values, first 0.weight")
    session.cast("0", "int8")
    assert torch.equal(session.model.weights["0.weight"].tensor, rounded)


def test_roundings_stay_fitted_to_the_first_inputs() -> None:
    session = de.open(str(DEMO), options=de.Options(device="cpu", prompts=("one short prompt",)))
    session.cast("*.q_proj", "int4@g32:gptq")
    weight, before = session.model.weights["model.layers.0.self_attn.q_proj.weight"], session.fitted_to
    codes = weight.tensor.clone()
    session.use_inputs(de.Options(prompts=("quite another text with other words in it",)))
    session.cast("*.q_proj", "bfloat16")
    session.cast("*.q_proj", "int4@g32:gptq")
    assert torch.equal(weight.tensor, codes)
    assert session.fitted_to == before
    assert any("were fitted to 1 sequence" in notice for notice in session.drift().notices)


def test_without_inputs_a_rounding_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(32, 32)
    session = de.open(module)
    with pytest.raises(de.UserError, match="without inputs"):
        session.cast("*", "int8:gptq")
    assert not session.recipe.rules


def test_held_out_text_is_measured_with_and_without_roundings(texts: Path) -> None:
    session = opened(texts)
    session.cast(LINEARS, "int4@g32:gptq")
    before = session.model.weights["model.layers.0.self_attn.q_proj.weight"].tensor
    found = session.held_out(de.Options(texts=(texts / "other.txt",)))
    assert found.nearest is not None
    assert found.output.kl_mean != found.nearest.kl_mean
    assert session.model.weights["model.layers.0.self_attn.q_proj.weight"].tensor is before
    plain = de.open(str(DEMO), options=de.Options(device="cpu", texts=(texts / "other.txt",)))
    plain.cast(LINEARS, "int4@g32")
    assert plain.drift().output.kl_mean == pytest.approx(found.nearest.kl_mean, rel=1e-6)
    with pytest.raises(de.UserError, match="--held-out"):
        session.held_out()


@pytest.mark.parametrize("plain", ["float8_e4m3fn", "int8", "mxfp4", "nvfp4", "int4@g32", "int4@g128a"])
def test_exports_hold_what_was_measured(plain: str, texts: Path, tmp_path: Path) -> None:
    session, dtype = opened(texts), f"{plain}:gptq"
    session.apply(de.Recipe.of([de.Rule.make(LINEARS, dtype)]))
    before = session.drift().output
    session.export(tmp_path / "out")
    report = session.verify(tmp_path / "out")
    assert (report.differences, unchecked(report)) == ((), [])
    assert report.rounded == sum(name.endswith("_proj.weight") and name[13] in "01" for name in session.model.weights)
    loaded = verify(tmp_path / "out", locate(str(DEMO)), drift=True, options=session.options)
    assert loaded.same
    assert loaded.drift_after is not None
    assert loaded.drift_after.kl_mean == pytest.approx(before.kl_mean, rel=1e-5)


def test_plain_transformers_computes_what_was_measured(texts: Path, tmp_path: Path) -> None:
    session = opened(texts)
    session.cast(LINEARS, "int4@g32:gptq")
    session.export(tmp_path / "out")
    ids = session.need_inputs().batches[0].kwargs["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.no_grad():
        p, q = (model(input_ids=ids).logits.double().log_softmax(-1) for model in (plain, theirs))
    assert session.drift().output.kl_mean == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.02)


def test_verify_finds_codes_and_scales_that_a_rounding_may_not_choose(texts: Path, tmp_path: Path) -> None:
    session, name = opened(texts), "model.layers.0.mlp.up_proj"
    session.cast(LINEARS, "int8:gptq")
    session.export(tmp_path / "out")
    change_tensors(tmp_path / "out", lambda held: held[f"{name}.weight_scale"].mul_(1.03))
    assert "scales" in session.verify(tmp_path / "out").differences[0].what
    session.export(tmp_path / "out", force=True)
    change_tensors(tmp_path / "out", lambda held: held[f"{name}.weight"].add_(3))
    found = {each.name: each.what for each in session.verify(tmp_path / "out").differences}
    assert "larger" in found[f"{name}.weight"]


def test_command_line_exports_and_verifies(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit, out = texts / "fit.txt", tmp_path / "out"
    cast = (
        "--device",
        "cpu",
        "--prompt",
        "one short prompt",
        "--cast",
        "model.layers.0.*_proj=nvfp4:gptq",
        "--calibration",
        fit,
    )
    assert engine("export", DEMO, *cast, "-o", out) == 0
    assert "fingerprint" in (out / "recipe.yaml").read_text()
    capsys.readouterr()
    assert engine("verify", out, "--against", DEMO, "--calibration", fit) == 0
    assert "with values that the rounding may choose" in capsys.readouterr().out
    assert engine("verify", out, "--against", DEMO, "--json") == 0
    assert "--calibration FILE names it" in json.loads(capsys.readouterr().out)["unchecked"][-1]
    held_out = ("--held-out", texts / "other.txt", "--json")
    assert engine("drift", DEMO, *cast, *held_out) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fitted_to"]["inputs"].startswith("fit.txt: ")
    assert report["held_out"]["nearest"]["kl_mean"] > 0


def test_verify_of_a_named_model_needs_the_calibration_inputs(texts: Path, tmp_path: Path) -> None:
    session = opened(texts)
    session.cast(LINEARS, "mxfp4:imatrix")
    session.export(tmp_path / "out")
    options = de.Options(device="cpu", prompts=("one short prompt",))
    assert unchecked(verify(tmp_path / "out", locate(str(DEMO)), options=options))
    fitted = de.Options(device="cpu", prompts=("one short prompt",), calibration=(texts / "fit.txt",))
    assert not unchecked(verify(tmp_path / "out", locate(str(DEMO)), options=fitted))


def test_saved_recipe_says_to_what_it_was_fitted(texts: Path, tmp_path: Path) -> None:
    fit = texts / "fit.txt"
    cast = ("--device", "cpu", "--prompt", "one short prompt", "--cast", "*.q_proj=int8:gptq", "--calibration", fit)
    assert engine("drift", DEMO, *cast, "-o", tmp_path / "r.yaml") == 0
    written = read_recipe_file(tmp_path / "r.yaml")
    assert written.fitted_to is not None
    assert written.fitted_to.inputs.startswith("fit.txt")
    assert str(written.recipe) == "*.q_proj=int8:gptq"


def test_calibration_without_roundings_is_said_to_be_unused(texts: Path) -> None:
    session = opened(texts)
    session.cast("*.mlp", "bfloat16")
    assert any("--calibration is not used" in notice for notice in session.drift().notices)


def test_errors_of_weights_are_those_of_the_nearest_values_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine("weights", DEMO, "--cast", "*.q_proj=int4@g32:gptq", "--json") == 0
    printed = capsys.readouterr()
    rounded = json.loads(printed.out)["weights"]
    assert {each["dtype"] for each in rounded} == {"int4@g32"}
    assert "6 weights with roundings: the errors are those of the nearest values" in printed.err
    assert engine("weights", DEMO, "--cast", "*.q_proj=int4@g32", "--json") == 0
    assert json.loads(capsys.readouterr().out)["weights"] == rounded


def test_found_recipe_says_to_what_it_was_fitted(texts: Path, tmp_path: Path) -> None:
    options = ("--device", "cpu", "--prompt", "one short prompt", "--calibration", texts / "fit.txt", "--draws", "1")
    found = ("--dtypes", "int4@g32:imatrix", "--budget", "60%", "-o", tmp_path / "r.yaml")
    assert engine("search", DEMO, *options, *found) == 0
    fitted = read_recipe_file(tmp_path / "r.yaml").fitted_to
    assert fitted is not None
    assert fitted.inputs.startswith("fit.txt")


def dense(tied: bool) -> torch.nn.Module:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


def experts() -> torch.nn.Module:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=256)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [partial(dense, False), partial(dense, True), experts, gpt2])
@pytest.mark.parametrize("dtype", ["int4@g32", "nvfp4", "int8"])
def test_no_module_gets_a_larger_error_by_its_inputs(make: Callable[[], torch.nn.Module], dtype: str) -> None:
    torch.manual_seed(0)
    session = de.open(make().eval(), inputs={"input_ids": torch.randint(0, 96, (2, 120))})
    session.apply(de.Recipe.of([de.Rule.make("*", f"{dtype}:gptq")]))
    rounded = {name: weight for name, weight in session.model.weights.items() if weight.rounded is not None}
    assert len(rounded) >= 6
    assert session.calibration is not None
    held = {name: weight_values(weight) for name, weight in rounded.items()}
    with session.putting_back():
        session.model.apply(dict.fromkeys(session.model.weights, "float32"))
        (found,) = session.calibration.collect(dict.fromkeys(rounded, f"{dtype}:gptq"), lambda: None, never)
    for name, weight in rounded.items():
        stored = weight.stored.read().float()
        nearest = values_in(stored, dtype, torch.float32, weight.amax if dtype == "nvfp4" else None)
        for index, given in found[name].parts.items():
            assert given.products is not None
            of_part = (index,) if index is not None else ()
            most, least = (
                output_error((values - stored)[of_part], given.products, found[name].across).sum()
                for values in (held[name], nearest)
            )
            assert most <= least * 1.0001, (name, index)


def weight_values(weight: Weight) -> torch.Tensor:
    assert weight.scale is not None
    return dequantize(weight.tensor.data, weight.scale, torch.float32, dtypes.BY_NAME[weight.dtype].blocks)


def test_saved_drift_of_a_rounding_is_only_for_its_calibration_inputs(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cast = (
        "--device",
        "cpu",
        "--prompt",
        "one short prompt",
        "--cast",
        "*.q_proj=int8:gptq",
        "--save",
        tmp_path / "d.json",
    )
    assert engine("drift", DEMO, *cast, "--calibration", texts / "fit.txt") == 0
    assert engine("drift", DEMO, *cast, "--calibration", texts / "fit.txt") == 0
    capsys.readouterr()
    assert engine("drift", DEMO, *cast, "--calibration", texts / "other.txt") == 2
    assert "was measured with other calibration inputs" in capsys.readouterr().err


def test_roundings_lost_if_the_drift_without_them_is_smaller_by_more_than_both_errors(texts: Path) -> None:
    session = opened(texts)
    session.cast("*.q_proj", "int4@g32:gptq")
    found = session.held_out(de.Options(prompts=("one short prompt",)))
    assert found.nearest is not None
    small, large = (dataclasses.replace(found.output, kl_mean=kl, kl_mean_se=0.01) for kl in (0.1, 0.2))
    near = dataclasses.replace(found.output, kl_mean=0.19, kl_mean_se=0.01)
    assert msgspec.structs.replace(found, output=large, nearest=small).lost
    assert "the roundings lost" in msgspec.structs.replace(found, output=large, nearest=small).sentence
    for output, nearest in ((small, large), (large, near), (large, None)):
        kept = msgspec.structs.replace(found, output=output, nearest=nearest)
        assert (kept.lost, kept.sentence) == (False, "")
