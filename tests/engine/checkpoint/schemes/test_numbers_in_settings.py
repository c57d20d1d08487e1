"""Numbers in the settings of quantized weights that no quantizer writes, and settings of more modules than a model has."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.mutations import places, replaced_at
from tests.helpers.quantized import CASES
from tests.helpers.quantized.block_scaled import ct, modelopt
from tests.helpers.quantized.case import Case
from tests.helpers.quantized.quantizers import awq, bnb_4bit, gptq, hqq, mlx_affine, torchao_blocks, torchao_int4

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.check import check
from dtype_engine.checkpoint.provenance import provenance
from dtype_engine.checkpoint.schemes.registry import input_format
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.weights.coded import CodedSource

VALUES: tuple[Any, ...] = (0, -1, 1, 1.5, 4.0, 2**30, 2**31, 2**64, 10**400, 1e308, math.nan, True, "8", [], {}, None)


def _auto_round() -> Case:
    case = gptq(size=96)
    case.config["quantization_config"] |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    return case


WITH_ONE_GROUP: dict[str, Callable[[], Case]] = {
    "gptq": lambda: gptq(size=96),
    "gptq in order": lambda: gptq(size=96, order="regular"),
    "auto-round": _auto_round,
    "awq": lambda: awq(size=128),
    "awq gemv": lambda: awq("gemv", size=128),
    "bnb": lambda: bnb_4bit((4, 16)),
    "bnb nested": lambda: bnb_4bit((4, 16), nested=True),
    "hqq": lambda: hqq(size=48),
    "mlx": lambda: mlx_affine(size=64),
    "torchao": lambda: torchao_blocks(block=(40, 64)),
    "torchao int4": lambda: torchao_int4(64),
}
"""Weights with one scale in a row, which larger groups would have as well."""


def _changed(make: Callable[[], Case]) -> Iterator[tuple[str, Case]]:
    """Yield (description, a case with another number) for each number in the settings of a case, and each of `VALUES`."""
    sound = make()
    for value in VALUES:
        for part in ("config", "hf_quant_config"):
            for place in places(getattr(sound, part)):
                case = make()
                setattr(case, part, replaced_at(getattr(sound, part), place, value))
                yield f"{place} {str(value)[:20]}", case
        for key, text in sound.metadata.items():
            settings = json.loads(text) if text[:1] == "{" else {}
            for place in places(settings):
                case = make()
                case.metadata[key] = json.dumps(replaced_at(settings, place, value))
                yield f"{key} {place} {str(value)[:20]}", case
        for name, tensor in sound.tensors.items():
            raw = tensor.numpy().tobytes() if tensor.dtype == torch.uint8 else b""
            settings = json.loads(raw) if raw[:2] == b'{"' else {}
            for place in places(settings):
                case = make()
                text = json.dumps(replaced_at(settings, place, value))
                case.tensors[name] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
                yield f"{name} {place} {str(value)[:20]}", case


def _use(path: Path) -> None:
    """Open a checkpoint, check it, and decode its weights."""
    checkpoint = open_checkpoint(path)
    folder = path if path.is_dir() else path.parent
    str(provenance(folder, checkpoint.config, {}))
    check(checkpoint, "model")
    for weight in checkpoint.coded.values():
        input_format(weight, checkpoint.config)
        assert tuple(CodedSource(weight).read().shape) == weight.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *(f"one group: {name}" for name in WITH_ONE_GROUP)])
def test_each_number_in_settings_is_used_or_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    make = CASES[name] if name in CASES else WITH_ONE_GROUP[name.removeprefix("one group: ")]
    failures = []
    for what, case in _changed(make):
        started = time.process_time()
        try:
            _use(case.save(tmp_path))
        except UserError as error:
            if not str(error).isprintable():
                failures.append(f"{what}: {str(error)!a}")
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        if (seconds := time.process_time() - started) > 5:
            failures.append(f"{what}: {seconds:.1f} s")
    assert failures == [], "\n".join(failures)


def _many(entries: int, key: str, weights: int) -> Case:
    """Return weights of a case of float8 with settings of `entries` modules, of which only the last ones are there."""
    names = [f"m.{number}" for number in range(entries - weights, entries)]
    case = CASES["modelopt fp8"]() if key == "quantized_layers" else CASES["ct fp8 by rows"]()
    (codes,) = [name for name in case.tensors if name.endswith("weight")]
    scale = f"{codes}_scale"
    tensors = {f"{name}.weight": case.tensors[codes].clone() for name in names}
    case.tensors = tensors | {f"{name}.weight_scale": case.tensors[scale].clone() for name in names}
    modules = [f"m.{number}" for number in range(entries)]
    if key == "quantized_layers":
        case.config = modelopt("MIXED_PRECISION", quantized_layers={name: {"quant_algo": "FP8"} for name in modules})
    else:
        case.config["quantization_config"]["config_groups"]["group_0"][key] = modules
    return case


@pytest.mark.slow
@pytest.mark.parametrize("key", ["quantized_layers", "targets"])
def test_time_for_settings_of_many_modules_is_limited(key: str, tmp_path: Path) -> None:
    path = _many(90_000, key, 200).save(tmp_path / "many")
    started = time.process_time()
    checkpoint = open_checkpoint(path)
    formats = [input_format(weight, checkpoint.config) for weight in checkpoint.coded.values()]
    assert len(formats) == 200
    assert time.process_time() - started < 5
    with pytest.raises(
        UserError, match=rf"config\.json: {key} .* has 600,000 entries, and beside 4 tensors at most 100,016"
    ):
        open_checkpoint(_many(600_000, key, 2).save(tmp_path / "more"))


@pytest.mark.parametrize("command", ["memory", "check", "inspect"])
def test_settings_of_many_modules_are_refused_although_no_weight_is_coded(
    command: str, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_llama() / "config.json"
    settings = {"quant_method": "auto-round", "extra_config": {f"m.{number}": {"bits": 4} for number in range(200_000)}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    capsys.readouterr()  # of saving the model
    assert run(cli, "dtype-engine", [command, str(path.parent)]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf"dtype-engine: {re.escape(str(path))}: extra_config .* has 200,000 entries, and .*\n", said)


@pytest.mark.parametrize("listed", [list, dict.fromkeys], ids=["lists", "mappings"])
def test_settings_of_many_modules_in_several_lists_are_refused(
    listed: Callable[[list[str]], Any], tmp_path: Path
) -> None:
    case = CASES["ct fp8 by rows"]()
    modules = [f"m.{number}" for number in range(30_000)]
    for key in ("ignore", "exclude", "skip_modules"):
        case.config["quantization_config"][key] = listed(modules)
    open_checkpoint(case.save(tmp_path / "as many"))
    case.config["quantization_config"]["exclude_modules"] = listed(modules)
    says = r"more/config\.json: the lists of the quantization settings have over 100,\d+ entries together"
    with pytest.raises(UserError, match=says):
        open_checkpoint(case.save(tmp_path / "more"))


def test_settings_of_many_modules_are_refused_for_each_component_of_a_pipeline(tmp_path: Path) -> None:
    component = _many(2, "targets", 2).save(tmp_path / "unet")
    (component / "model.safetensors").rename(component / "diffusion_pytorch_model.safetensors")
    config = {"quantization_config": {"quant_method": "auto-round", "extra_config": dict.fromkeys(range(200_000), 4)}}
    (component / "config.json").write_text(json.dumps(config))
    (tmp_path / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    with pytest.raises(UserError, match=r"unet/config\.json: extra_config .* has 200,000 entries"):
        open_checkpoint(tmp_path)


def test_number_of_config_groups_is_limited(tmp_path: Path) -> None:
    case = CASES["ct fp8 by rows"]()
    (group,) = case.config["quantization_config"]["config_groups"].values()
    case.config = ct(*[group] * 1001)
    with pytest.raises(UserError, match=r"config_groups .* has 1,001 entries"):
        open_checkpoint(case.save(tmp_path))


def test_slow_pattern_in_settings_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtype_engine.checkpoint.schemes.registry._MATCHING_S", 0.2)
    case = CASES["ct fp8 by rows"]()
    name = "a" * 200
    case.tensors = {f"{name}b!.{key.rpartition('.')[2]}": tensor for key, tensor in case.tensors.items()}
    case.config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:(?:a|aa)+$"]
    with pytest.raises(UserError, match=r"config\.json: pattern .* takes too long to match"):
        open_checkpoint(case.save(tmp_path))
