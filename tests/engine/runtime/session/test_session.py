from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.file_edits import change_config, change_tensors
from tests.helpers.paths import TINYNET
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint.source import DEMO, locate
from dtype_engine.core.system_memory import trim_heap
from dtype_engine.runtime.session.process_memory import process_memory


def test_session_accepts_short_dtype_names(tinynet: Any) -> None:
    tinynet.cast("*.bias", "bf16")
    tinynet.cast("head", "half")
    assert tinynet.recipe == Recipe((Rule("*.bias", "bfloat16"), Rule("head", "float16")))
    assert tinynet.plan.dtypes["head.bias"] == "float16"
    assert tinynet.drift().output.max_abs > 0
    assert tinynet.undo() is True
    assert tinynet.plan.dtypes["head.bias"] == "bfloat16"
    assert tinynet.redo() is True
    assert tinynet.redo() is False
    assert tinynet.undo() is True
    assert tinynet.undo() is True
    assert tinynet.undo() is False
    assert tinynet.drift().output.max_abs == 0


def test_cast_accepts_torch_dtypes(tinynet: Any) -> None:
    tinynet.cast("*.bias", torch.bfloat16)
    tinynet.cast("head", torch.float8_e4m3fn)
    assert tinynet.recipe == Recipe((Rule("*.bias", "bfloat16"), Rule.make("head", torch.float8_e4m3fn)))
    assert tinynet.plan.dtypes["head.weight"] == "float8_e4m3fn"
    with pytest.raises(de.UserError, match="can't cast to int32"):
        tinynet.cast("head", torch.int32)


@pytest.mark.parametrize(
    "inputs",
    [
        {"token_ids": torch.tensor([[1, 0]])},
        (torch.tensor([[1, 0]]),),
        torch.tensor([[1, 0]]),
        [torch.tensor([[1]]), (torch.tensor([[0]]),)],
    ],
)
def test_session_accepts_inputs_as_dict_tuple_tensor_or_list(inputs: Any) -> None:
    module = de.open(f"{TINYNET}:TinyNet").model.module
    session = de.open(module, inputs=inputs)
    session.cast("*", "bfloat16")
    assert session.drift().output.elements == 4


def test_module_without_inputs_can_be_cast_but_not_run() -> None:
    session = de.open(nn.Linear(2, 2))
    session.cast("*", "float16")
    assert session.memory().resident_bytes == 12
    with pytest.raises(de.NoForward, match="example_inputs"):
        session.drift()


def test_session_keeps_every_stored_dtype_of_a_mixed_checkpoint(make_llama: Callable[..., Path]) -> None:
    folder = make_llama(dtype="bfloat16", dtypes={"norm": "float32", "layers.1.mlp": "float16"})
    session = de.open(str(folder))
    stored = {name: tensor.dtype for name, tensor in session.tree.tensors.items() if tensor.persistent}
    assert stored["model.norm.weight"] == "float32"
    assert stored["model.layers.1.mlp.up_proj.weight"] == "float16"
    assert stored["model.layers.0.mlp.up_proj.weight"] == "bfloat16"
    assert session.drift().reference == "float32"
    checkpoint = locate(str(folder)).open()
    assert stored == {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}


def test_tied_weight_is_one_tensor_with_two_names(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama()))
    tied = session.tree.canonical("lm_head.weight")
    assert tied is not None
    assert set(tied.names) == {"model.embed_tokens.weight", "lm_head.weight"}
    session.cast("lm_head", "bfloat16")
    assert session.plan.planned_bytes == session.plan.stored_bytes - tied.nbytes // 2
    assert session.memory().resident_bytes == session.tree.stored_bytes - tied.nbytes // 2 + 2 * 32


def test_missing_weights_are_random_only_with_the_option(make_llama: Callable[..., Path]) -> None:
    folder = change_tensors(make_llama(), lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(
        de.NoForward, match=r"19 of 20 tensors found: 1 weight would be made at random, first model\.norm\.weight"
    ):
        de.open(str(folder))
    session = de.open(str(folder), options=de.Options(random_weights=True))
    assert "1 weight not in the checkpoint, made at random" in session.model.notices[0]
    coverage = session.drift().coverage
    assert coverage is not None
    assert coverage.missing == ("model.norm.weight",)


def test_unknown_architecture_is_reported(make_llama: Callable[..., Path]) -> None:
    folder = change_config(make_llama(), architectures=["Nonesuch"], model_type="nonesuch")
    with pytest.raises(de.NoForward, match="does not know the architecture"):
        de.open(str(folder))


def test_demo_takes_exactly_half_in_bfloat16() -> None:
    session = de.open()
    stored = session.plan.stored_bytes
    session.cast("*", "bfloat16")
    assert 2 * session.plan.planned_bytes == stored
    scratch = sum(tensor.nbytes for tensor in session.tree.tensors.values() if not tensor.persistent)
    report = session.drift()
    assert report.memory.resident_bytes == report.memory.planned_bytes + scratch
    assert report.output.kl_mean is not None
    assert 1e-5 < report.output.kl_mean < 1e-2
    assert report.output.perplexity_reference is not None
    assert report.output.perplexity_reference < 30, "the demo model was really trained"


def test_session_reports_the_memory_of_kv_cache_rules() -> None:
    session = de.open()
    assert session.memory().cache_planned_bytes is None, "no rule names them"
    session.cast("*.kv_cache.k", "fp8")
    memory, keys = session.memory(), 6 * 2 * 24 * 1024  # layers, heads, width, tokens
    assert (memory.cache_context, memory.cache_stored_bytes) == (1024, 2 * keys * 4)
    assert memory.cache_planned_bytes == keys * 4 + keys


def test_drift_reports_that_modules_were_compared_over_shorter_inputs() -> None:
    session = de.open()
    session.cast("*.kv_cache.k", "int4@kivi")
    report = session.drift()
    assert report.output.max_abs > 0
    assert not any(drift.max_abs for drift in report.modules), "the text over which they were compared is short"
    assert any("modules were compared over shorter inputs" in notice for notice in report.notices)


def test_perplexity_equals_the_loss_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "def add(first, second):\n    return first + second\n"
    folder = DEMO
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids, labels=ids).loss
    session = de.open(options=de.Options(prompts=(text,)))
    assert session.drift().output.perplexity_reference == pytest.approx(loss.exp().item(), rel=1e-5)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux has it")
def test_mapped_bytes_equal_those_in_smaps() -> None:
    session = de.open()
    session.drift()
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(str(session.model.files[0]))]
    resident = (next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts)
    assert session.memory().mapped_bytes == 1024 * sum(int(line.split()[1]) for line in resident) > 0


def test_undo_of_a_whole_model_cast_frees_the_cast_tensors(tmp_path: Path, make_llama: Callable[..., Path]) -> None:
    folder = make_llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8)
    session = de.open(str(folder))
    gc.collect()
    trim_heap()
    before = process_memory(session.model.files)
    session.cast("*", "bfloat16")
    cast = process_memory(session.model.files)
    planned = session.plan.planned_bytes
    assert planned > 50 * 2**20
    if before.anonymous is not None and cast.anonymous is not None:
        assert cast.anonymous - before.anonymous == pytest.approx(planned, rel=0.1), (
            "a cast takes its own bytes and no more"
        )
    session.undo()
    after = process_memory(session.model.files)
    assert session.memory().resident_bytes == sum(tensor.nbytes for tensor in session.tree.tensors.values())
    if before.anonymous is not None and after.anonymous is not None:
        assert after.anonymous - before.anonymous < 0.1 * planned


def test_saved_drift_is_checked_before_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = de.open(options=de.Options(sequences=2, sequence_length=16))
    with pytest.raises(de.UserError, match="there is no folder"):
        session.drift(save=tmp_path / "none" / "run.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    whole = session.drift(save=Path("~/run.json")).output
    saved = json.loads((tmp_path / "run.json").read_text())
    again = de.open(options=de.Options(sequences=2, sequence_length=16))
    assert again.drift(save=Path("~/run.json")).output == whole
    (tmp_path / "run.json").write_text(json.dumps(saved | {"drift_version": 2}))
    with pytest.raises(de.UserError, match="saved by another version of this program"):
        again.drift(save=Path("~/run.json"))
