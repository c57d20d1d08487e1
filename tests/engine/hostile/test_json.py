"""What `--json` prints of a model with hostile names: the terminal gets text, and programs get the names as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import pytest
import torch
from safetensors.torch import save_file
from tests.helpers import checkpoint_folders

from dtype_engine.cli import cli
from dtype_engine.cli.program import run

HOSTILE = "a\x1b]0;owned\x07\x7f\x85\x9b31m\u2028\u202eb\u3164"
"""Controls of both sets, DEL, a line separator, a turn of the text's direction, and a letter that is not drawn."""
NET = f"""
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.add_module({HOSTILE!r}, torch.nn.Linear(4, 4))

    def forward(self, rows):
        return self._modules[{HOSTILE!r}](rows)

def example_inputs():
    return (torch.ones(2, 4),)
"""
COMMANDS: dict[str, list[str]] = {
    "check": ["FILE", "--values"],
    "check --sarif": ["FILE", "--against", "OTHER"],
    "drift": ["NET", "--cast", "*=bf16"],
    "flow": ["NET", "--cast", "*=bf16"],
    "check-execution": ["NET", "--cast", "*=bf16", "--execution", "threads=1"],
    "tokens": ["TEXT", "--cast", "re:.*\x9b?=bf16", "--prompt", "fox", "--tokens", "2"],
    "speed": ["NET", "--cast", "*=bf16", "--repeats", "3"],
    "inspect": ["NET"],
    "memory": ["NET", "--activations", "none"],
    "weights": ["NET", "--cast", "*=bf16"],
    "export": ["NET", "--cast", "*=bf16", "-o", "OUT"],
    "verify": ["OUT", "--against", "NET"],
    "recipe convert": ["RECIPE", "--to", "torchao", "--model", "NET"],
    "recipe lint": ["RECIPE", "--for", "torchao", "--model", "NET"],
    "recipe lint --sarif": ["RECIPE", "--for", "diffusers", "--model", "NET"],
    "recipe presets": ["NET"],
    "report": ["NET", "--cast", "*=bf16", "-o", "OUT.html"],
    "scan": ["NET", "--dtypes", "bf16"],
    "search": ["NET", "--dtypes", "bf16", "--budget", "50%"],
    "sweep": ["NET", "RECIPE"],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "net\x9b.py").write_text(NET)
    save_file({f"{HOSTILE}.weight": torch.full((4, 4), torch.nan)}, folder / "file\x9b.safetensors")
    save_file({f"{HOSTILE}.bias": torch.ones(4)}, folder / "other.safetensors")
    rule = json.dumps({"pattern": f"{HOSTILE}.weight", "dtype": "bfloat16"})
    (folder / "recipe.yaml").write_text(f"version: 1\nrules:\n  - {rule}\n")
    checkpoint_folders.save("llama", folder / "text\x9b")
    names = {
        "TEXT": "text\x9b",
        "NET": "net\x9b.py:Net",
        "FILE": "file\x9b.safetensors",
        "OTHER": "other.safetensors",
        "RECIPE": "recipe.yaml",
    }
    return {name: f"{folder}/{file}" for name, file in names.items()} | {
        "OUT": f"{folder}/out\x9b", "OUT.html": f"{folder}/out.html"
    }  # fmt: skip


def with_json(group: click.Group, before: str = "") -> Iterator[str]:
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                yield from with_json(command, f"{before}{name} ")
            elif command is not None and any("--json" in parameter.opts for parameter in command.params):
                yield before + name


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from strings(item)


def test_hostile_names_are_tried_with_every_command_that_has_a_json_option() -> None:
    assert {command.removesuffix(" --sarif") for command in COMMANDS} == set(with_json(cli))


@pytest.mark.parametrize("command", COMMANDS)
def test_control_characters_in_json_output_are_escaped(
    command: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [places.get(argument, argument) for argument in COMMANDS[command]]
    option = [] if command.endswith("--sarif") else ["--json"]
    assert run(cli, "dtype-engine", [*command.split(), *arguments, *option]) in (0, 1)
    out, said = capsys.readouterr()
    assert all(character.isprintable() and character != "\u3164" for character in (out + said).replace("\n", ""))
    assert any("\x9b" in text for text in strings(json.loads(out)))
