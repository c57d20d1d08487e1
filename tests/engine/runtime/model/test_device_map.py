"""Which module is on which device, by a file and by the budgets of devices. `test_device.py` runs models on two devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.runtime.model.device_map import automatic, distribute, places_of

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


class Layered(nn.Module):
    """An embedding of 4,000 bytes, which the head shares, and three layers of 800 bytes each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 10)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(10, 10, bias=False), "b": nn.Linear(10, 10, bias=False)}) for _ in range(3)
        )
        self.head = nn.Linear(10, 100, bias=False)
        self.head.weight = self.embed.weight


def placed(*devices: torch.device) -> dict[str, torch.device]:
    return dict(zip(("embed", "layers.0", "layers.1", "layers.2", "head"), devices, strict=True))


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ({FIRST: 10_000, CPU: 0}, {"": FIRST}),
        ({FIRST: 5_600, SECOND: 800, CPU: 99}, placed(FIRST, FIRST, FIRST, SECOND, SECOND)),
        ({FIRST: 3_999, SECOND: 4_000, CPU: 9_999}, placed(SECOND, CPU, CPU, CPU, CPU)),
        ({FIRST: 4_799, CPU: 9_999}, placed(FIRST, CPU, CPU, CPU, CPU)),
    ],
)
def test_automatic_device_map_fills_devices_in_order(
    budgets: dict[torch.device, int], expected: dict[str, torch.device]
) -> None:
    """A layer stays whole, and a shared weight counts once."""
    assert automatic(Layered(), budgets) == expected


def test_automatic_device_map_names_a_module_that_fits_on_no_device() -> None:
    with pytest.raises(
        de.UserError, match=r"^layers\.1: its 800 B do not fit into what is left of cuda:0 4\.\d+ KiB, cpu 800 B$"
    ):
        automatic(Layered(), {FIRST: 4_500, CPU: 800})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "this is no device map: Expecting"),
        ("[]", "this is no device map: it must map modules to devices"),
        ('{"nowhere": "cpu"}', "the model has no module nowhere"),
        ('{"embed": "cpu"}', r'it names no device for layers\.0\.a; "" stands for all other modules'),
        ('{"": "disk"}', "no device 'disk' here"),
        ('{"": 7}', "no device"),
    ],
)
def test_invalid_device_map_is_refused_in_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(text)
    with pytest.raises(de.UserError, match=words):
        places_of(Layered(), FIRST, de.Options(device_map=str(file)))


def test_automatic_device_map_is_refused_if_no_part_fits_an_accelerator() -> None:
    root = nn.Sequential(Layered())
    root.register_buffer("steps", torch.zeros(3))  # so it is not divided
    with pytest.raises(de.UserError, match=r"no part of the model .* fits on cuda:0, cuda:1; give a file"):
        automatic(root, {FIRST: 5_000, SECOND: 5_000, CPU: 99_999})


class Head(nn.Module):
    """As in BERT for masked words: the decoder's bias is its parent's, and its weight is that of the embedding."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.transform, self.decoder = nn.Linear(10, 10), nn.Linear(10, 100)
        self.decoder.weight = embed.weight
        self.bias = self.decoder.bias


def test_device_map_keeps_tied_and_directly_used_tensors_on_one_device() -> None:
    embed = nn.Embedding(100, 10)
    model = nn.ModuleDict({"embed": embed, "head": Head(embed)})
    meta = torch.device("meta")
    distribute(model, {"embed": CPU, "head": meta}, CPU)
    assert {name: weight.device for name, weight in model.named_parameters(remove_duplicate=False)} == {
        "embed.weight": CPU, "head.decoder.weight": CPU, "head.decoder.bias": CPU, "head.bias": CPU,
        "head.transform.weight": meta, "head.transform.bias": meta,
    }  # fmt: skip
    assert model["head"].decoder.weight is model["embed"].weight


def test_device_map_to_one_device_does_not_change_the_drift(make_llama: Callable[..., Path]) -> None:
    found = []
    for wanted in ("", "auto"):
        options = de.Options(device="cpu", device_map=wanted, sequences=1, sequence_length=16)
        session = de.open(str(make_llama()), options=options)
        session.cast("*.mlp", "bfloat16")
        report = session.drift()
        found.append((report.output, report.modules))
    assert found[0] == found[1]


def test_missing_device_map_file_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", ["drift", "--device", "cpu", "--device-map", "none.json"]) == 2
    assert "can't read the device map none.json: No such file" in capsys.readouterr().err
