"""The model as stored as the reference: plain torch runs it in its own dtypes, for the right figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tests.helpers.measured_on import placed

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

Make = Callable[..., Path]
IDS = torch.arange(60).reshape(2, 30) % 64


def opened(folder: Path) -> de.Session:
    return de.open(str(folder), options=de.Options(reference="stored"), inputs={"input_ids": IDS})


def test_uncast_model_does_not_drift_from_the_model_as_stored(make_llama: Make, tmp_path: Path) -> None:
    for folder in (make_llama(dtype="bfloat16"), make_llama("mixed", dtypes={"mlp": "bfloat16", "norm": "float16"})):
        report = opened(folder).drift()
        assert report.output.max_abs == 0.0
        assert report.reference.startswith("as stored (")
    session = de.open(str(folder))
    session.cast("*", "fp8")
    session.export(tmp_path / "fp8")
    assert opened(tmp_path / "fp8").drift().output.max_abs == 0.0


def test_drift_from_the_model_as_stored_equals_plain_torch(make_llama: Make) -> None:
    folder = make_llama(dtype="bfloat16")
    session = opened(folder)
    session.cast("*", "float32")
    with torch.no_grad():
        before, after = (
            placed(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))(IDS).logits.cpu().double()
            for dtype in ("bfloat16", "float32")
        )
    delta, output = (after - before).abs(), session.drift().output
    assert output.max_abs == pytest.approx(float(delta.max()), rel=1e-6)
    assert output.mean_abs == pytest.approx(float(delta.mean()), rel=1e-6)


def test_causes_with_stored_reference_cast_one_module_of_the_stored_model(make_llama: Make) -> None:
    session = opened(make_llama(dtype="bfloat16"))
    session.cast("*.layers.0.mlp.up_proj", "fp8")
    report = session.causes()
    assert [cause.name for cause in report.causes] == ["model.layers.0.mlp.up_proj"]
    assert report.causes[0].drift == report.whole == session.drift().output.kl_mean > 0


def test_exact_scan_with_stored_reference_scores_casts_of_the_stored_model(make_llama: Make) -> None:
    session = opened(make_llama(dtype="bfloat16", num_hidden_layers=1))
    scan = session.scan(["fp8"], exact=True)
    assert scan.reference == "as stored (bfloat16)"
    scores, name = scan.scores(), "model.layers.0.mlp.up_proj.weight"
    assert scores[name, "bfloat16"] == 0.0
    session.cast(name, "fp8")
    assert scores[name, "float8_e4m3fn"] == session.drift().output.kl_mean > 0
    with pytest.raises(de.UserError, match="measure each cast with --exact"):
        session.scan(["fp8"])


def test_saved_scan_of_another_reference_is_refused(make_llama: Make, tmp_path: Path) -> None:
    folder, saved = make_llama(dtype="bfloat16", num_hidden_layers=1), tmp_path / "scan.json"
    opened(folder).scan(["fp8"], exact=True, save=saved)
    with pytest.raises(de.UserError, match="was made with another model"):
        de.open(str(folder), inputs={"input_ids": IDS}).scan(["fp8"], exact=True, save=saved)


def test_drift_command_names_the_stored_reference(make_llama: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", ["drift", "--reference", "stored", "--prompt", "a b c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reference"] == "as stored (float32)"
