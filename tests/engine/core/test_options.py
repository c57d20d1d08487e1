"""Options are checked when they are made, by the types of their fields."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import dtype_engine as de
from dtype_engine.cli.drift import drift
from dtype_engine.core.number_ranges import SequenceLength, Sequences
from dtype_engine.core.options import InputOptions, ModelOptions


@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        (de.Options, "sequences", "two", "expected int | None, got str"),
        (de.Options, "sequences", 0, "expected int >= 1"),
        (de.Options, "sequences", True, "expected int | None, got bool"),
        (de.Options, "sequence_length", 1, "expected int >= 2"),
        (de.Options, "prompts", "one prompt", "expected a tuple, got str"),
        (de.Options, "limits", 3, "expected InputLimits, got int"),
        (de.Options, "max_memory", {"cpu": "4GiB"}, "expected int, got str"),
        (de.Options, "floor", "often", "expected one of auto, always, never, got 'often'"),
        (de.Options, "precision", 5, "expected float < 1.0"),
        (de.Options, "reference_bytes", -1, "expected int >= 0"),
        (InputOptions, "chat", 1, "expected bool, got int"),
        (ModelOptions, "device", 0, "expected str, got int"),
        (de.RunSettings, "compute", "bfloat16\n", "expected one of float64, float32, bfloat16, float16"),
        (de.RunSettings, "compute", "int8", "expected one of float64, float32, bfloat16, float16"),
        (de.RunSettings, "autocast", "float32", "expected one of bfloat16, float16, got 'float32'"),
        (de.RunSettings, "classes_dim", 64, "expected int <= 63"),
        (de.InputLimits, "tokens", 1.5, "expected int, got float"),
    ],
)
def test_option_of_a_wrong_type_or_out_of_range_is_refused_when_it_is_made(
    kind: Any, name: str, value: object, said: str
) -> None:
    with pytest.raises(de.UserError) as refused:
        kind(**{name: value})
    assert str(refused.value) == f"{kind.__name__}.{name}: {said}"
    with pytest.raises(de.UserError):
        dataclasses.replace(kind(), **{name: value})


def test_refusal_says_which_of_several_values_is_wrong() -> None:
    with pytest.raises(de.UserError) as refused:
        de.Options(texts=(Path("a"), 3))  # type: ignore[arg-type]
    assert str(refused.value) == "Options.texts[1]: expected a path, got int"


def test_a_string_is_a_path_and_a_list_a_tuple() -> None:
    options = de.Options(weights="net.pth", texts=["a.txt"], prompts=["a", "b"])  # type: ignore[arg-type]
    assert options == de.Options(weights=Path("net.pth"), texts=(Path("a.txt"),), prompts=("a", "b"))
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(("name", "kind"), [("sequences", Sequences), ("sequence_length", SequenceLength)])
def test_the_command_line_has_the_ranges_of_the_options(name: str, kind: Any) -> None:
    (option,) = (each for each in drift.params if each.name == name)
    (limits,) = kind.__metadata__
    assert isinstance(option.type, click.IntRange)
    assert (option.type.min, option.type.max) == (limits.ge, limits.le)


def test_an_integer_of_numpy_is_an_integer() -> None:
    assert de.Options(sequences=np.int64(4)).sequences == 4  # type: ignore[arg-type]
