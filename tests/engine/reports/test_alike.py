"""Which neighbouring modules are alike, compared with a full text description of each module."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from dtype_engine.core.text import Name
from dtype_engine.core.tree import Module, TensorInfo, Tree
from dtype_engine.reports.alike import AlikeModules


def _written_out(module: Module, planned: dict[str, str]) -> Any:
    """Return class, tensors and children of a module as text. A tied tensor is described by the name of its canonical tensor."""
    tensors = [
        (local, tensor.name)
        if tensor.name != f"{module.name}.{local}"
        else (local, tensor.shape, tensor.dtype, tensor.kind, planned[tensor.name])
        for local, tensor in module.tensors.items()
    ]
    return (
        module.class_name,
        tensors,
        [(label, _written_out(child, planned)) for label, child in module.children.items()],
    )


def _random(seed: int) -> tuple[Tree, dict[str, str]]:
    """Twelve layers of which a few differ in one thing, with classes and ties or without."""
    chance = random.Random(seed)
    classes: dict[str, str] = {}
    tensors = [TensorInfo(Name("shared.weight"), (4, 4), "float32")]
    for layer in range(12):
        odd = chance.randrange(7) if chance.random() < 0.4 else None
        name = f"layers.{layer}"
        classes |= {name: "Other" if odd == 0 else "Layer", f"{name}.act": "GELU" if odd == 1 else "SiLU"}
        kind: Any = "buffer" if odd == 2 else "parameter"
        dtype, shape = "float16" if odd == 3 else "float32", (4, 8) if odd == 4 else (4, 4)
        tensors.append(TensorInfo(Name(f"{name}.mlp.{'up' if odd == 5 else 'down'}.weight"), shape, dtype, kind))
        tied = (Name(f"{name}.head.weight"),) if odd == 6 and seed % 2 else ()
        tensors.append(TensorInfo(Name(f"{name}.norm.weight"), (4,), "float32", aliases=tied))
    planned = {each.name: "bfloat16" if chance.random() < 0.1 else each.dtype for each in tensors}
    return Tree(tensors, classes if seed % 3 else None), planned


@pytest.mark.parametrize("seed", range(60))
def test_neighboring_modules_are_grouped_exactly_if_they_are_alike(seed: int) -> None:
    tree, planned = _random(seed)
    layers = list(tree.modules["layers"].children.values())
    runs = list(AlikeModules(tree, planned).runs(layers))
    assert [module for run in runs for module in run] == layers
    texts = pairwise(_written_out(layer, planned) for layer in layers)
    apart = [index for index, (one, other) in enumerate(texts) if one != other]
    assert [layers.index(run[-1]) for run in runs[:-1]] == apart
