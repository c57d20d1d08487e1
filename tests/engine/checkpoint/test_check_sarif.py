"""The SARIF of a check: files that a code host can find, messages without links, and a log also of a run without results."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.file_edits import change_config, change_tensors

from dtype_engine.cli import cli
from dtype_engine.cli.program import run


def sarif(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = run(cli, "dtype-engine", [*arguments, "--sarif"])
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    return status, found


def uris(run_of_sarif: Any) -> list[str]:
    places = (place for result in run_of_sarif["results"] for place in result["locations"])
    return [place["physicalLocation"]["artifactLocation"]["uri"] for place in places]


def damaged(folder: Path) -> Path:
    """Lose a tensor, add one, and change a declared size: findings of a shard, of the configuration, and of no file at all."""
    change_tensors(folder, lambda held: held.update({"model.extra.weight": torch.ones(2, 2)}))
    change_tensors(folder, lambda held: held.pop("model.norm.weight"))
    return change_config(folder, dtype="float16")


@pytest.mark.parametrize("place", ["folder", "below a repository", "outside"])
def test_uris_lead_to_files_from_the_repository_or_the_current_folder(
    place: str, make_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    base = tmp_path
    model = damaged(make_llama("a model#1"))
    if place == "below a repository":
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        (tmp_path / "below").mkdir()
        monkeypatch.chdir(tmp_path / "below")
    elif place == "outside":
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
    else:
        monkeypatch.chdir(tmp_path)
    status, found = sarif(capsys, "check", str(model))
    assert status == 1
    named = uris(found)
    assert {each["ruleId"] for each in found["results"]} == {"declared-dtype", "missing-tensor", "unused-tensor"}
    for uri in named:
        split = urlsplit(uri)
        assert split.scheme == ("file" if place == "outside" else "")
        path = Path(unquote(split.path))
        assert (path if place == "outside" else base / path).is_file()
        assert not split.fragment
    assert {unquote(uri).rpartition("/")[2] for uri in named} == {"config.json", "model.safetensors"}


def test_uri_of_an_absent_shard_is_that_of_the_index(
    make_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama(max_shard_size="10KB")
    min(folder.glob("model-*.safetensors")).unlink()
    monkeypatch.chdir(tmp_path)
    status, found = sarif(capsys, "check", "llama")
    assert (status, {*uris(found)}) == (1, {"llama/model.safetensors.index.json"})


@pytest.mark.parametrize("name", ["[text](https://example.com)", "[text\\](link)", "a[0](1)"])
def test_name_of_a_tensor_is_no_link(
    name: str, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """By SARIF 2.1.0, 3.11.6, a bracket after a backslash neither begins nor ends the text of a link."""
    folder = make_llama()
    change_tensors(folder, lambda held: held.update({f"{name}.weight": torch.ones(2, 2)}))
    _, found = sarif(capsys, "check", str(folder))
    (result,) = found["results"]
    text, plain, brackets, escaped = result["message"]["text"], "", "", False
    for character in text:
        if not escaped and character == "\\":
            escaped = True
            continue
        plain += character
        brackets += character if character in "[]" and not escaped else ""
        escaped = False
    assert not brackets
    assert plain.startswith(f"{name}.weight has no place")
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == f"{name}.weight"


def told(status: int, found: Any) -> str:
    """What a log says about a run that ended with an error."""
    (said,) = found["invocations"]
    assert (status, said["executionSuccessful"], said["exitCode"]) == (2, False, 2)
    (notification,) = said["toolExecutionNotifications"]
    assert notification["level"] == "error"
    return str(notification["message"]["text"])


@pytest.mark.parametrize("kind", ["cut shard", "pointer", "lost index", "no shards", "one file"])
def test_model_that_cannot_be_read_is_a_result(
    kind: str, make_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = make_llama(max_shard_size="10KB")
    shard = min(folder.glob("model-*.safetensors"))
    model, file = "llama", "model.safetensors.index.json"
    if kind in ("cut shard", "one file"):
        shard.write_bytes(shard.read_bytes()[:-10])
    elif kind == "pointer":
        shard.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 20123\n")
    elif kind == "lost index":
        (folder / file).unlink()
        file = "config.json"
    else:
        for each in folder.glob("model-*.safetensors"):
            each.unlink()
    if kind == "one file":
        model, file = f"llama/{shard.name}", shard.name
    monkeypatch.chdir(tmp_path)
    status = run(cli, "dtype-engine", ["check", model, "--sarif"])
    printed = capsys.readouterr()
    (found,) = json.loads(printed.out)["runs"]
    (result,) = found["results"]
    text = result["message"]["text"]
    assert (result["ruleId"], result["level"]) == ("unreadable", "error")
    assert told(status, found) == text
    assert shard.name in text
    assert ("git lfs pull" in text) == (kind == "pointer")
    assert uris(found) == [f"llama/{file}"]
    assert [rule["id"] for rule in found["tool"]["driver"]["rules"]] == ["unreadable"]
    assert printed.err == f"dtype-engine: {text}\n"


@pytest.mark.parametrize("kind", ["no folder", "recipe"])
def test_run_without_a_model_says_why_it_has_no_results(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text("version: 99\n")
    lint = ("recipe", "lint", str(tmp_path / "r.yaml"), "--for", "torchao", "--model", "demo")
    status, found = sarif(capsys, *(lint if kind == "recipe" else ("check", str(tmp_path / "nothing"))))
    assert told(status, found)
    assert found["results"] == []


def test_only_relative_uris_are_below_the_root_of_the_sources(
    make_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By SARIF 2.1.0, 3.4.4, a relative reference has a base, and an absolute one has none."""
    model = damaged(make_llama())
    (tmp_path / "elsewhere").mkdir()
    for here, base in ((tmp_path, "%SRCROOT%"), (tmp_path / "elsewhere", None)):
        monkeypatch.chdir(here)
        _, found = sarif(capsys, "check", str(model))
        places = [place["physicalLocation"] for result in found["results"] for place in result["locations"]]
        assert {place["artifactLocation"].get("uriBaseId") for place in places} == {base}


def test_file_of_a_component_is_below_its_folder(
    tmp_path: Path, make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = make_llama("pipeline/text_encoder")
    (encoder.parent / "vae").mkdir()
    (encoder.parent / "vae" / "config.json").write_text("{}")
    named = {"text_encoder": ["transformers", "LlamaForCausalLM"], "vae": ["diffusers", "AutoencoderKL"]}
    index = {"_class_name": "Pipeline", **named, "unet": ["diffusers", "UNet2DModel"], "safety_checker": [None, None]}
    (encoder.parent / "model_index.json").write_text(json.dumps(index))
    change_tensors(encoder, lambda held: held.update({"model.extra.weight": held.pop("model.norm.weight")}))
    assert "model.extra.weight" in load_file(encoder / "model.safetensors")
    change_config(encoder, num_key_value_heads=2)
    monkeypatch.chdir(tmp_path)
    status, found = sarif(capsys, "check", "pipeline")
    kinds = {
        each["locations"][0]["logicalLocations"][0]["fullyQualifiedName"]: each["ruleId"] for each in found["results"]
    }
    assert status == 1
    assert kinds == {
        "vae": "missing-tensor",
        "unet": "missing-tensor",
        "text_encoder.model.norm.weight": "missing-tensor",
        "text_encoder.model.extra.weight": "unused-tensor",
        **{
            f"text_encoder.model.layers.{layer}.self_attn.{part}_proj.weight": "tensor-shape"
            for layer in (0, 1)
            for part in "kv"
        },
    }
    assert all((tmp_path / uri).is_file() for uri in uris(found))
    assert {uri for uri in uris(found) if "text_encoder" in uri} == {
        "pipeline/text_encoder/model.safetensors", "pipeline/text_encoder/config.json",
    }  # fmt: skip


def test_pipeline_without_damage_has_no_finding(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = make_llama("pipeline/text_encoder")
    named = {"_class_name": "Pipeline", "text_encoder": ["transformers", "LlamaForCausalLM"]}
    (encoder.parent / "model_index.json").write_text(json.dumps(named))
    status, found = sarif(capsys, "check", str(encoder.parent))
    assert (status, found["results"]) == (0, [])
    save_file({"only": torch.ones(1)}, encoder / "model.safetensors")
    assert sarif(capsys, "check", str(encoder.parent))[0] == 1
