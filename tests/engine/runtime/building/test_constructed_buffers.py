"""Models with remote code run without a prompt, and buffers that are in no file have the values that the constructor sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel


class {name}Config(PretrainedConfig):
    model_type = "{name}"

    def __init__(self, width=8, **rest):
        self.width = width
        super().__init__(**rest)


class {name}(PreTrainedModel):
    config_class = {name}Config

    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(config.width, config.width)
        self.register_buffer("scale", torch.arange(config.width).float() + 0.5, persistent=False)
        self.register_buffer("phase", torch.linspace(0, 1, config.width), persistent=False)
        self.register_buffer("order", torch.arange(config.width).flip(0), persistent=False)
        {more}
        self.post_init()

    def forward(self, x):
        return (self.linear(x) * self.scale + self.phase)[:, self.order]
"""
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(27))
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(28))


def custom(folder: Path, name: str, more: str = "", auto: str = "AutoModel") -> Path:
    """Write a folder with remote code. transformers imports the code by its class name, so each test needs its own class name."""
    folder.mkdir()
    (folder / "code.py").write_text(CODE.format(name=name, more=more))
    save_file({"linear.weight": WEIGHT, "linear.bias": torch.zeros(8)}, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": name,
        "architectures": [name],
        "auto_map": {"AutoConfig": f"code.{name}Config", auto: f"code.{name}"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": X}, folder.parent / "x.safetensors")
    return folder


def expected(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the output with the linear layer in a dtype; torch promotes its result when the buffers are added."""
    values = torch.nn.functional.linear(X.to(dtype), WEIGHT.to(dtype)) * (torch.arange(8).float() + 0.5)
    return (values + torch.linspace(0, 1, 8)).flip(1)


def opened(folder: Path) -> tuple[de.Session, tuple[str, ...]]:
    options = de.Options(trust_remote_code=True, tensors=folder.parent / "x.safetensors")
    session = de.open(str(folder), options=options)
    return session, session.model.notices


@pytest.fixture(autouse=True)
def no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(prompt: str = "") -> str:
        raise AssertionError(f"something asks on standard input: {prompt}")

    monkeypatch.setattr("builtins.input", asked)


@pytest.fixture(autouse=True)
def dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the memory that `from_pretrained` allocates, so that it is not zero by chance."""
    empty_like = torch.empty_like

    def dirty(tensor: torch.Tensor, **rest: Any) -> torch.Tensor:
        found = empty_like(tensor, **rest)
        return found if found.is_meta else found.fill_(77)

    monkeypatch.setattr(torch, "empty_like", dirty)


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForSequenceClassification"])
def test_buffers_missing_in_the_files_are_filled_by_the_constructor(auto: str, tmp_path: Path) -> None:
    name = f"Toy{auto}"
    session, notices = opened(custom(tmp_path / "toy", name, auto=auto))
    torch.testing.assert_close(session.model.module(X), expected())
    assert notices == (
        "3 buffers, first scale, are not in the checkpoint, and from_pretrained does not fill such buffers: the values come from "
        f"the constructor of {name}",
    )
    session.cast("linear", "bfloat16")
    mean = float((expected(torch.bfloat16) - expected()).abs().mean())
    assert session.drift().output.mean_abs == pytest.approx(mean, rel=1e-6)


def test_buffers_filled_while_loading_are_not_replaced_by_the_constructor(tmp_path: Path) -> None:
    folder = custom(tmp_path / "toy", "Filled")
    code = (folder / "code.py").read_text()
    filled = """
    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            self.scale.copy_(torch.arange(8).float() + 0.5)
            self.phase.copy_(torch.linspace(0, 1, 8))
            self.order.copy_(torch.arange(8).flip(0))
"""
    (folder / "code.py").write_text(code + filled)
    session, notices = opened(folder)
    assert not notices
    torch.testing.assert_close(session.model.module(X), expected())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            'self.register_buffer("sum", self.linear.weight.sum(), persistent=False)',
            "the buffer sum is not in the checkpoint, and may hold any values, because the constructor of {} does not make them",
        ),
        (
            "float(self.linear.weight.sum()) if not self.scale.is_meta else 0",
            "3 buffers, first scale, are not in the checkpoint, and may hold any values, because the constructor of {} failed: "
            "Tensor.item() cannot be called on meta tensors",
        ),
    ],
    ids=["needs a weight", "raises"],
)
def test_buffers_that_no_constructor_fills_are_reported(more: str, said: str, tmp_path: Path) -> None:
    name = f"Unmade{len(more)}"
    _, notices = opened(custom(tmp_path / "toy", name, more))
    assert said.format(name) in notices


def test_remote_code_runs_only_with_trust_remote_code_and_without_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = custom(tmp_path / "toy", "Commanded")
    given = ["--inputs", str(tmp_path / "x.safetensors"), "--cast", "linear=bf16"]
    assert run(cli, "dtype-engine", ["drift", str(folder), *given, "--trust-remote-code"]) == 0
    assert run(cli, "dtype-engine", ["drift", str(folder), *given]) == 2
    assert "not run unless you pass --trust-remote-code" in capsys.readouterr().err


def test_nested_remote_code_is_refused_without_a_question(tmp_path: Path) -> None:
    other = custom(tmp_path / "other", "Other")
    folder = custom(
        tmp_path / "toy", "Nested", f"__import__('transformers').AutoConfig.from_pretrained({str(other)!r})"
    )
    with pytest.raises(de.UserError, match="set the option 'trust_remote_code=True'"):
        opened(folder)
    assert transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE > 0
