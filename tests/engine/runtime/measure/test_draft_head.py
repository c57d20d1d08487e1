"""The acceptance of a checkpoint's draft head against one computed from the definition, without transformers' `MtpModel`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.engine.runtime.model.test_same_plan import answer
from tests.helpers.draft_heads import PUBLISHED, as_published, with_head
from tests.helpers.file_edits import Tensors, change_tensors
from tests.helpers.measured_on import placed
from transformers import modeling_layers

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.cancellation import CancelToken
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.measure import draft_head
from dtype_engine.runtime.measure.listener import MeasurementListener

ASKED = de.RunSettings(acceptance=True)
NOT_RUN = "no forward pass uses it"
WITHOUT = "this transformers has no MtpModel"


def with_inputs(folder: Path) -> Path:
    ids = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(1))
    save_file({f"{row}.input_ids": ids[row : row + 1].clone() for row in range(3)}, folder / "inputs.safetensors")
    return folder


def made(name: str, folder: Path) -> tuple[Path, str]:
    """Make `model` and `inputs.safetensors` in a folder. Returns the folder, and the name of the model's draft layer."""
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip(WITHOUT)
    return with_inputs(folder), as_published(name, folder / "model")


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return made("glm4_moe", tmp_path_factory.mktemp("glm"))


def opened(folder: Path, settings: de.RunSettings = ASKED, **options: Any) -> de.Session:
    given = de.Options(tensors=folder / "inputs.safetensors", settings=settings, **options)
    return de.open(str(folder / "model"), options=given)


def values_in(export: Path) -> Tensors:
    """The values of an export's tensors: codes times scales."""
    stored = load_file(export / "model.safetensors")
    return {
        name: tensor.float() * stored[f"{name}_scale"].float() if f"{name}_scale" in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale")
    }


def expected(source: Path, head: Tensors, layer: str, main: torch.dtype, scratch: Path) -> np.ndarray:
    """Σ min(p, q) at each position of each sequence. head: the values of the head, by their names in the files. main: the dtype of
    all parameters of the model itself.
    """
    last = f"model.layers.{int(layer.rpartition('.')[2]) - 1}"
    weights = {
        name.removeprefix(f"{layer}."): tensor.float() for name, tensor in head.items() if name.startswith(layer)
    }
    # transformers loads the decoder layer of the head in the place of the model's last layer.
    shutil.copytree(source / "model", scratch)
    change_tensors(
        scratch,
        lambda tensors: tensors.update(
            {f"{last}.{name}": weight for name, weight in weights.items() if f"{last}.{name}" in tensors}
        ),
    )
    of_head = placed(transformers.AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()).model
    model = placed(transformers.AutoModelForCausalLM.from_pretrained(source / "model", dtype=torch.float32).eval())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(main)
    weights = placed(weights)
    eps = model.config.rms_norm_eps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weights[f"{name}.weight"]

    found = []
    for ids in placed(load_file(source / "inputs.safetensors")).values():
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state
            p = model.lm_head(hidden)[:, 1:].double().softmax(-1)
            embedded = model.model.embed_tokens(ids[:, 1:]).float()
            joined = torch.cat([norm(embedded, "enorm"), norm(hidden[:, :-1].float(), "hnorm")], -1)
            x = joined @ weights["eh_proj.weight"].T
            positions = placed(torch.arange(1, ids.shape[1])[None])
            allowed = placed(torch.ones(x.shape[1], x.shape[1]).tril().log()[None, None])
            rotary = of_head.rotary_emb(x, positions)
            x = of_head.layers[-1](x, attention_mask=allowed, position_ids=positions, position_embeddings=rotary)
            q = model.lm_head(norm(x, "shared_head.norm").to(main)).double().softmax(-1)
        found.append(torch.minimum(p, q).sum(-1).flatten().cpu().numpy())
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "dtype", "main"),
    [
        ("*_proj.weight", "int8", torch.float32),
        ("*_proj.weight", "float8_e4m3fn@tensor", torch.float32),
        ("*", "bfloat16", torch.float32),
        ("*_proj.weight", "int8", torch.bfloat16),
    ],
    ids=["int8", "fp8, one scale", "bf16", "int8, the model bf16"],
)
def test_acceptance_of_the_head_equals_that_of_its_definition(
    published: tuple[Path, str], pattern: str, dtype: str, main: torch.dtype, tmp_path: Path
) -> None:
    folder, layer = published
    session = opened(folder)
    if main != torch.float32:
        session.cast("*", "bfloat16")
    session.cast(f"{layer}.{pattern}", dtype)
    report = session.drift()
    session.export(tmp_path / "export")
    stored = load_file(folder / "model" / "model.safetensors")
    of_reference = expected(folder, stored, layer, torch.float32, tmp_path / "stored")
    of_candidate = expected(folder, values_in(tmp_path / "export"), layer, main, tmp_path / "cast")
    found = report.draft
    assert found is not None
    assert found.positions == len(of_reference) == 57
    assert found.reference == pytest.approx(of_reference.mean(), rel=1e-6)
    assert found.candidate == pytest.approx(of_candidate.mean(), rel=1e-6)
    assert found.reference_se == pytest.approx(of_reference.std(ddof=1) / math.sqrt(57), rel=1e-5)
    assert found.candidate_se == pytest.approx(of_candidate.std(ddof=1) / math.sqrt(57), rel=1e-5)
    assert 0.1 < of_reference.mean() < 0.9
    assert abs(of_candidate.mean() / of_reference.mean() - 1) > 1e-5
    assert not any(NOT_RUN in notice for notice in report.notices)


@pytest.mark.slow
def test_measuring_the_head_changes_nothing_else_and_a_second_measurement_runs_the_reference_no_more(
    glm: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, layer = glm
    session = opened(folder, de.RunSettings())
    built, real = list[int](), draft_head.built_head

    def counted(model: Any, planned: Any) -> Any:
        built.append(len(planned))
        return real(model, planned)

    monkeypatch.setattr(draft_head, "built_head", counted)
    session.cast("lm_head", "bfloat16")
    without = session.drift()
    assert without.draft is None
    assert built == []
    assert any(NOT_RUN in notice for notice in without.notices)
    session.settings = ASKED
    first = session.drift()
    session.cast(f"{layer}.*", "float16")
    second = session.drift()
    assert len(built) == 3  # both heads, then that of the candidate
    assert first.draft is not None
    assert second.draft is not None
    assert second.draft.reference == first.draft.reference
    assert second.draft.candidate != first.draft.candidate
    session.settings = de.RunSettings()
    assert session.drift().output == without.output


@pytest.mark.slow
def test_measuring_the_head_stops_between_two_sequences_and_leaves_out_those_of_one_token(
    glm: tuple[Path, str], tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(glm[0] / "model")
    lengths = (5, 1, 2)
    save_file(
        {f"{row}.input_ids": torch.arange(length)[None] for row, length in enumerate(lengths)},
        tmp_path / "inputs.safetensors",
    )
    session = opened(tmp_path)
    session.cast("*", "bfloat16")
    token, told = CancelToken(), []

    def stop(run: str, done: int, total: int) -> None:
        if "draft head" in run:
            told.append((run, done, total))
            if run.startswith("candidate"):
                token.cancel()

    with pytest.raises(Cancelled):
        session.drift(MeasurementListener(on_progress=stop, cancelled=token))
    assert told == [("reference, draft head", 0, 2), ("reference, draft head", 1, 2), ("candidate, draft head", 0, 2)]
    found = session.drift().draft
    assert found is not None
    assert found.positions == 5


@pytest.mark.slow
def test_command_json_and_reports_show_the_acceptance_of_the_head(
    glm: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, layer = glm
    inputs = ["--inputs", str(folder / "inputs.safetensors"), "--floor", "never"]
    drift = ["drift", str(folder / "model"), "--cast", f"{layer}.*=int8", *inputs]
    found = answer(capsys, *drift, "--acceptance", "--json")["draft"]
    assert set(found) == {"reference", "candidate", "reference_se", "candidate_se", "positions"}
    p, q = (f"{100 * found[side]:.2f} ± {100 * found[f'{side}_se']:.2g} %" for side in ("reference", "candidate"))
    page = tmp_path / "page.md"
    assert run(cli, "dtype-engine", [*drift, "--acceptance", "--report", str(page)]) == 0
    said = capsys.readouterr()
    assert f"\ndraft head acceptance {p} → {q}; first draft layer, 57 positions\n" in said.out
    assert NOT_RUN not in said.err
    assert (
        f"| draft head, acceptance | {p} → {q} | mean of Σ min(p, q), first draft layer, 57 positions |"
        in page.read_text()
    )
    assert answer(capsys, *drift, "--json")["draft"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("execution", "options", "why"),
    [
        (de.Execution(), {"reference": "stored"}, ""),
        (de.Execution(attention="eager"), {}, ""),
        (de.Execution(decode=True), {}, "it needs passes over one whole sequence each"),
        (de.Execution(), {"reference": "other"}, "the reference is another checkpoint"),
    ],
    ids=["reference as stored", "attention", "token by token", "another checkpoint"],
)
def test_settings_with_which_the_head_runs(
    glm: tuple[Path, str], execution: de.Execution, options: dict[str, str], why: str
) -> None:
    folder, _ = glm
    if options.get("reference") == "other":
        shutil.copytree(folder / "model", folder / "other")
        options = {"reference": str(folder / "other")}
    report = opened(folder, de.RunSettings(acceptance=True, execution=execution), **options).drift()
    assert (report.draft is None) == bool(why)
    said = [notice for notice in report.notices if "is not measured" in notice]
    assert said == ([f"acceptance of the draft head (MTP) is not measured: {why}"] if why else [])


def reason(folder: Path) -> str:
    """Why the acceptance of a model's head is not measured."""
    report = opened(folder).drift()
    assert report.draft is None
    (said,) = (notice for notice in report.notices if "is not measured" in notice)
    begin = "acceptance of the draft head (MTP) is not measured: "
    assert said.startswith(begin)
    return said.removeprefix(begin)


@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason=WITHOUT)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3_next", "can't run that of Qwen3NextForCausalLM"),
        ("deepseek_v3", "knows that of DeepseekV3ForCausalLM by other names than model.layers.2."),
    ],
)
def test_head_that_transformers_cannot_run_is_said(name: str, why: str, tmp_path: Path) -> None:
    with_head(name, with_inputs(tmp_path) / "model")
    assert reason(tmp_path).startswith(f"transformers {transformers.__version__} {why}")


def test_lost_head_and_lost_parts_are_said(tmp_path: Path) -> None:
    with_head("deepseek_v3", with_inputs(tmp_path) / "model")
    change_tensors(tmp_path / "model", lambda tensors: tensors.pop("model.layers.2.eh_proj.weight"))
    assert reason(tmp_path) == "its files lack model.layers.2.eh_proj"

    def lose(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    change_tensors(tmp_path / "model", lose)
    assert reason(tmp_path) == "config.json declares one by num_nextn_predict_layers, and no file has its tensors"


@pytest.mark.slow
def test_head_without_a_tensor_that_transformers_needs_is_said(glm: tuple[Path, str], tmp_path: Path) -> None:
    folder, layer = glm
    shutil.copytree(folder / "model", with_inputs(tmp_path) / "model")
    change_tensors(tmp_path / "model", lambda tensors: tensors.pop(f"{layer}.shared_head.norm.weight"))
    why = reason(tmp_path)
    assert why.startswith(f"transformers {transformers.__version__} can't build that of ")
    assert "layers.0.post_norm.weight" in why
    assert "dtype-engine-" not in why


@pytest.mark.slow
def test_transformers_without_draft_heads_is_said(glm: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(modeling_layers, "MtpModel")
    assert reason(glm[0]) == f"transformers {transformers.__version__} has no MtpModel, which runs draft heads"


@pytest.mark.slow
def test_padded_and_short_inputs_are_said(glm: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(glm[0] / "model")
    ids, mask = torch.randint(0, 64, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    save_file({"input_ids": ids, "attention_mask": mask}, tmp_path / "inputs.safetensors")
    together = opened(tmp_path).drift().draft
    save_file({f"{row}.input_ids": ids[row : row + 1].clone() for row in range(2)}, tmp_path / "inputs.safetensors")
    alone = opened(tmp_path).drift().draft
    assert together is not None
    assert alone is not None
    assert together.positions == alone.positions == 16
    assert together.reference == pytest.approx(alone.reference, rel=1e-5)
    mask[1, 6:] = 0
    save_file({"input_ids": ids, "attention_mask": mask}, tmp_path / "inputs.safetensors")
    assert reason(tmp_path) == "the inputs are not sequences of tokens alone, without padding"
    save_file({"input_ids": ids[:, :1].clone()}, tmp_path / "inputs.safetensors")
    assert reason(tmp_path) == "no sequence has two tokens"


def test_model_without_a_head_is_run_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(with_inputs(tmp_path) / "model")
    monkeypatch.setattr(draft_head.DraftMeter, "measure", None)
    report = opened(tmp_path).drift()
    assert report.output.acceptance == 1
    assert report.draft is None
    assert not any("draft" in notice for notice in report.notices)


@pytest.mark.slow
def test_outputs_of_a_file_have_no_head(glm: tuple[Path, str], tmp_path: Path) -> None:
    file = opened(glm[0]).save_logits(tmp_path / "reference.safetensors")
    given = de.Options(settings=ASKED, reference_logits=file)
    report = de.open(str(glm[0] / "model"), options=given).drift()
    assert report.draft is None
    assert sum("a file has the outputs, not the hidden states" in notice for notice in report.notices) == 1


@pytest.mark.slow
def test_head_of_a_quantized_checkpoint_has_the_values_of_its_codes(glm: tuple[Path, str], tmp_path: Path) -> None:
    folder, layer = glm
    session = opened(folder)
    session.cast("*_proj.weight", "int8")
    cast = session.drift().draft
    session.export(with_inputs(tmp_path) / "model")
    again = opened(tmp_path)
    again.cast(f"{layer}.*", "float16")
    found = again.drift().draft
    assert cast is not None
    assert found is not None
    assert found.reference == pytest.approx(cast.candidate, rel=1e-5)
    assert found.candidate != found.reference
    assert found.candidate == pytest.approx(cast.candidate, rel=1e-2)


@pytest.mark.slow
def test_head_of_a_model_larger_than_memory_is_the_same(glm: tuple[Path, str]) -> None:
    found = []
    for options in ({}, {"max_memory": {"cpu": 300_000}, "over_memory": True}):
        session = opened(glm[0], **options)
        session.cast("*", "bfloat16")
        found.append(session.drift().draft)
    assert found[0] is not None
    assert found[0] == found[1]
