"""Scales of KV caches in an export: compressed-tensors reads them, and rounds as the measurement did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from scipy import special
from tests.helpers.transformers_caches import cache_argument

import dtype_engine as de
from dtype_engine.recipe.presets import preset

PROMPT = "The sun rose over the harbour, and the first boats came in with fish."


FORMS = pytest.mark.parametrize(("form", "shape"), [("fp8@tensor", (1,)), ("fp8@head", (2, 1, 1))])
WITH_QUERIES = [("fp8@tensor+q", (1,)), ("fp8@head+q", (2, 1, 1))]


@pytest.mark.parametrize(("form", "shape"), [*FORMS.args[1], *WITH_QUERIES])
def test_exported_kv_cache_scales_come_from_the_largest_cached_values(
    form: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """The cached values are those of a plain cache of transformers."""
    session = de.open(options=de.Options(prompts=(PROMPT,)))
    model: Any = session.model.module
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(session.need_inputs().batches[0].kwargs["input_ids"], **{cache_argument(model): cache}, use_cache=True)
    session.cast("*.kv_cache", form)
    session.export(tmp_path / "export")
    with safe_open(tmp_path / "export/model.safetensors", "np") as file:
        for index, layer in enumerate(cache.layers):
            for part, states in (("k", layer.keys), ("v", layer.values)):
                scale = file.get_tensor(f"model.layers.{index}.self_attn.{part}_scale")
                largest = np.abs(states.numpy()).max((0, 2, 3) if "@head" in form else None)
                assert scale.shape == shape
                assert scale.ravel() == pytest.approx(np.ravel(largest) / 448, rel=1e-6)
        assert not any(name.endswith("q_scale") for name in list(file.keys()))  # vLLM then takes 1, which was measured


@FORMS
def test_kv_cache_rounding_in_compressed_tensors_equals_the_measured_rounding(
    form: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.initialize")
    from transformers import AutoModelForCausalLM

    session = de.open(options=de.Options(prompts=(PROMPT,)))
    model: Any = session.model.module
    if not lifecycle.is_cached_attention_module(model.model.layers[0].self_attn):
        pytest.skip("this compressed-tensors finds no KV cache in the models of this transformers")
    ids = session.need_inputs().batches[0].kwargs["input_ids"]
    with torch.no_grad():
        before = special.log_softmax(model(ids).logits.double().numpy(), -1)
    session.cast("*.kv_cache", form)
    drift = session.drift().output.kl_mean
    report = session.export(tmp_path / "export")
    assert report.notices == ()
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.model.layers[0].self_attn.k_scale.shape == shape
    with torch.no_grad():
        after = special.log_softmax(loaded(ids, use_cache=True).logits.double().numpy(), -1)
    assert drift is not None
    assert drift > 1e-4
    assert special.rel_entr(np.exp(before), np.exp(after)).sum(-1).mean() == pytest.approx(drift, abs=1e-6)
    again = de.open(str(tmp_path / "export"), options=session.options)
    again.use_recipe(preset("kv-declared").recipe(again.tree))
    assert again.recipe == session.recipe
    assert again.model.notices == ()
    assert again.drift().output.kl_mean == pytest.approx(drift, abs=1e-9)


def test_export_gives_a_notice_about_kv_cache_formats_that_config_cannot_express(tmp_path: Path) -> None:
    session = de.open(options=de.Options(prompts=(PROMPT,)))
    session.cast("*.kv_cache", "fp8")
    session.cast("*.0.*.kv_cache", "bf16")
    report = session.export(tmp_path / "export")
    told = [notice for notice in report.notices if "KV caches" in notice]
    assert len(told) == 1
    assert told[0].endswith("start vLLM with --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0")
    assert "quantization_config" not in json.loads((tmp_path / "export/config.json").read_text())
    assert "kv_cache" in (tmp_path / "export/recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("rules", "told", "in_config"),
    [
        (
            ["*.ssm_state=bf16"],
            "the formats of recurrent states are in recipe.yaml, not in the checkpoint: start vLLM with "
            "--mamba-ssm-cache-dtype bfloat16",
            False,
        ),
        (
            ["*.kv_cache.{k,v}=fp8@tensor", "*.{conv,ssm}_state=f16"],
            "the formats of recurrent states are in recipe.yaml, not in the checkpoint: start vLLM with "
            "--mamba-cache-dtype float16 --mamba-ssm-cache-dtype float16",
            True,
        ),
        (
            ["*.kv_cache.{k,v}=fp8", "*.0.*.ssm_state=bf16"],
            "the formats of KV caches are in recipe.yaml, not in the checkpoint: vLLM has one dtype for the recurrences of all "
            "layers",
            False,
        ),
    ],
)
def test_export_gives_a_notice_that_only_the_recipe_has_the_formats_of_states(
    rules: list[str], told: str, in_config: bool, tmp_path: Path
) -> None:
    config = transformers.JambaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        attn_layer_period=2, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False, mamba_d_state=4,
    )  # fmt: skip
    transformers.JambaForCausalLM(config).save_pretrained(tmp_path / "jamba")
    ids = torch.arange(3, 20)[None]
    session = de.open(str(tmp_path / "jamba"), inputs=[{"input_ids": ids}])
    session.use_recipe(de.Recipe.of(map(de.Rule.parse, rules)))
    report = session.export(tmp_path / "export")
    assert [notice for notice in report.notices if "recipe.yaml" in notice] == [told]
    settings = json.loads((tmp_path / "export/config.json").read_text())
    assert ("quantization_config" in settings) == in_config
    assert "_state" in (tmp_path / "export/recipe.yaml").read_text()
    with safe_open(tmp_path / "export/model.safetensors", "np") as file:
        assert sorted(name for name in list(file.keys()) if name.endswith("_scale")) == [
            f"model.layers.{layer}.self_attn.{part}_scale" for layer in (1, 3) for part in "kv" if in_config
        ]
    again = de.open(str(tmp_path / "export"), inputs=[{"input_ids": ids}])
    again.use_recipe(session.recipe)
    assert again.plan.caches == session.plan.caches
