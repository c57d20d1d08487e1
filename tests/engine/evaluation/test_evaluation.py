"""Evaluations in other processes give bitwise the results of this process, also if processes are killed."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.engine.evaluation.conftest import results_with_one_killed, untimed
from tests.helpers import preloaded

import dtype_engine as de
from dtype_engine.checkpoint.source import Source, locate
from dtype_engine.core.errors import KernelError
from dtype_engine.core.system_memory import memory_budget, share_memory
from dtype_engine.evaluation import work
from dtype_engine.evaluation.evaluate import evaluate
from dtype_engine.evaluation.pool import ProcessPool, fitting
from dtype_engine.evaluation.specs import (
    CompareTensors,
    Evaluated,
    Evaluation,
    Exported,
    Opened,
    RecipeDrift,
    ScanSequence,
    model_text,
    other_versions,
    portable,
)
from dtype_engine.results.export import VerifyReport
from dtype_engine.runtime.measure import attribution
from dtype_engine.runtime.session import opening
from dtype_engine.runtime.session.saved_statistics import SavedStatistics
from dtype_engine.runtime.session.verify import verify

pytestmark = pytest.mark.slow
RULES = [("*=bfloat16",), ("*.mlp=int8",), ("*=float16", "*norm*=float32")]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(2) as pool:
        yield pool


@pytest.mark.parametrize("exact", [False, True])
def test_scan_in_several_processes_equals_a_scan_in_one_process(
    exact: bool, session: Any, source: Source, options: de.Options, opened: Opened, pool: ProcessPool
) -> None:
    kinds = ["int8", "int8:gptq"]
    here = opening.open_session(source, options).scan(kinds, exact=exact)
    seen: list[tuple[str, int, int | None]] = []
    task = session.scan_task(kinds, None, exact, None)
    parts = task.parts
    there = work.scan(session, task, work.Over(pool, opened), lambda *progress: seen.append(progress))
    assert [step for step in seen if step[0] != "rounding"] == [
        ("scan", number, parts) for number in range(1, parts + 1)
    ]
    assert parts == (11 * 3 if exact else 5)  # weights by dtypes, the stored one among them; sequences
    assert len({one.score for one in here.weights}) > 10
    assert any(one.rounding_gain for one in here.weights) == (not exact)
    assert untimed(there) == untimed(here)
    assert session.scanned == there


def test_worker_process_reads_the_weights_that_were_rounded_for_it(
    session: Any, source: Source, options: de.Options, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("int8:gptq", "int4@g32:imatrix")
    task, collected = session.scan_task(kinds, 2, False, None), list[object]()
    rounded = task.share_rounded()
    assert rounded is not None
    collect = SavedStatistics.collect
    monkeypatch.setattr(SavedStatistics, "collect", lambda *given: collected.append(given) or collect(*given))
    here = task.measure(0)
    fresh = dataclasses.replace(opened, options=dataclasses.replace(opened.options, sequences=8))
    there = evaluate(Evaluation(fresh, ScanSequence(kinds, 2, 0, rounded))).value
    assert (there.scores, there.roundings) == (here.scores, here.roundings)
    assert collected == []
    for change in ({"path": "/nowhere"}, {"start": rounded.start + 1}, {"start": 1 << 40}):
        fresh = dataclasses.replace(
            opened, options=dataclasses.replace(fresh.options, sequences=fresh.options.sequences + 1)
        )
        other = ScanSequence(kinds, 2, 0, dataclasses.replace(rounded, **change))
        assert evaluate(Evaluation(fresh, other)).value.scores == here.scores
    assert len(collected) == 3, "each rounded the weights itself"


def test_roundings_fitted_to_earlier_inputs_are_not_measured_by_workers(
    source: Source, options: de.Options, opened: Opened, pool: ProcessPool, tmp_path: Path
) -> None:
    one = opening.open_session(source, options)
    recipes = [(de.Recipe.of([de.Rule.parse("*.mlp=int8:gptq")]), de.RunSettings())]
    one.use_recipe(recipes[0][0])
    torch.save({"input_ids": torch.arange(3, 11)[None]}, tmp_path / "other.pt")
    one.use_inputs(de.Options(tensors=tmp_path / "other.pt"))
    with pytest.raises(
        de.UserError, match=r"int8:gptq was fitted to .*: name the inputs with --calibration FILE, or leave"
    ):
        list(work.drifts(one, recipes, work.Over(pool, opened)))


def test_drifts_measured_in_several_processes_equal_those_of_one_process(
    session: Any, source: Source, options: de.Options, opened: Opened, pool: ProcessPool
) -> None:
    recipes = [(de.Recipe.of(map(de.Rule.parse, rules)), de.RunSettings()) for rules in RULES]
    one = opening.open_session(source, options)
    here = dict(work.drifts(one, recipes, None))
    for number, rules in enumerate(RULES):
        fresh = opening.open_session(source, options)
        fresh.apply(de.Recipe.of(map(de.Rule.parse, rules)))
        assert here[number].output == fresh.drift().output
    there = dict(work.drifts(session, recipes, work.Over(pool, opened)))
    assert {number: (report.output, report.rules) for number, report in there.items()} == {
        number: (report.output, report.rules) for number, report in here.items()
    }


def test_work_of_a_killed_process_is_repeated(session: Any, opened: Opened) -> None:
    with ProcessPool(2) as pool:
        found = results_with_one_killed(pool, opened, 20)
    scan = session.scan_task(["int8"], 2, False, None)
    for index, result in found.items():
        assert result.value.scores == scan.measure(index % 5).scores
        assert result.versions["torch"] == torch.__version__
        assert result.host


def test_worker_processes_that_keep_dying_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("import os\nos._exit(3)\n")
    opened = Opened(f"{file}:Net", de.Options(device="cpu"), "", "")
    with ProcessPool(1) as pool, pytest.raises(de.UserError, match="ended 3 times without a result"):
        list(pool.results([Evaluation(opened, RecipeDrift(de.Recipe(), de.RunSettings()))]))


@pytest.mark.parametrize("what", ["weights", "inputs"])
def test_worker_refuses_a_model_or_inputs_that_differ_from_the_requested_ones(
    what: str, opened: Opened, pool: ProcessPool
) -> None:
    other = dataclasses.replace(opened, **{what: "0" * 64})
    with pytest.raises(de.UserError, match=rf"process \d+ on .* has other {what} for {opened.model}"):
        list(pool.results([Evaluation(other, RecipeDrift(de.Recipe(), de.RunSettings()))]))


def test_worker_process_that_cannot_open_the_model_is_named(opened: Opened, pool: ProcessPool) -> None:
    gone = dataclasses.replace(opened, model="/nowhere/at/all")
    with pytest.raises(de.UserError, match=r"process \d+ on .* can't open the model: /nowhere/at/all: no such folder"):
        list(pool.results([Evaluation(gone, RecipeDrift(de.Recipe(), de.RunSettings()))]))


def test_worker_processes_are_reused_after_a_cancellation(opened: Opened, pool: ProcessPool) -> None:
    evaluations = [Evaluation(opened, ScanSequence(("int8",), 2, index % 5)) for index in range(50)]
    seen: list[object] = []
    found = pool.results(evaluations, cancelled=lambda: bool(seen))
    seen.append(next(found))
    with pytest.raises(de.Cancelled):
        seen.extend(found)
    assert len(seen) < 50
    assert len(list(pool.results(evaluations[:3]))) == 3


def test_worker_process_opens_the_model_only_once(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[object] = []
    opens = opening.open_session
    monkeypatch.setattr(opening, "open_session", lambda *given: times.append(given) or opens(*given))
    fresh = dataclasses.replace(opened, options=dataclasses.replace(opened.options, sequences=9))
    for index in range(3):
        evaluate(Evaluation(fresh, ScanSequence(("int8",), 2, index)))
    assert len(times) == 1


def test_worker_processes_end_with_their_parent(opened: Opened, tmp_path: Path) -> None:
    file = tmp_path / "evaluation.pickle"
    file.write_bytes(pickle.dumps(Evaluation(opened, RecipeDrift(de.Recipe(), de.RunSettings()))))
    program = (
        "import pickle, sys, time\n"
        "from dtype_engine.evaluation.pool import ProcessPool\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPool(1)\n"
        f"    for _, result in pool.results([pickle.load(open({str(file)!r}, 'rb'))]):\n"
        "        print(result.process, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(preloaded.command(program), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert worker.wait(timeout=60) is None


def test_number_of_worker_processes_is_limited_by_free_memory() -> None:
    free = psutil.virtual_memory().available
    assert fitting(1, 10 * free) == 1
    assert fitting(64, free) == 1
    assert fitting(2, 0) <= 2
    assert fitting(10_000, 0) < 10_000


def test_worker_processes_divide_the_memory_budget() -> None:
    try:
        share_memory(4)
        quarter = memory_budget()
    finally:
        share_memory(1)
    assert 3 < memory_budget() / quarter < 5


def test_kernel_error_is_unchanged_by_pickling() -> None:
    error = KernelError("mlp", "linear", "float64", "mps", "float32", "not implemented")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_paths_in_a_task_for_workers_are_absolute(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source.path is not None
    monkeypatch.chdir(source.path.parent)
    (source.path.parent / "net.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    absolute = str(source.path)
    typed: Sequence[tuple[str | None, str | None]] = [
        (source.path.name, absolute),
        (absolute, absolute),
        ("net.py:Net", f"{source.path.parent}/net.py:Net"),
        ("collections:Counter", "collections:Counter"),
        ("demo", "demo"),
        (None, None),
    ]
    for text, expected in typed:
        assert model_text(locate(text)) == expected
    made = portable(de.Options(texts=(Path("a.txt"),), tensors=Path("b.pt")), 3)
    assert (made.texts, made.tensors, made.threads) == (
        (source.path.parent / "a.txt",), source.path.parent / "b.pt", 3,
    )  # fmt: skip
    metrics = portable(de.Options(metrics=("queries:a.jsonl", "queries:accuracy", "lm-eval:arc_easy")), 1).metrics
    assert metrics == (f"queries:{source.path.parent / 'a.jsonl'}", "queries:accuracy", "lm-eval:arc_easy")


def test_causes_found_in_several_processes_equal_those_of_one_process(
    session: Any, opened: Opened, pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.apply(de.Recipe.of([de.Rule.parse("*=bfloat16"), de.Rule.parse("*.mlp=int8")]))
    over = work.Over(pool, opened)
    for most in (attribution.MOST_PASSES, 8):  # each module, and subtrees that are opened
        monkeypatch.setattr(attribution, "MOST_PASSES", most)
        here = session.causes()
        seen: list[tuple[int, int]] = []
        there = work.causes(session, over, lambda *progress, seen=seen: seen.append(progress))
        assert dataclasses.replace(there, seconds=0.0) == dataclasses.replace(here, seconds=0.0)
        assert len({cause.drift for cause in here.causes}) > 3
        assert [done for done, _ in seen] == list(range(len(seen))), "from the reference on, a part after the other"
    session.apply(de.Recipe.of([de.Rule.parse("*=float16")]))  # what the processes kept is of another recipe
    here = session.causes()
    assert dataclasses.replace(work.causes(session, over), seconds=0.0) == dataclasses.replace(here, seconds=0.0)


def test_verification_in_several_processes_finds_a_changed_value(
    session: Any, source: Source, tmp_path: Path, pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.apply(de.Recipe.of([de.Rule.parse("*.mlp=fp8"), de.Rule.parse("*.o_proj=int8")]))
    out = tmp_path / "out"
    session.export(out)
    monkeypatch.setattr(work, "_GROUP_TENSORS", 3)  # several groups
    options = de.Options(device="cpu", threads=1)
    counted: list[tuple[int, int]] = []

    def both() -> list[VerifyReport]:
        compare = work.comparing(pool, 1, out, source, options)
        reports = [
            verify(out, source, options=options),
            verify(out, source, options=options, on_bytes=lambda *done: counted.append(done), elsewhere=compare),
        ]
        return [dataclasses.replace(report, seconds=0.0) for report in reports]

    here, there = both()
    assert there == here
    assert there.same
    assert counted[-1][0] == counted[-1][1] == here.nbytes
    file = out / "model.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    here, there = both()
    assert there == here
    assert len(there.differences) == 1


def test_worker_refuses_an_export_that_differs_from_the_requested_one(
    session: Any, source: Source, tmp_path: Path, pool: ProcessPool
) -> None:
    session.export(tmp_path / "out")
    asked = Exported(str(source.path), de.Options(device="cpu"), tmp_path / "out", "0" * 64)
    with pytest.raises(de.UserError, match=r"process \d+ on .* has another export or another source"):
        list(pool.results([Evaluation(asked, CompareTensors((0,)))]))


def test_results_from_another_version_of_torch_are_noted_or_refused(
    session: Any, source: Source, opened: Opened, tmp_path: Path
) -> None:
    class Elsewhere:
        """Processes with another version of torch, as a cluster may have."""

        workers = 1

        def results(
            self, evaluations: Sequence[Evaluation], cancelled: object = None
        ) -> Iterator[tuple[int, Evaluated]]:
            for index, evaluation in enumerate(evaluations):
                result = evaluate(evaluation)
                yield index, dataclasses.replace(result, versions=result.versions | {"torch": "1.2.3"})

    said: list[str] = []
    work.scan(session, session.scan_task(["int8"], 1, False, None), work.Over(Elsewhere(), opened, said.append))
    assert len(said) == 1
    assert f"has torch 1.2.3 (here {torch.__version__})" in said[0]
    assert other_versions(evaluate(Evaluation(opened, RecipeDrift(de.Recipe(), de.RunSettings())))) == ""
    session.export(tmp_path / "out")
    options = de.Options(device="cpu", threads=1)
    compare = work.comparing(Elsewhere(), 1, tmp_path / "out", source, options)
    with pytest.raises(de.UserError, match=r"torch 1\.2\.3 .* a bitwise comparison needs equal versions"):
        verify(tmp_path / "out", source, options=options, elsewhere=compare)
