"""Models larger than the memory they may take: their figures are those of a run in memory, and each weight is read once."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.helpers.file_edits import store_in_fp8
from tests.helpers.hub_server import hub_of

import dtype_engine as de
from dtype_engine.core.errors import Cancelled, NoForward, UserError
from dtype_engine.runtime.building.load import blocks
from dtype_engine.runtime.formats import row_blocks
from dtype_engine.runtime.measure import drift
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.scan import local_errors, sequence_groups
from dtype_engine.runtime.weights.stacked import StackedSource

LENGTHS = (5, 16, 3, 9)
MORE = (*LENGTHS, 12, 8, 4, 6)
FEW = (5, 9)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
RECIPES = (
    ("*=bfloat16",),
    ("*.mlp=float8_e4m3fn", "*.self_attn=nvfp4", "*.layers.1=float16", "*norm*=float32", "*embed*=int8"),
)


def opened(folder: Path, limit: int | None, lengths: Sequence[int] = LENGTHS, **options: Any) -> de.Session:
    draw = torch.Generator().manual_seed(1)
    inputs = [{"input_ids": torch.randint(0, 512, (1, length), generator=draw)} for length in lengths]
    limits = {} if limit is None else {"cpu": limit}
    made = de.Options(device="cpu", over_memory=limit is not None, max_memory=limits, modules="exact", **options)
    return de.open(str(folder), options=made, inputs=inputs)


def measured(session: de.Session, rules: tuple[str, ...]) -> list[Any]:
    cast(session, rules)
    report = session.drift()
    return [report.output, report.modules, report.lost, report.sequences]


def mixtral(folder: Path, layers: int, experts: int) -> Path:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_hidden_layers=layers, num_local_experts=experts)
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def cast(session: de.Session, rules: tuple[str, ...]) -> None:
    session.apply(de.Recipe.of(map(de.Rule.parse, rules)))


@pytest.fixture
def llama(make_llama: Callable[..., Path]) -> Path:
    return make_llama(dtype="bfloat16", **SIZES)


def test_drift_of_a_model_run_from_disk_equals_that_in_memory(llama: Path) -> None:
    inside, over = opened(llama, None, reference_bytes=0), opened(llama, 1 << 21, reference_bytes=0)
    memory = over.model.memory
    assert memory.limited
    assert len(memory.blocks) > 10
    for rules in RECIPES:
        assert measured(over, rules) == measured(inside, rules)
        # The head is tied to the embedding, of which look-ups read a few rows. Small weights stay in memory.
        assert 0.9 < memory.bytes_read / (2 * over.tree.stored_bytes) <= 1
    assert not inside.model.memory.limited
    for session in (inside, over):
        session.undo()
        session.undo()
        assert not session.recipe.rules
    assert over.generate(3)[0].candidate.ids == inside.generate(3)[0].candidate.ids


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux has it")
def test_small_weights_of_a_model_run_from_disk_are_mapped_without_read_ahead(llama: Path) -> None:
    """The system may read 8 MiB around a page. Around a norm, they are dropped before their block needs them, and read again."""
    over = opened(llama, 1 << 21)
    smaps = Path("/proc/self/smaps").read_text()
    mappings = re.findall(r"(?ms)^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", smaps)
    norms = [weight for name, weight in over.model.weights.items() if "norm" in name]
    assert norms
    for weight in norms:
        at = weight.tensor.data_ptr()
        (flags,) = [flags.split() for first, end, flags in mappings if int(first, 16) <= at < int(end, 16)]
        assert "rr" in flags, weight.info.name  # "random read advise"


def test_drift_of_stacked_experts_run_from_disk_equals_that_in_memory(tmp_path: Path) -> None:
    moe = mixtral(tmp_path, layers=2, experts=4)
    inside, over = opened(moe, None, FEW), opened(moe, 1 << 22, FEW)
    # Only the experts are read that tokens are sent to, one by one, so they are not computed by one grouped product.
    inside.model.module.set_experts_implementation("eager")  # type: ignore[operator]
    assert any("one by one" in notice for notice in over.model.notices)
    assert any(name.endswith(".experts") for name in over.model.memory.blocks)
    for rules in (*RECIPES, ("*.kv_cache.k=fp8@head", "*.kv_cache.v=int4@token")):
        assert measured(over, rules) == measured(inside, rules)
    dtypes = ["float16", "nvfp4", "int8", "fp8@128x128"]
    assert over.scan(dtypes, draws=1).scores() == inside.scan(dtypes, draws=1).scores()


def test_experts_cast_one_by_one_from_disk_give_the_figures_of_a_model_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = mixtral(tmp_path, layers=1, experts=8)
    inside, over = (opened(moe, limit, (2,)) for limit in (None, 1 << 22))
    inside.model.module.set_experts_implementation("eager")  # type: ignore[operator]
    assert over.model.memory.limited
    # All experts of a layer may take more memory than the machine has.
    monkeypatch.setattr(StackedSource, "read", lambda *_: pytest.fail("all experts of a layer were read at once"))
    for dtype in ("float16", "int8", "int8@tensor", "float8_e4m3fn", "nvfp4", "mxfp4", "int4@g128", "fp8@128x128"):
        rules = (f"*.experts={dtype}",)
        assert measured(over, rules) == measured(inside, rules), dtype
    runs: dict[str, None] = {}
    over.apply(de.Recipe.of([de.Rule.parse("*.experts=mxfp8")]))
    over.drift(MeasurementListener(on_progress=lambda run, *_: runs.setdefault(run)))
    assert list(runs)[-1] == "values that casts lose"  # of the experts to which no token was sent
    over.undo()
    found = [session.causes().causes for session in (inside, over)]
    assert found[0] == found[1]
    assert over.generate(3)[0].candidate.ids == inside.generate(3)[0].candidate.ids


def test_cast_of_a_single_weight_read_from_disk_can_be_cancelled(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "CHUNK", 1 << 11)  # so that this weight has as many blocks as a large one
    over = opened(llama, 1 << 21, (2,))
    over.cast("model.layers.0.mlp.up_proj", "nvfp4")
    memory, asked = over.model.memory, [0]
    weight = over.model.weights["model.layers.0.mlp.up_proj.weight"]
    assert memory.limited

    def cancelled() -> bool:
        asked[0] += 1
        return asked[0] > 4  # once before the values are read, and once before the first blocks

    memory.cancelled = cancelled
    memory.enter(next(name for name in memory.blocks if "layers.0.mlp" in name))
    with pytest.raises(Cancelled):
        weight.current()
    assert asked[0] < 4 + 2 * torch.get_num_threads() + 2
    memory.leave()


def test_scan_can_be_cancelled_within_the_cast_of_one_weight(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [0, 0]

    def scan(number: int) -> None:
        def cancelled() -> bool:
            asked[number] += 1
            return False

        opened(llama, None, (2,)).scan(["nvfp4"], draws=1, cancelled=cancelled)

    scan(0)
    monkeypatch.setattr(row_blocks, "CHUNK", 1 << 13)  # so that these weights have as many blocks as large ones
    scan(1)
    assert asked[1] > asked[0] + 100


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="only that is interrupted")
def test_interrupt_ends_a_forward_pass_at_the_next_weight_of_a_block(llama: Path) -> None:
    over = opened(llama, 1 << 21)
    memory, asked = over.model.memory, [0]
    assert memory.limited
    memory.use_blocks(blocks(over.model, 1 << 22))
    assert "model.layers.1" in memory.blocks

    def cancelled() -> bool:
        if memory.inside == "model.layers.1" or asked[0]:
            asked[0] += 1
        if asked[0] == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # the main thread takes it
        return False

    with pytest.raises(KeyboardInterrupt):
        over.drift(cancelled=cancelled)
    assert asked[0] < 8  # a layer has seven weights, and more modules


def test_drift_of_tied_encoder_and_decoder_run_from_disk_equals_that_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=512, d_model=256, d_kv=32, d_ff=512, num_layers=2, num_heads=8, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    inputs = [{"input_ids": torch.arange(n)[None], "decoder_input_ids": torch.arange(n // 2)[None]} for n in (8, 12)]
    found = []
    for options in (de.Options(device="cpu"), de.Options(device="cpu", over_memory=True, max_memory={"cpu": 1 << 21})):
        session = de.open(str(tmp_path / "t5"), options=options, inputs=inputs)
        found.append(measured(session, RECIPES[1]))
    assert found[0] == found[1]


def test_modules_of_a_model_run_from_disk_are_compared_although_few_outputs_fit(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All eight sequences run side by side. Modules are compared in a few, whose outputs take over an eighth of the memory."""
    reports = []
    for limit in (None, 1 << 21):
        inputs = opened(llama, None, MORE).inputs.batches
        limits = {} if limit is None else {"cpu": limit}
        options = de.Options(device="cpu", over_memory=limit is not None, max_memory=limits, reference_bytes=0)
        session = de.open(str(llama), inputs=[batch.kwargs for batch in inputs], options=options)
        session.cast("*", "bfloat16")
        if limit is not None:
            monkeypatch.setattr(drift, "cache_budget", lambda device: 600_000)
        reports.append(session.drift())
    assert [str(module) for module in reports[1].modules] == [str(module) for module in reports[0].modules]
    assert reports[1].output == reports[0].output


def test_scan_of_a_model_run_from_disk_has_the_scores_of_a_model_in_memory_and_resumes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_errors, "PIECE", 1 << 16)  # the head has two pieces
    dtypes = ["float16", "nvfp4", "int8@tensor"]
    inside, over = opened(llama, None, MORE), opened(llama, 1 << 21, MORE)
    expected = inside.scan(dtypes, draws=2).scores()
    memory = over.model.memory
    assert memory.limited
    found = over.scan(dtypes, draws=2, save=tmp_path / "scan.json").scores()
    # To the last bit, although fewer gradients are held at a time.
    assert found == expected
    # A forward pass, two backward passes, and a pass for a weight whose dtype the code reads.
    assert memory.bytes_read / over.tree.stored_bytes < 5
    before = memory.bytes_read
    assert opened(llama, 1 << 21, MORE).scan(dtypes, draws=2, save=tmp_path / "scan.json").scores() == found
    assert memory.bytes_read == before


def test_number_of_sequences_scanned_side_by_side_is_limited_by_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = opened(llama, None, MORE).scan(["int8"], draws=1).scores()
    over, after = opened(llama, 1 << 21, MORE), list[int]()
    monkeypatch.setattr(sequence_groups, "cache_budget", lambda device: 2_000_000)
    found = over.scan(["int8"], draws=1, on_estimate=lambda report: after.append(report.sequences))
    assert found.scores() == expected
    # What a graph takes at least: each linear layer's input and output in float32.
    shapes = [tensor.shape for name, tensor in over.tree.tensors.items() if name.endswith("_proj.weight")]
    least = 4 * sum(rows + columns for rows, columns in shapes)
    begins = [0, *after[:-1]]
    assert 1 < len(after) < len(MORE)
    assert after[-1] == len(MORE)
    assert all(least * sum(MORE[begin:end]) < 2_000_000 for begin, end in zip(begins, after, strict=True))


def test_memory_of_the_first_picture_limits_how_many_are_scanned_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture of 64 x 64 pixels has 12,288 numbers, and its 17 patches make a small graph."""
    config = transformers.ViTConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=16
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    options = de.Options(over_memory=True, max_memory={"cpu": 1 << 19})
    pictures = [{"pixel_values": torch.randn(1, 3, 64, 64)} for _ in range(6)]
    session, after = de.open(str(tmp_path), options=options, inputs=pictures), list[int]()
    assert session.model.memory.limited
    monkeypatch.setattr(sequence_groups, "cache_budget", lambda device: 8_000_000)
    session.scan(["int8"], draws=1, on_estimate=lambda report: after.append(report.sequences))
    assert after == [1, 6]


def test_backward_pass_reads_no_unneeded_bytes_ahead_from_disk(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(llama, 1 << 21)
    memory = session.model.memory
    assert memory.limited
    asked = 0

    def advise(descriptor: int, start: int, nbytes: int, advice: int) -> None:
        nonlocal asked
        asked += nbytes * (advice == os.POSIX_FADV_WILLNEED)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    session.scan(["int8"], draws=2)
    # Bytes that are asked for in vain would be read from the disk all the same.
    assert asked <= 1.05 * memory.bytes_read


def test_causes_of_drift_of_a_model_run_from_disk_equal_those_in_memory(make_llama: Callable[..., Path]) -> None:
    stored, coded = (make_llama(name, dtype="bfloat16", **SIZES) for name in ("stored", "coded"))
    store_in_fp8(coded)
    for limit in (None, 1 << 21):
        session = opened(coded, limit, FEW)
        assert session.model.weights["model.layers.0.mlp.up_proj.weight"].info.dtype == "fp8:e4m3@128x128"
        found = [measured(session, rules) for rules in ((), RECIPES[1])]
        found.append([(cause.name, cause.drift) for cause in session.causes().causes])
        found.append(measured(opened(coded, limit, FEW, reference=str(stored)), ("*embed*=int8",)))
        if limit is None:
            inside = found
    assert found == inside


def test_figures_of_an_export_with_scales_run_from_disk_equal_those_in_memory(llama: Path, tmp_path: Path) -> None:
    source = opened(llama, None, FEW)
    cast(source, (*RECIPES[1], "lm_head=bfloat16"))
    source.export(tmp_path / "coded")
    found = []
    for limit in (None, 1 << 20):
        session = opened(tmp_path / "coded", limit, FEW)
        assert session.model.weights["model.layers.0.mlp.up_proj.weight"].blockwise is (limit is not None)
        results = [measured(session, ("*norm*=bfloat16",)), session.generate(3)[0].candidate.ids]
        results.append([(cause.name, cause.drift) for cause in session.causes().causes])
        results.append(session.scan(["float16"], draws=1).scores())
        found.append([*results, measured(opened(tmp_path / "coded", limit, FEW, reference=str(llama)), ())])
    assert found[0] == found[1]


def test_drift_of_a_stateful_model_run_from_disk_equals_that_in_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
        last = getattr(self, "last", None)
        self.last = x.mean()
        result: torch.Tensor = forward(self, x if last is None else x + last)
        return result

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", counting)
    inside, over = opened(llama, None), opened(llama, 1 << 21)
    assert measured(over, RECIPES[0]) == measured(inside, RECIPES[0])


def test_saved_drift_of_a_model_run_from_disk_is_continued(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "MOST_UNSAVED", 3)
    expected = measured(opened(llama, None), RECIPES[1])
    over, file = opened(llama, 1 << 21), tmp_path / "drift.json"
    cast(over, RECIPES[1])
    done: list[int] = []
    listener = MeasurementListener(on_sequence=lambda totals: done.extend(totals.numbers), cancelled=lambda: bool(done))
    with pytest.raises(Cancelled):
        over.drift(listener, save=file)
    assert len(json.loads(file.read_text())["totals"]["sequences"]) == 3
    again = opened(llama, 1 << 21)
    cast(again, RECIPES[1])
    for _ in range(2):
        report = again.drift(save=file)
        assert [report.output, report.modules, report.lost, report.sequences] == expected
    before = again.memory().read_bytes
    assert before == 0  # nothing is left to run
    again.undo()
    with pytest.raises(UserError, match="with other rules"):
        again.drift(save=file)
    file.write_text("{}")
    with pytest.raises(UserError, match="is not a saved drift"):
        again.drift(save=file)


def test_forward_pass_from_disk_can_be_cancelled_within_a_block_and_repeated(llama: Path) -> None:
    over = opened(llama, 1 << 21)
    over.cast("*", "float16")
    asked = iter(range(10**9))
    with pytest.raises(Cancelled):
        over.drift(MeasurementListener(cancelled=lambda: next(asked) > 25))
    assert over.drift().output == measured(opened(llama, None), ("*=float16",))[0]


def test_export_of_a_model_run_from_disk_equals_that_in_memory(llama: Path, tmp_path: Path) -> None:
    for limit, name in ((None, "inside"), (1 << 21, "over")):
        session = opened(llama, limit)
        cast(session, RECIPES[1])
        session.export(tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("inside", "over")]
    assert files[0] == files[1]


def test_model_larger_than_memory_is_refused_with_an_estimate(llama: Path) -> None:
    with pytest.raises(NoForward) as refused:
        de.open(str(llama), options=de.Options(max_memory={"cpu": 1 << 20}))
    assert "this machine may use 1.00 MiB of memory" in str(refused.value)
    assert "--over-memory runs it from the disk" in str(refused.value)


def test_hub_model_of_which_only_headers_are_present_is_not_run(llama: Path, tmp_path: Path) -> None:
    with (
        hub_of(tmp_path / "cache", org__name=llama),
        pytest.raises(NoForward, match="only the headers of hf://org/name"),
    ):
        de.open("hf://org/name", options=de.Options(over_memory=True))


def test_over_memory_option_is_not_suggested_without_an_architecture(llama: Path) -> None:
    (llama / "config.json").unlink()
    with pytest.raises(NoForward, match=r"Planning, patterns, weights and export work$"):
        de.open(str(llama), options=de.Options(max_memory={"cpu": 1 << 20}))


def test_error_for_pickled_weights_larger_than_memory_suggests_an_export(llama: Path, tmp_path: Path) -> None:
    state = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    torch.save(state, llama / "pytorch_model.bin")
    with pytest.raises(NoForward, match="pickled weights can't be run in parts; dtype-engine export writes them as"):
        opened(llama, 1 << 20)
    de.open(str(llama)).export(tmp_path / "out")
    assert opened(tmp_path / "out", 1 << 20).model.memory.limited


@pytest.mark.parametrize("limit", [100, 1000])
def test_module_of_user_code_is_refused_over_the_memory_limit(tmp_path: Path, limit: int) -> None:
    """A linear layer of 5 x 6 weights and 5 biases takes 140 bytes."""
    net = "import torch\nNet = lambda: torch.nn.Linear(6, 5)\nexample_inputs = lambda: (torch.ones(1, 6),)\n"
    (tmp_path / "net.py").write_text(net)
    torch.save(torch.nn.Linear(6, 5), tmp_path / "whole.pt")
    inputs = {"input": torch.ones(1, 6)}
    for model in (f"{tmp_path / 'net.py'}:Net", str(tmp_path / "whole.pt")):
        options = de.Options(device="cpu", max_memory={"cpu": limit}, trust_pickle=True, over_memory=True)
        if limit > 140:
            assert de.open(model, options=options, inputs=inputs).drift().output.max_abs == 0
            continue
        with pytest.raises(NoForward, match="its weights take 140 B and may take 100 B on cpu; a module that Python"):
            de.open(model, options=options, inputs=inputs)


def test_bytes_read_from_disk_include_those_of_experts(tmp_path: Path) -> None:
    moe = mixtral(tmp_path, layers=1, experts=4)
    over = opened(moe, 1 << 21)
    assert over.memory().read_bytes == 0
    over.drift()
    read = over.memory().read_bytes
    assert read is not None
    # All experts of the only layer are sent tokens, and the embedding's rows are looked up.
    assert 0.8 < read / over.tree.stored_bytes <= 2
    assert opened(moe, None).memory().read_bytes is None


def test_diffusers_model_larger_than_memory_is_refused(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    diffusers.AutoencoderKL(norm_num_groups=8).save_pretrained(tmp_path / "vae")
    with pytest.raises(
        NoForward, match="it is larger than the memory to use, and models of diffusers can't be run in parts"
    ):
        opened(tmp_path / "vae", 1 << 10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_model_runs_on_cuda_in_a_quarter_of_its_memory_without_a_change_of_figures(
    make_llama: Callable[..., Path],
) -> None:
    # Much larger than the workspaces of cuBLAS, of which each thread has one: 32 MiB on Hopper.
    folder = make_llama(
        dtype="bfloat16", **SIZES | {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 12}
    )
    limit = (folder / "model.safetensors").stat().st_size // 4
    draw = torch.Generator().manual_seed(1)
    inputs = [{"input_ids": torch.randint(0, 512, (1, length), generator=draw)} for length in LENGTHS]
    found, peaks = [], []
    for limits in ({}, {"cuda:0": limit}):
        session = de.open(str(folder), options=de.Options(device="cuda:0", max_memory=limits), inputs=inputs)
        torch.cuda.reset_peak_memory_stats()
        found.append([measured(session, rules) for rules in RECIPES])
        peaks.append(torch.cuda.max_memory_allocated())
        del session
    assert found[0] == found[1]
    assert peaks[1] < peaks[0]
