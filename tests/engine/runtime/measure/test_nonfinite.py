"""Planted outliers beyond float16: the module is named, and the proposed rule mends it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine.reports.text_drift import nonfinite_lines
from dtype_engine.results.attribution import NonFiniteDiagnosis

MLP = "model.layers.1.mlp"


def planted(plant: Callable[[nn.Module], None], dtype: str = "float16", **settings: Any) -> tuple[Any, Any]:
    """Change a small Llama by `plant` and cast all of it. Returns the session and the diagnosis."""
    module, inputs = architectures.make("llama")
    with torch.no_grad():
        plant(module)
    return diagnosed(module, inputs, dtype, **settings)


def diagnosed(module: nn.Module, inputs: Any, dtype: str = "float16", **settings: Any) -> tuple[Any, Any]:
    """Cast all of a module. Returns the session and the diagnosis."""
    session = de.open(module, inputs=inputs)
    session.settings = de.RunSettings(**settings)
    session.cast("*", dtype)
    return session, session.nonfinite(session.drift())


def mended(session: Any, found: NonFiniteDiagnosis) -> bool:
    assert found.remedy
    assert session.drift().output.nonfinite  # trials left the recipe in force
    for rule in found.remedy:
        session.cast(*rule.rsplit("=", 1))
    return session.drift().output.nonfinite == 0


def large_weight(module: Any) -> None:
    module.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5


def test_weight_beyond_float16_is_diagnosed() -> None:
    session, found = planted(large_weight)
    assert (found.kind, found.first_module, found.module) == ("weight", f"{MLP}.up_proj", f"{MLP}.up_proj")
    assert found.weights == (f"{MLP}.up_proj.weight",)
    assert (found.dtype, found.limit, found.operation) == ("float16", 65504.0, "linear")
    assert found.largest == 1e5
    assert found.remedy == (f"{MLP}.up_proj.weight=bfloat16",)
    assert mended(session, found)


def test_activations_beyond_float16_in_one_module_are_diagnosed() -> None:
    def plant(module: Any) -> None:
        mlp = module.model.layers[1].mlp
        mlp.up_proj.weight.mul_(3e4)
        mlp.gate_proj.weight.mul_(1e2)
        mlp.down_proj.weight.mul_(1e-6)

    session, found = planted(plant)
    assert (found.kind, found.module, found.operation) == ("activation", MLP, "mul")
    heard: list[torch.Tensor] = []
    module, inputs = architectures.make("llama")
    with torch.no_grad():
        plant(module)
        module.get_submodule(f"{MLP}.down_proj").register_forward_pre_hook(lambda m, args: heard.append(args[0]))
        module(**inputs)
    assert found.largest_reference == pytest.approx(float(heard[0].abs().max()), rel=1e-6)
    assert found.largest < 65504 < found.largest_reference
    assert found.remedy == (f"{MLP}=bfloat16",)
    assert mended(session, found)


def test_remedy_makes_the_output_finite_if_large_activations_reach_later_layers() -> None:
    def plant(module: Any) -> None:
        module.model.layers[0].mlp.down_proj.weight.mul_(2e6)

    session, found = planted(plant)
    assert found.module.startswith("model.layers.0")
    assert mended(session, found)


def test_overflow_inside_a_linear_is_diagnosed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.large, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.last(torch.tanh(self.large(self.first(x)))))

    net = Net()
    with torch.no_grad():
        net.large.weight.fill_(6e4)
        net.first.bias.fill_(10)
    x = torch.ones(2, 8)
    with torch.no_grad():
        largest = float(net.large(net.first(x)).abs().max())
    session = de.open(net, inputs=(x,))
    session.cast("*", "float16")
    report = session.drift()
    # tanh brings infinity back to 1: the output is finite, and one module is not.
    assert not report.output.nonfinite
    found = session.nonfinite(report)
    assert (found.first_module, found.operation, found.dtype) == ("large", "linear", "float16")
    assert found.largest_reference == pytest.approx(largest, rel=1e-6)
    (rule,) = found.remedy
    pattern, dtype = rule.rsplit("=", 1)
    assert pattern == "large"
    session.cast(pattern, dtype)
    after = session.drift()
    assert not any(each.nonfinite for each in after.modules)
    assert found.after == after.output
    assert "every module is finite, SQNR" in nonfinite_lines(found)[-1]


def t5(seed: int = 25) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=2, vocab_size=256, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        feed = model.encoder.block[0].layer[1].DenseReluDense
        for part in (feed.wi_0, feed.wi_1):
            part.weight.normal_(0, 2.0)
        feed.wo.weight.normal_(0, 40.0)
    return model


def test_overflow_hidden_by_clamping_is_diagnosed_and_fixed() -> None:
    """T5 clamps infinity in float16: its output is finite and wrong."""
    wo = "encoder.block.0.layer.1.DenseReluDense.wo"
    given = {"input_ids": torch.randint(2, 256, (1, 40)), "decoder_input_ids": torch.randint(2, 256, (1, 20))}
    model = t5()
    session = de.open(model, inputs=given)
    session.cast("*", "float16")
    report = session.drift()
    assert not report.output.nonfinite
    found = session.nonfinite(report)
    assert (found.first_module, found.kind) == (wo, "activation")
    (rule,) = found.remedy
    pattern, dtype = rule.rsplit("=", 1)
    assert pattern == wo
    narrow = t5().half()
    narrow.get_submodule(wo).weight.data = t5().get_submodule(wo).weight.data.to(getattr(torch, dtype))
    with torch.no_grad():
        r, c = (each(**given).logits.double() for each in (t5(), narrow))
    expected = 20 * math.log10(float(r.norm() / (c - r).norm()))
    assert found.before == report.output
    assert found.after.sqnr_db > report.output.sqnr_db + 20
    assert found.after.sqnr_db == pytest.approx(expected, rel=1e-6)
    assert not session.loss_remedy(report)


def test_epsilon_that_becomes_zero_in_float16_is_diagnosed() -> None:
    """A row of zeros over the epsilon is 0; in float16 the epsilon is 0, and the row NaN."""

    class Net(nn.Module):
        def __init__(self, own: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.own = nn.Linear(8, 8, bias=False), nn.Linear(8, 4), own

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = x / (x.norm(dim=-1, keepdim=True) + 1e-9) if self.own else nn.functional.normalize(x, dim=-1)
            return torch.as_tensor(self.last(x))

    x = torch.randn(3, 8)
    x[1] = 0
    for own, operation, epsilon in ((False, "normalize", 1e-12), (True, "div", 1e-9)):
        with torch.no_grad():
            assert bool(Net(own).half()(x.half()).isnan().any())
        session, found = diagnosed(Net(own), (x,), float_inputs="model")
        assert (found.operation, found.module, found.dtype, found.constant) == (operation, "", "float16", epsilon)
        assert f"the epsilon {epsilon:g} is zero in float16, so that it divides by zero" in nonfinite_lines(found)[1]
        assert mended(session, found)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8)


def test_mask_value_beyond_the_range_of_float16_is_diagnosed() -> None:
    class Net(Attends):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = self.query(x) @ x.transpose(-1, -2)
            scores = scores + (1.0 - mask.to(scores.dtype)[:, None]) * -1e9
            return torch.as_tensor(scores.softmax(-1) @ self.value(x))

    x, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    with torch.no_grad():
        assert bool(Net().half()(x.half(), mask).isnan().any())
    session, found = diagnosed(Net(), {"x": x, "mask": mask}, float_inputs="model")
    assert (found.module, found.dtype, found.constant) == ("", "float16", -1e9)
    line = "           the constant -1e+09, as masks have, is beyond the range of float16, which holds up to 65504"
    assert nonfinite_lines(found)[1] == line
    assert mended(session, found)


def test_mask_of_minus_infinity_is_not_diagnosed_as_the_cause() -> None:
    class Masked(Attends):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.query(x) @ x.transpose(-1, -2)
            mask = torch.full_like(scores, -math.inf).triu(1)
            lowest = torch.full_like(scores, torch.finfo(scores.dtype).min).triu(1)
            return torch.as_tensor((scores + mask + lowest).softmax(-1) @ self.value(x))

    net = Masked()
    with torch.no_grad():
        net.value.weight[0, 0] = 7e4
    session, found = diagnosed(net, (torch.randn(1, 4, 8),))
    assert (found.kind, found.module, found.weights) == ("weight", "value", ("value.weight",))
    assert mended(session, found)


class LowestMask(nn.Module):
    """Attention whose mask is the dtype's lowest value: scores below -16 make it -infinity in float16, and rows of it NaN.

    After huggingface/transformers#17306 and NVIDIA-NeMo/Automodel#2658.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        with torch.no_grad():
            self.q.bias.fill_(3)
            self.k.bias.fill_(-3)

    def masked(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores + mask, -1)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> Any:
        q, k, v = self.q(x), self.k(x), self.v(x)
        mask = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, torch.finfo(q.dtype).min)[:, None]
        return self.out(self.masked(q @ k.mT, mask) @ v)


class InPlaceMask(LowestMask):
    def masked(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores += mask
        return torch.softmax(scores.reshape(-1, scores.shape[-1]), -1).reshape(scores.shape)


class SoftmaxByHand(LowestMask):
    def masked(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (scores + mask).mT.mT
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        return powers / powers.sum(-1, keepdim=True)


class TwoMasks(LowestMask):
    """The sum of two masks is -infinity in the reference, too, and harms nothing there."""

    def masked(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        causal = torch.full(scores.shape[-2:], torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
        return torch.softmax(scores + (mask + causal), -1)


class Inside(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.post = attention, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> Any:
        return self.post(self.attention(x, keep))


def padded() -> dict[str, torch.Tensor]:
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[0] = False
    return {"x": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)), "keep": keep}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("attention", [LowestMask, InPlaceMask, SoftmaxByHand, TwoMasks])
def test_operation_that_makes_a_mask_infinite_is_named(attention: type[LowestMask], inside: bool) -> None:
    inputs = padded()
    if attention is TwoMasks:
        inputs["keep"][0] = torch.arange(8) > 2
    module: nn.Module = Inside(attention()) if inside else attention()
    with torch.no_grad():
        assert bool(module(**inputs).isfinite().all())
        assert bool(module.half()(inputs["x"].half(), inputs["keep"]).isnan().any())
    session, found = diagnosed(module.float(), inputs)
    where = "attention" if inside else ""
    assert (found.module, found.operation.strip("_"), found.dtype) == (where, "add", "float16")
    assert found.first_module == ("attention.out" if inside else "out")
    pattern = "*." if inside else ""
    assert found.remedy == (f"{pattern}k=bfloat16", f"{pattern}q=bfloat16")
    assert mended(session, found)


class Masking(nn.Module):
    """A module of its own for the sum that overflows."""

    def forward(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores + mask, -1)


class MasksInAModule(LowestMask):
    def __init__(self) -> None:
        super().__init__()
        self.mask = Masking()

    def masked(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.mask(scores, mask)
        return result


class Twice(nn.Module):
    """Two layers of attention, in a list or under names of their own, between which values are added."""

    def __init__(self, attention: type[LowestMask], names: tuple[str, str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Inside(attention()) for name in names})
        for layer in self.layers.values():
            layer.post = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> Any:
        for layer in self.layers.values():
            x = x + layer(x, keep)
        return x


@pytest.mark.parametrize("names", [("0", "1"), ("near", "far")])
@pytest.mark.parametrize("attention", [LowestMask, SoftmaxByHand, MasksInAModule])
def test_remedy_of_two_alike_attentions_leaves_their_other_weights(
    attention: type[LowestMask], names: tuple[str, str]
) -> None:
    session, found = diagnosed(Twice(attention, names), padded())
    numbered = ("layers.{0,1}.attention.{k,q}=bfloat16",)
    assert found.remedy == (numbered if names == ("0", "1") else ("*.k=bfloat16", "*.q=bfloat16"))
    assert mended(session, found)


class ZeroTimesInfinity(LowestMask):
    """A product becomes zero in float16, and zero times the -infinity of the model's code is NaN."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> Any:
        q = self.q(x)
        never = torch.full_like(q, -math.inf)
        return self.out(torch.exp((q.abs() * 1e-9) * never))


class LogOfZero(LowestMask):
    """A probability becomes zero in float16: its logarithm is -infinity, and their product NaN."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> Any:
        share = torch.softmax(self.q(x) * 15, -1)
        return self.out(share * torch.log(share))


class SameOperationElsewhere(LowestMask):
    """Another sum of the same module is not finite in either run."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> Any:
        q, v = self.q(x), self.v(x)
        never = torch.log(x * 0) + x
        large = q.clamp(max=4) * 10000 + v.abs().clamp(max=1) * 40000
        return self.out(large * torch.exp(never))


@pytest.mark.parametrize(
    ("model", "operation"), [(ZeroTimesInfinity, "mul"), (LogOfZero, "log"), (SameOperationElsewhere, "add")]
)
def test_operation_in_which_values_arise_is_named_beside_infinities_of_the_reference(
    model: type[LowestMask], operation: str
) -> None:
    inputs, module = padded(), model()
    with torch.no_grad():
        assert bool(module(**inputs).isfinite().all())
        assert not bool(module.half()(inputs["x"].half(), inputs["keep"]).isfinite().all())
    session, found = diagnosed(module.float(), inputs)
    assert (found.module, found.operation, found.first_module) == ("", operation, "out")
    assert mended(session, found)


def test_softmax_over_nothing_is_named_in_the_reference() -> None:
    class Masked(LowestMask):
        def masked(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.softmax(scores.masked_fill(mask < 0, -math.inf), -1)

    _, found = diagnosed(Masked(), padded(), "bfloat16")
    assert (found.kind, found.module, found.operation) == ("reference", "", "softmax")


def test_nonfinite_reference_is_diagnosed() -> None:
    def plant(module: Any) -> None:
        module.model.layers[1].mlp.up_proj.weight[3, 4] = math.nan

    _, found = planted(plant)
    assert (found.kind, found.remedy) == ("reference", ())
    assert found.first_module == f"{MLP}.up_proj"
    assert found.weights == (f"{MLP}.up_proj.weight",)
    assert "no dtype helps" in found.reason


def test_reference_that_overflows_float32_is_diagnosed() -> None:
    def plant(module: Any) -> None:
        module.model.layers[0].mlp.up_proj.weight.mul_(1e30)
        module.model.layers[0].mlp.down_proj.weight.mul_(1e30)

    _, found = planted(plant, "bfloat16")
    assert (found.kind, found.remedy) == ("reference", ())
    assert found.module.startswith("model.layers.0.mlp")


def test_diagnosis_of_overflow_by_autocast_suggests_no_rules_and_says_to_turn_it_off() -> None:
    def plant(module: Any) -> None:
        module.model.layers[1].mlp.up_proj.weight.mul_(1e7)

    _, found = planted(plant, "float32", autocast="float16")
    assert found.remedy == ()
    assert "turn it off" in found.reason


def test_finite_output_has_no_overflow_diagnosis() -> None:
    _, found = planted(lambda module: None)
    assert found is None


class Squares(nn.Module):
    """Overflows float16 between its two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.a.weight.mul_(4000)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        return self.b(y * y)


def test_overflow_in_code_of_the_model_itself_is_not_attributed_to_a_submodule() -> None:
    torch.manual_seed(0)
    _, found = diagnosed(Squares(), torch.linspace(-1, 1, 32).reshape(4, 8))
    assert (found.module, found.operation, found.first_module) == ("", "mul", "b")
    assert nonfinite_lines(found)[0] == "not finite first in the model itself: mul in float16"


class OverflowsAnyway(Squares):
    """One of its outputs is beyond float32 too."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y * torch.tensor([math.inf] + [1.0] * 7, dtype=y.dtype)


def test_remedy_restores_the_values_that_are_finite_in_the_reference() -> None:
    torch.manual_seed(0)
    _, found = diagnosed(OverflowsAnyway(), torch.linspace(0.5, 1, 32).reshape(4, 8))
    assert found.remedy
    assert nonfinite_lines(found)[-1].endswith("tried, the output is finite where the reference is")


class Residual(nn.Module):
    """Four blocks, of which the third adds the square of something large, and a head that brings all of it back."""

    class Block(nn.Module):
        def __init__(self, squares: bool) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
            self.squares = squares

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.up(self.norm(x)))
            y = self.down(y)
            return x + (1000 * y) ** 2 if self.squares else x + y

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Residual.Block(number == 2) for number in range(4)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_remedy_casts_only_the_blocks_that_overflow_reaches() -> None:
    """The remedy leaves out the blocks before the overflow, and weights to which rules gave other dtypes."""
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    session = de.open(Residual(), inputs=(x,))
    session.cast("*", "float16")
    session.cast("type:LayerNorm", "float32")
    session.cast("blocks.0.up", "float8_e4m3fn")
    before = session.plan.dtypes
    found = session.nonfinite(session.drift())
    assert (found.module, found.operation) == ("blocks.2", "pow")
    assert mended(session, found)
    changed = {name for name, dtype in session.plan.dtypes.items() if dtype != before[name]}
    linear = {f"{part}.{local}" for part in ("up", "down") for local in ("weight", "bias")}
    assert changed == {f"blocks.{block}.{name}" for block in (2, 3) for name in linear} | {"head.weight", "head.bias"}
    assert {session.plan.dtypes[name] for name in changed} == {"bfloat16"}
    assert len(found.remedy) <= 3, found.remedy
    for part in ("blocks.3", "head"):  # none of the two could be left out
        session.cast(part, "float16")
        assert session.drift().output.nonfinite
        session.cast(part, "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_weight_beyond_float32_is_diagnosed(dtype: str) -> None:
    net = nn.Sequential(nn.Linear(32, 8, bias=False, dtype=torch.float64))
    with torch.no_grad():
        net[0].weight[0, 0] = 1e39
    x = torch.randn(2, 32, dtype=torch.float64) * 1e-3
    x[:, 0] = 0
    session, found = diagnosed(net, (x,), dtype)
    assert (found.kind, found.module, found.weights, found.largest) == ("weight", "0", ("0.weight",), 1e39)
    assert found.remedy == ("0.weight=float64",)
    assert mended(session, found)
