"""The scan against measuring every weight alone, and what it does when stopped, saved and taken up again."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from tests.helpers import architectures
from tests.helpers.rank_correlation import FLOOR, compared
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.core.cancellation import CancelToken
from dtype_engine.results.drift import NATS, NATS_PER_EXAMPLE, SQUARED
from dtype_engine.results.scan import ScanReport
from dtype_engine.runtime.scan import saved
from dtype_engine.runtime.scan.routing import TopKSample
from dtype_engine.runtime.scan.savable_scan import DEFAULT_DTYPES
from dtype_engine.runtime.scan.scan import Scan
from dtype_engine.runtime.scan.scores import SequenceScores


def opened(name: str) -> Any:
    module, inputs = architectures.make(name)
    return de.open(module, inputs=inputs)


NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")


@pytest.mark.parametrize(
    ("name", "unit", "kinds"),
    [("llama", NATS, DEFAULT_DTYPES), ("vit", NATS_PER_EXAMPLE, NARROW), ("bert", NATS, DEFAULT_DTYPES)],
)
def test_estimated_scan_scores_agree_with_exact_scores(name: str, unit: str, kinds: Sequence[str]) -> None:
    session = opened(name)
    scan = session.scan(kinds, draws=64)
    rank, ratio, count = compared(scan, session.scan(kinds, exact=True))
    assert scan.unit == unit
    assert count >= 40
    assert rank >= 0.99
    assert 0.8 <= ratio <= 1.25


def test_scan_of_outputs_without_probabilities_scores_the_relative_squared_error() -> None:
    session = opened("torch_encoder")
    scan, exact = session.scan(draws=96), session.scan(exact=True)
    rank, ratio, _ = compared(scan, exact)
    assert scan.unit == exact.unit == SQUARED
    assert rank >= 0.97
    assert 0.8 <= ratio <= 1.25


def test_scan_of_a_model_with_few_classes_is_exact_with_few_backward_passes() -> None:
    torch.manual_seed(0)
    session = de.open(
        nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 3, bias=False), Classes()), inputs=torch.randn(1, 8)
    )
    few, many = session.scan(["int8"], draws=2), session.scan(["int8"], draws=4)
    exact = session.scan(["int8"], exact=True)
    assert few.unit == NATS_PER_EXAMPLE
    for one, other, truth in zip(few.weights, many.weights, exact.weights, strict=True):
        assert one.score == pytest.approx(other.score, rel=1e-6)  # two directions span three classes
        assert one.score == pytest.approx(truth.score, rel=0.02)


class Classes(nn.Module):
    def forward(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": logits}


def test_scan_scores_both_uses_of_a_tied_embedding() -> None:
    session = opened("llama")
    weight = "model.embed_tokens.weight"
    assert session.tree.tensors[weight].aliases
    kinds = ["float8_e4m3fn", "float8_e5m2", "int8"]
    scan = session.scan(kinds, draws=100).scores()
    for kind in kinds:
        session.apply(Recipe((Rule(weight, kind),)))
        assert scan[weight, kind] == pytest.approx(session.drift().output.kl_mean, rel=0.2)


class Twice(nn.Module):
    """One weight used twice, where the errors of the two uses cancel to the first order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() - x @ self.weight.T[:, :] + x


def test_scan_adds_the_effects_of_all_uses_of_a_weight_before_it_squares_them() -> None:
    torch.manual_seed(0)
    session = de.open(Twice(), inputs=torch.randn(4, 6))
    (score,) = [entry.score for entry in session.scan(["int8"], draws=8).weights if entry.dtype == "int8"]
    assert score < 1e-12  # either use alone would give about 1e-5


class Odd(nn.Module):
    """Weights in views, slices, lists, functions of weights alone, in place, and in outputs that are overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(3, 8, 8))
        self.log = nn.Parameter(torch.randn(8))
        self.shift = nn.Parameter(torch.randn(8))
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.packed[1:].unbind(0):
            x = torch.einsum("ij,kj->ik", x, part)
        first, second = self.packed[0].chunk(2, 1)
        x = x + torch.cat([x @ first, x @ second], 1)
        x = x * torch.exp(-self.log.exp())
        x += self.shift
        return torch.relu_(self.linear(x)) + x


class Divides(nn.Module):
    """Divides a weight in place in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.divided = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.divided:
            with torch.no_grad():
                self.first.weight.div_(3)
            self.divided = True
        return self.second(torch.tanh(self.first(x)))


def test_scan_scores_weights_that_the_model_divides_in_place() -> None:
    torch.manual_seed(0)
    session = de.open(Divides(), inputs=(torch.randn(5, 8),))
    scan, exact = (session.scan(["bfloat16", "int8"], **how).scores() for how in ({"draws": 400}, {"exact": True}))
    for key, score in exact.items():
        if key == ("first.bias", "bfloat16"):  # what follows is then in bfloat16, too
            assert score / 4 < scan[key] < score
        else:
            assert scan[key] == pytest.approx(score, rel=0.2, abs=1e-12), key


def test_scan_scores_every_kind_of_use_of_a_weight() -> None:
    torch.manual_seed(0)
    session = de.open(Odd(), inputs=[torch.randn(3, 8), torch.randn(5, 8)])
    kinds = ["bfloat16", "float8_e4m3fn", "int8"]
    scan, exact = session.scan(kinds, draws=200), session.scan(kinds, exact=True)
    found, truth = scan.scores(), exact.scores()
    assert {name for name, _ in truth} == {name for name, tensor in session.tree.tensors.items() if tensor.castable}
    for key, value in truth.items():
        if key[1] == "bfloat16":  # what follows a bfloat16 operation may round once more
            assert value / 2 <= found[key] <= value * 1.5, key
        else:
            assert found[key] == pytest.approx(value, rel=0.2), key
    assert found["unused", "int8"] == 0.0


def test_standard_error_of_a_scan_shrinks_with_the_sequences() -> None:
    module = architectures.make("llama")[0]
    ids = [torch.randint(3, 64, (1, 10), generator=torch.Generator().manual_seed(seed)) for seed in range(24)]
    session = de.open(module, inputs=[{"input_ids": each} for each in ids])
    reports: list[ScanReport] = []
    progress: list[tuple[int, int | None]] = []
    told = lambda what, done, total: progress.append((done, total))  # noqa: E731
    session.scan(["int8"], draws=4, on_estimate=reports.append, on_progress=told)
    assert [report.sequences for report in reports] == list(range(1, 25))
    errors = [sum(entry.error or 0.0 for entry in report.weights) for report in reports]
    assert 0 < errors[-1] < errors[3]  # that of two sequences alone is little more than chance
    assert progress[-1][0] == progress[-1][1]
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_score_of_a_lossless_cast_is_zero(make_llama: Any) -> None:
    session = de.open(str(make_llama(dtype="bfloat16")), inputs={"input_ids": architectures.tokens(64)})
    scan, exact = session.scan(["float32", "int8"], draws=48), session.scan(["float32", "int8"], exact=True)
    scores = scan.scores()
    weight = "model.layers.0.mlp.up_proj.weight"
    assert scores[weight, "float32"] == 0.0 == exact.scores()[weight, "float32"]
    assert 0 < scores[weight, "bfloat16"] < scores[weight, "int8"]
    rank, ratio, _ = compared(scan, exact)
    assert rank >= 0.95
    assert 0.75 <= ratio <= 1.25


def test_scan_neither_uses_nor_changes_the_current_recipe() -> None:
    session = opened("llama")
    before = Scan(session.model, session.inputs, ("int8",), draws=4).run().scores()
    session.cast("*", "float8_e4m3fn")
    assert Scan(session.model, session.inputs, ("int8",), draws=4).run().scores() == before
    session.scan(["int8"], exact=True)
    assert {weight.dtype for weight in session.model.weights.values() if weight.info.persistent} == {"float8_e4m3fn"}


def test_score_of_an_overflowing_cast_is_infinite() -> None:
    module = nn.Linear(4, 4)
    module.weight.data.fill_(1e6)
    session = de.open(module, inputs=torch.randn(2, 4))
    assert session.scan(["float16"]).scores()["weight", "float16"] == float("inf")
    assert session.scan(["float16"], exact=True).scores()["weight", "float16"] == float("inf")


def sequences() -> Any:
    module, _ = architectures.make("llama")
    return de.open(module, inputs=[{"input_ids": architectures.tokens(length)} for length in (6, 7, 8)])


def test_cancelled_scan_resumes_with_the_sequences_done(tmp_path: Path) -> None:
    whole = sequences().scan(["int8"], draws=4).scores()
    session, done = sequences(), []
    file = tmp_path / "scan.json"
    with pytest.raises(de.Cancelled):
        session.scan(["int8"], draws=4, save=file, on_estimate=done.append, cancelled=lambda: len(done) == 2)
    assert len(json.loads(file.read_text())["sequences"]) == 2
    later: list[ScanReport] = []
    assert session.scan(["int8"], draws=4, save=file, on_estimate=later.append).scores() == whole
    assert len(later) == 1
    other: list[ScanReport] = []
    assert sequences().scan(["int8"], draws=4, save=file, on_estimate=other.append).scores() == whole
    assert not other  # all of it was in the file


def test_scan_waits_while_paused_and_gives_the_scores_of_an_unpaused_scan() -> None:
    whole = opened("llama").scan(["int8"], draws=4).scores()
    token, one, found = CancelToken(), opened("llama"), []
    seen = threading.Event()

    def progress(what: str, done: int, total: int | None) -> None:
        if done == 3:
            token.pause()
            seen.set()

    thread = threading.Thread(
        target=lambda: found.append(one.scan(["int8"], draws=4, on_progress=progress, cancelled=token))
    )
    thread.start()
    assert seen.wait(60)
    assert not found
    token.resume()
    thread.join(60)
    assert found[0].scores() == whole


def test_paused_scan_can_be_cancelled() -> None:
    token, one = CancelToken(), opened("llama")
    token.pause()
    threading.Timer(0.05, token.cancel).start()
    with pytest.raises(de.Cancelled):
        one.scan(["int8"], draws=4, cancelled=token)


def test_concurrent_scans_never_share_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes under a name of its own and renames it when it is on the disk: the file is one of both, never a mixture."""
    file, seen = tmp_path / "scan.json", []
    replace = os.replace

    def watched(source: str, target: Path) -> None:
        seen.append((Path(source).name, json.loads(Path(source).read_text())["version"]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    for _ in range(2):
        sequences().scan(["int8"], draws=2, save=file)
        file.unlink()
    names = [name for name, _ in seen]
    assert len(set(names)) == len(names) == 6
    assert not list(tmp_path.iterdir())


def test_failed_save_of_a_scan_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scan.json"
    session = sequences()
    session.scan(["int8"], draws=2, save=file)
    before = file.read_text()

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    scan = Scan(session.model, session.inputs, ("int8",), session.settings, file, draws=2)
    scan.done.popitem()
    with pytest.raises(de.UserError, match="No space left"):
        scan.run()
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("exact", [False, True])
def test_concurrent_scans_into_one_file_keep_the_results_of_both(exact: bool, tmp_path: Path) -> None:
    file = tmp_path / "scan.json"
    draws = None if exact else 2
    first, second = (sequences().scan_task(["int8"], draws, exact, file) for _ in range(2))
    keys = first.pending()
    for task, key in ((first, keys[0]), (second, keys[1]), (first, keys[2]), (second, keys[0])):
        task.add(task.measure(key))
    third = sequences().scan_task(["int8"], draws, exact, file)
    assert third.pending() == keys[3:]
    assert third.done == first.done | second.done


@pytest.mark.parametrize("what", ["model", "inputs", "dtypes", "number of draws"])
def test_saved_scan_with_another_model_or_other_inputs_dtypes_or_draws_is_refused(what: str, tmp_path: Path) -> None:
    file = tmp_path / "scan.json"
    sequences().scan(["int8"], draws=2, save=file)
    session, kinds, draws = sequences(), ["int8"], 2
    if what == "model":
        session.model.weights["model.norm.weight"].stored.tensors[0][3] += 1
    elif what == "inputs":
        session = de.open(architectures.make("llama")[0], inputs={"input_ids": architectures.tokens(6)})
    elif what == "dtypes":
        kinds = ["bfloat16"]
    else:
        draws = 3
    with pytest.raises(de.UserError, match=f"another {what}"):
        session.scan(kinds, draws=draws, save=file)


@pytest.mark.parametrize("text", ["", "{}", '{"fingerprint": 3}', "[1]"])
def test_file_that_is_not_a_scan_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "scan.json"
    file.write_text(text)
    with pytest.raises(de.UserError, match="is not a saved scan"):
        sequences().scan(["int8"], draws=2, save=file)


def test_saved_scan_is_unchanged_by_reading_and_writing(tmp_path: Path) -> None:
    """saved/scan.json was written by hand: infinity, and figures that are missing, are in it."""
    old, new = Path(__file__).parent / "saved" / "scan.json", tmp_path / "scan.json"
    fingerprint = saved.Fingerprint("m" * 8, "i" * 8, ("bfloat16", "float8_e4m3fn"), "defaults")
    first, second = ("layers.0.weight", "bfloat16"), ("layers.1.weight", "float8_e4m3fn")
    scan = saved.read(old, fingerprint, 4)
    assert scan.done == {
        0: SequenceScores(
            normalizer=16.0,
            sums={first: 1.5e-4, second: math.inf},
            independent={first: 1.25e-4},
            complete=True,
            topk_samples=[TopKSample(0, 0.5, [0.25, -1.0], 0.125, {first: 0.5}, {first: 0.25, second: 2.0})],
            measured={second: 7.5},
        ),
        1: SequenceScores(3.0, {first: 0.0}),
    }
    assert (scan.draws, scan.unit, scan.forward_seconds, scan.scan_seconds) == (4, "nats per position", 0.5, 12.25)
    saved.write(new, scan)
    before, after = json.loads(old.read_text()), json.loads(new.read_text())
    assert (after.pop("scores"), after.pop("shard")) == (None, {"number": 1, "count": 1})
    assert after.pop("roundings") == []
    assert after == before
    assert saved.read(new, fingerprint, 4) == scan


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"draws": "4"}, "draws: expected int, got str"),
        ({"fingerprint": {}}, "fingerprint: object missing required field model"),
        ({"sequences": [{"mass": 1.0, "complete": True, "selections": [], "index": 0, "sums": [["a", "int8", 1.0]]}]},
         r"sequences\[0\].sums\[0\]: expected array of length 5, got 3"),
    ],
)  # fmt: skip
def test_damaged_scan_is_refused_with_the_bad_entry(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = tmp_path / "scan.json"
    file.write_text(json.dumps(json.loads((Path(__file__).parent / "saved" / "scan.json").read_text()) | change))
    with pytest.raises(de.UserError, match=rf"scan\.json is not a saved scan \({says}\)"):
        saved.read(file, saved.Fingerprint("", "", (), ""), None)


def test_predicted_drift_is_the_sum_of_the_scores() -> None:
    session = opened("llama")
    with pytest.raises(de.UserError, match="nothing was scanned"):
        session.predict()
    scores = session.scan(["int8", "bfloat16"], draws=8).scores()
    recipe = Recipe((Rule("*.mlp", "int8"), Rule("*.down_proj", "bfloat16"), Rule("*.norm", "float32")))
    predicted = session.predict(recipe)
    mlp = [name for name in session.tree.tensors if ".mlp." in name]
    assert predicted.value == pytest.approx(sum(scores[name, "bfloat16" if "down" in name else "int8"] for name in mlp))
    session.apply(recipe)
    assert session.predict() == predicted
    assert predicted.planned_bytes == session.plan.planned_bytes
    assert predicted.value == pytest.approx(session.drift().output.kl_mean, rel=0.5)
    with pytest.raises(de.UserError, match="was not scanned in float16"):
        session.predict(Recipe((Rule("*", "float16"),)))


def test_products_in_16_bits_summed_in_float32_equal_those_of_torch() -> None:
    from dtype_engine.runtime.scan.local_errors import summed_in_float32

    torch.manual_seed(0)
    linear, conv = nn.functional.linear, nn.functional.conv2d
    for dtype in (torch.bfloat16, torch.float16):
        x, w, b = torch.randn(16, 64).to(dtype), torch.randn(32, 64).to(dtype), torch.randn(32).to(dtype)
        picture, kernel = torch.randn(1, 4, 8, 8).to(dtype), torch.randn(6, 4, 3, 3).to(dtype)
        for func, args in ((linear, (x, w, b)), (torch.matmul, (x, w.t())), (conv, (picture, kernel))):
            own, ours = func(*args), summed_in_float32(func)(*args)
            assert ours.dtype == dtype
            assert (own != ours).float().mean() < 0.01  # they may round a tie differently


def test_scan_scores_a_bias_beside_a_quantized_weight(tmp_path: Path) -> None:
    """The operation runs again with the weight's values, not with the codes that the file has for them."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    made.save_pretrained(tmp_path / "plain")
    source = de.open(str(tmp_path / "plain"))
    source.cast("*_proj.weight", "float8_e4m3fn")
    source.export(tmp_path / "scaled")
    session = de.open(str(tmp_path / "scaled"), inputs={"input_ids": torch.randint(0, 256, (4, 32))})
    estimates = session.scan(("float8_e5m2", "int8@tensor"), draws=64).scores()
    truths = session.scan(("float8_e5m2", "int8@tensor"), exact=True).scores()
    biases = [key for key in truths if key[0].endswith("bias") and key[1] != "float32"]
    assert len(biases) == 16
    for key in biases:
        if truths[key] > FLOOR:
            assert 0.2 < estimates[key] / truths[key] < 5, (key, estimates[key], truths[key])
    rank = scipy.stats.spearmanr([estimates[key] for key in biases], [truths[key] for key in biases]).statistic
    assert rank > 0.9
