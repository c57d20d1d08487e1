"""A new scheme takes two files, one beside the other schemes and one beside their decoders: everything else then knows it.

The test writes the two files in folders of its own, which it adds to the search paths of both packages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.hub_server import hub_of

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint, schemes
from dtype_engine.checkpoint.schemes import registry
from dtype_engine.checkpoint.source import locate
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.runtime.formats import schemes as decoders

SCHEME = """
from dtype_engine.checkpoint.schemes.layout import Layout
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Scheme
from dtype_engine.checkpoint.schemes.small_tensors import read_small


def _read(tensors, config, metadata):
    for name, codes in tensors.items():
        stem = name.removesuffix("toy_levels")
        step, sign = tensors.get(f"{stem}toy_step"), tensors.get(f"{stem}toy_sign")
        if stem != name and step is not None and sign is not None and step.shape == codes.shape[:1]:
            settings = {"sign": int.from_bytes(read_small(sign), "little", signed=True)}
            parts = {CODES: codes, "step": step}
            yield CodedWeight(f"{stem}weight", codes.shape, SCHEME, "toy:int8@channel", parts, settings, (sign,))


_LAYOUT = Layout(
    "stored as a toy", "toy_levels", "toy_step", frozenset({"int8"}), ("toy_sign",), alone=(".toy_levels",),
    orphans=(".toy_step",), required=lambda codes, scale: ("toy_sign",),
    scale_shapes=lambda weight, tensors, config: (tensors[weight.codes].shape[:1],),
)
SCHEME = Scheme("toy", "toy_decoder", _read, (_LAYOUT,), describing=(".toy_sign",), settings_files=("toy_settings.json",))
"""
DECODER = """
def decode(weight, parts, first, last):
    return parts["codes"][first:last].float() * parts["step"][first:last, None] * weight.settings["sign"]
"""
MODULE = "model.layers.0.mlp.down_proj"
WEIGHT, OTHER = f"{MODULE}.weight", "model.layers.1.mlp.up_proj.weight"
IDS = {"input_ids": torch.arange(60).reshape(2, 30) % 64}


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scheme `toy`, found as long as the test runs."""
    for package, name, text in ((schemes, "toy", SCHEME), (decoders, "toy_decoder", DECODER)):
        folder = tmp_path / f"files of {name}"
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    _forget()
    yield
    _forget()


def _forget() -> None:
    registry.schemes.cache_clear()
    registry.layouts.cache_clear()
    for package, name in ((schemes, "toy"), (decoders, "toy_decoder")):
        sys.modules.pop(f"{package.__name__}.{name}", None)


@pytest.fixture
def folders(make_llama: Callable[..., Path]) -> tuple[Path, Path]:
    """Return the folders of a model with a weight in the new scheme and of the same model with the decoded weight."""
    coded, decoded = make_llama("coded", initializer_range=0.3), make_llama("decoded", initializer_range=0.3)
    tensors = load_file(coded / "model.safetensors")
    values = tensors[WEIGHT]
    step = values.abs().amax(1) / 127
    levels = -torch.round(values / step[:, None])
    save_file(tensors | {WEIGHT: -levels * step[:, None]}, decoded / "model.safetensors", {"format": "pt"})
    del tensors[WEIGHT]
    parts = {"toy_levels": levels.to(torch.int8), "toy_step": step, "toy_sign": torch.tensor(-1)}
    _save(coded, tensors | {f"{MODULE}.{local}": part for local, part in parts.items()})
    return coded, decoded


def _save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    run(cli, "dtype-engine", [*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_inspect_shows_a_weight_of_a_new_scheme_as_one_tensor(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    coded, decoded = (_said(capsys, "inspect", str(folder)) for folder in folders)
    assert coded["parameters"] == decoded["parameters"]
    assert "toy:int8@channel" in json.dumps(coded)
    checkpoint = open_checkpoint(folders[0])
    assert checkpoint.weights.keys() == open_checkpoint(folders[1]).weights.keys()
    assert checkpoint.owners.keys() == {f"{MODULE}.{local}" for local in ("toy_levels", "toy_step", "toy_sign")}


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (lambda parts: parts.update({f"{MODULE}.toy_step": torch.ones(5)}), "part-shape", "toy_step"),
        (lambda parts: parts[f"{MODULE}.toy_step"].fill_(torch.nan), "scale-values", "toy_step"),
        (lambda parts: parts.pop(f"{MODULE}.toy_step"), "missing-part", "toy_levels"),
        (lambda parts: parts.pop(f"{MODULE}.toy_sign"), "missing-part", "toy_levels"),
        (lambda parts: parts.pop(f"{MODULE}.toy_levels"), "orphan-part", "toy_step"),
    ],
)
def test_check_finds_damaged_parts_of_a_new_scheme(
    change: Callable[[dict[str, torch.Tensor]], Any],
    kind: str,
    name: str,
    folders: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    coded, _ = folders
    assert _said(capsys, "check", str(coded), "--against", str(folders[1]))["findings"] == []
    parts = load_file(coded / "model.safetensors")
    change(parts)
    _save(coded, parts)
    findings = _said(capsys, "check", str(coded))["findings"]
    assert (kind, f"{MODULE}.{name}") in {(finding["kind"], finding["tensor"]) for finding in findings}


def test_drift_refuses_a_weight_of_a_new_scheme_with_a_missing_part(folders: tuple[Path, Path], tmp_path: Path) -> None:
    coded, _ = folders
    parts = load_file(coded / "model.safetensors")
    del parts[f"{MODULE}.toy_sign"]
    _save(coded, parts)
    with pytest.raises(de.NoForward, match="part of a weight that is stored as a toy"):
        de.open(str(coded), inputs=IDS).drift()


def test_small_tensors_and_settings_of_a_new_scheme_are_fetched_from_a_hub(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    coded, _ = folders
    (coded / "toy_settings.json").write_text('{"quant_method": "toy"}')
    with hub_of(tmp_path / "cache", org__name=coded) as hub:
        there = locate("hf://org/name").open()
        assert there is not None
        weight = there.coded[WEIGHT]
        assert any(path.endswith("/toy_settings.json") for path in hub.paths())
    assert (weight.format, weight.settings) == ("toy:int8@channel", {"sign": -1})
    assert (weight.parts["codes"].absent, weight.beside[0].absent) == (True, False)
    assert there.provenance.method == open_checkpoint(coded).provenance.method == "toy"


@pytest.mark.parametrize("over_memory", [False, True])
def test_drift_uses_the_decoded_weights_of_a_new_scheme(over_memory: bool, folders: tuple[Path, Path]) -> None:
    limits: dict[str, Any] = {"over_memory": True, "max_memory": {"cpu": 1 << 19}} if over_memory else {}
    coded, decoded = (de.open(str(folder), options=de.Options(**limits), inputs=IDS) for folder in folders)
    for session in (coded, decoded):
        session.use_recipe(de.Recipe((de.Rule(OTHER, "bfloat16"),)))
    found, right = coded.drift().output, decoded.drift().output
    assert (found.kl_mean, found.max_abs) == (right.kl_mean, right.max_abs)
    assert found.max_abs > 0


def test_checkpoint_of_a_new_scheme_has_no_drift_from_its_decoded_copy(folders: tuple[Path, Path]) -> None:
    coded, decoded = folders
    for model, reference in ((coded, decoded), (decoded, coded)):
        session = de.open(str(model), options=de.Options(reference=str(reference)), inputs=IDS)
        assert session.drift().output.max_abs == 0


def test_export_copies_or_casts_weights_of_a_new_scheme(folders: tuple[Path, Path], tmp_path: Path) -> None:
    session = de.open(str(folders[0]), inputs=IDS)
    parts, values = (load_file(folder / "model.safetensors") for folder in folders)
    for rule, expected in (((), parts), ((de.Rule(WEIGHT, "bfloat16"),), {WEIGHT: values[WEIGHT].bfloat16()})):
        session.use_recipe(de.Recipe(rule))
        folder = tmp_path / f"export of {len(rule)} rules"
        session.export(folder)
        written = load_file(folder / "model.safetensors")
        assert all(torch.equal(written[name], expected[name]) for name in expected)
