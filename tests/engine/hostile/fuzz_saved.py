"""Files that this program saves and reads again, as `test_saved_numbers.py` and `fuzz.py` change them. `FORMS` has, for each form,
a function that writes a sample and returns its content, and one that reads a file and computes and shows all that depends on it.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tests.helpers.mutations import changed

from dtype_engine.recipe.file import read_recipe_file, write_recipe
from dtype_engine.reports.text_groups import group_lines, group_words
from dtype_engine.reports.text_weights import comparison_text
from dtype_engine.results.drift import Extent, OutputDrift
from dtype_engine.results.figures import View, cells
from dtype_engine.results.groups import GROUPINGS, PositionGroup
from dtype_engine.results.weights import WeightDifference, WeightsComparison

if TYPE_CHECKING:
    from dtype_engine.runtime.numerics.compare.element_sums import ElementSums
    from dtype_engine.runtime.scan.saved import Fingerprint

KINDS = ("exact-scan", "drift", "comparison")
"""The forms that are kinds of `fuzz.py`, which runs the others through the programs."""
_VIEWS: tuple[View, ...] = ("text", "report", "pane", "details", "comparison", "history", "recipe")


def make_good(kind: str, folder: Path) -> list[bytes]:
    return [FORMS[kind][0](folder)]


def mutated(kind: str, content: bytes, chooser: random.Random) -> bytes | None:
    """A file with other values, or None for whatever `fuzz.py` does to bytes."""
    if chooser.random() < 0.3:
        return None
    value = json.loads(content)
    for _ in range(chooser.randrange(1, 3)):
        value = changed(value, chooser)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def use(kind: str, path: Path) -> None:
    """Read a file, and use what it holds. Raises UserError."""
    FORMS[kind][1](path)


def fingerprint() -> Fingerprint:
    from dtype_engine.runtime.scan.saved import Fingerprint

    return Fingerprint("m" * 64, "i" * 64, ("bfloat16", "float16"), "defaults")


def _scan(folder: Path) -> bytes:
    from dtype_engine.runtime.scan import saved as scan_file
    from dtype_engine.runtime.scan.routing import TopKSample
    from dtype_engine.runtime.scan.scores import SequenceScores

    keys = {("a.weight", "bfloat16"): 0.5, ("b.weight", "float16"): 1.5}
    sample = TopKSample(3, 0.5, [0.1, 0.2], 0.3, keys, keys)
    done = {0: SequenceScores(16.0, keys, keys, True, [sample], keys), 2: SequenceScores(8.0, keys)}
    path = folder / "scan.json"
    scan_file.write(path, scan_file.SavedScan(fingerprint(), 4, "nats", 1.5, 2.5, 3, done))
    return path.read_bytes()


def _use_scan(path: Path) -> None:
    from dtype_engine.runtime.scan import saved as saved_scan
    from dtype_engine.runtime.scan.scores import combine_scores

    for draws in (4, None):
        saved = saved_scan.read(path, fingerprint(), draws)
    done = [saved.done[index] for index in sorted(saved.done)]
    combine_scores(done, {"a.weight": ("bfloat16",), "b.weight": ("float16",)}, saved.draws, lambda name, dtype: False)
    saved_scan.write(path, saved)


def _exact(folder: Path) -> bytes:
    from dtype_engine.runtime.scan import saved as saved_scan

    made = saved_scan.SavedScan(fingerprint(), 0, "nats", 1.5, 2.5, 3, {}, {("a.weight", "bfloat16"): (0.5, 0.1)})
    saved_scan.write(folder / "exact.json", made)
    return (folder / "exact.json").read_bytes()


def _use_exact(path: Path) -> None:
    from dtype_engine.runtime.scan import saved as saved_scan

    saved_scan.write(path, saved_scan.read(path, fingerprint(), None, exact=True))


def _sums(noise: float) -> ElementSums:
    from dtype_engine.runtime.numerics.compare.element_sums import ElementSums

    return ElementSums(64, 0, 0, 0, 3.0, 0.5, noise, 40.0, 41.0, 40.5)


def _drift(folder: Path) -> bytes:
    import torch

    from dtype_engine.runtime.measure.modules.module_sums import ModuleSums
    from dtype_engine.runtime.measure.running_totals import SavedSequence, SavedTotals, SavedVectors
    from dtype_engine.runtime.session import saved_drift

    rows = [0.1, 0.2, 0.3, 0.4]
    modules = {"layer": ModuleSums(_sums(0.5), rerouted=2)}
    sequences = [
        SavedSequence(
            number,
            4,
            1,
            _sums(1.0),
            (rows, [True, True, False, True], rows[:3], rows[:3]),
            modules,
            [0.2, 0.6, 0.7, 1.0],
            [1, 2, 3, 4],
            rows,
            SavedVectors.of((torch.eye(6), torch.eye(6) + 0.1)),
        )
        for number in range(2)
    ]
    totals = SavedTotals("logits", 3, 2, (1.5, 2.5), ["left"], ["wide"], sequences, ["unseen"], acceptance=True)
    saved_drift.write(folder / "drift.json", fingerprint(), totals)
    return (folder / "drift.json").read_bytes()


def _use_drift(path: Path) -> None:
    from dtype_engine.runtime.measure.running_totals import RunningTotals
    from dtype_engine.runtime.session import saved_drift

    totals = RunningTotals.restored(saved_drift.read(path, fingerprint(), 3), 3, routed=False)
    if not totals.numbers:
        return
    output, extent = totals.output, totals.extent
    _show(output, extent)
    str((totals.modules, totals.unit, totals.seconds, totals.notices(output)))
    saved_drift.write(path, fingerprint(), totals.saved())


def _show(output: OutputDrift, extent: Extent) -> None:
    for view in _VIEWS:
        cells(view, output, extent)
    group_words(output)
    group_lines(output, *GROUPINGS)
    extent.rest_for(0.1)
    str((output.nonfinite_text, extent.left_out_text))


class _Nothing:
    identities = ()


def _comparison(folder: Path) -> bytes:
    from dtype_engine.runtime.measure.saved_differences import SavedDifferences

    weight = WeightDifference("a", "b", "float32", "int8", (4, 8), False, 40.0, 0.5, 0.1, 0.01, 0)
    file = SavedDifferences(folder / "comparison.json", _Nothing(), _Nothing())  # type: ignore[arg-type]
    file.add(weight)
    file.write()
    return (folder / "comparison.json").read_bytes()


def _use_comparison(path: Path) -> None:
    from dtype_engine.runtime.measure.saved_differences import SavedDifferences

    found = SavedDifferences(path, _Nothing(), _Nothing()).found  # type: ignore[arg-type]
    comparison_text(WeightsComparison("a", "b", tuple(found.values()), (), (), ()))


def _session(folder: Path) -> bytes:
    from tests.helpers.recording_engine import report

    from dtype_engine import Options, Recipe, Rule, RunSettings
    from dtype_tui.state.measurement_log import measured
    from dtype_tui.state.rule_list import RuleList
    from dtype_tui.state.session_store import SavedSession, SessionFile

    bf16 = Recipe((Rule("*", "bfloat16"),))
    entry = measured(report(bf16), bf16, RunSettings(), 1_415_616)
    groups = {"confidence": {"0.95-1": PositionGroup(9, 3e-4, 1e-5, 0.25, 0.5)}}
    entry = msgspec.structs.replace(entry, output=dataclasses.replace(entry.output, groups=groups))
    rule_lists = (
        RuleList(),
        RuleList.of([Rule("*", "bfloat16")]),
        RuleList.of([Rule("re:.*up.*", "float16"), Rule("*", "bfloat16")]).toggled(0),
    )
    model = str(folder / "model.safetensors")
    file = SessionFile()
    file.path = folder / "session.json"
    file.save(
        SavedSession(model, "model", Path(model), folder, Options(device="cpu"), rule_lists, 1, "model", (entry,))
    )
    return file.path.read_bytes()


def _use_session(path: Path) -> None:
    from dtype_tui.state.session_store import read_session

    saved = read_session(path)
    for entry in saved.measured:
        _show(entry.output, entry.extent)
    str((saved.recipe, saved.options, saved.valid_measurements))


def _recipe(folder: Path) -> bytes:
    lost = {"tensor": "a", "dtype": "float16", "overflowed": 1, "vanished": 2, "elements": 3, "channels": 1}
    settings = {"compute": "float32", "classes_dim": 1}
    rules = [{"pattern": "*", "dtype": "float16"}]
    file = {"version": 1, "rules": rules, "settings": settings, "measured": {"kl_mean": 0.5, "lost": [lost]}}
    return json.dumps(file).encode()


def _use_recipe(path: Path) -> None:
    file = read_recipe_file(path)
    write_recipe(file.recipe, file.model, file.settings, file.measured, lost=file.lost)


FORMS: dict[str, tuple[Callable[[Path], bytes], Callable[[Path], None]]] = {
    "scan": (_scan, _use_scan),
    "exact-scan": (_exact, _use_exact),
    "drift": (_drift, _use_drift),
    "comparison": (_comparison, _use_comparison),
    "session": (_session, _use_session),
    "recipe": (_recipe, _use_recipe),
}
