"""How runtimes build draft heads whose names differ from those in the files, on trees made by hand."""

from __future__ import annotations

import pytest

from dtype_engine.core.draft_heads import Runtime, draft_head
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe.draft_serving import draft_notes, draft_problems

MODEL = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]


def tree_of(model_type: str, *head: str) -> Tree:
    """Make a model of two layers with a matrix in each, and a head of these linear layers."""
    modules = [*MODEL, *head]
    tensors = [TensorInfo(f"{module}.weight", (128, 128), "bfloat16") for module in modules]
    tree = Tree(tensors, dict.fromkeys(modules, "Linear"))
    config = {"model_type": model_type, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    tree.draft = draft_head(tree.tensors, config)
    assert len(tree.of_draft) == len(head)
    return tree


@pytest.mark.parametrize(
    ("model_type", "runtime", "layer", "wide"),
    [
        ("mimo", "vllm", "model.mtp_layers.0.mlp.up_proj", "model.mtp_layers.0.input_proj"),
        ("ernie4_5_moe", "vllm", "model.mtp_block.0.mlp.up_proj", "model.mtp_linear_proj.0"),
        ("deepseek_v3", "sglang", "model.layers.2.mlp.up_proj", "model.layers.2.eh_proj"),
    ],
)
def test_layers_that_a_runtime_looks_up_under_other_names_can_have_no_scales(
    model_type: str, runtime: Runtime, layer: str, wide: str
) -> None:
    tree = tree_of(model_type, layer, wide)
    for quantized in (layer, wide):
        (problem,) = draft_problems(tree, runtime, {f"{quantized}.weight": "float8_e4m3fn"})
        assert problem.tensors == (f"{quantized}.weight",)
        assert ("without scales" in problem.why) == (quantized == wide)
        assert ("and finds none" in problem.why) == (quantized == layer)
    assert not list(draft_problems(tree, runtime, {f"{MODEL[0]}.weight": "float8_e4m3fn"}))
    assert not list(draft_problems(tree, runtime, {}))


def test_layers_of_the_head_without_scales_need_a_name_in_the_settings_of_deepseek() -> None:
    """These settings list the layers without scales, under the names of the files."""
    tree = tree_of("mimo", "model.mtp_layers.0.mlp.up_proj")
    quantized = {f"{name}.weight": "mxfp8" for name in MODEL}
    assert not list(draft_problems(tree, "vllm", quantized))
    quantized = {f"{name}.weight": "fp8@128x128:ue8m0" for name in MODEL}
    (problem,) = draft_problems(tree, "vllm", quantized)
    assert "finds those of a layer in" in problem.why


def test_runtime_that_is_not_known_to_build_the_head_is_named() -> None:
    tree = tree_of("mimo", "model.mtp_layers.0.mlp.up_proj")
    planned = {name: tensor.dtype for name, tensor in tree.tensors.items()}
    (known,), (unknown,) = draft_notes(tree, "vllm", planned), draft_notes(tree, "sglang", planned)
    assert "1 in bf16; vllm builds it with the settings of the model (vllm/model_executor/models/mimo_mtp.py" in known
    assert "how sglang builds a head with these names is not known" in unknown
    assert not list(draft_problems(tree, "sglang", {"model.mtp_layers.0.mlp.up_proj.weight": "float8_e4m3fn"}))
    assert draft_notes(Tree([]), "vllm", {}) == ()
