"""Recipe files are unchanged by writing and reading, and errors in them are named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.recipe.file import LOST, RecipeFile, read_recipe_file, write_recipe
from dtype_engine.results.losses import ValueLoss

SETTINGS = st.builds(
    RunSettings,
    st.sampled_from(dtypes.COMPUTE_DTYPES),
    st.sampled_from([None, "bfloat16", "float16"]),
    st.sampled_from(["given", "model"]),
    st.sampled_from(["none", "weights"]),
    st.sampled_from(["auto", "none", -1, 0, 1, 7]),
)
SPEAKABLE = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
FIGURES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), SPEAKABLE, st.sampled_from(["yes", "1e3", "null"])
)
FIGURE_NAMES = SPEAKABLE.filter(lambda name: name != LOST)
"""Without the name that a recipe file uses for lost values."""


@pytest.mark.slow
@given(
    st.lists(
        st.builds(Rule, SPEAKABLE.map(str.strip).filter(bool), st.sampled_from(dtypes.CASTABLE_DTYPES)), max_size=5
    ),
    SPEAKABLE,
)
def test_recipe_is_unchanged_by_writing_and_reading_its_file(
    tmp_path_factory: pytest.TempPathFactory, rules: list[Rule], model: str
) -> None:
    try:
        recipe = Recipe(tuple(Rule.make(rule.pattern, rule.dtype) for rule in rules))
    except UserError:
        return
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(write_recipe(recipe, model), encoding="utf-8")
    assert read_recipe_file(path).recipe == recipe


@pytest.mark.slow
@given(st.none() | SETTINGS, st.none() | SPEAKABLE, st.dictionaries(FIGURE_NAMES, FIGURES, max_size=4))
def test_recipe_file_keeps_run_settings_and_measured_figures(
    tmp_path_factory: pytest.TempPathFactory, settings: RunSettings | None, model: str | None, measured: dict[str, Any]
) -> None:
    recipe = Recipe((Rule("*.mlp", "bfloat16"), Rule("type:Linear", "float8_e4m3fn@tensor")))
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(write_recipe(recipe, model, settings, measured), encoding="utf-8")
    found = read_recipe_file(path)
    assert (found.recipe, found.model, found.settings) == (recipe, model, settings)
    assert list(found.measured) == list(measured)
    for name, value in measured.items():
        got = found.measured[name]
        assert type(got) is type(value)
        assert got == value or (isinstance(value, float) and math.isnan(value) and math.isnan(got))  # type: ignore[arg-type]


def test_recipe_file_with_rules_only_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("version: 1\nrules:\n  - {pattern: '*', dtype: half}\n")
    assert read_recipe_file(path) == RecipeFile(Recipe((Rule("*", "float16"),)))


def test_recipe_file_of_an_earlier_version_is_read_and_written_unchanged() -> None:
    """saved/recipe.yaml was written before msgspec read such files."""
    path = Path(__file__).parent / "saved" / "recipe.yaml"
    found = read_recipe_file(path)
    assert found == RecipeFile(
        Recipe((Rule("*", "bfloat16"), Rule("type:LayerNorm", "float32"))),
        "org/name",
        RunSettings("bfloat16", "float16", "model"),
        {
            "kl_mean": 0.00125,
            "sqnr_db": math.inf,
            "positions": 64,
            "finite": True,
            "inputs": "6 prompts",
            "perplexity": None,
        },
        (ValueLoss("norm.weight", "float16", 1, 0, 64),),
    )
    said = ["12 tensors", "2 tensors"], {"kl_mean": "nats"}, found.lost
    assert write_recipe(found.recipe, found.model, found.settings, found.measured, *said) == path.read_text()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("rules: 3", "is not a recipe"),
        ("version: 2\nrules: []", "version 2 is unknown"),
        ("version: 1\nrules: [{pattern: a}]", "rule 1 must have"),
        ("version: 1\nrules: [{pattern: a, dtype: foo}]", "rule 1: unknown dtype"),
        ("a: [", "not valid YAML in line"),
        ("model: [1]", "'model' must be a string"),
        ("settings: 3", "settings: expected object, got int"),
        ("settings: {speed: 1}", "unknown setting 'speed'"),
        ("settings: {compute: fp8}", "setting compute: choose one of"),
        ("settings: {compute: foo}", "setting compute: unknown dtype"),
        ("settings: {autocast: float32}", "torch.autocast supports"),
        ("settings: {quantize_activations: all}", "settings: quantize_activations: invalid enum value 'all'"),
        ("settings: {float_inputs: maybe}", "settings: float_inputs: invalid enum value 'maybe'"),
        ("measured: 3", "'measured' must be a mapping"),
        ("measured: {a: [1]}", r"measured: \[...\]: expected bool | int | float | str | null, got array"),
        ("measured: {3: 1}", "measured: expected str"),
        ("measured: {lost: 3}", "measured.lost: expected array, got int"),
        (
            "measured: {lost: [{tensor: a, dtype: f16}]}",
            r"measured.lost: \[0\]: object missing required field overflowed",
        ),
        (
            "measured: {lost: [{tensor: a, dtype: f16, overflowed: -1, vanished: 0, elements: 1}]}",
            r"measured.lost: \[0\].overflowed: expected int >= 0",
        ),
        (
            "measured: {lost: [{tensor: a, dtype: stored, overflowed: 0, vanished: 0, elements: 1}]}",
            "measured.lost: stored is not a dtype",
        ),
        ("notes: 3", "unknown entry 'notes'"),
        ("version: 1\nrules: [" + "a," * 5_001 + "]", "it has 5,001 rules, over the limit of 5,000: use patterns"),
    ],
)
def test_invalid_recipe_entry_is_refused_by_name(tmp_path: Path, entry: str, says: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(entry if "rules" in entry or entry == "a: [" else f"version: 1\nrules: []\n{entry}\n")
    with pytest.raises(UserError, match=says) as caught:
        read_recipe_file(path)
    assert str(path) in str(caught.value)


def test_binary_or_missing_recipe_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not text"):
        read_recipe_file(path)
    with pytest.raises(UserError, match="can't read"):
        read_recipe_file(tmp_path / "none.yaml")


@pytest.mark.slow
def test_drift_command_uses_the_run_settings_of_the_recipe_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(write_recipe(Recipe((Rule("*.mlp", "bfloat16"),)), settings=RunSettings(autocast="bfloat16")))
    assert run(cli, "dtype-engine", ["drift", "--recipe", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == "autocast bfloat16"
    arguments = ["drift", "--recipe", str(file), "--autocast", "f16", "--float-inputs", "model", "--json"]
    assert run(cli, "dtype-engine", arguments) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == "autocast float16, floating inputs follow the model"
