"""The table of draft heads: the names of each layout are found, and agree with those that transformers leaves out on purpose."""

from __future__ import annotations

import re
from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dtype_engine.core.draft_heads import COUNTS, LAYOUTS, draft_head

FOUND: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_nextn_predict_layers": 1},
        ["model.layers.60.mlp.up_proj.weight", "model.layers.61.eh_proj.weight", "model.layers.610.x.weight"],
        ["model.layers.61"],
    ),
    "GLM-4.5": (
        {"model_type": "glm4_moe", "num_hidden_layers": 46, "num_nextn_predict_layers": 1},
        ["model.layers.46.enorm.weight", "model.layers.4.enorm.weight"],
        ["model.layers.46"],
    ),
    "Qwen3-Next": (
        {"model_type": "qwen3_next", "num_hidden_layers": 48},
        ["model.layers.0.mlp.gate.weight", "mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"],
        ["mtp"],
    ),
    "MiMo": (
        {"model_type": "mimo", "num_hidden_layers": 36, "num_nextn_predict_layers": 1},
        ["model.mtp_layers.0.input_proj.weight"],
        ["model.mtp_layers"],
    ),
    "ERNIE-4.5": (
        {"model_type": "ernie4_5_moe", "num_hidden_layers": 28, "num_nextn_predict_layers": 1},
        ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight"],
        ["model.mtp_block", "model.mtp_linear_proj"],
    ),
    "numbered": (
        {"model_type": "new", "text_config": {"num_hidden_layers": 4, "num_nextn_predict_layers": 2}},
        ["model.language_model.layers.3.a", "model.language_model.layers.4.a", "model.language_model.layers.5.a"],
        ["model.language_model.layers.4", "model.language_model.layers.5"],
    ),
    "named": ({"model_type": "new"}, ["a.mtp.0.weight", "a.b.weight"], ["a.mtp"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draft_head_of_each_layout_is_found_by_its_names(layout: str) -> None:
    config, names, modules = FOUND[layout]
    found = draft_head(names, config)
    assert found
    assert (found.layout, list(found.modules)) == (layout, modules)
    held = [name for name in names if found.holds(name)]
    assert held == [name for name in names if any(name.startswith(f"{module}.") for module in modules)]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model_type": "deepseek_v3", "num_hidden_layers": 2}, ["model.layers.2.eh_proj.weight"]),
        ({"num_hidden_layers": 2, "num_nextn_predict_layers": 0}, ["model.layers.2.eh_proj.weight"]),
        ({"num_hidden_layers": True, "num_nextn_predict_layers": True}, ["model.layers.1.eh_proj.weight"]),
        ({"num_hidden_layers": 2, "num_nextn_predict_layers": 10**9}, ["model.layers.2.eh_proj.weight"]),
        ({"num_hidden_layers": 2, "num_nextn_predict_layers": "1"}, ["model.layers.2.eh_proj.weight"]),
        ({"model_type": ["mimo"], "text_config": 3}, ["prompt.weight", "mtp", "smtp.weight"]),
        ({"num_hidden_layers": 10**30, "num_nextn_predict_layers": 1}, [f"model.layers.{10**30}.eh_proj.weight"]),
        ({"model_type": "new"}, [f"block_{number}.mtp.weight" for number in range(1000)]),
        (None, ["mtp.fc.weight"]),
        ({}, ["mtp.fc.weight"]),
    ],
)
def test_model_without_a_draft_head_has_none(config: dict[str, Any] | None, names: list[str]) -> None:
    found = draft_head(names, config)
    assert not found
    assert found.missing(names) == ()


@pytest.mark.parametrize("entry", COUNTS)
def test_declared_number_of_draft_layers_is_read(entry: str) -> None:
    found = draft_head([], {"num_hidden_layers": 2, entry: 3})
    assert (found.declared, found.entry, bool(found)) == (3, entry, False)


def test_layers_and_modules_that_a_head_needs_are_named() -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 2}
    names = [f"model.layers.2.{part}.weight" for part in ("eh_proj", "enorm", "mlp.up_proj")]
    assert draft_head(names, config).missing(names) == ("model.layers.2.hnorm", "model.layers.3")
    names = ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.input_layernorm.weight"]
    missing = draft_head(names, {"model_type": "qwen3_next"}).missing(names)
    assert missing == ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")


def _of_transformers() -> list[str]:
    types = sorted(kind for layout in LAYOUTS.values() for kind in layout.model_types)
    return [kind for kind in types if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind != "ernie4_5"]


@pytest.mark.parametrize("model_type", _of_transformers())
def test_transformers_leaves_out_the_tensors_of_the_head_on_purpose(model_type: str) -> None:
    """The class lists the names of the published checkpoints. Those that number the layers name the numbers of these."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    patterns = model_class._keys_to_ignore_on_load_unexpected
    layout = next(row for row in LAYOUTS.values() if model_type in row.model_types)
    numbers = re.findall(r"layers\\\.(\d+)", " ".join(patterns)) if layout.numbered else ["0"]
    assert numbers
    for number in numbers:
        config = {"model_type": model_type, "num_hidden_layers": int(number), "num_nextn_predict_layers": 1}
        above = "" if layout.name == "Qwen3-Next" else "model."
        for template in (*layout.needed, layout.layer):
            stored = above + template.replace("{n}", number).replace("{i}", "0") + ".weight"
            assert draft_head([stored], config).holds(stored)
            assert any(re.search(pattern, stored) for pattern in patterns), stored
