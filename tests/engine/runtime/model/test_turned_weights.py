"""Weights that transformers turns as it loads them: the published experts of Qwen3-VL have two dimensions the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.exporting import export_checkpoint
from tests.helpers.file_edits import change_tensors
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.source import locate
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.runtime.session.verify import verify

IDS = torch.arange(2, 30)[None]
DOWN = "model.language_model.layers.0.mlp.experts.down_proj"
QUERIES = "model.language_model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    transformers = pytest.importorskip("transformers", "5.0")
    torch.manual_seed(0)
    text = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    made: nn.Module = transformers.Qwen3VLMoeForConditionalGeneration(
        transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    ).eval()
    return made


def turned(model: nn.Module, folder: Path, *names: str) -> Path:
    """Write the model's checkpoint with the last two dimensions of some weights swapped."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return change_tensors(
        folder, lambda tensors: tensors.update({name: tensors[name].transpose(-2, -1) for name in names})
    )


@pytest.fixture(scope="module")
def source(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    loading = pytest.importorskip("transformers.core_model_loading")
    if not hasattr(loading, "Transpose"):
        pytest.skip("this transformers turns nothing")
    return turned(model, tmp_path_factory.mktemp("turned") / "model", DOWN)


def test_experts_transposed_while_loading_give_the_logits_of_transformers(model: nn.Module, source: Path) -> None:
    session = de.open(str(source), inputs=[{"input_ids": IDS}])
    assert load_file(source / "model.safetensors")[DOWN].shape == (4, 96, 128)
    live = dict(session.model.module.named_parameters())
    assert all(torch.equal(live[name], parameter) for name, parameter in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(session.model.module(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_experts_transposed_while_loading_are_exported_and_loaded_back(source: Path, tmp_path: Path) -> None:
    session = de.open(str(source), inputs=[{"input_ids": IDS}])
    session.cast("*.experts", "bfloat16")
    session.export(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")[DOWN].shape == (4, 96, 128), "as in the source"
    assert verify(tmp_path / "out", locate(str(source))).same
    back = dict(de.load_pretrained(tmp_path / "out").named_parameters())
    for name, parameter in session.model.module.named_parameters():
        assert back[name].dtype == parameter.dtype
        assert torch.equal(back[name], parameter), name


def test_export_refuses_scaled_formats_for_experts_transposed_while_loading(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is \[4, 96, 128\] in the checkpoint and \[4, 128, 96\] in the model"):
        export_checkpoint(open_checkpoint(source), "moe", Recipe((Rule("*.experts", "mxfp4"),)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_transposed_weights_other_than_experts_are_refused(model: nn.Module, tmp_path: Path) -> None:
    folder = turned(model, tmp_path / "model", QUERIES)
    with pytest.raises(NoForward, match="these are not one model"):
        de.open(str(folder), inputs=[{"input_ids": IDS}])
