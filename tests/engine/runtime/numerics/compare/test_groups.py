"""The drift in groups of positions, against loops over the log-softmax of plain transformers."""

from __future__ import annotations

import copy
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.groups import GROUPINGS
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.numerics.compare.groups import grouped
from dtype_engine.runtime.numerics.compare.merged import merged_figures
from dtype_engine.runtime.numerics.compare.sequence_figures import PositionFigures

LENGTHS = (12, 9, 4)
"""The tokens of the sequences in a padded batch."""


class Position(NamedTuple):
    confidence: float
    place: int
    kl: float
    same: bool


def sharp(name: str) -> nn.Module:
    """Return a model with a head whose outputs range from undecided to sure: those of the zoo are all alike."""
    model, _ = architectures.make(name)
    model.config.tie_word_embeddings, model.config.decoder_start_token_id = False, 0
    model.config.scale_decoder_outputs = False
    width = model.get_output_embeddings().in_features
    torch.manual_seed(1)
    head = nn.Linear(width, architectures.VOCABULARY, bias=False, device=model.device)
    nn.init.normal_(head.weight, std=4 / math.sqrt(width))
    model.set_output_embeddings(head)
    return model.eval()


def left_padded() -> dict[str, torch.Tensor]:
    mask = torch.zeros(3, 12, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        mask[row, 12 - length :] = 1
    return {"input_ids": architectures.tokens(batch=3), "attention_mask": mask}


def with_labels() -> dict[str, torch.Tensor]:
    """Return inputs of an encoder-decoder model whose labels leave out the end of the second sequence."""
    labels = architectures.tokens(9, batch=2)
    labels[1, 5:] = -100
    return {"input_ids": architectures.tokens(batch=2), "labels": labels}


CASES: dict[str, tuple[dict[str, torch.Tensor], list[list[int]]]] = {
    "llama": (left_padded(), [list(range(12 - length, 12)) for length in LENGTHS]),
    "gpt2": ({"input_ids": architectures.tokens(32, batch=2)}, [list(range(32))] * 2),
    "t5": (with_labels(), [list(range(9)), list(range(5))]),
}
"""Inputs of models, and the indexes of the positions in each sequence that are no padding."""


def plain_positions(model: nn.Module, given: dict[str, torch.Tensor], kept: list[list[int]]) -> list[Position]:
    """Return the figures of each position by plain transformers: the model in float32 and in bfloat16, except for buffers that are
    in no file, such as rotary frequencies.
    """
    narrow = copy.deepcopy(model)
    for parameter in narrow.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    with torch.no_grad():
        r, c = (each(**given).logits.double().log_softmax(-1) for each in (model, narrow))
    found = []
    for row, places in enumerate(kept):
        for place, index in enumerate(places, 1):
            p, q = r[row, index], c[row, index]
            kl = float((p.exp() * (p - q)).sum())
            found.append(Position(float(p.max().exp()), place, kl, int(p.argmax()) == int(q.argmax())))
    return found


def by_confidence(position: Position) -> str:
    for below, name in ((0.25, "0-0.25"), (0.5, "0.25-0.5"), (0.75, "0.5-0.75"), (0.95, "0.75-0.95")):
        if position.confidence < below:
            return name
    return "0.95-1"


def by_place(position: Position) -> str:
    for name, last in (("1", 1), ("2", 2), ("3-4", 4), ("5-8", 8), ("9-16", 16), ("17-32", 32)):
        if position.place <= last:
            return name
    raise AssertionError(position.place)


def expected(positions: Iterable[Position], name: Any) -> dict[str, list[Position]]:
    groups: dict[str, list[Position]] = {}
    for position in positions:
        groups.setdefault(name(position), []).append(position)
    return groups


@pytest.mark.parametrize("name", CASES)
def test_groups_of_positions_equal_those_of_plain_transformers(name: str) -> None:
    model, (given, kept) = sharp(name), CASES[name]
    positions = plain_positions(model, given, kept)
    session = de.open(model, inputs=given)
    session.cast("*", "bfloat16")
    output = session.drift().output
    assert output.positions == len(positions)
    total = sum(each.kl for each in positions)
    for grouping, of in (("confidence", by_confidence), ("position", by_place)):
        groups = expected(positions, of)
        assert len(groups) > 3, "the model has positions of all kinds"
        assert set(output.groups[grouping]) == set(groups)
        for group, members in groups.items():
            found, kls = output.groups[grouping][group], [each.kl for each in members]
            assert found.positions == len(members)
            assert found.kl_mean == pytest.approx(statistics.fmean(kls), rel=1e-9)
            error = None if len(kls) == 1 else pytest.approx(statistics.stdev(kls) / math.sqrt(len(kls)), rel=1e-9)
            assert found.kl_mean_se == error
            assert found.kl_share == pytest.approx(sum(kls) / total, rel=1e-9)
            assert found.top1_agreement == sum(each.same for each in members) / len(members)
    check_sums(output)


def check_sums(output: OutputDrift) -> None:
    """The groups of each grouping add up to the whole output."""
    assert output.positions
    assert output.kl_mean is not None
    assert output.top1_agreement is not None
    for groups in output.groups.values():
        rows = groups.values()
        assert sum(each.positions for each in rows) == output.positions
        total = output.kl_mean * output.positions
        assert sum(each.kl_mean * each.positions for each in rows) == pytest.approx(total, rel=1e-12)
        assert sum(each.kl_share or 0.0 for each in rows) == pytest.approx(1, rel=1e-12)
        same = output.top1_agreement * output.positions
        assert sum(each.top1_agreement * each.positions for each in rows) == pytest.approx(same, rel=1e-12)


def test_groups_over_several_inputs_count_positions_from_1_in_each() -> None:
    model = sharp("gpt2")
    given = [{"input_ids": architectures.tokens(length)} for length in (8, 5, 32)]
    positions = [each for one in given for each in plain_positions(model, one, [list(range(one["input_ids"].numel()))])]
    session = de.open(model, inputs=given)
    session.cast("*", "bfloat16")
    found = session.drift().output.groups["position"]
    for group, members in expected(positions, by_place).items():
        assert found[group].positions == len(members)
        assert found[group].kl_mean == pytest.approx(statistics.fmean(each.kl for each in members), rel=1e-9)


def test_estimate_from_some_inputs_has_the_groups_of_these() -> None:
    model = sharp("gpt2")
    given = [{"input_ids": architectures.tokens(32)} for _ in range(8)]
    session = de.open(model, inputs=given, options=de.Options(precision=0.9))
    session.cast("*", "bfloat16")
    report = session.drift()
    assert not report.sequences.whole
    assert report.output.positions == 32 * report.sequences.done
    check_sums(report.output)


def test_group_includes_its_lower_end_alone() -> None:
    edges = torch.tensor([0.25, 0.5, 0.75, 0.95, 1.0, math.nextafter(0.95, 0), 1 + 1e-15], dtype=torch.float64)
    kl, same = torch.ones(len(edges), dtype=torch.float64), torch.ones(len(edges), dtype=torch.bool)
    figures = PositionFigures(kl, same, kl[:0], kl[:0], edges, torch.tensor([1, 2, 3, 4, 5, 2**20, 2**20 + 1]))
    found = grouped([figures])
    assert {name: group.positions for name, group in found["confidence"].items()} == {
        "0.25-0.5": 1, "0.5-0.75": 1, "0.75-0.95": 2, "0.95-1": 3,
    }  # fmt: skip
    assert {name: group.positions for name, group in found["position"].items()} == {
        "1": 1, "2": 1, "3-4": 2, "5-8": 1, "524289-1048576": 1, "1048577-2097152": 1,
    }  # fmt: skip
    assert all(group.kl_mean_se in (None, 0.0) for groups in found.values() for group in groups.values())


@pytest.mark.parametrize(
    ("name", "groupings"),
    [("vit", {"confidence"}), ("bert", set(GROUPINGS)), ("torch_lstm", set()), ("blip", set(GROUPINGS))],
)
def test_only_positions_of_sequences_are_grouped_by_place(name: str, groupings: set[str]) -> None:
    model, inputs = architectures.make(name)
    session = de.open(model, inputs=inputs)
    session.cast("*", "bfloat16")
    assert set(session.drift().output.groups) == groupings


def test_pixels_of_a_segmentation_are_grouped_by_confidence_alone() -> None:
    model = architectures.make("resnet")[0].resnet.embedder
    session = de.open(
        model, inputs=(architectures.picture(),), options=de.Options(settings=de.RunSettings(classes_dim=1))
    )
    session.cast("*", "bfloat16")
    output = session.drift().output
    assert set(output.groups) == {"confidence"}
    check_sums(output)


def test_output_that_is_not_finite_in_the_reference_has_no_groups() -> None:
    model = sharp("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight[3] = math.inf
    session = de.open(model, inputs={"input_ids": architectures.tokens(8)})
    session.cast("*", "bfloat16")
    output = session.drift().output
    assert math.isnan(output.kl_mean or 0.0)
    assert output.groups == {}


@pytest.mark.parametrize("known_is", ["reference", "candidate"])
@pytest.mark.parametrize("k", [1, 3, None])
def test_confidence_is_exact_where_only_the_likeliest_classes_are_known(known_is: str, k: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(40, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    known, whole = (p, q) if known_is == "reference" else (q, p)
    known = known.log_softmax(-1)
    if k is None:
        values, ids = known.masked_fill(known < known.amax(-1, keepdim=True) - 4, -math.inf), None
    else:
        values, ids = known.topk(k)
    positions = merged_figures(values, ids, whole, None, known_is).positions
    assert positions is not None
    torch.testing.assert_close(positions.confidence, p.softmax(-1).amax(-1), rtol=1e-12, atol=0)
    assert positions.position is None


def saved_run(path: Path, cast: str = "bfloat16") -> de.Session:
    model = sharp("gpt2")
    session = de.open(model, inputs=[{"input_ids": architectures.tokens(length)} for length in (8, 32)])
    session.cast("*", cast)
    session.drift(save=path)
    return session


def test_saved_measurement_keeps_its_groups(tmp_path: Path) -> None:
    session = saved_run(tmp_path / "run.json")
    whole = session.drift().output
    assert set(whole.groups) == set(GROUPINGS)
    assert session.drift(save=tmp_path / "run.json").output == whole


def test_measurement_that_an_earlier_version_saved_is_read_and_has_no_groups(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    session = saved_run(path)
    file = json.loads(path.read_text())
    for sequence in file["totals"]["sequences"]:
        assert len(sequence.pop("confidence")) == len(sequence.pop("position")) == sequence["rows"]
    path.write_text(json.dumps(file))
    report = session.drift(save=path)
    assert report.output.groups == {}
    assert report.output.kl_mean == session.drift().output.kl_mean
    assert any("no groups of positions" in notice for notice in report.notices)


@pytest.mark.parametrize(("field", "value"), [("confidence", [0.5]), ("position", [0] * 8), ("position", [1])])
def test_saved_measurement_with_impossible_groups_is_refused(tmp_path: Path, field: str, value: list[float]) -> None:
    path = tmp_path / "run.json"
    session = saved_run(path)
    file = json.loads(path.read_text())
    file["totals"]["sequences"][0][field] = value
    path.write_text(json.dumps(file))
    with pytest.raises(de.UserError, match="is not a saved drift"):
        session.drift(save=path)


def test_running_measurement_reports_the_groups_so_far() -> None:
    model, seen = sharp("gpt2"), []
    session = de.open(model, inputs=[{"input_ids": architectures.tokens(8)}, {"input_ids": architectures.tokens(16)}])
    session.cast("*", "bfloat16")
    session.drift(MeasurementListener(on_sequence=lambda totals: seen.append(totals.partial().output)))
    assert [sum(each.positions for each in output.groups["position"].values()) for output in seen] == [
        seen[0].positions, 24,
    ]  # fmt: skip
