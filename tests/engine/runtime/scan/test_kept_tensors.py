"""The activations of a scan that are written to a temporary file come back with their values, once for all that share memory."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.runtime.test_over_memory import SIZES, opened
from tests.helpers import architectures
from tests.helpers.measured_on import DEVICE
from torch import nn

import dtype_engine as de
from dtype_engine.core.errors import Cancelled, NoForward, UserError
from dtype_engine.runtime.building import module_sources
from dtype_engine.runtime.scan import kept_tensors, scan, sequence_groups, sequence_scans
from dtype_engine.runtime.scan.kept_tensors import ActivationFile, KeptTensor
from dtype_engine.runtime.scan.weight_ops import WeightOp
from dtype_engine.runtime.weights import temporary_file


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
)
def test_activation_file_keeps_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    given = drawn(64, 128, dtype=dtype)
    with closing(ActivationFile()) as file:
        kept = file.keep(given, "a")
        file.write()
        assert kept.tensor is None
        assert file.nbytes == given.nbytes
        found = file.load(kept)
        assert (found.dtype, found.shape, found.stride()) == (given.dtype, given.shape, given.stride())
        assert torch.equal(found.view(torch.uint8), given.view(torch.uint8))


def test_activation_file_stores_views_once_and_keeps_their_strides() -> None:
    given = drawn(64, 128)
    views = [given, given.t(), given[3:50, ::2], given[:, None].expand(64, 5, 128), given.view(torch.int32), given[-1]]
    with closing(ActivationFile()) as file:
        kept = [file.keep(view, "a") for view in views]
        file.write()
        assert file.nbytes == given.nbytes  # also for the view whose elements are apart
        found = [file.load(each) for each in kept]
        assert all(torch.equal(one, other) for one, other in zip(found, views, strict=True))
        assert [each.stride() for each in found] == [each.stride() for each in views]
        assert len({each.untyped_storage().data_ptr() for each in found[:-1]}) == 1
        assert kept[-1].tensor is not None  # a row of 512 bytes is not worth a read


def test_activations_of_a_block_stay_in_memory_until_the_next_block() -> None:
    with closing(ActivationFile()) as file:
        first = [file.keep(drawn(64, 128), "a") for _ in range(3)]
        assert file.nbytes == 0
        second = file.keep(drawn(64, 128), "b")
        assert file.nbytes == 3 * 64 * 128 * 4
        assert all(each.tensor is None for each in first)
        assert second.tensor is not None
        assert torch.equal(file.load(second), file.load(first[0]))


def test_activations_overwritten_before_they_are_stored_are_refused() -> None:
    with closing(ActivationFile()) as file:
        early, late, unwritten = drawn(64, 128), drawn(64, 128), drawn(2)
        kept_early, kept_late = file.keep(early, "a"), file.keep(late, "a")
        early.view(-1).add_(1)
        file.write()
        late.add_(1)
        assert (kept_early.changed, kept_late.changed) == (True, False)
        assert torch.equal(file.load(kept_late), drawn(64, 128))
        with pytest.raises(RuntimeError, match="overwritten an activation"):
            file.load(kept_early)
        kept = file.keep(unwritten, "b")
        unwritten.zero_()
        with pytest.raises(RuntimeError, match="overwritten an activation"):
            file.load(kept)


def test_activation_file_stores_small_views_without_their_large_tensor() -> None:
    large = drawn(1024, 1024)
    with closing(ActivationFile()) as file:
        parts = [large[:2], large[900:902], large[1:2, 7:].bfloat16(), large[5:9].view(torch.int64)[:, 3:]]
        kept = [file.keep(part, "a") for part in parts]
        file.write()
        assert file.nbytes < 40_000
        assert all(torch.equal(file.load(each), part) for each, part in zip(kept, parts, strict=True))
        assert [file.load(each).stride() for each in kept] == [part.stride() for part in parts]


def test_activation_file_holds_tensors_in_memory_up_to_its_limit() -> None:
    with closing(ActivationFile(1 << 20)) as file:
        kept = [file.keep(drawn(64, 1024), "a") for _ in range(16)]
        assert sum(each.tensor is not None for each in kept) <= 5
        file.write()
        assert all(torch.equal(file.load(each), drawn(64, 1024)) for each in (*kept, kept[0]))
        assert sum(each.nbytes for each in file._read.values()) <= 1 << 20


def test_sparse_activations_are_kept_in_memory() -> None:
    with closing(ActivationFile()) as file:
        sparse = drawn(64, 128).to_sparse()
        assert file.load(file.keep(sparse, "a")).to_dense().equal(drawn(64, 128))


def test_vector_in_the_activation_file_can_be_overwritten_in_place() -> None:
    with closing(ActivationFile()) as file:
        kept = file.put(drawn(4096))
        other = file.put(drawn(4096) + 2)
        assert file.put(drawn(4096) + 1, kept) is kept
        assert file.nbytes == 2 * 4 * 4096
        assert torch.equal(file.take(kept), drawn(4096) + 1)
        assert torch.equal(file.take(other), drawn(4096) + 2)


def test_activation_file_is_in_tmpdir_and_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_file.tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with closing(ActivationFile()) as file:
        file.put(drawn(4096))
        where = os.path.realpath(f"/proc/self/fd/{file._file.fileno()}") if Path("/proc/self/fd").exists() else ""
        assert not where or where.startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_scan_that_fills_the_disk_fails_in_one_sentence_and_can_be_repeated(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_llama(dtype="bfloat16", **SIZES)
    expected = opened(folder, 1 << 21, (9, 5)).scan(["int8"], draws=1).scores()
    session = opened(folder, 1 << 21, (9, 5))
    monkeypatch.setattr(sequence_groups, "cache_budget", lambda device: 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"can't write its temporary file here \(File too large\): set TMPDIR to"):
            session.scan(["int8"], draws=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert session.scan(["int8"], draws=1).scores() == expected


@pytest.mark.parametrize(
    ("name", "budgets"),
    [
        *((name, (0, 1)) for name in ("llama", "gemma3", "swin", "blip", "mixtral")),
        *((name, (1,)) for name in ("bart", "deberta", "qwen3_next", "mamba2")),
    ],
)
def test_scan_scores_do_not_depend_on_the_memory_for_activations(
    name: str, budgets: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small budget, gradients of one draw are held at a time, and weights are read again in the backward pass. Otherwise,
    the activation file has the weights, too, which is one path for all architectures with the same operations.
    """
    monkeypatch.setattr(module_sources, "SMALLEST", 1)  # otherwise these weights stay in memory
    monkeypatch.setattr(kept_tensors, "_SMALLEST", 1)
    module, inputs = architectures.make(name)
    module.bfloat16().save_pretrained(tmp_path)  # type: ignore[operator]
    options = de.Options(device="cpu", over_memory=True, max_memory={"cpu": 1 << 12})
    files = list[int]()
    close = ActivationFile.close

    def noting(self: ActivationFile) -> None:
        files.append(self.nbytes)
        close(self)

    monkeypatch.setattr(ActivationFile, "close", noting)

    def scores(budget: int) -> dict[tuple[str, str], float]:
        session = de.open(str(tmp_path), inputs=inputs, options=options)
        dtypes = ("int8", "float16")
        return scan.Scan(session.model, session.inputs, dtypes, draws=2, budget=budget).run().scores()

    expected = scores(0)
    assert not files
    monkeypatch.setattr(sequence_groups, "cache_budget", lambda device: 1)
    monkeypatch.setattr(sequence_scans, "_LEAST_WAITING", 10_000)
    for budget in budgets:
        assert scores(budget) == expected
    assert all(files)
    assert len(files) == len(budgets)


@pytest.mark.parametrize(("length", "in_file"), [(1, True), (400, False)])
def test_activation_file_is_used_if_that_reads_fewer_bytes_than_reading_weights_again(
    length: int, in_file: bool, make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs of four texts do not fit. Those of short texts are smaller than the weights, those of long ones are larger."""
    session = opened(make_llama(dtype="bfloat16", **SIZES), 1 << 21, (length,) * 4)
    memory = session.model.memory
    assert memory.limited
    groups = scan.Scan(session.model, session.inputs, ("int8",), draws=1)._scans.groups
    room = 1.9 * groups.graph_bytes(0)
    monkeypatch.setattr(sequence_groups, "cache_budget", lambda device: room)
    assert groups.next([0, 1, 2, 3], 1) == (([0, 1, 2, 3], True) if in_file else ([0], False))
    monkeypatch.setattr(sequence_groups, "free_for_temporary_files", lambda: 4 * groups.graph_bytes(0))
    assert groups.next([0, 1, 2, 3], 1) == (([0, 1], True) if in_file else ([0], False))
    monkeypatch.setattr(sequence_groups, "free_for_temporary_files", lambda: 0)
    assert groups.next([0, 1, 2, 3], 1) == ([0], False)
    room /= 4
    monkeypatch.setattr(sequence_groups, "free_for_temporary_files", lambda: 2 * groups.graph_bytes(0))
    assert groups.next([0, 1, 2, 3], 1) == ([0], True)  # it fits only there
    groups.behavior.stateful = True
    monkeypatch.setattr(sequence_groups, "free_for_temporary_files", lambda: 1 << 40)
    assert groups.next([0, 1, 2, 3], 1) == ([0], True)


def test_activations_on_an_accelerator_are_stored_in_the_file(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        pytest.skip("DTYPE_TUI_TEST_DEVICE names no accelerator")
    monkeypatch.setattr(module_sources, "SMALLEST", 1)
    folder, scores, written = make_llama(dtype="bfloat16", **SIZES), [], ActivationFile._append
    ids = [{"input_ids": torch.arange(3, 3 + length)[None]} for length in (16, 9)]
    sizes = list[int]()

    def noting(self: ActivationFile, data: torch.Tensor) -> int:
        sizes.append(len(data))
        return written(self, data)

    monkeypatch.setattr(ActivationFile, "_append", noting)
    for in_file in (False, True):
        session = de.open(str(folder), options=de.Options(device=DEVICE, max_memory={DEVICE: 1 << 19}), inputs=ids)
        assert session.model.memory.limited
        monkeypatch.setattr(sequence_groups, "cache_budget", lambda device, room=1 if in_file else 1 << 40: room)
        scores.append(session.scan(["int8"], draws=2).scores())
        assert bool(sizes) == in_file
    assert scores[0] == scores[1]


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """Keep collections from going through all that torch and earlier tests have left in memory."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_scan_frees_all_kept_activations(name: str, stop: bool) -> None:
    module, inputs = architectures.make(name)
    session = de.open(module.bfloat16(), inputs=inputs)
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return stop and asked > 40

    made: Any = scan.Scan(session.model, session.inputs, ("int8",), budget=1)  # type: ignore[arg-type]
    with pytest.raises(Cancelled) if stop else nullcontext():
        made.run(cancelled=cancelled)
    gc.collect()
    # By type: for some lazy objects of torch, `isinstance` imports what they stand for.
    alive = [each for each in gc.get_objects() if issubclass(type(each), (KeptTensor, WeightOp))]
    assert not alive


class Overwrites(nn.Module):
    """Writes to an activation that the gradient of a product needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.first(x), self.second(x)
        product = one * other
        one.mul_(3)
        found: torch.Tensor = self.last(torch.tanh(product) + one)
        return found


@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_scan_refuses_a_model_that_overwrites_an_activation(budget: int) -> None:
    if DEVICE == "fake":
        pytest.skip(
            "a backward pass that raises an error aborts the process: torch's device guard in Python can't raise it"
        )
    session = de.open(Overwrites().bfloat16(), inputs=[torch.randn(3, 8)])
    made: Any = scan.Scan(session.model, session.inputs, ("int8",), budget=budget)  # type: ignore[arg-type]
    with pytest.raises(NoForward, match=r"backward pass failed: .*(overwritten|modified).*--exact"):
        made.run()
