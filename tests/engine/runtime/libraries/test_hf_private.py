"""The private names that transformers must have, and what is done without each."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.helpers.paths import DEMO
from torch import nn
from transformers import conversion_mapping, core_model_loading, dynamic_module_utils, modeling_layers

import dtype_engine as de
from dtype_engine.recipe.loader_facts import loaded_dtype
from dtype_engine.runtime.libraries import hf_private

CONFIG = transformers.LlamaConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
)


@pytest.mark.parametrize(
    ("holder", "name", "without_it"),
    [
        (transformers.PreTrainedModel, "_get_dtype_plan", "loading copies tensors of other dtypes than the widest"),
        (transformers.PreTrainedModel, "_keep_in_fp32_modules", "no module is marked as kept in float32"),
        (transformers.PreTrainedModel, "_keep_in_fp32_modules_strict", "no module is marked as kept in float32"),
        (transformers.PreTrainedModel, "_can_set_attn_implementation", "the noise floor has no other attention"),
        (CONFIG, "_attn_implementation", "the noise floor has no other attention"),
        (CONFIG, "_attn_implementation_internal", "attention of native code is not refused"),
        (CONFIG, "_experts_implementation_internal", "experts of native code are not refused"),
        (conversion_mapping, "get_model_conversion_mapping", "tensors that are renamed or packed find no place"),
        (core_model_loading, "rename_source_key", "tensors that are renamed or packed find no place"),
        (core_model_loading, "WeightConverter", "tensors that are renamed or packed find no place"),
        (dynamic_module_utils, "TIME_OUT_REMOTE_CODE", "code that loads other code may ask on standard input"),
        (core_model_loading, "WeightRenaming", "tensors that are renamed or packed find no place"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_installed_transformers_has_every_private_name_that_dtype_engine_uses(
    holder: object, name: str, without_it: str
) -> None:
    assert hasattr(holder, name), (
        f"transformers {transformers.__version__} has {name} no more, which hf_private.py takes from it: {without_it}"
    )


def test_logits_of_a_draft_head_are_scaled_as_by_transformers_if_it_has_a_function_for_that() -> None:
    mtp_model = getattr(modeling_layers, "MtpModel", None)
    assert mtp_model is None or hasattr(mtp_model, "_project_to_logits"), (
        "logits of a draft head lose the model's scaling"
    )
    layer, states = nn.Linear(4, 6), torch.randn(2, 4)
    alone = SimpleNamespace(shared_head=layer)
    assert torch.equal(hf_private.draft_logits(alone, states), layer(states))
    scaled = SimpleNamespace(shared_head=layer, _project_to_logits=lambda states: layer(states) / 2)
    assert torch.equal(hf_private.draft_logits(scaled, states), layer(states) / 2)


class Islands(nn.Module):
    """Declares modules to be kept in float32 in all three ways that transformers has."""

    _keep_in_fp32_modules = ("wo",)
    _keep_in_fp32_modules_strict = ("norm",)
    _skip_layerwise_casting_patterns = ("pos.*embed",)


def test_patterns_of_modules_kept_in_float32_are_read_from_the_class() -> None:
    patterns = {attribute: pattern for pattern, attribute in hf_private.float32_patterns(Islands())}
    assert re.search(patterns["_keep_in_fp32_modules"], "layer.0.wo")
    assert not re.search(patterns["_keep_in_fp32_modules"], "layer.0.wonder")
    assert re.search(patterns["_keep_in_fp32_modules_strict"], "norm.weight")
    assert re.search(patterns["_skip_layerwise_casting_patterns"], "position_embedding")
    assert hf_private.float32_patterns(nn.Linear(1, 1)) == []


def test_transformers_is_told_the_dtype_of_each_single_tensor() -> None:
    class Model(nn.Module):
        def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
            return {}

    stored = {"a.weight": torch.bfloat16, "a.bias": torch.float32, "b.weight": torch.bfloat16}
    made = hf_private.with_dtypes(Model, stored)
    plan = made()._get_dtype_plan(torch.float32)
    assert issubclass(made, Model)
    assert (made.__name__, made.__module__) == (Model.__name__, Model.__module__)
    assert {name: [dtype for pattern, dtype in plan.items() if re.search(pattern, name)] for name in stored} == {
        name: [dtype] for name, dtype in stored.items()
    }
    assert not any(re.search(pattern, "aXweight") for pattern in plan)
    assert hf_private.with_dtypes(nn.Linear, stored) is nn.Linear, "without the name: the class itself"


def test_no_tensor_is_renamed_if_transformers_lacks_its_conversion_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("conversion_mapping", "core_model_loading"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, f"transformers.{name}", None)
            assert hf_private.converted_names(nn.Linear(1, 1), ["x.weight"], {"x.weight": torch.zeros(1)}) == {}


@pytest.mark.parametrize("gone", [None, "_can_set_attn_implementation", "set_attn_implementation"])
def test_attention_implementation_is_replaced_temporarily(gone: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, attn_implementation="sdpa")
    if gone is not None:
        monkeypatch.delattr(transformers.PreTrainedModel, gone)
    with hf_private.other_attention(model) as name:
        assert name == ("eager" if gone is None else None)
        assert model.config._attn_implementation == (name or "sdpa")
    assert model.config._attn_implementation == "sdpa"
    with hf_private.other_attention(nn.Linear(1, 1)) as name:
        assert name is None


@pytest.mark.parametrize("of", ["attn", "experts"])
def test_attention_or_expert_implementation_in_a_config_can_be_read_and_set(of: str) -> None:
    config = transformers.LlamaConfig.from_dict(CONFIG.to_dict())
    hf_private.set_implementation(config, of, "eager")
    assert hf_private.implementation(config, of) == "eager"
    hf_private.set_implementation(config, of, None)
    assert hf_private.implementation(config, of) is None
    assert hf_private.implementation(object(), of) is None


SMALL_MODELS: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    ),
    "moe": lambda: transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
            first_k_dense_replace=1,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("form", ["t5", "moe"])
def test_predicted_dtypes_of_loaded_tensors_equal_those_of_from_pretrained(
    form: str, dtype: str, tmp_path: Path
) -> None:
    """A word declares modules (`wo`) or single tensors (`e_score_correction_bias`)."""
    module = SMALL_MODELS[form]()
    module.save_pretrained(tmp_path)
    tree = de.open(str(tmp_path)).tree
    loaded = type(module).from_pretrained(tmp_path, dtype=dtype).state_dict()
    ours = {tensor.name: loaded_dtype(tree, tensor, dtype) for tensor in tree.tensors.values()}
    held = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in loaded.items() if name in ours}
    assert {name: ours[name] for name in held} == held
    assert ("float32" in held.values()) == (form == "moe" or dtype != "bfloat16")
