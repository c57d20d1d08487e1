"""Which modules stand for a model's depth."""

from __future__ import annotations

import pytest

from dtype_engine.core.tree import TensorInfo, Tree
from dtype_tui.state.depth import depth_label, depth_modules


def tree(*names: str) -> Tree:
    return Tree(tuple(TensorInfo(f"{name}.weight", (2, 2), "float32") for name in names))


LLAMA = (
    "model.embed",
    *(f"model.layers.{layer}.{part}" for layer in range(3) for part in ("attn", "mlp.up")),
    "model.norm",
)
EXPERTS = tuple(f"layers.{layer}.mlp.experts.{expert}" for layer in range(2) for expert in range(4))
BOTH = tuple(f"{side}.layers.{layer}.fc" for side in ("encoder", "decoder") for layer in range(2))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            (*LLAMA, "lm_head"),
            ["model.embed", *(f"model.layers.{layer}" for layer in range(3)), "model.norm", "lm_head"],
        ),
        (EXPERTS, ["layers.0", "layers.1"]),
        (
            ("conv1", *BOTH, "head"),
            ["conv1", *(f"{side}.layers.{n}" for side in ("encoder", "decoder") for n in range(2)), "head"],
        ),
        (("0", "1", "2"), ["0", "1", "2"]),
        (("stem", "body.one", "body.two", "head"), ["stem", "body", "head"]),
    ],
    ids=["a stack", "stacks in a stack", "two stacks", "a stack alone", "no stack"],
)
def test_depth_plot_has_layers_and_modules_outside_layers(names: tuple[str, ...], expected: list[str]) -> None:
    assert depth_modules(tree(*names)) == expected


def test_nonpersistent_buffers_are_not_in_the_depth_plot() -> None:
    rope = TensorInfo("rope.inv_freq", (2,), "float32", "non-persistent buffer")
    weights = [TensorInfo(f"{name}.weight", (2, 2), "float32") for name in ("stem", "head")]
    assert depth_modules(Tree((*weights, rope))) == ["stem", "head"]


def test_depth_labels_are_short() -> None:
    assert depth_label("model.layers.12") == "layers.12"
    assert depth_label("model.embed_tokens") == "embed_tokens"
    assert len(depth_label("x" * 40)) == 16
