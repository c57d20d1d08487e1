"""Every command that takes a model opens it in the same ways."""

from __future__ import annotations

import click
import pytest

from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.cli.recipe import recipe as recipe_group
from dtype_tui.cli.command import command as app_command

MODEL_OPTIONS = {
    "--trust-pickle",
    "--download",
    "--weights",
    "--trust-remote-code",
    "--architecture",
    "--revision",
    "--component",
    "--base",
}
RULE_OPTIONS = {"--cast", "--recipe", "--preset"}


def commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    other = {"recipe", "stdio", "worker", "mcp"}  # a group, what is told of its model by the app, and what has none
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context) if name not in other}
    found |= {f"recipe {name}": command for name, command in recipe_group.commands.items()}
    return {name: command for name, command in found.items() if command is not None} | {"dtype-tui": app_command}


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_the_same_model_options(name: str) -> None:
    command = commands()[name]
    spelled = {text for option in command.params if isinstance(option, click.Option) for text in option.opts}
    assert spelled >= MODEL_OPTIONS
    takes_rules = name in {
        "inspect", "weights", "drift", "flow", "speed", "tokens", "check-execution", "export", "report", "memory", "dtype-tui",
    }  # fmt: skip
    assert (spelled & RULE_OPTIONS == RULE_OPTIONS) is takes_rules


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "--weights", "x.pth"], "--weights goes with the code of a model"),
        (["weights", "--weights", "x.pth"], "--weights goes with the code of a model"),
        (
            ["drift", "net.py:Net", "--weights", "x.pth", "--against", "demo"],
            "demo is no code; for --against, write functions",
        ),
        (["inspect", "{net}", "--architecture", "BertModel"], "makes its own module"),
        (["drift", "{net}", "*.mlp=bf16"], "extra argument (*.mlp=bf16); rules are given as --cast PATTERN=DTYPE"),
    ],
)
def test_option_that_does_not_apply_to_the_model_is_refused(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    file = tmp_path_factory.mktemp("net") / "net.py"
    file.write_text("from torch import nn\n\ndef make(): return nn.Linear(2, 2)\n")
    assert run(cli, "dtype-engine", [text.format(net=f"{file}:make") for text in arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--sequences", "--sequence-length"])
def test_number_of_sequences_or_tokens_beyond_its_bound_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, "dtype-engine", ["drift", "demo", f"{option}={10**30}"]) == 2
    assert f"Invalid value for '{option}': {10**30} is not in the range" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["9" * 4000, "9" * 5000, "nine " * 1000])
def test_overlong_value_of_an_option_is_quoted_in_part(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", ["memory", "MODEL", "--context", value]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("dtype-engine: Invalid value for '--context': ")
    assert sentence.endswith((" is not in the range 1<=x<=16777216.\n", " is not a valid integer range.\n"))
    assert len(sentence) < 450
