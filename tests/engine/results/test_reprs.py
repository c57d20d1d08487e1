"""What a notebook or a shell shows of a result: at most five lines, whatever the model's size."""

from __future__ import annotations

from pathlib import Path

import pytest

import dtype_engine as de
from dtype_engine.results.attribution import AttributionReport, Contribution, LossRemedy, NonFiniteDiagnosis
from dtype_engine.results.export import CastReport, ComparedTensor, TensorDifference, VerifyReport
from dtype_engine.results.inputs import InputBatch, InputsSummary
from dtype_engine.results.runs import Generation, Written

NAMES = tuple(f"model.layers.{number}.mlp.down_proj.weight" for number in range(500))
DIFFERENCES = tuple(TensorDifference(name, "is missing") for name in NAMES)
COMPARED = tuple(ComparedTensor(name, "float32", "float16", 9, 1, 0.1) for name in NAMES)
LARGE = [
    VerifyReport("out", "a model", NAMES, 500, 1 << 30, DIFFERENCES, 1.0),
    CastReport("out", "a model", 1, COMPARED, (), DIFFERENCES, 1),
    AttributionReport(
        "a model", NAMES, "nats per token", 1.0, 1.0, 9, 9, 1.0, tuple(Contribution(name, 1, 0.1, 0.1) for name in NAMES)
    ),
    LossRemedy(NAMES, NAMES, 2, 1),
    NonFiniteDiagnosis("weight", "a", "a", "linear", "float16", 65504.0, NAMES, None, None, NAMES, "why"),
    Generation("a\n" * 500, Written((1,) * 500, ("a\n",) * 500, 1.0), Written((1,) * 500, ("a\n",) * 500, 1.0)),
    InputsSummary("500 texts", ("texts",) * 500, 9, tuple(InputBatch(name, 9, ()) for name in NAMES)),
]  # fmt: skip


def is_brief(shown: object) -> bool:
    lines = repr(shown).split("\n")
    return len(lines) <= 5 and max(map(len, lines)) <= 320 and repr(shown).startswith(type(shown).__name__)


@pytest.mark.parametrize("result", LARGE, ids=lambda result: type(result).__name__)
def test_result_with_hundreds_of_entries_shows_itself_in_five_lines(result: object) -> None:
    assert is_brief(result), repr(result)


def test_every_result_of_a_session_shows_itself_in_five_lines(tmp_path: Path) -> None:
    session = de.open(options=de.Options(device="cpu", prompts=("one short prompt",)))
    scan, _ = session.scan(["bfloat16"], draws=1), session.cast("*.mlp", "bfloat16")
    front, found = session.front(), session.search(budget="60%")
    shown = [
        session, session.model, session.inputs, session.inputs_reading, session.tree, session.plan, session.export_contents(),
        session.export(tmp_path / "out"), session.verify(tmp_path / "out"), session.drift(), session.causes(),
        session.attribution(), session.speed(repeats=3), session.generate(2)[0], scan, front, session.predict(),
        session.scan_task(["bfloat16"], None, False, None), session.scan_task(["bfloat16"], None, True, None),
        session.activation_memory(8), session.options, session.settings,
    ]  # fmt: skip
    assert [repr(each) for each in shown if not is_brief(each)] == []
    assert repr(found).startswith("FoundRecipe: demo, the best of ")


def test_options_show_what_is_not_the_default() -> None:
    assert repr(de.Options()) == "Options()"
    options = de.Options(sequences=2, settings=de.RunSettings(autocast="bfloat16"))
    assert repr(options) == "Options(sequences=2, settings=RunSettings(autocast='bfloat16'))"


def test_export_shows_what_was_written_where(tmp_path: Path) -> None:
    session = de.open(options=de.Options(device="cpu", prompts=("one short prompt",)))
    session.cast("*.mlp", "bfloat16")
    assert repr(session.export(tmp_path / "out")).splitlines() == [
        "ExportReport: demo, 1.86 MiB in 1 file",
        f"  folder  {tmp_path / 'out'}",
        "  rules   *.mlp=bfloat16",
        "  tensors 38 in f32, 18 in bf16",
    ]
    assert repr(session.verify(tmp_path / "out")).splitlines() == [
        f"VerifyReport: {tmp_path / 'out'} against demo: the same, bit for bit",
        "  rules   *.mlp=bfloat16",
        "  tensors 56, 1.86 MiB",
    ]
