"""The acceptance as a draft model against plain transformers, and what asks for it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from tests.engine.runtime.model.test_same_plan import answer, refusal
from tests.helpers.measured_on import placed

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.cancellation import CancelToken
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.measure.listener import MeasurementListener

ASKED = de.RunSettings(acceptance=True)
SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, intermediate_size=48, initializer_range=0.4)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SMALL, intermediate_size=48, initializer_range=0.4)
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(**SMALL, state_size=8, initializer_range=0.4)
    ),
}


def accepted(reference: torch.Tensor, candidate: torch.Tensor) -> np.ndarray:
    """Σ min(p, q) of plain torch at each position, in float64."""
    log_p, log_q = (logits.cpu().double().log_softmax(-1) for logits in (reference, candidate))
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1).flatten().numpy()


def made(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(folder / "model")
    ids = torch.randint(2, 300, (3, 50), generator=torch.Generator().manual_seed(1))
    save_file({f"{row}.input_ids": ids[row : row + 1].clone() for row in range(3)}, folder / "inputs.safetensors")
    return folder


def opened(folder: Path, settings: de.RunSettings = ASKED, **options: Any) -> de.Session:
    given = de.Options(tensors=folder / "inputs.safetensors", settings=settings, **options)
    return de.open(str(folder / "model"), options=given)


def logits(name: str, folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """The output of plain transformers for each sequence, with all parameters in a dtype."""
    model = placed(type(MODELS[name]()).from_pretrained(folder / "model", dtype=torch.float32).eval())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    given = load_file(folder / "inputs.safetensors")
    with torch.no_grad():
        return [model(input_ids=placed(given[key])).logits for key in sorted(given)]


@pytest.mark.parametrize("name", MODELS)
def test_acceptance_equals_that_of_plain_transformers(name: str, tmp_path: Path) -> None:
    folder = made(name, tmp_path)
    session = opened(folder)
    session.cast("*", "bfloat16")
    report = session.drift()
    pairs = zip(logits(name, folder, torch.float32), logits(name, folder, torch.bfloat16), strict=True)
    expected = np.concatenate([accepted(*pair) for pair in pairs])
    assert report.output.positions == len(expected) == 150
    assert report.output.acceptance == pytest.approx(expected.mean(), rel=1e-9)
    assert report.output.acceptance_se == pytest.approx(expected.std(ddof=1) / math.sqrt(150), rel=1e-7)
    assert 0.9 < expected.mean() < 0.999
    assert report.settings == "acceptance measured"


def test_acceptance_of_the_reference_itself_is_one_and_without_the_setting_there_is_none(tmp_path: Path) -> None:
    session = opened(made("llama", tmp_path))
    same = session.drift()
    assert (same.output.acceptance, same.output.acceptance_se) == (1, 0)
    session.settings = de.RunSettings()
    without = session.drift().output
    assert without.acceptance is None
    assert without == dataclasses.replace(
        same.output, values={name: value for name, value in same.output.values.items() if "acceptance" not in name}
    )


def test_positions_of_padding_are_not_in_the_acceptance(tmp_path: Path) -> None:
    folder = made("llama", tmp_path)
    ids = torch.randint(2, 300, (2, 16), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 9:] = 0
    save_file({"input_ids": ids, "attention_mask": mask}, folder / "inputs.safetensors")
    session = opened(folder)
    session.cast("*", "bfloat16")
    found = session.drift()
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        model = placed(transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype=dtype).eval())
        with torch.no_grad():
            outputs.append(model(input_ids=placed(ids), attention_mask=placed(mask)).logits.cpu()[mask.bool()])
    assert found.sequences.left_out == 7
    assert found.output.positions == 25
    assert found.output.acceptance == pytest.approx(accepted(*outputs).mean(), rel=1e-9)


def test_output_without_a_distribution_has_no_acceptance_and_a_notice_says_so(tmp_path: Path) -> None:
    report = opened(made("llama", tmp_path), de.RunSettings(acceptance=True, classes_dim="none")).drift()
    assert report.output.acceptance is None
    assert "acceptance is not measured: the output is no distribution" in report.notices


def test_interrupted_measurement_continues_with_its_acceptance(tmp_path: Path) -> None:
    folder, file, token = made("llama", tmp_path), tmp_path / "run.json", CancelToken()
    session = opened(folder)
    session.cast("*", "bfloat16")
    whole = session.drift().output
    partial = []

    def stop(totals: Any) -> None:
        partial.append(totals.partial().output.acceptance)
        token.cancel()

    again = opened(folder)
    again.cast("*", "bfloat16")
    with pytest.raises(Cancelled):
        again.drift(MeasurementListener(on_sequence=stop, cancelled=token), save=file)
    (first,) = partial
    saved = json.loads(file.read_text())["totals"]
    assert first == pytest.approx(np.mean(saved["sequences"][0]["accepted"]), rel=1e-14)
    assert len(saved["sequences"]) == 1
    assert again.drift(save=file).output == whole
    again.settings = de.RunSettings()
    with pytest.raises(de.UserError, match="was measured with other settings"):
        again.drift(save=file)
    saved["sequences"][0]["accepted"].pop()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"totals": saved}))
    again.settings = ASKED
    with pytest.raises(de.UserError, match=r"is not a saved drift \(its sequences\)"):
        again.drift(save=file)


def test_scan_does_not_depend_on_the_acceptance(tmp_path: Path) -> None:
    folder, file = made("llama", tmp_path), tmp_path / "scan.json"
    scanned = [opened(folder, settings).scan(["bfloat16"], save=file) for settings in (de.RunSettings(), ASKED)]
    assert scanned[0].weights == scanned[1].weights


@pytest.mark.parametrize("option", ["against_logits", "reference_logits"])
def test_acceptance_to_a_file_of_outputs_needs_the_probability_of_every_token(option: str, tmp_path: Path) -> None:
    folder = made("llama", tmp_path)
    ids = torch.cat([load_file(folder / "inputs.safetensors")["0.input_ids"]])
    own = logits("llama", folder, torch.float32)[0].cpu()
    other = own + 0.3 * torch.randn(own.shape, generator=torch.Generator().manual_seed(3))
    save_file({"input_ids": ids, "log_probs": other.log_softmax(-1)}, tmp_path / "all.safetensors")
    lines: list[Any] = [None, *({str(i): {"logprob": float(row[i])} for i in row.topk(9).indices.tolist()} for row in
                                other.log_softmax(-1)[0, :-1])]  # fmt: skip
    for token, line in zip(ids[0, 1:].tolist(), lines[1:], strict=True):
        line.setdefault(str(token), {"logprob": -20.0})
    (tmp_path / "top.jsonl").write_text(json.dumps({"prompt_token_ids": ids[0].tolist(), "prompt_logprobs": lines}))
    whole, top = (
        de.open(str(folder / "model"), options=de.Options(settings=ASKED, **{option: tmp_path / name})).drift()
        for name in ("all.safetensors", "top.jsonl")
    )
    assert whole.output.acceptance == pytest.approx(accepted(own, other).mean(), rel=1e-5)  # the file is in float32
    assert top.output.kl_mean is not None
    assert top.output.acceptance is None
    assert "acceptance is not measured: the probabilities of some tokens are not known one by one" in top.notices


def status_and_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = run(cli, "dtype-engine", arguments)
    return status, capsys.readouterr().out


@pytest.mark.slow
def test_limit_on_the_acceptance_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, recipe = made("llama", tmp_path), tmp_path / "found.yaml"
    drift = ["drift", str(folder / "model"), "--inputs", str(folder / "inputs.safetensors"), "--floor", "never"]
    drift += ["--json", "--cast", "*=bfloat16"]
    assert answer(capsys, *drift)["output"]["acceptance"] is None
    asked = answer(capsys, *drift, "--acceptance", "-o", str(recipe))
    limited = answer(capsys, *drift, "--min", "acceptance=50%")
    assert limited["output"] == asked["output"]
    assert limited["thresholds"][0]["value"] == asked["output"]["acceptance"]
    assert status_and_text(capsys, *drift[:-2], "--max", "acceptance=0.5")[0] == 1
    assert "acceptance: true" in recipe.read_text()
    written = yaml.safe_load(recipe.read_text())["measured"]["acceptance"]
    assert written == pytest.approx(asked["output"]["acceptance"], rel=1e-5)
    again = answer(capsys, *drift[:-2], "--recipe", str(recipe))
    assert again["output"] == asked["output"]
    assert "no figure" in refusal(capsys, *drift, "--min", "accepted=1")


@pytest.mark.slow
def test_acceptance_is_shown_by_sweep_search_executions_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, recipe = made("llama", tmp_path), tmp_path / "bf16.yaml"
    recipe.write_text('version: 1\nrules:\n  - {pattern: "*", dtype: bfloat16}\n')
    inputs = ["--inputs", str(folder / "inputs.safetensors")]
    session = opened(folder)
    session.cast("*", "bfloat16")
    share = f"{100 * float(session.drift().output.acceptance or 0):.2f} %"
    model = str(folder / "model")
    texts = [
        ("sweep", model, str(recipe), *inputs, "--acceptance"),
        ("search", model, "--dtypes", "bf16", "--budget", "50%", "--measure", "--acceptance", *inputs),
        ("check-execution", model, "--execution", "decode=yes", "--min", "acceptance=50%", *inputs),
    ]
    said = []
    for arguments in texts:
        status, text = status_and_text(capsys, *arguments)
        assert status == 0
        said.append(text)
    assert f" {share}" in said[0].partition("acceptance")[2]
    assert f"acceptance {share}" in said[1]
    assert " 100.00 %" in said[2].partition("acceptance")[2]
    page = tmp_path / "page.md"
    arguments = ("report", model, "--cast", "*=bf16", *inputs, "--acceptance", "-o", str(page))
    assert status_and_text(capsys, *arguments)[0] == 0
    assert f"· acceptance: {share} ·" in page.read_text()
    assert f"| acceptance of drafts | {share.removesuffix(' %')} ± " in page.read_text()
