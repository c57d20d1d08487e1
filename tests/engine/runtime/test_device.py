"""Devices: on an accelerator without float64, made in pure Python, everything runs and has the figures of the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.helpers import preloaded

from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.runtime.device import free_bytes, has_float64, pick_device

NAMES = ("auto", "cpu", "fake", "fake:0", "fake:1", "mps", "nonsense")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is found in a process of its own, since torch keeps a device for good."""
    folder = tmp_path_factory.mktemp("model")
    program = preloaded.run(preloaded.module("tests.helpers.on_accelerator"), str(folder), *NAMES)
    assert program.returncode == 0, program.stderr
    read: dict[str, Any] = json.loads(program.stdout.splitlines()[-1])
    return read


def test_drift_and_causes_on_the_fake_accelerator_equal_those_of_the_cpu(found: dict[str, Any]) -> None:
    fake, cpu = found["fake"], found["cpu"]
    assert (fake["device"], cpu["device"]) == ("fake", "cpu")
    assert fake["drift"].keys() == cpu["drift"].keys()
    for dtype, figures in fake["drift"].items():
        assert figures == pytest.approx(cpu["drift"][dtype], rel=1e-3), dtype
    assert fake["exact"]
    assert fake["causes"] == pytest.approx(cpu["causes"], rel=1e-2)
    assert (fake["flow"], fake["lost"], fake["rows"]) == (cpu["flow"], cpu["lost"], cpu["rows"])


@pytest.mark.parametrize("way", ["estimated", "exact"])
def test_scans_on_the_fake_accelerator_equal_those_of_the_cpu(way: str, found: dict[str, Any]) -> None:
    assert found["fake"][way] == pytest.approx(found["cpu"][way], rel=1e-2, abs=1e-12)


def test_drift_from_other_references_on_the_fake_accelerator_equals_the_cpu(found: dict[str, Any]) -> None:
    """From another checkpoint, and from the model as stored."""
    assert len(found["cpu"]["against"]) > 10
    assert found["fake"]["against"] == pytest.approx(found["cpu"]["against"], rel=1e-2)


def test_text_generated_on_the_fake_accelerator_equals_that_of_the_cpu(found: dict[str, Any]) -> None:
    assert found["fake"]["text"] == found["cpu"]["text"]


def test_memory_of_the_fake_accelerator_is_reported(found: dict[str, Any]) -> None:
    resident, allocated, peak = found["fake"]["memory"]
    assert resident <= allocated <= peak
    assert found["cpu"]["memory"][1:] == [None, None]
    assert found["full"].endswith("not enough memory on fake (fake out of memory); use --device cpu")


def test_model_over_the_memory_of_the_fake_accelerator_has_the_same_drift(found: dict[str, Any]) -> None:
    inside, over = found["over"]
    assert (inside[0], over[0]) == (False, True)
    assert over[1:] == inside[1:]


def test_drift_on_two_devices_equals_that_on_one(found: dict[str, Any]) -> None:
    two = found["two"]
    assert [two[way][0] for way in ("one", "auto", "file")] == [["fake:0"], ["fake:0", "fake:1"], ["fake:0", "fake:1"]]
    assert two["auto"][1] == two["one"][1] == two["file"][1]


def test_module_too_large_for_the_second_device_is_named(found: dict[str, Any]) -> None:
    assert found["two"]["full"].startswith("model.layers.0: not enough memory on fake:1 (fake out of memory)")


def test_scan_of_a_model_partly_on_the_cpu_gives_the_same_scores(found: dict[str, Any]) -> None:
    assert found["two"]["scan"] == pytest.approx(found["fake"]["estimated"], rel=1e-2, abs=1e-12)


def test_float64_is_refused_on_an_accelerator_without_it(found: dict[str, Any]) -> None:
    said = "can't be cast to float64, which fake does not have; use --device cpu"
    assert found["fake"]["float64"] == f"model.layers.0.mlp.gate_proj.weight {said}"
    assert found["wide"] == "net.py:Net: weight is in float64, which fake does not have; use --device cpu"


def test_missing_device_is_reported_with_the_available_ones(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    picked = found["picked"]
    assert [picked[name] for name in ("auto", "cpu", "fake", "fake:0")] == ["cpu", "cpu", "fake", "fake:0"]
    assert picked["fake:1"] == "no device 'fake:1' here: fake has 1, which are counted from 0"
    for name in ("mps", "nonsense"):
        assert picked[name].startswith(
            f"no device '{name}' here: torch {torch.__version__} has cpu and fake on this machine"
        )
    assert run(cli, "dtype-engine", ["drift", "--device", "nonsense"]) == 2
    error = capsys.readouterr().err
    assert "no device 'nonsense' here: torch" in error
    assert error.count("\n") == 1


def test_the_cpu_has_float64_and_no_memory_of_its_own() -> None:
    device = pick_device("cpu")
    assert has_float64(device)
    assert free_bytes(device) is None


@pytest.mark.slow
def test_fake_accelerator_passes_the_tests_of_accelerators() -> None:
    """A share of what `test_accelerator.py` and the measuring tests show, on the fake accelerator."""
    names = "convolutional or fit or fp8 or random or kernel or export or byte or copies_ahead"
    files = ["tests/engine/runtime/test_accelerator.py", "tests/engine/runtime/weights/test_copies_ahead.py"]
    arguments = [*files, "-k", names, "-p", "no:cacheprovider"]
    code = f"import os; os.environ['DTYPE_TUI_TEST_DEVICE'] = 'fake'; import pytest; raise SystemExit(pytest.main({arguments}))"
    program = preloaded.run(code)
    assert program.returncode == 0, program.stdout
    assert "no tests ran" not in program.stdout
