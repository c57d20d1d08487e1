"""Model cards: what `report --model-card` writes, and what `check --card` says when it measures it again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from scipy import special, stats
from tests.helpers import adapters
from tests.helpers.file_edits import change_tensors
from tests.helpers.kl_divergence import logits_of, statistics

from dtype_engine.checkpoint.source import DEMO
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

pytestmark = pytest.mark.slow
TEXT = (
    "def area(width, height):\n    return width * height\n\nThe quick brown fox jumps over the lazy dog, and sleeps.\n"
    * 12
)
RULE = "*.mlp=fp8"


def engine(*arguments: object) -> int:
    return run(cli, "dtype-engine", [str(word) for word in arguments])


def checked(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Run `check --json`, and return its status, its object (empty if there is none) and what it said on standard error."""
    capfd.readouterr()
    status = engine("check", *arguments, "--json")
    out, said = capfd.readouterr()
    return status, json.loads(out) if out else {}, said


def rows_of(card: str) -> dict[str, tuple[float, float | None]]:
    """The figures in the table of a card."""
    cells = [
        [cell.strip(" `") for cell in line.split("|")[1:4]] for line in card.splitlines() if line.startswith("| `")
    ]
    return {name: (float(value), float(error) if error else None) for name, value, error in cells}


def yaml_of(card: str) -> dict[str, Any]:
    loaded = yaml.safe_load(card.split("```yaml\n")[1].split("\n```")[0])
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def base(make_llama: Callable[..., Path], here: Path) -> Path:
    """A folder `llama`, which has no tokenizer, so it runs on token ids at random."""
    assert make_llama() == here / "llama"
    return Path("llama")


@pytest.fixture
def card(base: Path) -> Path:
    """A card of a recipe on `llama`, and an export in its folder `small`."""
    assert engine("report", base, "--cast", RULE, "--model-card", "-o", "card.md") == 0
    assert engine("export", base, "--cast", RULE, "-o", "small") == 0
    return Path("card.md")


def test_figures_on_a_card_are_those_of_an_independent_script(here: Path) -> None:
    Path("text.txt").write_text(TEXT)
    shutil.copytree(DEMO, "model")
    assert engine("export", "model", "--cast", "*=bf16", "-o", "bf16") == 0
    assert engine("report", "model", "--cast", "*=bf16", "--text", "text.txt", "--model-card", "-o", "card.md") == 0
    logits, ids = logits_of(Path("model"), TEXT, "float32")
    theirs, _ = logits_of(Path("bf16"), TEXT, "bfloat16")
    expected = statistics(logits, theirs, ids)
    text = Path("card.md").read_text()
    found = rows_of(text)
    assert found["positions"] == (sum(map(len, ids)), None)
    assert found["kl_mean"][0] == pytest.approx(expected["kl_mean"], rel=1e-5)
    assert found["kl_mean"] == pytest.approx((expected["kl_mean"], expected["kl_mean_se"]), rel=0.06)
    assert found["top1_agreement"][0] == pytest.approx(expected["top1_agreement"], rel=1e-5)
    assert found["top1_agreement"][1] == pytest.approx(expected["top1_agreement_se"], rel=0.06)
    both = np.concatenate(logits), np.concatenate(theirs)
    log_p, log_q = (special.log_softmax(each, -1) for each in both)
    sure = log_p.max(-1) >= np.log(0.95)
    assert sure.any()
    kls = special.rel_entr(np.exp(log_p), np.exp(log_q)).sum(-1)[sure]
    assert found["kl_confident"] == pytest.approx((kls.mean(), stats.sem(kls)), rel=0.06)
    assert found["kl_confident"][0] == pytest.approx(kls.mean(), rel=1e-5)
    sqnr = 20 * np.log10(np.linalg.norm(both[0]) / np.linalg.norm(both[0] - both[1]))
    assert found["sqnr_db"][0] == pytest.approx(sqnr, rel=1e-5)
    measured = yaml_of(text)["measured"]
    assert measured["file text.txt"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert measured["reference_sha256"] == hashlib.sha256(Path("model/model.safetensors").read_bytes()).hexdigest()
    assert (measured["torch"], measured["reference"]) == (torch.__version__, "float32")


def test_bytes_on_a_card_are_those_of_the_tensors_in_both_files(card: Path, base: Path) -> None:
    found = rows_of(card.read_text())
    for name, folder in (("reference_bytes", base), ("bytes", Path("small"))):
        tensors = load_file(folder / "model.safetensors").values()
        assert found[name] == (sum(tensor.nbytes for tensor in tensors), None)


def test_hash_of_several_files_is_that_of_sha256sum(make_llama: Callable[..., Path], here: Path) -> None:
    make_llama("sharded", max_shard_size="10KB")
    assert len(list(Path("sharded").glob("*.safetensors"))) > 1
    assert engine("report", "sharded", "--cast", RULE, "--model-card", "-o", "card.md") == 0
    line = "cd sharded && sha256sum *.safetensors | sha256sum"
    said = subprocess.run(
        ["bash", "-c", line], check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert yaml_of(Path("card.md").read_text())["measured"]["reference_sha256"] == said.stdout.split()[0]


@pytest.mark.parametrize("of", ["recipe", "export"])
def test_card_is_confirmed_in_another_folder_and_process_with_other_threads(
    of: str, card: Path, base: Path, tmp_path: Path
) -> None:
    if of == "export":
        assert engine("report", base, "--against", "small", "--model-card", "-o", "export.md") == 0
        card = Path("export.md")
    clone = tmp_path / "clone"
    for folder in (base, Path("small")):
        shutil.copytree(folder, clone / folder.name)
    shutil.copy(card, clone / "small" / "README.md")
    words = ["check", "small", "--against", "llama", "--card", "small", "--json"]
    code = "import torch; torch.set_num_threads(2); from dtype_engine.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=clone, capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["findings"] == []
    assert {each["name"] for each in found["card"]["figures"]} == rows_of(card.read_text()).keys()
    assert all(each["holds"] for each in found["card"]["figures"])


ALTERED = ("kl_mean", "top1_agreement", "sqnr_db", "positions", "reference_bytes", "bytes")


@pytest.mark.parametrize("name", ALTERED)
def test_altered_figure_fails_the_check_by_its_name(
    name: str, card: Path, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = card.read_text()
    value = rows_of(text)[name][0]
    row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
    other = {"kl_mean": value / 2, "top1_agreement": value - 0.1, "sqnr_db": value + 1}.get(name, value - 1)
    cells = row.split("|")
    cells[2] = f" {other:g} "
    _, body = text.split("\n---\n", 1)
    Path("altered.md").write_text(body.replace(row, "|".join(cells)))
    status, found, _ = checked(capfd, base, "--card", "altered.md")
    assert (status, [(each["kind"], each["tensor"]) for each in found["findings"]]) == (1, [("card-figure", name)])
    assert [each["name"] for each in found["card"]["figures"] if not each["holds"]] == [name]


def test_large_standard_error_on_a_card_confirms_no_other_value(
    card: Path, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = card.read_text().split("\n---\n", 1)[1]
    row = next(line for line in text.splitlines() if line.startswith("| `kl_mean` |"))
    Path("wide.md").write_text(text.replace(row, "| `kl_mean` | 1e-12 | 1 | mean KL |"))
    status, found, _ = checked(capfd, base, "--card", "wide.md")
    assert (status, [each["tensor"] for each in found["findings"]]) == (1, ["kl_mean"])


def test_figure_that_differs_between_metadata_and_card_is_found(
    card: Path, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = card.read_text()
    value = f"value: {rows_of(text)['kl_mean'][0]:g}\n"
    assert text.count(value) == 1
    card.write_text(text.replace(value, "value: 1.0e-09\n"))
    status, found, _ = checked(capfd, base, "--card", card)
    assert (status, [(each["kind"], each["tensor"]) for each in found["findings"]]) == (
        1,
        [("card-metadata", "kl_mean")],
    )


def test_card_of_other_weights_is_a_finding_with_the_readme_as_its_file(
    card: Path, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert engine("report", base, "--against", "small", "--model-card", "-o", "small/README.md", "--force") == 0
    change_tensors(Path("small"), lambda held: held["model.norm.weight"].mul_(1.001))
    status, found, _ = checked(capfd, "small", "--against", base, "--card", "small")
    assert status == 1
    assert "card-weights" in [each["kind"] for each in found["findings"]]
    assert engine("check", "small", "--against", base, "--card", "small", "--sarif") == 1
    (log,) = json.loads(capfd.readouterr().out)["runs"]
    (result,) = [each for each in log["results"] if each["ruleId"] == "card-weights"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "small/README.md"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["small", "--card", "card.md"],
            "small is not the model llama that the rules of the card cast: its weights have the SHA-256",
        ),
        (["small", "--card", "card.md", "--against", "small"], "--against small is not the reference of the card"),
        (
            ["llama", "--card", "export.md"],
            "the card compares llama with another checkpoint: give the model llama by --against",
        ),
        (["llama", "--card", "llama"], "llama has no README.md"),
        (["llama", "--card", "llama/config.json"], "config.json has no model card of dtype-tui"),
        (["llama", "--card", "none.md"], "No such file"),
        (["llama", "--text", "card.md"], "check --text goes with --card, without which no model is run"),
        (["llama", "--card", "card.md", "--inputs", "ids.safetensors"], "the inputs are not those of the card"),
    ],
)
def test_card_that_cannot_be_measured_again_is_refused_in_one_sentence(
    words: list[str], says: str, card: Path, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    save_file({"input_ids": torch.arange(12)[None]}, "ids.safetensors")
    assert engine("report", base, "--against", "small", "--model-card", "-o", "export.md") == 0
    status, _, said = checked(capfd, *words)
    assert (status, len(said.splitlines())) == (2, 1), said
    assert says in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-o", "card.html"], "name a file that ends in .md"),
        (["-o", "card.md", "--speed"], "leave --speed out"),
        (["-o", "card.md", "--metric", "metric.py:accuracy"], "leave them out"),
        (["-o", "card.md", "--cast", "*=fp16"], "no figures of an output that is not finite"),
        (["-o", "card.md", "--into", "bad.md"], "bad.md: its metadata: not valid YAML in line 2: anchors"),
        (["-o", "card.md", "--into", "none.md"], "No such file"),
        (["-o", "here/card.md"], "there is no folder"),
    ],
)
def test_card_that_cannot_be_made_is_refused_in_one_sentence(
    words: list[str], says: str, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change_tensors(base, lambda held: held["model.norm.weight"].mul_(1e30))  # beyond the range of float16
    Path("bad.md").write_text("---\nname: me\nother: &other [1]\n---\n# Mine\n")
    assert engine("report", base, "--model-card", *words) == 2
    said = capfd.readouterr().err
    assert (len(said.splitlines()), says in said) == (1, True), said
    assert not Path("card.md").exists()


def test_card_of_python_code_is_refused_before_it_runs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("net.py").write_text("raise SystemExit('this code was run')\n")
    assert engine("report", "net.py:Net", "--model-card", "-o", "card.md") == 2
    assert capfd.readouterr().err == (
        "dtype-engine: net.py:Net is code, and a model card is about the files of a checkpoint: name one\n"
    )


def test_roundings_of_a_card_need_the_same_calibration(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    for name, first in (("one", 1), ("two", 2)):
        save_file({"input_ids": torch.arange(first, first + 40)[None] % 60}, f"{name}.safetensors")
    words = (
        "report",
        base,
        "--cast",
        "*.{gate,up}_proj=int4@g32:gptq",
        "--calibration",
        "one.safetensors",
        "--model-card",
    )
    assert engine(*words, "-o", "card.md") == 0
    assert checked(capfd, base, "--card", "card.md", "--calibration", "one.safetensors")[:1] == (0,)
    status, _, said = checked(capfd, base, "--card", "card.md", "--calibration", "two.safetensors")
    assert status == 2
    assert "the roundings of the card were fitted to one.safetensors" in said


def test_export_whose_readme_got_a_card_is_still_replaced_by_a_newer_export(card: Path, base: Path) -> None:
    before = Path("small/README.md").read_text()
    words = ("report", base, "--against", "small", "--model-card", "--into", "small/README.md", "-o", "small/README.md")
    assert engine(*words, "--force") == 0
    assert before.rstrip() in Path("small/README.md").read_text()
    assert engine("export", base, "--cast", "*=bf16", "-o", "small", "--force") == 0
    assert Path("small/README.md").read_text().count("model card") == 0


def test_nothing_that_a_card_names_is_opened(
    card: Path, base: Path, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each name on the card is that of a file, of a model with its weights, or of Python code."""
    bait = here / "bait"
    shutil.copytree(base, bait)
    (bait / "net.py").write_text("raise SystemExit('this code was run')\n")
    opened: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("open", "os.listdir", "os.scandir", "exec"):
            opened.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else str(arguments[0]))

    sys.addaudithook(watch)  # it stays until this process ends
    content = yaml_of(card.read_text())
    before, rest = card.read_text().split("```yaml\n")
    _, after = rest.split("\n```", 1)
    try:
        for name in (str(bait), str(bait / "model.safetensors"), f"{bait / 'net.py'}:Net", "bait"):
            for more in ({}, {"candidate_sha256": "0" * 64}):
                measured = (
                    content["measured"]
                    | {"reference": name, "inputs": name, "device": name, f"file {name}": "0" * 64}
                    | more
                )
                text = yaml.safe_dump(content | {"model": name, "measured": measured})
                Path("hostile.md").write_text(f"{before}```yaml\n{text}```{after}")
                for words in (["small"], ["llama"], ["small", "--against", "llama"]):
                    status, _, said = checked(capfd, *words, "--card", "hostile.md")
                    assert "this code was run" not in said
                    assert status == 2 or more or words[0] == "llama", said
    finally:
        watching = False
    assert any(name.endswith("hostile.md") for name in opened)
    assert [name for name in opened if "bait" in name] == []


def test_card_of_an_adapter_with_its_base_is_refused(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = adapters.save_base(Path("base"), adapters.llama())
    adapters.save_adapter(Path("adapter"), here / "base", adapters.linear(weights))
    assert engine("report", "adapter", "--base", "base", "--cast", "*=bf16", "--model-card", "-o", "card.md") == 2
    assert "export it, and use the export" in capfd.readouterr().err
