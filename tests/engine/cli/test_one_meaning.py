"""A rule means the same in every command: its tensors, the reason of a refusal, and the name of the model in the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from tests.engine.runtime.model.test_same_plan import NET, answer, refusal
from tests.helpers import preloaded
from torch import nn

from dtype_engine.cli import cli
from dtype_engine.cli.program import run


def net_of_code() -> nn.Module:
    scope: dict[str, Any] = {}
    exec(NET, scope)
    net: nn.Module = scope["Net"]()
    return net


def every_command(model: str, out: Path, rules: list[str]) -> list[list[str]]:
    return [
        ["inspect", model, *rules],
        ["weights", model, *rules],
        ["drift", model, *rules],
        ["flow", model, *rules],
        ["export", model, *rules, "-o", str(out / "export")],
        ["report", model, *rules, "-o", str(out / "report.md")],
    ]


def test_every_command_refuses_class_rules_without_known_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "net.safetensors"
    safetensors.torch.save_file(nn.Linear(4, 4).state_dict(), file)
    said = {refusal(capsys, *command) for command in every_command(str(file), tmp_path, ["--cast", "type:Linear=f16"])}
    assert len(said) == 1
    assert "pattern 'type:Linear' matches module classes" in said.pop()
    recipe = tmp_path / "r.yaml"
    recipe.write_text("version: 1\nrules:\n  - pattern: type:Linear\n    dtype: float16\n")
    for command in (["convert", str(recipe), "--to", "torchao"], ["lint", str(recipe), "--for", "torchao"]):
        assert "matches module classes" in refusal(capsys, "recipe", *command, "--model", str(file))


def test_every_command_refuses_an_unknown_class(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = ["--cast", "type:Nope=f16"]
    folder = str(make_llama())
    capsys.readouterr()  # what transformers says as it saves
    said = {refusal(capsys, *command) for command in every_command(folder, tmp_path, rules)}
    assert said == {"dtype-engine: pattern 'type:Nope' matches nothing in this model\n"}


def test_weights_command_casts_a_tied_weight_as_torch_does(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    module = transformers.LlamaForCausalLM.from_pretrained(folder)
    found = answer(capsys, "weights", str(folder), "--cast", "lm_head=f16", "--json")["weights"]
    assert [row["name"] for row in found] == ["model.embed_tokens.weight"]
    head = module.lm_head.weight.detach().double()
    assert found[0]["max_abs"] == pytest.approx(float((head - head.half().double()).abs().max()))


def test_rules_may_name_a_tensor_as_in_the_file_or_as_in_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading packs and renames experts; a base model has names without the prefix."""
    from tests.helpers import checkpoint_folders

    folder = checkpoint_folders.save("mixtral", tmp_path / "mixtral", processed=False)
    names = safetensors.torch.load_file(folder / "model.safetensors")
    experts = [name for name in names if "layers.0" in name and ("w1" in name or "w3" in name) and "experts" in name]
    assert experts
    own = answer(capsys, "inspect", str(folder), "--cast", "model.layers.0.mlp.experts.gate_up_proj=f16", "--json")
    theirs = answer(
        capsys, "inspect", str(folder), "--cast", "re:model[.]layers[.]0[.].*experts.*w[13].*=f16", "--json"
    )
    halved = sum(names[name].numel() * 2 for name in experts)
    assert own["stored_bytes"] - own["planned_bytes"] == halved
    assert theirs["planned_bytes"] == own["planned_bytes"]
    drift = answer(capsys, "drift", str(folder), "--cast", "re:model[.]layers[.]0[.].*experts.*w[13].*=f16", "--json")
    assert drift["memory"]["planned_bytes"] == own["planned_bytes"]
    assert "matches only a part of" in refusal(capsys, "inspect", str(folder), "--cast", f"{experts[0]}=f16")


def test_weights_command_reads_a_model_made_by_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text(NET)
    torch.manual_seed(3)
    values = {"embed.weight": torch.randn(16, 8), "layers.0.weight": torch.randn(8, 8)}
    state = net_of_code().state_dict() | values | {"lm_head.weight": values["embed.weight"]}
    torch.save(state, tmp_path / "net.pth")
    model, given = f"{file}:Net", ["--weights", str(tmp_path / "net.pth")]
    found = answer(capsys, "weights", model, *given, "--cast", "layers.0.weight=bf16", "--json")["weights"]
    expected = (values["layers.0.weight"] - values["layers.0.weight"].bfloat16().float()).abs()
    assert [row["name"] for row in found] == ["layers.0.weight"]
    assert found[0]["max_abs"] == pytest.approx(float(expected.max()))
    everything = answer(capsys, "weights", model, "--preset", "fp8-linears", "--json")["weights"]
    assert {row["name"] for row in everything} >= {"embed.weight", "layers.0.weight", "layers.1.weight"}


def gptq(folder: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    config.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    said |= {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(said))
    words = {"dtype": torch.int32}
    tensors = {
        "model.layers.0.mlp.up_proj.qweight": torch.zeros(4, 48, **words),
        "model.layers.0.mlp.up_proj.qzeros": torch.zeros(1, 6, **words),
        "model.layers.0.mlp.up_proj.scales": torch.ones(1, 48),
        "model.embed_tokens.weight": torch.zeros(64, 32),
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("form", ["safetensors", "pth", "nested", "gptq", "no inputs"])
def test_report_without_a_forward_pass_says_why(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = nn.Linear(4, 4).state_dict()
    model = str(tmp_path / f"net.{form}")
    if form == "safetensors":
        safetensors.torch.save_file(state, model)
    elif form == "gptq":
        (tmp_path / "gptq").mkdir()
        model = str(gptq(tmp_path / "gptq"))
    elif form == "no inputs":
        (tmp_path / "code.py").write_text("from torch import nn\n\n\ndef make():\n    return nn.Linear(4, 4)\n")
        model = f"{tmp_path / 'code.py'}:make"
    else:
        model = str(tmp_path / "net.pth")
        torch.save({"state_dict": state, "epoch": 3} if form == "nested" else state, model)
    out = tmp_path / "report.md"
    rules = ["--cast", "*=bf16"]
    said = answer(capsys, "report", model, *rules, "-o", str(out), "--json")
    inspected = answer(capsys, "inspect", model, *rules, "--json")
    assert said["measured"] is False
    assert said["planned_bytes"] == inspected["planned_bytes"] < inspected["stored_bytes"]
    text = out.read_text().replace("\\", "")  # before what Markdown would take for its own
    assert said["no_drift"] in text
    assert "bfloat16" in text
    assert run(cli, "dtype-engine", ["report", model, "-o", str(tmp_path / "again.html")]) == 0
    assert "without drift: " in capsys.readouterr().err


def test_perplexity_equals_cross_entropy_of_torch(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 16:] = 0
    safetensors.torch.save_file({"input_ids": ids, "attention_mask": mask}, tmp_path / "ids.safetensors")
    given = ["--inputs", str(tmp_path / "ids.safetensors")]
    found = answer(capsys, "drift", str(folder), *given, "--cast", "*=bf16", "--json")["output"]

    def perplexity(dtype: torch.dtype) -> float:
        module = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        with torch.no_grad():
            logits = module(input_ids=ids, attention_mask=mask).logits.double()
        labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        return float(nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64), labels.reshape(-1)).exp())

    assert found["perplexity_reference"] == pytest.approx(perplexity(torch.float32), rel=1e-6)
    assert found["perplexity_candidate"] == pytest.approx(perplexity(torch.bfloat16), rel=1e-3)


def test_pickled_module_without_its_code_is_refused_with_the_missing_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "somenet.py").write_text(NET)
    monkeypatch.chdir(code)
    preloaded.run("import somenet, torch; torch.save(somenet.Net(), '../whole.pt')")
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, "inspect", str(tmp_path / "whole.pt"), "--trust-pickle")
    assert "No module named 'somenet'" in said
    assert "PYTHONPATH" in said
    monkeypatch.chdir(code)
    found = answer(capsys, "inspect", str(tmp_path / "whole.pt"), "--trust-pickle", "--json")
    assert found["parameters"] == sum(parameter.numel() for parameter in net_of_code().parameters())


def test_error_for_an_unknown_class_of_a_python_file_lists_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = "\n\ndef make():\n    return Net()\n\n\ndef sized(width):\n    return Net()\n\n\ndef _hidden():\n    return Net()\n"
    (tmp_path / "net.py").write_text(NET + extra)
    said = refusal(capsys, "inspect", f"{tmp_path / 'net.py'}:Nope")
    assert said.rstrip().endswith("it has Net, make")
