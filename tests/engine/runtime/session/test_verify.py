"""A session checks its own exports, and leads from a search to a checked file."""

from __future__ import annotations

import dataclasses
import pydoc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.helpers.file_edits import change_tensors
from tests.helpers.paths import TINYNET

import dtype_engine as de
from dtype_engine.checkpoint.source import locate
from dtype_engine.runtime.session.verify import verify

OPTIONS = de.Options(device="cpu", prompts=("one short prompt",))


def test_search_leads_to_a_checked_file(tmp_path: Path) -> None:
    session = de.open(options=OPTIONS)
    session.scan(["bfloat16", "int8"], draws=1)
    found = session.search(budget="45%")
    assert str(found.recipe) == ", ".join(found.rules)
    session.apply(found)
    assert session.recipe == found.recipe
    assert session.plan.planned_bytes == found.planned_bytes
    session.export(tmp_path / "out")
    assert session.verify(tmp_path / "out").same
    assert session.undo()


@pytest.mark.parametrize("method", ["search", "predict", "front"])
def test_what_needs_a_scan_names_it(method: str) -> None:
    with pytest.raises(de.UserError, match=r"call scan\(\) first"):
        getattr(de.open(options=OPTIONS), method)()


def test_session_verifies_as_the_command_line_does(tmp_path: Path, make_llama: Callable[..., Path]) -> None:
    source, out = make_llama(dtype="bfloat16"), tmp_path / "out"
    session = de.open(str(source), options=de.Options(device="cpu"))
    session.apply(de.Recipe.of(map(de.Rule.parse, ("*.mlp=f16", "type:*RMSNorm=f32"))))
    session.export(out)
    steps: list[tuple[int, int]] = []
    own = session.verify(out, lambda done, total: steps.append((done, total)))
    assert own.same
    assert steps[-1] == (own.nbytes, own.nbytes)
    change_tensors(out, lambda held: held["model.norm.weight"].fill_(3))
    change_tensors(out, lambda held: held.pop("model.embed_tokens.weight"))
    own, other = session.verify(out), verify(out, locate(str(source)))
    assert not own.same
    assert {each.name for each in own.differences} == {"model.norm.weight", "model.embed_tokens.weight"}
    assert (own.differences, own.tensors, own.nbytes, own.unchecked) == (
        other.differences, other.tensors, other.nbytes, other.unchecked,
    )  # fmt: skip


def test_export_under_another_recipe_than_the_current_one_differs(tmp_path: Path) -> None:
    session = de.open(options=OPTIONS)
    session.cast("*.mlp", "bfloat16")
    session.export(tmp_path / "out")
    session.cast("model.norm", "float16")
    (found,) = session.verify(tmp_path / "out").differences
    assert (found.name, found.what) == ("model.norm.weight", "is float32 [96] and should be float16 [96]")
    session.undo()
    assert session.verify(tmp_path / "out").same
    session.apply(session.recipe.then(de.Rule.parse("nothing=int8")))
    assert session.verify(tmp_path / "out").same


def test_session_verifies_an_export_with_scales_of_activations(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, settings=de.RunSettings(quantize_activations="weights"))
    session = de.open(options=options)
    session.cast("*.mlp", "nvfp4")
    session.export(tmp_path / "out")
    report = session.verify(tmp_path / "out")
    assert report.same
    assert "18 scales of activations come from calibration inputs" in report.unchecked[0]
    assert report.drift_after is None


def test_session_of_a_live_module_verifies_with_its_own_values(tmp_path: Path) -> None:
    first = torch.nn.Linear(8, 8)
    net = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Linear(8, 2))
    session = de.open(net, inputs=(torch.ones(4, 8),))
    session.cast("0", "float16")
    cast = first.weight.clone()
    session.export(tmp_path / "out")
    assert session.verify(tmp_path / "out").same
    assert torch.equal(first.weight, cast)
    change_tensors(tmp_path / "out", lambda held: held["2.bias"].add_(1))
    assert [each.name for each in session.verify(tmp_path / "out").differences] == ["2.bias"]


def test_session_of_code_that_draws_its_weights_verifies_its_export(tmp_path: Path) -> None:
    session = de.open(f"{TINYNET}:TinyNet", options=de.Options(device="cpu"))
    session.cast("*", "bfloat16")
    session.export(tmp_path / "out")
    report = session.verify(tmp_path / "out")
    assert report.same
    assert not any("at random" in sentence for sentence in report.unchecked)


def test_what_is_no_export_is_refused_with_a_sentence(tmp_path: Path) -> None:
    session = de.open(options=OPTIONS)
    session.export(tmp_path / "net.pth")
    for path in (tmp_path / "net.pth", tmp_path / "nothing", tmp_path):
        with pytest.raises(de.UserError, match="is no folder that this program exported"):
            session.verify(path)


def test_help_of_a_session_shows_an_example_of_each_way() -> None:
    shown = pydoc.plain(pydoc.render_doc(de.Session))
    for call in ("session.search(budget=", "session.apply(found)", "session.verify(folder", "session.drift()"):
        assert call in shown
