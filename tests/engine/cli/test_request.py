"""The command line as one frozen request: explicit options take precedence, and each file is read once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from dtype_engine.checkpoint import safetensors_header
from dtype_engine.cli import cli
from dtype_engine.cli.options import REFERENCE, ModelCommand
from dtype_engine.cli.program import run
from dtype_engine.cli.request import RunRequest
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.recipe import file as recipe_file

RECIPE = """\
version: 1
model: another
rules: [{pattern: "*.mlp", dtype: bfloat16}]
settings: {autocast: float16, compute: bfloat16}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def request_of(*arguments: str, **configured: str) -> RunRequest:
    """Return the request that `drift` makes of these arguments and the defaults of a config file."""
    requests: list[RunRequest] = []

    @click.command(cls=ModelCommand, also=REFERENCE)
    def command(request: RunRequest) -> None:
        requests.append(request)

    command.main(list(arguments), standalone_mode=False, default_map=configured)
    return requests[0]


def counted(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[Any]:
    """Return a list to which every later call of a function of the module adds its first argument."""
    calls: list[Any] = []
    function: Callable[..., object] = getattr(module, name)

    def counting(first: object, *others: object) -> object:
        calls.append(first)
        return function(first, *others)

    monkeypatch.setattr(module, name, counting)
    return calls


def test_empty_command_line_means_demo_and_defaults() -> None:
    request = request_of()
    assert request.model is None
    assert request.explicit == frozenset()
    assert request.options.settings == RunSettings()
    assert len(request.recipe) == 0


def test_recipe_file_rules_precede_command_line_rules(recipe: Path) -> None:
    request = request_of("some/model", "--cast", "*norm*=f32", "--recipe", str(recipe), "--cast", "*=f16")
    assert list(map(str, request.recipe.rules)) == ["*.mlp=bfloat16", "*norm*=float32", "*=float16"]
    assert request.made_for == "another"
    assert request.explicit == {"model", "casts", "recipe_file"}


def test_command_line_setting_overrides_the_recipe_file(recipe: Path) -> None:
    assert request_of("--recipe", str(recipe)).options.settings == RunSettings("bfloat16", "float16")
    # Even where it says what is the default: it was said.
    said = request_of("--recipe", str(recipe), "--compute", "float32").options.settings
    assert said == RunSettings("float32", "float16")
    quantised = request_of("--recipe", str(recipe), "--quantize-activations", "weights").options.settings
    assert quantised == RunSettings("bfloat16", "float16", quantize_activations="weights")


@pytest.mark.parametrize(("said", "expected"), [("1", 1), ("-1", -1), ("none", "none"), ("auto", "auto")])
def test_classes_dim_option_is_parsed(said: str, expected: int | str, recipe: Path) -> None:
    found = request_of("--recipe", str(recipe), "--classes-dim", said).options.settings
    assert found == RunSettings("bfloat16", "float16", classes_dim=expected)  # type: ignore[arg-type]
    recipe.write_text(recipe_file.write_recipe(Recipe(), settings=found), encoding="utf-8")
    assert request_of("--recipe", str(recipe)).options.settings == found


def test_invalid_classes_dim_is_refused() -> None:
    with pytest.raises(click.BadParameter, match="'x': give a dimension such as 1 or -1, none or auto"):
        ModelCommand("drift").make_context("drift", ["--classes-dim", "x"])


def test_request_is_made_without_a_click_context() -> None:
    with pytest.raises(RuntimeError):
        click.get_current_context()
    request = RunRequest.of({"model": "m", "casts": ("*=bf16",), "weights": Path("w.pth")}, frozenset(), runs=False)
    assert (request.model, request.options.device, request.options.weights) == ("m", "cpu", Path("w.pth"))


def test_the_recipe_file_is_read_once_per_command(
    monkeypatch: pytest.MonkeyPatch, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = counted(monkeypatch, recipe_file, "read_recipe_file")
    assert run(cli, "dtype-engine", ["flow", "--recipe", str(recipe)]) == 0
    assert "was made for another" in capsys.readouterr().err
    assert reads == [recipe]


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "--cast", "type:Linear=bf16"],
        ["drift", "--cast", "*.mlp=bf16"],
        ["scan", "--dtypes", "bf16"],
    ],
)
def test_headers_are_read_once_per_command(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    headers = counted(monkeypatch, safetensors_header, "open_regular")
    assert run(cli, "dtype-engine", arguments) == 0
    assert [path.name for path in headers] == ["model.safetensors"]


def test_against_option_opens_the_candidate_with_the_model_as_reference() -> None:
    for request, expected in (
        (request_of("a", "--against", "b"), ("b", "a")),
        (request_of("--against", "b"), ("b", "demo")),
        (request_of("a", "--reference", "stored"), ("a", "stored")),
        (request_of("a", reference="stored"), ("a", "stored")),
        # A configuration's default does not stand in the way.
        (request_of("a", "--against", "b", reference="stored"), ("b", "a")),
    ):
        assert (request.model, request.options.reference) == expected
        assert "reference" in request.explicit
    with pytest.raises(UserError, match="leave it out, or leave out --against"):
        request_of("a", "--against", "b", "--reference", "stored")
