"""Entries of a GGUF file are translated to the config, or the file is refused by the name of the entry. The logits are compared
with those of plain transformers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tests.helpers.gguf_files import Change
from tests.helpers.gguf_files import write_model as write

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli, run
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options
from dtype_engine.runtime.building.load import load_pretrained

_SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "pad_token_id": None,
          "bos_token_id": None, "eos_token_id": None}  # fmt: skip


def made(model_class: Any, **settings: Any) -> Any:
    """Return a model of transformers with random weights, norms and biases included."""
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**_SIZES | settings)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def ids(length: int) -> torch.Tensor:
    return torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(length))


def logits(model: Any, length: int = 40) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids(length), use_cache=False).logits
    return found


def assert_same_model(path: Path, model: Any, *lengths: int, tolerance: float = 1e-5) -> None:
    """Assert that the file runs as `model`, and that plain transformers loads the same from its export."""
    assert not open_checkpoint(path).notices
    ours = load_pretrained(path)
    out = path.with_name("out")
    assert run(cli, "dtype-engine", ["export", str(path), "--cast", "*=f32", "-o", str(out)]) == 0
    exported, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for length in lengths or (40,):
        right = logits(model, length)
        for found in (ours, exported.eval()):
            torch.testing.assert_close(logits(found, length), right, rtol=tolerance, atol=tolerance)


def add_factors(writer: gguf.GGUFWriter, long: list[float], short: list[float]) -> None:
    writer.add_tensor("rope_factors_long.weight", np.array(long, np.float32))
    writer.add_tensor("rope_factors_short.weight", np.array(short, np.float32))


LONG, SHORT = [1.0, 2.0, 3.5, 5.0, 7.0, 9.0, 12.0, 15.0], [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8]


def write_longrope(path: Path, attention: float, **more: Any) -> Any:
    """Write a Phi-3 with LongRoPE factors to a GGUF file and return the model. more: further entries of the config."""
    scaling = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 1e4, **more}
    model = made(transformers.Phi3ForCausalLM, original_max_position_embeddings=64, rope_parameters=scaling)
    write(
        path, "phi3", model, lambda writer: add_factors(writer, LONG, SHORT),
        lambda writer: writer.add_rope_scaling_orig_ctx_len(64),
        lambda writer: writer.add_rope_scaling_attn_factors(attention),
    )  # fmt: skip
    assert_same_model(path, model, 48, 100)
    return model


@pytest.mark.slow
def test_longrope_factors_switch_at_the_original_context_length(tmp_path: Path) -> None:
    model = write_longrope(tmp_path / "x.gguf", math.sqrt(1 + math.log(2) / math.log(64)))
    model.save_pretrained(tmp_path / "hf")
    options = Options(device="cpu", reference=str(tmp_path / "hf"))
    session = de.open(str(tmp_path / "x.gguf"), options=options, inputs={"input_ids": ids(100)})
    assert session.drift().output.rel_l2 < 1e-5


def test_unusual_longrope_attention_factor_is_read_from_gguf(tmp_path: Path) -> None:
    write_longrope(tmp_path / "x.gguf", 1.7, attention_factor=1.7)


def test_partial_rotary_factor_is_read_from_gguf(tmp_path: Path) -> None:
    model = made(
        transformers.Phi3ForCausalLM,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    )
    write(tmp_path / "x.gguf", "phi3", model, lambda writer: writer.add_rope_dimension_count(12))
    assert_same_model(tmp_path / "x.gguf", model)


@pytest.mark.parametrize("window", [0, 8])
def test_gguf_sliding_window_of_0_means_no_window(tmp_path: Path, window: int) -> None:
    model = made(transformers.Phi3ForCausalLM, sliding_window=window or None)
    write(tmp_path / "x.gguf", "phi3", model, lambda writer: writer.add_sliding_window(window))
    assert_same_model(tmp_path / "x.gguf", model)


def test_llama_gguf_with_a_sliding_window_is_opened_as_mistral(tmp_path: Path) -> None:
    model = made(transformers.MistralForCausalLM, sliding_window=8)
    write(tmp_path / "x.gguf", "llama", model, lambda writer: writer.add_sliding_window(8))
    assert_same_model(tmp_path / "x.gguf", model)


def test_gguf_biases_of_attention_and_mlp_are_loaded(tmp_path: Path) -> None:
    model = made(transformers.LlamaForCausalLM, attention_bias=True, mlp_bias=True)
    write(tmp_path / "x.gguf", "llama", model)
    assert_same_model(tmp_path / "x.gguf", model)


@pytest.mark.parametrize("named", [True, False])
def test_gguf_rope_factor_without_a_type_means_linear_scaling(tmp_path: Path, named: bool) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    model = made(transformers.LlamaForCausalLM, rope_parameters=scaling)
    of_type: tuple[Change, ...] = (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),)
    write(
        tmp_path / "x.gguf", "llama", model, lambda writer: writer.add_rope_scaling_factor(4.0), *of_type[: int(named)]
    )
    assert_same_model(tmp_path / "x.gguf", model)


def test_yarn_beta_fast_and_beta_slow_are_read_from_gguf(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32,
               "beta_fast": 16.0, "beta_slow": 2.0}  # fmt: skip
    model = made(transformers.Qwen2ForCausalLM, rope_parameters=scaling)
    write(
        tmp_path / "x.gguf", "qwen2", model, lambda writer: writer.add_rope_scaling_factor(4.0),
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        lambda writer: writer.add_rope_scaling_orig_ctx_len(32),
        lambda writer: writer.add_float32("qwen2.rope.scaling.yarn_beta_fast", 16.0),
        lambda writer: writer.add_float32("qwen2.rope.scaling.yarn_beta_slow", 2.0),
    )  # fmt: skip
    assert_same_model(tmp_path / "x.gguf", model)


def test_llama_3_1_rope_factors_combine_with_linear_scaling(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    doubled = [2 * factor for factor in factors]
    scaling = {"rope_type": "longrope", "short_factor": doubled, "long_factor": doubled, "attention_factor": 1.0,
               "factor": 1.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}  # fmt: skip
    model = made(transformers.LlamaForCausalLM, rope_parameters=scaling)
    write(
        tmp_path / "x.gguf", "llama", model, lambda writer: writer.add_rope_scaling_factor(2.0),
        lambda writer: writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32)),
    )  # fmt: skip
    assert_same_model(tmp_path / "x.gguf", model)


def test_missing_kv_head_count_defaults_to_the_head_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, "add_head_count_kv", lambda self, count: None)
    model = made(transformers.Qwen2ForCausalLM)
    write(tmp_path / "x.gguf", "qwen2", model)
    assert_same_model(tmp_path / "x.gguf", model)


_HARMLESS: tuple[Change, ...] = (
    lambda writer: writer.add_logit_scale(1.0),
    lambda writer: writer.add_sliding_window(128),
    lambda writer: writer.add_attention_scale(0.25),
    lambda writer: writer.add_rope_dimension_count(16),
    lambda writer: writer.add_key_length(16),
    lambda writer: writer.add_value_length(16),
    lambda writer: writer.add_expert_count(0),
    lambda writer: writer.add_causal_attention(True),
    lambda writer: writer.add_rope_scaling_finetuned(True),
    lambda writer: writer.add_final_logit_softcapping(0.0),
    lambda writer: writer.add_string("quantize.imatrix.file", "x.dat"),
    lambda writer: writer.add_uint32("tokenizer.ggml.bos_token_id", 1),
)


def test_gguf_entries_that_do_not_change_the_model_are_accepted(tmp_path: Path) -> None:
    model = made(transformers.LlamaForCausalLM)
    write(tmp_path / "x.gguf", "llama", model, *_HARMLESS)
    assert_same_model(tmp_path / "x.gguf", model)


def add_vector(name: str, values: int = 32, dtype: type = np.float32) -> Change:
    return lambda writer: writer.add_tensor(name, np.ones(values, dtype))


_REFUSED: dict[str, tuple[str, Change]] = {
    "llama.rope.dimension_count (8)": ("llama", lambda writer: writer.add_rope_dimension_count(8)),
    "llama.logit_scale (0.5)": ("llama", lambda writer: writer.add_logit_scale(0.5)),
    "llama.residual_scale (0.25)": ("llama", lambda writer: writer.add_residual_scale(0.25)),
    "llama.embedding_scale (12.0)": ("llama", lambda writer: writer.add_embedding_scale(12.0)),
    "llama.attention.scale (0.5)": ("llama", lambda writer: writer.add_attention_scale(0.5)),
    "llama.attn_logit_softcapping (50.0)": ("llama", lambda writer: writer.add_attn_logit_softcapping(50.0)),
    "llama.final_logit_softcapping (30.0)": ("llama", lambda writer: writer.add_final_logit_softcapping(30.0)),
    "llama.attention.causal (False)": ("llama", lambda writer: writer.add_causal_attention(False)),
    "llama.attention.clamp_kqv (8.0)": ("llama", lambda writer: writer.add_clamp_kqv(8.0)),
    "llama.attention.value_length (8)": ("llama", lambda writer: writer.add_value_length(8)),
    "llama.rope.dimension_sections (3)": ("llama", lambda writer: writer.add_array("llama.rope.dimension_sections", [4, 2, 2])),
    "llama.rope.scaling.type (new)": ("llama", lambda writer: writer.add_string("llama.rope.scaling.type", "new")),
    "llama.rope.scaling.yarn_ext_factor (1.0)": ("llama", lambda writer: writer.add_rope_scaling_yarn_ext_factor(1.0)),
    "llama.something.new (7)": ("llama", lambda writer: writer.add_uint32("llama.something.new", 7)),
    "llama.context_length (2)": ("llama", lambda writer: None),
    "qwen2.pooling_type (3)": ("qwen2", lambda writer: writer.add_pooling_type(gguf.PoolingType.LAST)),
    "the tensor blk.0.ffn_up.bias": ("qwen2", add_vector("blk.0.ffn_up.bias", 48)),
    "the tensor blk.1.attn_q_norm.weight": ("llama", add_vector("blk.1.attn_q_norm.weight", 16)),
    "the tensor blk.1.post_attention_norm.weight": ("llama", add_vector("blk.1.post_attention_norm.weight")),
    "the tensor blk.2.attn_norm.weight": ("llama", add_vector("blk.2.attn_norm.weight")),
    "the tensor output.bias": ("llama", add_vector("output.bias", 64)),
    "the tensor blk.0.ffn_up.scale": ("llama", add_vector("blk.0.ffn_up.scale", 1)),
    "the tensor rope_freqs.weight": ("llama", add_vector("rope_freqs.weight", 8, np.float16)),
    "the tensor rope_factors_long.weight": ("llama", add_vector("rope_factors_long.weight", 8)),
}  # fmt: skip


@pytest.mark.parametrize("entry", list(_REFUSED))
def test_gguf_entry_for_an_unsupported_computation_is_refused_by_name(
    tmp_path: Path, entry: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture, change = _REFUSED[entry]
    if "context_length" in entry:
        monkeypatch.setattr(
            gguf.GGUFWriter,
            "add_context_length",
            lambda self, length: self.add_array("llama.context_length", [length, 4]),
        )
    classes = {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM}
    path = tmp_path / "x.gguf"
    write(path, architecture, made(classes[architecture]), change)
    with pytest.raises(UserError) as refused:
        de.open(str(path), options=Options(device="cpu"))
    assert f"{entry} changes what the model computes" in str(refused.value)
    assert run(cli, "dtype-engine", ["export", str(path), "--cast", "*=f32", "-o", str(tmp_path / "out")]) == 2
    assert f"{entry} changes what the model computes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(cli, "dtype-engine", ["inspect", str(path), "--json"]) == 0
    assert any(entry in notice for notice in json.loads(capsys.readouterr().out)["notices"])


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("qwen2", "Qwen2"), ("qwen2moe", "Qwen2Moe"), ("qwen3", "Qwen3"), ("qwen3moe", "Qwen3Moe")],
)
def test_gguf_window_without_its_layers_is_refused_with_the_reason(
    tmp_path: Path, architecture: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' configurations have the window, and use_sliding_window, for which GGUF has no entry."""
    path, model_class = tmp_path / "x.gguf", getattr(transformers, f"{name}ForCausalLM")
    assert {"sliding_window", "use_sliding_window"} <= model_class.config_class().to_dict().keys()
    moe = "moe" in architecture
    model = made(model_class, num_experts=4, num_experts_per_tok=2) if moe else made(model_class)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(8)
        writer.add_key_length(model.model.layers[0].self_attn.head_dim)
        if moe:
            writer.add_expert_count(4)
            writer.add_expert_used_count(2)

    write(path, architecture, model, add)
    assert run(cli, "dtype-engine", ["export", str(path), "--cast", "*=f32", "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"llama.cpp does not use the entry {architecture}.attention.sliding_window (8)" in said
    assert f"which layers of {name}ForCausalLM have a sliding window (use_sliding_window)" in said
    assert "no place" not in said
    assert not (tmp_path / "out").exists()


def test_check_reports_refused_gguf_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "x.gguf", "llama", made(transformers.LlamaForCausalLM), lambda writer: writer.add_logit_scale(0.5))
    run(cli, "dtype-engine", ["check", str(tmp_path / "x.gguf")])
    assert "note: the entry llama.logit_scale (0.5) changes what the model computes" in capsys.readouterr().err


@pytest.mark.parametrize("opened", ["x-00001-of-00004.gguf", "x-00003-of-00004.gguf", "."])
def test_parts_of_a_split_gguf_open_as_one_model(tmp_path: Path, opened: str) -> None:
    model = made(transformers.LlamaForCausalLM)
    (tmp_path / "split").mkdir()
    write(tmp_path / "split" / "x.gguf", "llama", model, parts=6)
    checkpoint = open_checkpoint(tmp_path / "split" / opened)
    assert [file.name for file in checkpoint.files] == [f"x-0000{number}-of-00004.gguf" for number in (1, 2, 3, 4)]
    assert checkpoint.config is not None
    assert checkpoint.config["tie_word_embeddings"] is False
    found = load_pretrained(tmp_path / "split" / opened).state_dict()
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name
    asked = ["export", str(tmp_path / "split" / opened), "--cast", "*=f32", "-o", str(tmp_path / "out")]
    assert run(cli, "dtype-engine", asked) == 0
    assert (
        run(cli, "dtype-engine", ["verify", str(tmp_path / "out"), "--against", str(tmp_path / "split" / opened)]) == 0
    )
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(exported), logits(model))


@pytest.fixture
def split(tmp_path: Path) -> Path:
    write(tmp_path / "x.gguf", "llama", made(transformers.LlamaForCausalLM), parts=6)
    return tmp_path


@pytest.mark.parametrize("missing", [1, 2, 4])
def test_missing_gguf_part_is_named(split: Path, missing: int) -> None:
    (split / f"x-0000{missing}-of-00004.gguf").unlink()
    with pytest.raises(
        UserError, match=rf"one of 4 parts of a model, and x-0000{missing}-of-00004.gguf is not beside it"
    ):
        open_checkpoint(split / "x-00003-of-00004.gguf")


def test_renamed_gguf_part_is_refused(split: Path) -> None:
    (split / "x-00001-of-00004.gguf").rename(split / "model.gguf")
    with pytest.raises(UserError, match=r"model.gguf is one of 4 parts of a model, and its name does not end as"):
        open_checkpoint(split / "model.gguf")


def test_gguf_part_with_the_wrong_part_number_is_refused(split: Path) -> None:
    third = (split / "x-00003-of-00004.gguf").read_bytes()
    (split / "x-00002-of-00004.gguf").write_bytes(third)
    with pytest.raises(UserError, match="says that it is part 2 "):
        open_checkpoint(split / "x-00001-of-00004.gguf")
