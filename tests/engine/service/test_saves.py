"""What the worker writes: a checkpoint, a recipe file, a report, a recipe for another tool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.helpers.large_checkpoints import sparse_file
from tests.helpers.recorded_worker import RecordedEngine, Way

from dtype_engine import Options, Recipe, Rule, RunSettings
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.recipe.file import read_recipe_file
from dtype_engine.results.runs import SpeedReport, SpeedRow
from dtype_engine.runtime.verify.verify import compare
from dtype_engine.service import events
from dtype_engine.service.commands import Cancel, Measure, SetRecipe, SetSettings
from dtype_engine.service.save_requests import (
    ConvertRequest,
    ExportRequest,
    RecipeRequest,
    ReportRequest,
    SaveRequest,
)

RECIPE = Recipe((Rule("*", "bfloat16"), Rule("*.mlp", "float8_e4m3fn")))
SPEED = SpeedReport(
    "llama", "cpu", 1, tuple(map(str, RECIPE.rules)), "inputs",
    tuple(
        SpeedRow(what, "bf16", seconds, seconds, seconds, 3, None, False)
        for what, seconds in (("reference", 0.2), ("candidate", 0.1))
    ),
)  # fmt: skip


@pytest.fixture(scope="module", params=["runs", "headers only"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder: one with a live model, and one whose architecture is unknown."""
    import transformers

    folder: Path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    if request.param == "headers only":
        (folder / "config.json").unlink()
    return folder


@pytest.fixture(scope="module")
def shared(folder: Path, way: Way) -> Iterator[RecordedEngine]:
    with RecordedEngine(way, str(folder), Options(device="cpu")) as recorded:
        yield recorded


@pytest.fixture
def recorded(shared: RecordedEngine) -> Iterator[RecordedEngine]:
    yield shared
    shared.on_event = lambda event: None


def save(recorded: RecordedEngine, request: SaveRequest) -> events.Saved:
    start = len(recorded.events)
    recorded.worker.save(request)
    return recorded.wait_for(events.Saved, since=start)


def checked(recorded: RecordedEngine, path: str, for_export: bool = False) -> events.PathChecked:
    start = len(recorded.events)
    recorded.worker.check_path(path, for_export)
    return recorded.wait_for(events.PathChecked, since=start)


def test_path_to_save_to_is_checked_while_another_command_runs(
    recorded: RecordedEngine, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    recorded.worker.request(Measure())
    in_it = "is a folder; name a file in it"
    for name, taken, reason in (
        ("full", False, in_it), ("full/file", True, ""), ("empty", False, in_it), ("none", False, ""), ("link", True, ""),
    ):  # fmt: skip
        path = str(tmp_path / name)
        assert checked(recorded, path) == events.PathChecked(path, taken, reason and f"{path} {reason}")
    found = checked(recorded, "x" * 5000)
    assert (found.taken, "File name too long" in found.reason) == (False, True)
    for place, says in (
        (tmp_path / "full", "has no recipe.yaml of an export"), (folder, "holds the model"), (tmp_path / "empty", ""),
    ):  # fmt: skip
        found = checked(recorded, str(place), for_export=True)
        assert says in found.reason
        assert bool(says) == bool(found.reason)


def test_every_save_request_writes_its_file(recorded: RecordedEngine, folder: Path, tmp_path: Path) -> None:
    recorded.worker.request(SetRecipe(RECIPE))
    recorded.worker.plan_export()
    plan = recorded.wait_for(events.ExportPlanned).plan
    assert plan is not None
    refused = save(recorded, ExportRequest(tmp_path / "out", layout="gptq"))
    assert "the layout gptq" in refused.sentence
    saved = save(recorded, ExportRequest(tmp_path / "out"))
    assert saved.done, saved
    assert str(tmp_path / "out") in saved.sentence
    from dtype_engine.runtime.export import of_checkpoint
    from dtype_engine.runtime.verify.source_values import of_files

    source = open_checkpoint(folder)
    contents = of_checkpoint(source, "llama", RECIPE)
    names = frozenset(item.name for item in contents.items)
    assert compare(contents, of_files(source.files, names, trust=False), tmp_path / "out") == ()
    assert plan.nbytes == contents.nbytes
    assert sum(size for _, _, size in plan.dtypes) == plan.nbytes
    progress = recorded.of(events.SavingProgress)
    assert progress[-1].done == progress[-1].total == plan.nbytes

    refused = save(recorded, ExportRequest(tmp_path / "out"))
    assert (refused.done, "is not empty" in refused.sentence) == (False, True)
    assert not recorded.of(events.Failed)

    for request in (
        RecipeRequest(tmp_path / "r.yaml"),
        ReportRequest(tmp_path / "r.html", speed=SPEED),
        ConvertRequest(tmp_path / "c.json", "comfyui"),
        ExportRequest(tmp_path / "out", replace=True),
    ):
        saved = save(recorded, request)
        assert saved.done, saved
    assert read_recipe_file(tmp_path / "r.yaml").recipe == RECIPE
    text = (tmp_path / "r.html").read_text()
    assert "speed against the reference" in text
    assert "2.00 x as fast" in text
    assert "SQNR" in text if recorded.of(events.ModelReady) else "Not measured" in text
    assert "have scales, which need a config.json" in save(recorded, ExportRequest(tmp_path / "out.pth")).sentence
    recorded.worker.request(SetRecipe(Recipe((Rule("*", "float16"),))))
    saved = save(recorded, ExportRequest(tmp_path / "out.pth"))
    assert (saved.done, {value.dtype for value in torch.load(tmp_path / "out.pth").values()}) == (True, {torch.float16})
    assert "name a report .html or .md" in save(recorded, ReportRequest(tmp_path / "r.pdf")).sentence


def test_new_recipe_does_not_stop_a_running_export(recorded: RecordedEngine, tmp_path: Path) -> None:
    worker = recorded.worker
    worker.request(SetRecipe(RECIPE))

    changes = []

    def change(event: events.Event) -> None:
        # From a process, only the newest progress arrives, which may be the last.
        if isinstance(event, events.SavingProgress) and not changes:
            changes.append(event)
            worker.request(SetRecipe(Recipe()))

    recorded.on_event = change
    assert save(recorded, ExportRequest(tmp_path / "out")).done
    assert changes
    since = len(recorded.events)
    worker.plan_export()
    assert recorded.wait_for(events.ExportPlanned, since=since).recipe == Recipe()
    assert read_recipe_file(tmp_path / "out" / "recipe.yaml").recipe == RECIPE


def test_export_cancelled_through_the_worker_leaves_no_files(recorded: RecordedEngine, tmp_path: Path) -> None:
    if recorded.way == "process":
        pytest.skip("so small an export is done before the word arrives; one in another process is stopped below")

    def stop(event: events.Event) -> None:
        if isinstance(event, events.SavingProgress) and event.done < event.total:
            recorded.worker.request(Cancel())

    recorded.on_event = stop
    saved = save(recorded, ExportRequest(tmp_path / "out"))
    assert (saved.done, saved.sentence) == (False, "stopped: nothing was written")
    assert [entry.name for entry in tmp_path.iterdir() if "out" in entry.name] == []


def test_current_casts_are_restored_after_saving_a_report_of_an_older_recipe(
    recorded: RecordedEngine, tmp_path: Path
) -> None:
    if not recorded.of(events.ModelReady):
        pytest.skip("nothing is cast without a live model")
    start = len(recorded.events)
    recorded.worker.request(SetRecipe(RECIPE))
    recorded.worker.save(ReportRequest(tmp_path / "r.md"))
    recorded.worker.request(SetRecipe(Recipe()))
    recorded.wait_for(events.Saved, since=start)
    recorded.wait_for(events.Idle, since=recorded.events.index(recorded.of(events.Saved, start)[0]))
    assert "`*.mlp`" in (tmp_path / "r.md").read_text()
    last = recorded.of(events.Memory)[-1]
    assert last.recipe == Recipe()
    assert (last.stats.resident_bytes or 0) >= (last.stats.stored_bytes or 0) > 0  # under the report's recipe, 40 %


def test_long_export_cancelled_through_the_worker_leaves_no_files(tmp_path: Path, way: Way) -> None:
    model = sparse_file(tmp_path / "zeros.safetensors", 24)
    with RecordedEngine(way, str(model), Options(device="cpu")) as recorded:
        recorded.worker.request(SetRecipe(RECIPE))
        recorded.worker.save(ExportRequest(tmp_path / "out"))
        recorded.wait_for(events.SavingProgress)
        recorded.worker.request(Cancel())
        saved = recorded.wait_for(events.Saved)
    assert (saved.done, saved.sentence) == (False, "stopped: nothing was written")
    assert list(tmp_path.iterdir()) == [model]


def test_export_with_quantized_activations_calibrates_the_exported_recipe(
    recorded: RecordedEngine, tmp_path: Path
) -> None:
    recipe = Recipe((Rule("*.q_proj", "nvfp4"),))
    recorded.worker.request(SetSettings(RunSettings(quantize_activations="weights")))
    recorded.worker.request(SetRecipe(recipe))
    saved = save(recorded, ExportRequest(tmp_path / "out"))
    recorded.worker.request(SetSettings(RunSettings()))
    if recorded.of(events.ModelReady):
        assert saved.done, saved
        scales = [name for name in open_checkpoint(tmp_path / "out").tensors if name.endswith("input_global_scale")]
        assert len(scales) == 2
    else:  # nothing says which weights are of linear layers, so none is written for others
        assert saved.done, saved
        assert "a layout that only dtype-engine reads" in " ".join(saved.notices)
