"""What a rounding would gain is computed without casting the model, as plain code computes it from exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.helpers.recorded_worker import RecordedWorker

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.cancellation import CancelToken
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.service.jobs import VALUES, InspectTensor

UP, DOWN, EMBEDDING = "model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.embed_tokens"


@pytest.fixture
def llama(make_llama: Callable[..., Path]) -> Path:
    return make_llama(tie_word_embeddings=False, initializer_range=0.2, intermediate_size=64)


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    file = tmp_path / "calibration.safetensors"
    save_file({"input_ids": torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))}, file)
    return file


def exported_values(session: de.Session, name: str, dtype: str, folder: Path) -> torch.Tensor:
    """Decode the int4 groups of an export: eight codes in a word, the lowest bits first, each 8 more than its value."""
    session.apply(de.Recipe((de.Rule(f"{name}.weight", dtype),)))
    session.export(folder)
    stored = load_file(folder / "model.safetensors")
    words = stored[f"{name}.weight_packed"].long() & 0xFFFFFFFF
    codes = torch.stack([(words >> 4 * place & 15) - 8 for place in range(8)], -1).flatten(1).double()
    return codes * stored[f"{name}.weight_scale"].double().repeat_interleave(32, 1)


def test_gains_are_those_of_exported_codes_and_the_inputs_of_plain_layers(
    llama: Path, calibration: Path, tmp_path: Path
) -> None:
    session = de.open(str(llama), options=de.Options(device="cpu", calibration=(calibration,)))
    wanted = {f"{name}.weight": ("int4@g32", "int4@g32:imatrix") for name in (UP, DOWN)}
    gains = {(each.name, each.dtype): each.gain for each in session.rounding_gains(wanted)}
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for name in (UP, DOWN):
        layer, seen = plain.get_submodule(name), list[torch.Tensor]()
        layer.register_forward_pre_hook(lambda module, given, seen=seen: seen.append(given[0].double().flatten(0, 1)))
        for ids in load_file(calibration)["input_ids"]:
            plain(ids[None])
        x, stored = torch.cat(seen), layer.weight.detach().double()
        products = x.T @ x
        for dtype, matrix in (("int4@g32:gptq", products), ("int4@g32:imatrix", products.diag().diag())):
            errors = []
            for place, form in enumerate(("int4@g32", dtype)):
                values = exported_values(session, name, form, tmp_path / f"{name}{dtype.rpartition(':')[2]}{place}")
                errors.append(((values - stored) @ matrix @ (values - stored).T).trace().item())
            gain = gains[f"{name}.weight", dtype]
            assert gain == pytest.approx(errors[0] / errors[1], rel=1e-3), (name, dtype)
            assert gain > 1.05


def test_gains_cast_nothing_and_stop(llama: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = de.open(str(llama), options=de.Options(device="cpu", calibration=(calibration,)))
    session.cast(f"{UP}.weight", "int4@g32")
    session.cast("*norm*", "bfloat16")
    session.cast("*.o_proj", "nvfp4:imatrix")

    def refused(*arguments: object, **named: object) -> None:
        raise AssertionError("the model is cast")

    monkeypatch.setattr(LiveModel, "apply", refused)
    steps = list[tuple[int, int]]()
    found = session.rounding_gains(on_progress=lambda done, total: steps.append((done, total)))
    outputs = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)]
    assert {(each.name, each.dtype) for each in found} == {
        (f"{UP}.weight", "int4@g32:gptq"), *((name, "nvfp4:imatrix") for name in outputs),
    }  # fmt: skip
    assert steps[-1] == (4, 4), "a run and three weights"
    token = CancelToken()
    with pytest.raises(de.Cancelled):
        session.rounding_gains(on_progress=lambda done, total: token.cancel(), cancelled=token)
    (unused,) = session.rounding_gains({f"{EMBEDDING}.weight": ["int8", "bfloat16"]})
    assert (unused.dtype, unused.gain) == ("int8:gptq", None)
    with pytest.raises(de.UserError, match=r"the model has no weight lm_head$"):
        session.rounding_gains({"lm_head": ["int8"]})


def test_command_weights_has_a_column_of_gains(
    llama: Path, calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["weights", str(llama), "--cast", f"{UP}=int4@g32", "--cast", f"{EMBEDDING}=int8"]
    assert run(cli, "dtype-engine", [*arguments, "--calibration", str(calibration)]) == 2
    assert "weights --calibration goes with --gains, without which no model is run" in capsys.readouterr().err
    assert run(cli, "dtype-engine", [*arguments, "--gains", "--calibration", str(calibration), "--json"]) == 0
    gains = {each["name"]: each for each in json.loads(capsys.readouterr().out)["gains"]}
    session = de.open(str(llama), options=de.Options(device="cpu", calibration=(calibration,)))
    (expected,) = session.rounding_gains({f"{UP}.weight": ["int4@g32"]})
    assert expected.gain is not None
    assert gains[f"{UP}.weight"]["gain"] == pytest.approx(expected.gain)
    assert gains[f"{EMBEDDING}.weight"] == {"name": f"{EMBEDDING}.weight", "dtype": "int8:gptq", "gain": None}
    assert run(cli, "dtype-engine", [*arguments, "--gains", "--calibration", str(calibration)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("rounding")
    shown = {row.split()[0]: row for row in rows}
    assert shown[f"{UP}.weight"].endswith(f"gptq: {expected.gain:.2f}x less error")
    assert shown[f"{EMBEDDING}.weight"].split()[-1] == "-"


def test_app_gets_gains_beside_the_values_of_a_tensor(llama: Path, calibration: Path) -> None:
    options = de.Options(device="cpu", calibration=(calibration,))
    (expected,) = de.open(str(llama), options=options).rounding_gains({f"{UP}.weight": ["nvfp4"]})
    with RecordedWorker(str(llama), options=options) as recorded:
        recorded.worker.request(VALUES.ask(InspectTensor(f"{UP}.weight", ("nvfp4", "bfloat16"), with_gains=True)))
        stats = recorded.answer(VALUES)
    assert stats.gains == (expected,)
    assert [error.dtype for error in stats.errors] == ["nvfp4", "bfloat16"]
