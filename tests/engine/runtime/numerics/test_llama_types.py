"""Casts to llama.cpp's types, as the rest of the engine sees them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import libgguf
import numpy as np
import pytest
import torch
import transformers
from tests.helpers.gguf_files import write_model
from torch.nn import functional

import dtype_engine as de
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import LLAMA_DTYPES, LLAMA_TYPES
from dtype_engine.runtime.formats import llama_blocks
from dtype_engine.runtime.formats.dequantize import dequantized_rows
from dtype_engine.runtime.numerics.activations import quantize_activations
from dtype_engine.runtime.numerics.overflow_underflow import all_losses, count_losses
from dtype_engine.runtime.numerics.quantization_error import round_trip
from dtype_engine.runtime.numerics.quantize import cast_or_quantize, values_in
from dtype_engine.runtime.scan.scanned_roundings import ScannedRoundings

SOME = ("q8_0", "q4_k", "iq3_s", "tq2_0", "iq2_xxs:imatrix")


def weight(rows: int = 40, width: int = 256) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("dtype", SOME)
def test_round_trip_error_is_that_of_the_values(dtype: str) -> None:
    before = weight()
    after = llama_blocks.rounded(before, dtype)
    found = round_trip("w", before, dtype)
    assert found.max_abs == pytest.approx(float((after - before).abs().max()), rel=1e-6)
    signal, noise = before.double().square().sum(), (after - before).double().square().sum()
    assert found.sqnr_db == pytest.approx(float(10 * torch.log10(signal / noise)), abs=1e-4)
    assert found.underflowed == int((after == 0).sum())
    assert (found.overflowed, found.saturated, found.subnormal, found.nonfinite) == (0, 0, 0, 0)
    assert count_losses("w", before, dtype) is None, "zeros are rounding in a few bits"


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k", "iq4_xs"])
def test_block_whose_float16_scale_overflows_is_counted(dtype: str) -> None:
    before = weight()
    before[2, 3], before[5, 6], before[7, 0] = 1e30, torch.nan, torch.inf
    after = values_in(before, dtype, torch.float32)
    lost = int((torch.isfinite(before) & ~torch.isfinite(after)).sum())
    assert lost > 0
    assert torch.equal(torch.isfinite(after[3]), torch.ones(256, dtype=torch.bool))
    error, loss = round_trip("w", before, dtype), count_losses("w", before, dtype)
    assert (error.overflowed, error.nonfinite) == (lost, 2)
    assert loss is not None
    assert (loss.overflowed, loss.nonfinite) == (lost, 2)


@pytest.mark.parametrize("dtype", ["q4_k", "q8_0"])
def test_cast_again_gives_the_same_counts_as_the_cast_values(dtype: str) -> None:
    before = weight() * torch.logspace(-12, 2, 40)[:, None]
    cast, scale = cast_or_quantize(before, dtype)
    assert scale is not None
    assert all_losses("w", before, dtype, cast) == all_losses("w", before, dtype)


@pytest.mark.parametrize("dtype", LLAMA_DTYPES)
def test_rows_of_an_embedding_are_those_of_the_whole_table(dtype: str) -> None:
    table, scale = cast_or_quantize(weight(), dtype)
    assert scale is not None
    ids = torch.tensor([[3, 0, 39], [3, 5, 1]])
    found = dequantized_rows(table, scale, dtype, ids, torch.bfloat16)
    assert torch.equal(found, functional.embedding(ids, llama_blocks.rounded(weight(), dtype).bfloat16()))


def test_model_computes_with_the_values_and_takes_the_planned_bytes(make_llama: Callable[..., Path]) -> None:
    folder = str(make_llama(hidden_size=64, intermediate_size=256, head_dim=32))
    ids = torch.randint(3, 64, (1, 30), generator=torch.Generator().manual_seed(1))
    session = de.open(folder, inputs={"input_ids": ids})
    rules = [de.Rule.parse(each) for each in ("*=q4_0", "*.down_proj=q6_k", "*.gate_proj=q5_k")]
    session.apply(de.Recipe.of(rules))
    planned = session.plan.dtypes
    assert planned["model.layers.0.mlp.down_proj.weight"] == "q6_k"
    assert planned["model.layers.0.mlp.gate_proj.weight"] == "q5_1"
    assert planned["model.norm.weight"] == "float32"
    bits = {"q4_0": 4.5, "q5_1": 6, "q6_k": 6.5625, "float32": 32}
    counted = [tensor for tensor in session.tree.tensors.values() if tensor.counted]
    assert session.plan.planned_bytes == sum(tensor.numel * bits[planned[tensor.name]] / 8 for tensor in counted)
    report = session.drift()
    assert set(report.notices) >= {
        "5 tensors in float32, not q4_0: llama-quantize keeps vectors, norms and routers in float32 "
        "(first model.layers.0.input_layernorm.weight)",
        "2 tensors in q5_1, not q5_k: q5_k needs rows of a multiple of 256 values "
        "(first model.layers.0.mlp.gate_proj.weight with 64)",
    }
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    with torch.no_grad():
        for name, tensor in after.named_parameters():
            tensor.copy_(llama_blocks.rounded(tensor, planned[name]) if planned[name] != "float32" else tensor)
        reference, candidate = (model(ids).logits.double() for model in (before, after))
    wanted = (candidate - reference).norm() / reference.norm()
    assert report.output.rel_l2 == pytest.approx(float(wanted), rel=1e-4)


def activations() -> torch.Tensor:
    """Activations [70, 512] with zeros, halves between codes, and values whose scale is 0 in float16."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(70, 512, generator=generator) / torch.rand(512, generator=generator).clamp(min=0.02)
    values[0], values[1], values[2] = 0.0, values[1] * 1e-7, values[2] * 1e-30
    values[3] = torch.arange(512) % 250 / 2 - 60
    values[3, ::32], values[4, 5:8] = 127.0, 0.0
    return values


def q8_k(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The values of `quantize_row_q8_K_ref`, a block after the other: the largest value, with its sign, gets the code -127."""
    blocks = values.reshape(-1, 256)
    made = np.zeros_like(blocks)
    for block, into in zip(blocks, made, strict=True):
        largest = block[np.argmax(np.abs(block))]
        if largest != 0:
            inverse = np.float32(-127) / largest
            codes = np.minimum(np.rint(inverse * block), np.float32(127))
            into[:] = np.float32(1) / inverse * codes
    return made.reshape(values.shape)


@pytest.mark.parametrize("dtype", ["q8_0", "q5_1:imatrix", "q4_k", "tq2_0"])
def test_activations_are_rounded_as_by_the_reference_code(dtype: str) -> None:
    values = activations()
    if dtypes.BY_NAME[dtype].llama in (LLAMA_TYPES["q4_k"], LLAMA_TYPES["tq2_0"]):
        expected = q8_k(values.numpy())
    else:
        expected = libgguf.dequantize_rows(libgguf.quantize_rows(values.numpy(), 8), 8, 512)
    assert torch.equal(quantize_activations(values, dtype), torch.from_numpy(expected))
    wide = quantize_activations(torch.cat([values, values[:, :40]], 1)[None], dtype)[0]
    assert torch.equal(wide[:, :512], torch.from_numpy(expected)), "a shorter last block changes no other"
    values[5, 9], values[6, 0] = torch.nan, -torch.inf
    found = quantize_activations(values.bfloat16(), dtype)
    assert found.dtype == torch.bfloat16
    assert int((~torch.isfinite(found)).sum()) == 2
    assert found[6, 0] == -torch.inf


def test_model_with_rounded_activations_computes_what_plain_torch_does(make_llama: Callable[..., Path]) -> None:
    """Each product takes the rounding of the type that its weight got; the look-up of the tied embedding takes none."""
    folder = str(make_llama(hidden_size=64, intermediate_size=256, head_dim=32))
    ids = torch.randint(3, 64, (1, 30), generator=torch.Generator().manual_seed(1))
    session = de.open(folder, inputs={"input_ids": ids})
    session.apply(de.Recipe.of([de.Rule.parse(each) for each in ("*=q5_k", "*.down_proj=q6_k")]))
    assert session.drift().weights_only
    session.settings = de.RunSettings(quantize_activations="weights")
    report = session.drift()
    assert not report.weights_only
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    planned = {"lm_head.weight": session.plan.dtypes["model.embed_tokens.weight"], **session.plan.dtypes}
    with torch.no_grad():
        for name, tensor in after.named_parameters():
            tensor.copy_(llama_blocks.rounded(tensor, planned[name]) if planned[name] != "float32" else tensor)
        for name, module in after.named_modules():
            if isinstance(module, torch.nn.Linear):
                row = dtypes.BY_NAME[planned[f"{name}.weight"]].llama
                assert row is not None
                rounding = partial(llama_blocks.rounded_inputs, form=row.inputs)
                module.register_forward_pre_hook(lambda _, given, rounding=rounding: (rounding(given[0][0])[None],))
        reference, candidate = (model(ids).logits.double() for model in (before, after))
    wanted = (candidate - reference).norm() / reference.norm()
    assert report.output.rel_l2 == pytest.approx(float(wanted), rel=1e-4)
    found = {(row.module, row.target) for row in session.flow() if row.in_torch == "rounded"}
    assert found >= {("lm_head", "q8_1"), ("model.layers.0.mlp.down_proj", "q8_k")}


def test_scan_scores_a_type_as_the_one_that_replaces_it(make_llama: Callable[..., Path]) -> None:
    folder = str(make_llama(hidden_size=64, intermediate_size=256, head_dim=32))
    ids = torch.randint(3, 64, (1, 30), generator=torch.Generator().manual_seed(1))
    settings = de.RunSettings(quantize_activations="weights")
    session = de.open(folder, inputs={"input_ids": ids}, options=de.Options(settings=settings))
    kinds = ("q4_k:imatrix", "q6_k:imatrix", "q5_0:imatrix")
    scan = session.scan(list(kinds), draws=2)
    scores, gains = scan.scores(), {(row.name, row.dtype): row.rounding_gain for row in scan.weights}
    wanted = ScannedRoundings(session.model, dict.fromkeys(session.model.weights, kinds)).wanted
    for name in {row.name for row in scan.weights}:
        k4, k6, k5 = ((name, kind) for kind in kinds)
        if name.endswith("norm.weight"):
            assert scores[k4] == scores[k6] == scores[k5] == 0
            assert name not in wanted
        elif name.endswith("down_proj.weight"):
            assert scores[k4] > 2 * scores[k5] > 4 * scores[k6]
            assert gains[k4] != gains[k5]
            assert wanted[name] == kinds
        else:
            assert scores[k4] == pytest.approx(scores[k5], rel=1e-6)
            assert scores[k5] > 4 * scores[k6] > 0
            assert (gains[k4], gains[k6]) == (gains[k5], None)
            assert wanted[name] == ("q5_0:imatrix",), "rounded once"


def test_scan_of_rounded_weights_does_not_depend_on_how_many_rows_it_takes_at_once(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_llama(hidden_size=64, intermediate_size=256, head_dim=32))
    ids = torch.randint(3, 64, (1, 30), generator=torch.Generator().manual_seed(1))

    def scores() -> dict[tuple[str, str], float]:
        found = de.open(folder, inputs={"input_ids": ids}).scan(["q4_0:imatrix", "iq3_xxs:imatrix"], draws=2)
        gained = {score.dtype for score in found.weights if (score.rounding_gain or 0) > 1}
        assert gained == {"q4_0:imatrix", "iq3_xxs:imatrix"}
        return {(score.name, score.dtype): score.score for score in found.weights}

    whole = scores()
    monkeypatch.setattr("dtype_engine.runtime.scan.local_errors.PIECE", 1 << 13)
    assert scores() == pytest.approx(whole, rel=1e-4)


def test_gguf_model_is_cast_to_other_types_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    write_model(tmp_path / "model.gguf", "llama", transformers.LlamaForCausalLM(config), kind="Q8_0")
    session = de.open(str(tmp_path / "model.gguf"), inputs={"input_ids": torch.arange(3, 60)[None]})
    weight = session.model.weights["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == "gguf:q8_0"
    session.apply(de.Recipe.of([de.Rule.parse("*=q4_k"), de.Rule.parse("*.v_proj=q6_k:imatrix")]))
    assert torch.equal(weight.tensor, llama_blocks.rounded(weight.stored.read(), "q4_k"))
    assert session.drift().output.kl_mean > 0
    session.apply(de.Recipe.of([de.Rule.parse("*=stored")]))
    assert weight.dtype == "gguf:q8_0"
    assert session.drift().output.kl_mean == 0
    session.settings = de.RunSettings(quantize_activations="weights")
    assert session.drift().output.kl_mean > 0, "the inputs of the file's own weights are rounded, too"
    assert "q8_0" in {row.target for row in session.flow() if row.module == "model.layers.0.mlp.up_proj"}


def test_export_to_safetensors_is_refused(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    session = de.open(str(make_llama(hidden_size=64)))
    for dtype in ("q8_0", "q4_0:imatrix"):
        session.cast("*.q_proj", dtype)
        with pytest.raises(UserError, match=r"can't be exported in q\d_0.*`recipe convert --to llama\.cpp`"):
            session.export(tmp_path / "export")
