"""An engine that is opened read-only, for an app that others see: it refuses what names files, whatever its app does."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from tests.helpers.recorded_worker import RecordedEngine

from dtype_engine import Options, Recipe
from dtype_engine.checkpoint.source import locate
from dtype_engine.core.user_folders import state_folder
from dtype_engine.service import commands, control, events, messages
from dtype_engine.service.commands import READ_ONLY, Command, Traits
from dtype_engine.service.jobs import JOBS
from dtype_engine.service.save_requests import ConvertRequest, ExportRequest, RecipeRequest, ReportRequest, SaveRequest
from dtype_engine.service.worker import Worker

HARMLESS = {
    "SetRecipe", "FollowRecipe", "SetSettings", "Pause", "Cancel", "Measure",
    "MeasureRecipes", "Ask", "OpenOverMemory",
    "Open", "Resume", "Acknowledge", "PlanExport", "Close",
}  # fmt: skip
REFUSED = {"SetInputs", "ExportRequest", "RecipeRequest", "ReportRequest", "ConvertRequest", "CheckPath", "Download"}
IN_PART = {"Scan": "runs, but is not saved"}
HARMLESS_JOBS = {
    "flow", "causes", "generate", "tokens", "speed", "activations", "check", "values", "nonfinite", "losses", "floor", "weights",
    "executions", "kernels",
}  # fmt: skip


def test_every_request_is_classified_as_allowed_or_refused_when_read_only() -> None:
    """A new request fails this test until somebody has decided whether it can read or write a file that a viewer names."""
    requests = {kind.__name__ for kind in typing.get_args(messages.Request)}
    assert requests == HARMLESS | REFUSED | IN_PART.keys()
    assert JOBS.keys() == HARMLESS_JOBS
    names_path = {
        kind.__name__ for kind in Command.__subclasses__() if isinstance(kind.traits, Traits) and kind.traits.names_path
    }
    assert names_path == {"SetInputs", "Download", "Save"}


@pytest.mark.parametrize("read_only", [True, False])
def test_read_only_engine_refuses_requests_with_file_names(tmp_path: Path, read_only: bool) -> None:
    """Requests are refused before the model is open; otherwise the queue would keep them until then."""
    emitted: list[events.Event] = []
    worker = Worker(locate(None), Options(read_only=read_only), emitted.append)
    saves: list[SaveRequest] = [
        ExportRequest(tmp_path / "out"),
        RecipeRequest(tmp_path / "r.yaml"),
        RecipeRequest(tmp_path / "r.yaml", as_text=True),
        ReportRequest(tmp_path / "r.html"),
        ConvertRequest(tmp_path / "r.json", "torchao"),
    ]
    for save in saves:
        worker.save(save)
    worker.request(commands.SetInputs("/etc/passwd"))
    worker.check_path("/etc/passwd", False)
    worker.request(commands.SetRecipe(Recipe()))
    refused = [event for event in emitted if isinstance(event, events.Refused)]
    (checked,) = (event for event in emitted if isinstance(event, events.PathChecked))
    waiting = {type(command) for command in worker._queue.waiting}
    if read_only:
        assert refused == [*[events.Refused("write", READ_ONLY)] * 5, events.Refused("inputs", READ_ONLY)]
        assert checked == events.PathChecked("/etc/passwd", False, READ_ONLY)
        assert waiting == {commands.Measure}
    else:
        assert refused == []
        assert checked.taken
        assert waiting == {commands.Measure, commands.Save, commands.SetInputs}


def test_read_only_option_reaches_the_engine() -> None:
    opened = messages.decode_request(messages.encode_request(control.Open(None, Options(read_only=True), False)))
    assert isinstance(opened, control.Open)
    assert opened.options.read_only
    assert issubclass(commands.Save, Command)


@pytest.mark.slow
def test_read_only_engine_saves_no_scan() -> None:
    scans = state_folder() / "scans"
    before = list(scans.glob("*"))
    options = Options(device="cpu", prompts=("import os",), read_only=True)
    with RecordedEngine("process", options=options) as recorded:
        recorded.wait_for(events.Measured)
        recorded.worker.request(commands.Scan(("int8",), keep=True))
        recorded.wait_for(events.ScanUpdated, lambda event: event.finished)
    assert list(scans.glob("*")) == before
