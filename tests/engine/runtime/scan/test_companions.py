"""Scores in 16 bits against plain torch with the tensors cast by hand. Casts of exact values still round activations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.search.sensitivity import aggregate_by_node


def model_and_batches(name: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    torch.manual_seed(0)
    module, inputs = architectures.make(name)
    generator = torch.Generator().manual_seed(1)
    if "pixel_values" in inputs:
        return module, [{"pixel_values": torch.randn(24, 3, 32, 32, generator=generator)} for _ in range(2)]
    return module, [{"input_ids": torch.randint(3, architectures.VOCABULARY, (1, 24), generator=generator)}]


def join_dtypes(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook: the float arguments of a module in the widest dtype of its own weights, in which torch then computes all of it."""
    own = list(module.parameters(recurse=False))
    dtype = own[0].dtype
    for parameter in own[1:]:
        dtype = torch.promote_types(dtype, parameter.dtype)
    for parameter in own:
        parameter.data = parameter.data.to(dtype)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args)


_REFUSING = (nn.LayerNorm, nn.Linear, nn.Conv2d)
"""Modules that raise in plain torch where activations and weights have several dtypes."""


def plain_kl(module: nn.Module, batches: list[dict[str, Any]], cast: list[str]) -> float:
    """The mean KL in nats of a copy of the model with the parameters `cast` in bfloat16, in plain torch."""
    candidate = copy.deepcopy(module)
    for name in cast:
        parameter = candidate.get_parameter(name)
        parameter.data = parameter.data.bfloat16()
    for child in candidate.modules():
        if isinstance(child, _REFUSING):
            child.register_forward_pre_hook(join_dtypes)
    total, rows = 0.0, 0
    for batch in batches:
        with torch.no_grad():
            p, q = (
                torch.log_softmax(each(**batch).logits.cpu().double().flatten(0, -2), -1)
                for each in (module, candidate)
            )
        total, rows = total + float((p.exp() * (p - q)).sum()), rows + len(p)
    return total / rows


@pytest.mark.parametrize("exact", [False, True])
def test_scan_scores_a_lossless_cast_of_norms_by_its_effect_on_activations(exact: bool) -> None:
    module, batches = model_and_batches("vit")
    session = de.open(module, inputs=batches)
    scores = session.scan(
        ["bfloat16"], exact=exact, draws=64
    ).scores()  # an estimate by the usual 24 may be off by half
    sums = aggregate_by_node(session.tree, scores, "bfloat16")
    norms = [name for name, child in module.named_modules() if isinstance(child, nn.LayerNorm)]
    pairs = {norm: [f"{norm}.weight", f"{norm}.bias"] for norm in norms}
    for norm, pair in pairs.items():
        # In plain torch the weight alone leaves float32 what it was. Only with the bias activations are in bfloat16.
        assert scores[pair[0], "bfloat16"] == 0.0 == plain_kl(module, batches, pair[:1])
        assert sums[norm] == pytest.approx(plain_kl(module, batches, pair), rel=0.1)
    together = plain_kl(module, batches, [name for pair in pairs.values() for name in pair])
    assert session.predict(Recipe((Rule("type:LayerNorm", "bfloat16"),))).value == pytest.approx(together, rel=0.5)


def test_scan_scores_norms_that_torch_promotes_with_zero() -> None:
    module, batches = model_and_batches("llama")
    session = de.open(module, inputs=batches)
    names = [name for name, _ in module.named_parameters() if "norm" in name]
    for exact in (False, True):
        scores = session.scan(["bfloat16"], exact=exact).scores()
        assert [scores[name, "bfloat16"] for name in names] == [0.0] * 5
    assert plain_kl(module, batches, names) == 0.0


def test_scan_scores_norms_that_cast_activations_to_their_dtype() -> None:
    """The norms of T5 read the dtype of their weight and compute in it."""
    torch.manual_seed(0)
    module, inputs = architectures.make("t5")
    session = de.open(module, inputs=inputs)
    scores = session.scan(["bfloat16"], draws=64).scores()
    for name in ("encoder.block.0.layer.0.layer_norm.weight", "decoder.block.1.layer.2.layer_norm.weight"):
        truth = plain_kl(module, [inputs], [name])
        assert truth / 3 < scores[name, "bfloat16"] < truth * 3


def test_measured_drift_of_a_searched_recipe_is_near_the_prediction() -> None:
    module, batches = model_and_batches("vit")
    session = de.open(module, inputs=batches)
    session.scan(["bfloat16", "float16"])
    found = session.search("50%", measure=True)
    assert found.measured is not None
    assert found.measured / 3 < found.predicted < found.measured * 3
    session.cast("*", "float16")
    assert found.measured <= 1.05 * (session.drift().output.kl_mean or 0.0)
