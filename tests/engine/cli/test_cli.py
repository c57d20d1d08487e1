from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from tests.helpers import paths
from tests.helpers.recording_engine import report

from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.recipe import Recipe
from dtype_engine.results.attribution import near_floor

TINYNET = f"{paths.TINYNET}:TinyNet"
PROGRAM = str(Path(sys.executable).with_name("dtype-engine"))


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=120)


def object_from(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(cli, "dtype-engine", arguments) == 0

    def strict(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(capsys.readouterr().out, parse_constant=strict)


def test_installed_program_prints_drift_as_json(tinynet: Any) -> None:
    done = program("drift", TINYNET, "--cast", "*=float16", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    found = json.loads(done.stdout)
    tinynet.cast("*", "float16")
    output = tinynet.drift().output
    assert found["output"]["mean_abs"] == pytest.approx(output.mean_abs, rel=1e-6)
    assert found["output"]["max_abs"] == pytest.approx(output.max_abs, rel=1e-6)


def test_drift_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_from(capsys, "drift", "--cast", "*.mlp=bf16", "--json")
    assert {"model", "device", "reference", "rules", "output", "modules", "memory", "seconds"} <= found.keys()
    assert {
        "mean_abs", "max_abs", "rel_l2", "sqnr_db", "cosine", "nonfinite", "kl_mean", "kl_p99", "kl_max", "top1_agreement",
        "perplexity_reference", "perplexity_candidate",
    } <= found["output"].keys()  # fmt: skip
    assert found["modules"][0].keys() >= {"name", "sqnr_db", "max_abs", "nonfinite"}
    assert found["memory"].keys() >= {"stored_bytes", "planned_bytes", "resident_bytes", "peak_rss_bytes"}
    assert found["seconds"].keys() >= {"reference", "candidate"}
    assert found["rules"] == ["*.mlp=bfloat16"]


def test_measurement_stops_at_the_requested_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """The noise floor is measured only if it may matter, or with `--floor always`."""
    found = object_from(capsys, "drift", "--cast", "*=bf16", "--precision", "20%", "--json")
    assert found["sequences"]["done"] < found["sequences"]["total"] == 6
    assert 0 < found["sequences"]["kl_error"] <= 0.2
    assert found["floor"] is None
    assert found["under_floor"] is False
    always = object_from(
        capsys, "drift", "--cast", "*=bf16", "--sequences", "1", "--json", "--keep", "1MiB", "--floor", "always"
    )
    assert always["floor"]["ways"]
    assert object_from(capsys, "drift", "--sequences", "1", "--json")["floor"] is None  # nothing differs


@pytest.mark.parametrize(
    ("rel_l2", "near"), [(0.0, False), (1e-7, True), (1e-4, True), (5e-3, False), (math.inf, False)]
)
def test_only_a_small_relative_error_is_near_the_noise_floor(rel_l2: float, near: bool) -> None:
    assert near_floor(dataclasses.replace(report(Recipe()).output, rel_l2=rel_l2)) is near


def test_zero_drift_is_printed_as_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    output = object_from(capsys, "drift", "--cast", "*=float32", "--json")["output"]
    assert (output["max_abs"], output["kl_max"], output["sqnr_db"]) == (0, 0, None)


def test_inspect_json_shows_the_planned_casts(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_from(capsys, "inspect", "--json", "--cast", "*.mlp=bf16")
    assert found["parameters"] == 707808
    assert found["stored_bytes"] == 4 * 707808
    assert found["planned_bytes"] == 4 * 707808 - 2 * 6 * 3 * 96 * 256
    assert set(found["dtypes"]) == {"float32", "bfloat16"}
    saved = [tensor for tensor in found["tensors"] if tensor["kind"] != "non-persistent buffer"]
    assert len(saved) == 56
    assert run(cli, "dtype-engine", ["inspect"]) == 0
    text = capsys.readouterr().out
    assert "707.8 k" in text
    assert "2.70 MiB" in text


def test_inspect_of_a_python_file_lists_the_module_classes(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_from(capsys, "inspect", TINYNET, "--json", "--cast", "type:Linear=bf16")
    assert {module["class"] for module in found["modules"]} == {"TinyNet", "Embedding", "Linear", "LayerNorm"}


def test_drift_command_prints_a_readable_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", ["drift", "--cast", "*=bf16"]) == 0
    text = capsys.readouterr().out
    for word in ("SQNR", "KL", "same top-1", "perplexity", "planned 1.35 MiB", "worst modules"):
        assert word in text


def test_rules_of_cast_options_apply_after_those_of_the_recipe_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text('version: 1\nrules:\n  - {pattern: "*", dtype: bfloat16}\n')
    found = object_from(capsys, "inspect", "--json", "--recipe", str(recipe), "--cast", "*norm*=f32")
    assert found["rules"] == ["*=bfloat16", "*norm*=float32"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["drift", "no-such-model"], "no such folder or file"),
        (["drift", "--cast", "*=bfloat17"], "did you mean bfloat16"),
        (["drift", "--cast", "model.layer=bf16"], "matches nothing"),
        (["drift", "--cast", "model.layers"], "write PATTERN=DTYPE"),
        (["drift", "--cast", "{a=bf16"], "never closed"),
        (["drift", "--text", "BINARY"], "is not text"),
        (["drift", "--text", "MISSING"], "No such file"),
        (["drift", "--recipe", "MISSING"], "can't read the recipe"),
        (["drift", "--device", "toaster"], "no device"),
        (["drift", "--compute", "int8"], "choose one of"),
        (["inspect", "EMPTY"], "is no model"),
        (["drift", f"{TINYNET}x"], "it has TinyNet"),
        (["nonsense"], "No such command"),
        (["drift", "--nonsense"], "No such option"),
        (["drift", "--precision", "5"], "such as 5%"),
        (["drift", "--precision", "few"], "such as 5%"),
        (["drift", "--keep", "10%"], "such as 2GiB"),
        (["drift", "--floor", "sometimes"], "is not one of"),
        (["flow", "--precision", "5%"], "No such option"),
    ],
)
def test_command_exits_with_one_line_and_status_2_for_bad_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").mkdir()
    places = {"BINARY": "binary", "MISSING": "missing", "EMPTY": "empty"}
    given = [str(tmp_path / places[word]) if word in places else word for word in arguments]
    assert run(cli, "dtype-engine", given) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("dtype-engine: ")
    assert says in captured.err


def test_interrupted_command_exits_with_status_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(model: str | None, *how: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dtype_engine.checkpoint.source.locate", interrupted)
    assert run(cli, "dtype-engine", ["inspect"]) == 130


def test_command_exits_with_130_if_an_interrupt_became_another_error(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def stopped() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    assert run(stopped, "dtype-engine", []) == 130
    assert capsys.readouterr().err == "dtype-engine: interrupted\n"


def test_verbose_version_lists_libraries_threads_and_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    import platform
    from importlib import metadata

    import torch

    assert run(cli, "dtype-engine", ["--version"]) == 0
    assert capsys.readouterr().out == f"dtype-engine, version {metadata.version('dtype-tui')}\n"
    for order in (["--version", "--verbose"], ["--verbose", "--version"]):
        assert run(cli, "dtype-engine", order) == 0
        found = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
        assert found["torch"] == metadata.version("torch")
        assert found["textual"] == metadata.version("textual")
        assert found["python"] == platform.python_version()
        assert found["threads"] == str(torch.get_num_threads())
        assert {"transformers", "safetensors", "platform", "processor", "kernels", "accelerator"} <= found.keys()
    assert run(cli, "dtype-engine", ["--verbose", "inspect"]) == 2
    assert "--version" in capsys.readouterr().err


def test_command_in_a_removed_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(cli, "dtype-engine", ["drift", str(tmp_path), "--cast", "*=bf16"]) == 2
    assert capsys.readouterr().err.startswith("dtype-engine: the working folder has been removed: change to one ")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--generate", "4"), "a Linear does not generate text"),
        (("--save-pictures", "pictures"), "net.py:Net makes no pictures to save"),
    ],
)
def test_unsupported_generation_is_refused_before_measuring(
    asked: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import torch\nNet = lambda: torch.nn.Linear(2, 2)\nexample_inputs = lambda: (torch.ones(1, 2),)\n"
    (tmp_path / "net.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert run(cli, "dtype-engine", ["drift", "net.py:Net", *asked, "--save", "drift.json"]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "drift.json").exists()
