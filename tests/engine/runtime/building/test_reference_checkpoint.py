"""Drift from another checkpoint's weights: plain transformers runs both checkpoints, each loaded on its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoint_folders import tokenizer
from tests.helpers.file_edits import change_tensors, store_in_fp8, write_gguf
from tests.helpers.measured_on import DEVICE, placed

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.evaluation.specs import portable

Make = Callable[..., Path]
IDS = torch.arange(60).reshape(2, 30) % 64


def opened(reference: Path, candidate: Path) -> de.Session:
    return de.open(str(candidate), options=de.Options(reference=str(reference)), inputs={"input_ids": IDS})


def plain(folder: Path, dtype: str = "auto") -> torch.Tensor:
    """The logits that transformers computes, in float64."""
    model = placed(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    with torch.no_grad():
        return model(IDS).logits.cpu().double()


def kl(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    p, q = (torch.log_softmax(logits, -1) for logits in (reference, candidate))
    return float((p.exp() * (p - q)).sum(-1).mean())


def assert_figures(session: de.Session, reference: torch.Tensor, candidate: torch.Tensor) -> None:
    # Elsewhere another kernel may round a logit of float32 by 1e-8 in a drift of 1e-3.
    output, delta, rel = session.drift().output, (candidate - reference).abs(), 1e-6 if DEVICE == "cpu" else 1e-4
    assert output.kl_mean == pytest.approx(kl(reference, candidate), rel=rel)
    assert output.mean_abs == pytest.approx(float(delta.mean()), rel=rel)
    assert output.max_abs == pytest.approx(float(delta.max()), rel=rel)
    late = output.groups["position"]["17-32"]
    assert late.positions == 28, "of both sequences"
    assert late.kl_mean == pytest.approx(kl(reference[:, 16:], candidate[:, 16:]), rel=rel)


def rewritten(source: Path, folder: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> Path:
    """Write a copy of a checkpoint with other names or values."""
    folder.mkdir()
    tensors = dict(change(name, tensor) for name, tensor in load_file(source / "model.safetensors").items())
    config = json.loads((source / "config.json").read_text())
    (dtype,) = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def tuned(source: Path, folder: Path, part: str = "", dtype: torch.dtype = torch.float32, size: float = 0.02) -> Path:
    """Write a fine-tuned copy: noise is added to the weights whose names contain `part`."""
    generator = torch.Generator().manual_seed(1)

    def change(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        noise = size * torch.randn(tensor.shape, generator=generator)
        return name, (tensor.float() + noise * (part in name)).to(dtype)

    return rewritten(source, folder, change)


def test_drift_from_a_bfloat16_copy_equals_that_of_transformers(make_llama: Make, tmp_path: Path) -> None:
    a = make_llama()
    b = rewritten(a, tmp_path / "b", lambda name, tensor: (name, tensor.bfloat16()))
    assert_figures(opened(a, b), plain(a), plain(b))
    assert_figures(opened(b, a), plain(b, "float32"), plain(a))


def test_reference_checkpoint_without_the_name_prefix_is_matched(make_llama: Make, tmp_path: Path) -> None:
    """transformers adds the prefix when it loads the checkpoint."""
    a = make_llama(dtype="bfloat16")
    b = tuned(a, tmp_path / "b")
    short = rewritten(b, tmp_path / "short", lambda name, tensor: (name.removeprefix("model."), tensor))
    assert_figures(opened(a, short), plain(a, "float32"), plain(b))
    assert_figures(opened(short, a), plain(b), plain(a))


def test_float8_export_of_dtype_engine_can_be_candidate_or_reference(make_llama: Make, tmp_path: Path) -> None:
    a = make_llama()
    session = de.open(str(a))
    session.cast("*.{mlp,self_attn}", "fp8")
    session.export(tmp_path / "b")

    def change(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        stored = load_file(tmp_path / "b" / "model.safetensors")
        if (scale := stored.get(f"{name}_scale")) is None:
            return name, stored[name]
        return name, stored[name].float() * scale.float().reshape(-1, 1)

    values = rewritten(a, tmp_path / "values", change)
    assert not np.allclose(plain(values), plain(a), rtol=1e-4)
    assert_figures(opened(a, tmp_path / "b"), plain(a), plain(values))
    assert_figures(opened(tmp_path / "b", a), plain(values), plain(a))


def test_checkpoint_in_fp8_blocks_of_another_program_can_be_the_candidate(make_llama: Make, tmp_path: Path) -> None:
    a = make_llama(dtype="bfloat16")
    values = store_in_fp8(b := make_llama("b", dtype="bfloat16"))
    decoded = rewritten(a, tmp_path / "values", lambda name, tensor: (name, values[name].bfloat16()))
    assert_figures(opened(a, b), plain(a, "float32"), plain(decoded))


def test_drift_from_a_gguf_copy_equals_that_of_transformers(make_llama: Make, tmp_path: Path) -> None:
    """The copy is in Q8_0, with the rows of queries and keys in the order of llama.cpp. Its header stores settings in float32."""
    a = make_llama(num_attention_heads=4, num_key_value_heads=2)
    names, kind = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2), gguf.GGMLQuantizationType.Q8_0
    rounded, written = {}, dict[str, Any]()
    for name, tensor in load_file(a / "model.safetensors").items():
        values = rounded[name] = tensor.numpy()
        new = names.get_name(name, (".weight",))
        assert new is not None
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                values = values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            rounded[name] = gguf.quants.dequantize(gguf.quants.quantize(rounded[name], kind), kind)
            written[new] = gguf.quants.quantize(values, kind), kind
        else:
            written[new] = values
    write_gguf(
        tmp_path / "b.gguf", written, block_count=2, embedding_length=32, feed_forward_length=48, head_count=4,
        head_count_kv=2, vocab_size=64, layer_norm_rms_eps=1e-6,
    )  # fmt: skip
    b = rewritten(a, tmp_path / "values", lambda name, tensor: (name, torch.from_numpy(rounded[name])))
    assert_figures(opened(a, tmp_path / "b.gguf"), plain(a), plain(b))


def test_drift_between_two_moe_models_equals_that_of_transformers(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "a")
    b = tuned(tmp_path / "a", tmp_path / "b")
    assert_figures(opened(tmp_path / "a", b), plain(tmp_path / "a"), plain(b))


def test_rules_cast_the_candidate_and_not_the_reference_checkpoint(make_llama: Make, tmp_path: Path) -> None:
    a = make_llama()
    b = tuned(a, tmp_path / "b", dtype=torch.bfloat16)
    session = opened(a, b)
    assert {tensor.dtype for tensor in session.tree.tensors.values() if tensor.persistent} == {"bfloat16"}
    session.cast("*", "float16")
    c = rewritten(b, tmp_path / "c", lambda name, tensor: (name, tensor.half()))
    assert_figures(session, plain(a), plain(c))
    session.undo()
    assert_figures(session, plain(a), plain(b))


def test_only_changed_weight_is_the_only_cause_of_drift(make_llama: Make, tmp_path: Path) -> None:
    a = make_llama()
    b = tuned(a, tmp_path / "b", "layers.1.mlp.down_proj")
    session = opened(a, b)
    report = session.causes()
    assert [cause.name for cause in report.causes if cause.drift > 1e-12] == ["model.layers.1.mlp.down_proj"]
    assert report.whole == pytest.approx(kl(plain(a), plain(b)), rel=1e-6)
    worst = {module.name for module in session.drift().modules if module.sqnr_db < 100}
    assert "model.layers.1.mlp.down_proj" in worst
    assert not [name for name in worst if "layers.0" in name]


def test_scan_against_a_checkpoint_scores_the_exchange_of_each_single_weight(make_llama: Make, tmp_path: Path) -> None:
    """The expected score comes from transformers, running the reference with one weight of the candidate."""
    a = make_llama(num_hidden_layers=1, tie_word_embeddings=False)
    b = tuned(a, tmp_path / "b", size=0.001)
    session = opened(a, b)
    scores = session.scan(["bfloat16"], draws=64).scores()
    model = transformers.AutoModelForCausalLM.from_pretrained(a)
    other = load_file(b / "model.safetensors")
    for name, parameter in model.named_parameters():
        held = copy.deepcopy(parameter.data)
        parameter.data = other[name]
        with torch.no_grad():
            truth = kl(plain(a), model(IDS).logits.double())
        parameter.data = held
        assert scores[name, "float32"] == pytest.approx(truth, rel=0.5)
    with pytest.raises(de.UserError, match="leave out --exact or --against"):
        session.scan(["bfloat16"], exact=True)


def test_generation_compares_text_of_both_checkpoints(make_llama: Make, tmp_path: Path) -> None:
    a = make_llama()
    b = tuned(a, tmp_path / "b")
    for folder in (a, b):
        tokenizer().save_pretrained(folder)
    session = de.open(str(b), options=de.Options(reference=str(a), prompts=("a b c",)))
    (text,) = session.generate(8)
    ids = tokenizer()("a b c", return_tensors="pt")["input_ids"]
    for written, folder in ((text.reference, a), (text.candidate, b)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert list(written.ids) == expected.tolist()


def test_commands_with_against_name_the_reference_checkpoint(
    make_llama: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_llama()
    b = tuned(a, tmp_path / "twin")
    for folder in (a, b):
        tokenizer().save_pretrained(folder)
    arguments = [str(a), "--against", str(b), "--prompt", "a b c d e f"]
    assert run(cli, "dtype-engine", ["drift", *arguments, "--json", "--causes"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["model"], shown["reference"]) == ("twin", str(a))
    mean = shown["output"]["kl_mean"]
    assert mean > 1e-4
    assert run(cli, "dtype-engine", ["drift", *arguments, "--max-kl", str(mean / 2)]) == 1
    assert f"reference {a}" in capsys.readouterr().out
    assert run(cli, "dtype-engine", ["drift", *arguments, "--max-kl", str(mean * 2)]) == 0
    assert run(cli, "dtype-engine", ["flow", *arguments, "--cast", "*.mlp=bf16", "--json"]) == 0
    capsys.readouterr()
    assert run(cli, "dtype-engine", ["report", *arguments, "-o", str(tmp_path / "r.md")]) == 0
    assert "drift from the weights of " in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_hidden_layers": 1}, r"llama has tensors that other lacks, .* model\.layers\.1\..* and 6 more"),
        ({"num_hidden_layers": 3}, r"other has tensors that llama lacks"),
        ({"vocab_size": 66}, r"model\.embed_tokens\.weight is \[64, 32\] in llama and \[66, 32\] in other"),
        (
            {"hidden_act": "gelu"},
            r"differently in model\.layers\.0\.mlp\.act_fn, .* hidden_act is silu in llama and gelu in other",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"the rotary frequencies, .* rope_parameters\.factor is None in llama and 2\.0 in other",
        ),
        (
            {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2},
            r"inv_freq, .* head_dim is 16 in llama and 8 in other",
        ),
    ],
)
def test_reference_is_refused_if_its_config_changes_the_computation(
    make_llama: Make, settings: dict[str, Any], words: str
) -> None:
    a, b = make_llama(), make_llama("other", **settings)
    with pytest.raises(de.UserError, match=words):
        opened(a, b)


ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rms_norm_eps": 0.1}, "rms_norm_eps is 1e-06 in llama and 0.1 in b"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            "rope_theta is 10000.0 in llama and 500.0 in b",
        ),
        (
            {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}},
            "rope_type is default in llama and yarn in b",
        ),
    ],
)
def test_each_checkpoint_is_run_with_its_own_config(make_llama: Make, settings: dict[str, Any], said: str) -> None:
    a = make_llama()
    b = make_llama("b", **settings)
    for name in load_file(a / "model.safetensors"):
        assert torch.equal(load_file(a / "model.safetensors")[name], load_file(b / "model.safetensors")[name])
    (b / "generation_config.json").write_text('{"bos_token_id": 5, "pad_token_id": 7}')
    session = opened(a, b)
    assert kl(plain(a), plain(b)) > 1e-9
    assert_figures(session, plain(a), plain(b))
    assert any(said in notice for notice in session.drift().notices)
    assert_figures(opened(b, a), plain(b), plain(a))
    session.cast("*.mlp", "bfloat16")
    session.undo()
    assert_figures(session, plain(a), plain(b))
    assert session.causes().whole == pytest.approx(kl(plain(a), plain(b)), rel=1e-5)


def test_config_values_read_during_a_pass_are_those_of_each_checkpoint(tmp_path: Path) -> None:
    """Granite divides the logits by `config.logits_scaling`, which no module copies. Its modules copy the other multipliers."""
    settings = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "initializer_range": 0.3,
    }  # fmt: skip
    for name, more in (("a", {}), ("b", {"logits_scaling": 3.0, "attention_multiplier": 0.2})):
        torch.manual_seed(0)
        transformers.GraniteForCausalLM(transformers.GraniteConfig(**settings, **more)).save_pretrained(tmp_path / name)
    a, b = tmp_path / "a", tmp_path / "b"
    session = opened(a, b)
    assert_figures(session, plain(a), plain(b))
    assert session.causes().whole == pytest.approx(kl(plain(a), plain(b)), rel=1e-5)


def test_tied_weight_of_the_reference_is_matched_with_untied_weights(make_llama: Make, tmp_path: Path) -> None:
    """A tied weight is the reference of both weights that are not tied; two weights are no reference of one."""
    a, b = make_llama(), make_llama("untied", tie_word_embeddings=False)
    assert_figures(opened(a, b), plain(a), plain(b))
    with pytest.raises(de.UserError, match="are two tensors in untied and one in llama"):
        opened(b, a)


def test_reference_that_is_not_a_comparable_model_is_refused(
    make_llama: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_llama()
    save_file(load_file(a / "model.safetensors"), tmp_path / "alone.safetensors")
    for reference, words in (
        (tmp_path / "alone.safetensors", "the reference can't be used: alone.safetensors: no forward pass"),
        (tmp_path / "nothing", "no such folder or file"),
    ):
        with pytest.raises(de.UserError, match=words):
            opened(reference, a)
    arguments = ["drift", str(a), "--against", str(a), "--reference", "stored"]
    assert run(cli, "dtype-engine", arguments) == 2
    assert "leave it out, or leave out --against" in capsys.readouterr().err


def test_reference_file_that_changed_after_opening_is_refused(make_llama: Make, tmp_path: Path) -> None:
    a = make_llama()
    session = opened(a, tuned(a, tmp_path / "b"))
    (a / "model.safetensors").touch()
    with pytest.raises(de.UserError, match="was written to"):
        session.drift()


def test_path_of_the_reference_is_made_absolute_for_workers(make_llama: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a = make_llama()
    monkeypatch.chdir(a.parent)
    assert portable(de.Options(reference=a.name), 1).reference == str(a)
    assert portable(de.Options(reference="stored"), 1).reference == "stored"


def test_notices_about_the_reference_checkpoint_are_shown(make_llama: Make) -> None:
    a, b = make_llama(), make_llama("other")
    change_tensors(a, lambda tensors: tensors.update({"extra.weight": torch.ones(2)}))
    notices = opened(a, b).drift().notices
    assert "of the reference: 1 tensor of the checkpoint not used by LlamaForCausalLM, first extra.weight" in notices
