"""An accelerator's figures are those of plain torch and transformers on it, and its memory and settings are left as they were.

On the CPU these tests are left out: `test_device.py` runs them on the fake accelerator, and `DTYPE_TUI_TEST_DEVICE=cuda` on CUDA.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import architectures, fake_accelerator
from tests.helpers.candidate_output import candidate_output
from tests.helpers.measured_on import DEVICE, placed
from torch import nn

import dtype_engine as de
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.runtime.device import exact_float32, has_float64, random_states
from dtype_engine.runtime.modes.reference import copied_bytes
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.scan import local_errors

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="DTYPE_TUI_TEST_DEVICE names no accelerator")
on_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="DTYPE_TUI_TEST_DEVICE is not cuda")
on_fake = pytest.mark.skipif(DEVICE != "fake", reason="DTYPE_TUI_TEST_DEVICE is not fake")
NAMES = ("llama", "bert", "t5", "mixtral", "torch_convolutional")
SHORT = de.Options(sequence_length=32, sequences=2)


def run_plainly(module: nn.Module, inputs: Any) -> torch.Tensor:
    """The main output of plain torch on the device, whose float32 is float32."""
    with torch.no_grad(), exact_float32(torch.device(DEVICE)):
        return main_output(module(**inputs) if isinstance(inputs, dict) else module(*inputs))[1]


def floats_to(values: Any, dtype: torch.dtype) -> Any:
    if isinstance(values, dict):
        return {name: floats_to(value, dtype) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(floats_to(value, dtype) for value in values)
    return values.to(dtype) if values.is_floating_point() else values


def sqnr(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    before, after = (values.detach().cpu().double() for values in (reference, candidate))
    noise = (after - before).square().sum()
    return float(10 * torch.log10(before.square().sum() / noise)) if noise else math.inf


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Leave about `size` bytes of the device's memory free. CUDA's allocator has up to 10 MiB at hand for small tensors."""
    gc.collect()
    if DEVICE == "fake":
        device = fake_accelerator.device
        device.limit = device.allocated + size
    else:
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)
    try:
        yield
    finally:
        if DEVICE == "fake":
            device.limit = None
        else:
            torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def wide(make_llama: Callable[..., Path]) -> Path:
    """A model whose logits for 64 tokens and whose embeddings in 16 bits take 16 MiB each: more than an allocator keeps at hand."""
    return make_llama(vocab_size=65536, hidden_size=128)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_accelerator_drift_equals_that_of_plain_torch(name: str, dtype: str) -> None:
    module, inputs = architectures.make(name)
    by_hand = copy.deepcopy(module)
    expected = run_plainly(module, inputs)
    session = de.open(module, inputs=inputs, options=de.Options(settings=de.RunSettings(float_inputs="model")))
    assert session.model.device.type == DEVICE
    assert session.drift().output.sqnr_db == math.inf, "nothing is cast"
    session.cast("*", dtype)
    report = session.drift()
    for tensor in by_hand.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(getattr(torch, dtype))
    found = run_plainly(by_hand, floats_to(inputs, getattr(torch, dtype)))
    assert torch.equal(candidate_output(session), found)
    assert report.output.sqnr_db == pytest.approx(sqnr(expected, found), rel=1e-6)


def test_fp8_weights_on_an_accelerator_compute_in_float32() -> None:
    module, inputs = architectures.make("llama")
    by_hand = copy.deepcopy(module)
    session = de.open(module, inputs=inputs)
    session.cast("*_proj", "float8_e4m3fn")
    for name, tensor in by_hand.named_parameters():
        if "_proj" in name:
            values = tensor.data.cpu()
            scales = values.abs().amax(-1, keepdim=True) / 448
            tensor.data = ((values / scales).to(torch.float8_e4m3fn).float() * scales).to(DEVICE)
    assert sqnr(run_plainly(by_hand, inputs), candidate_output(session)) > 120, "but for one rounding of the scales"
    held = session.model.weights["model.layers.0.mlp.up_proj.weight"].tensor
    assert (held.dtype, held.device.type) == (torch.float8_e4m3fn, DEVICE)


class Masked(nn.Module):
    """Masks a narrow bias by the most negative number of the inputs' wider dtype, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(4, 4, dtype=torch.bool, device=x.device).tril()
        return x + torch.where(seen, self.bias, torch.finfo(x.dtype).min).softmax(-1)


@on_cuda
def test_mask_of_minus_infinity_in_bfloat16_works_on_an_accelerator_as_on_the_cpu() -> None:
    module, x = Masked(), torch.ones(4, 4)
    with torch.no_grad():
        expected = x + torch.where(torch.ones(4, 4).bool().tril(), module.bias.bfloat16(), -math.inf).softmax(-1)
    session = de.open(module, inputs=(placed(x),))
    session.cast("bias", "bfloat16")
    torch.testing.assert_close(candidate_output(session).cpu(), expected)


@on_cuda
def test_autocast_on_an_accelerator_equals_that_of_torch() -> None:
    module, inputs = architectures.make("llama")
    session = de.open(module, inputs=inputs, options=de.Options(settings=de.RunSettings(autocast="bfloat16")))
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = run_plainly(module, inputs)
    assert torch.equal(candidate_output(session), expected)


def test_text_generated_on_an_accelerator_equals_that_of_transformers(make_llama: Callable[..., Path]) -> None:
    import transformers

    folder = make_llama()
    ids = torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    session = de.open(str(folder))
    session.use_inputs(de.Options(sequence_length=16, sequences=1))
    session.cast("*", "bfloat16")
    told = session.generate(6)[0]
    ids = session.need_inputs().batches[0].kwargs["input_ids"]
    for dtype, continued in (("float32", told.reference), ("bfloat16", told.candidate)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(DEVICE)
        with exact_float32(torch.device(DEVICE)):
            expected = model.generate(ids.to(DEVICE), max_new_tokens=6, do_sample=False)
        assert list(continued.ids) == expected[0, ids.shape[1] :].tolist()


def test_accelerator_scan_agrees_with_the_cpu(make_llama: Callable[..., Path]) -> None:
    folder = str(make_llama(num_hidden_layers=1))
    scores = {}
    for device in (DEVICE, "cpu"):
        session = de.open(folder, options=de.Options(device=device, sequence_length=32, sequences=2))
        for exact in (False, True):
            report = session.scan(["int8"], draws=None if exact else 8, exact=exact)
            scores[device, exact] = list(report.scores().values())
    for exact in (False, True):
        assert scores[DEVICE, exact] == pytest.approx(scores["cpu", exact], rel=2e-2, abs=1e-9)


def test_export_from_an_accelerator_has_the_bytes_of_that_from_the_cpu(
    make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder = str(make_llama())
    for device in (DEVICE, "cpu"):
        session = de.open(folder, options=de.Options(device=device))
        session.cast("*_proj", "float8_e4m3fn")
        session.cast("*.input_layernorm", "bfloat16")
        session.cast("*.down_proj", "int8")
        session.export(tmp_path / device)
    ours, cpus = ((tmp_path / device / "model.safetensors").read_bytes() for device in (DEVICE, "cpu"))
    assert ours == cpus


def test_module_that_does_not_fit_in_accelerator_memory_is_named(wide: Path) -> None:
    session = de.open(str(wide), options=de.Options(sequence_length=64, sequences=1))
    before = session.drift().output
    session.use_inputs(session.options)  # which forgets what was kept
    del session._drift.meter
    session._drift.meter = None
    with room_for(10 << 20), pytest.raises(NoForward, match=f"^lm_head: not enough memory on {DEVICE}"):
        session.drift()
    assert session.drift().output == before
    session.cast("*", "bfloat16")
    assert session.drift().output.sqnr_db > 20


@on_fake  # which counts every byte
def test_too_little_accelerator_memory_by_one_byte_names_the_module(wide: Path) -> None:

    def measure() -> Any:
        gc.collect()
        return de.open(str(wide), options=de.Options(sequence_length=64, sequences=1)).drift().output

    gc.collect()
    device = fake_accelerator.device
    before = device.allocated
    device.reset_peak_memory_stats()
    expected = measure()
    needed = device.max_memory_allocated() - before
    with room_for(needed):
        assert measure() == expected
    # A device that has float64 computes the figures as well, which then need the most.
    module = "the figures of the output" if has_float64(torch.device(DEVICE)) else "lm_head"
    with room_for(needed - 1), pytest.raises(UserError, match=f"^{module}: not enough memory on fake"):
        measure()


def test_cast_that_does_not_fit_in_accelerator_memory_is_reverted(wide: Path) -> None:
    session = de.open(str(wide))
    before = {name: weight.tensor.data_ptr() for name, weight in session.model.weights.items()}
    embedding = "model.embed_tokens.weight in bfloat16: not enough memory on"
    with room_for(1 << 20), pytest.raises(de.UserError, match=f"^{embedding} {DEVICE}"):
        session.cast("*", "bfloat16")
    assert session.recipe == de.Recipe()
    assert {weight.dtype for weight in session.model.weights.values()} == {"float32"}
    assert before.keys() == session.model.weights.keys()
    session.cast("*", "bfloat16")
    assert session.undo()


def test_model_that_does_not_fit_in_accelerator_memory_is_refused(wide: Path) -> None:
    size = (wide / "model.safetensors").stat().st_size
    with room_for(int(0.6 * size)), pytest.raises(de.UserError, match=f"^the model: not enough memory on {DEVICE}"):
        de.open(str(wide))
    de.open(str(wide))


@on_fake
def test_scan_of_a_model_larger_than_gpu_memory_splits_the_largest_weight(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_errors, "PIECE", 1 << 18)
    folder = make_llama(vocab_size=16384, hidden_size=128, dtype="bfloat16")
    ids = [torch.arange(3, 3 + length)[None] for length in (5, 3)]
    head, scores = 16384 * 128 * 4, []
    for limits in ({}, {"fake": 1 << 20}):
        options = de.Options(max_memory=limits)
        session = de.open(str(folder), options=options, inputs=[{"input_ids": each} for each in ids])
        with room_for(int(2.2 * head)) if limits else nullcontext():
            scores.append(session.scan(["float16", "float8_e4m3fn", "int8"], draws=2).scores())
    assert scores[0] == scores[1]


@on_fake
def test_scan_needs_no_float32_copies_of_all_weights(make_llama: Callable[..., Path]) -> None:
    folder = make_llama(num_hidden_layers=16, hidden_size=128, dtype="bfloat16")
    scores = []
    for limited in (False, True):
        gc.collect()
        session = de.open(str(folder), inputs=[{"input_ids": torch.arange(3, 8)[None]}])
        with room_for(copied_bytes(session.model) // 2) if limited else nullcontext():
            scores.append(session.scan(["int8"], draws=2).scores())
    assert scores[0] == scores[1]


def test_accelerator_memory_is_freed_after_casts_and_counted_as_by_torch(wide: Path) -> None:
    session = de.open(str(wide), options=SHORT)
    session.drift()
    device = torch.get_device_module(DEVICE)
    gc.collect()
    before = device.memory_allocated()
    for number in range(20):
        session.cast("*", ("bfloat16", "float16", "float8_e4m3fn")[number % 3])
        session.undo()
    gc.collect()
    assert device.memory_allocated() <= before
    memory = session.drift().memory
    assert memory.resident_by_device[0][0].partition(":")[0] == DEVICE
    assert memory.device_peak_bytes == device.max_memory_allocated()
    assert memory.device_peak_bytes > memory.device_allocated_bytes >= memory.resident_bytes


def test_resized_tensor_frees_all_of_its_accelerator_memory() -> None:
    device = torch.get_device_module(DEVICE)
    gc.collect()
    before = device.memory_allocated()
    result = torch.empty(0, device=DEVICE)
    torch.add(torch.ones(1 << 20, device=DEVICE), 1, out=result)
    assert device.memory_allocated() >= before + (4 << 20)
    del result
    gc.collect()
    assert device.memory_allocated() == before


class Dropping(nn.Module):
    """Draws random numbers on its device in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, device=x.device)
        return self.linear(nn.functional.dropout(x + noise, 0.5, training=True))


def test_accelerator_draws_the_same_random_numbers_in_every_pass() -> None:
    session = de.open(Dropping(), inputs=(placed(torch.ones(4, 8)),))
    device = session.model.device
    device_numbers = torch.rand(3, device=device)
    before = random_states(device)
    assert session.drift().output.max_abs == 0
    assert all(torch.equal(was, now) for was, now in zip(before, random_states(device), strict=True))
    assert not torch.equal(torch.rand(3, device=device), device_numbers)


def test_noise_floor_on_an_accelerator_is_far_below_a_bfloat16_cast(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama()), options=SHORT)
    floor = session.floor()
    assert floor.ways
    assert floor.sqnr_db > 100
    session.cast("*", "bfloat16")
    assert session.drift().output.sqnr_db < floor.sqnr_db


def test_speed_is_measured_on_an_accelerator(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama()), options=SHORT)
    session.cast("*", "bfloat16")
    rows = session.speed(repeats=3).rows
    assert [row.what for row in rows] == ["reference", "candidate"]
    assert all(0 < row.fastest <= row.seconds <= row.slowest for row in rows)


def test_tf32_setting_of_the_process_does_not_change_the_drift() -> None:
    """Convolutions use it on CUDA unless told otherwise."""
    module, inputs = architectures.make("torch_convolutional")
    found = []
    before = torch.get_float32_matmul_precision()
    for precision, allowed in (("highest", False), ("high", True)):
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = allowed
        session = de.open(copy.deepcopy(module), inputs=inputs)
        session.cast("*", "float16")
        found.append(session.drift().output)
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cudnn.allow_tf32 == allowed
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision(before)
    assert found[0] == found[1]


@on_fake  # which can lack a kernel
@pytest.mark.parametrize("missing", [True, False])
def test_missing_kernel_on_an_accelerator_is_reported_with_its_module(missing: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(fake_accelerator.device, "missing", {("addmm", torch.float16)} if missing else set())
    session = de.open(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), inputs=(torch.ones(2, 4),))
    session.cast("1", "float16")
    with pytest.raises(de.KernelError, match=r"^1: linear has no float16 kernel on fake") if missing else nullcontext():
        session.drift()


@on_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")
def test_second_cuda_device_is_used_without_memory_on_the_first(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama()), options=de.Options(device="cuda:1", sequence_length=32, sequences=1))
    session.cast("*", "bfloat16")
    before = torch.cuda.memory_allocated(0)
    session.drift()
    assert torch.cuda.memory_allocated(0) == before
    assert session.memory().resident_by_device[0][0] == "cuda:1"
