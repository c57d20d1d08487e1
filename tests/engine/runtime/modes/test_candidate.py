"""The zoo: every architecture under random dtypes for every single weight, and what is added to plain torch, one by one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn
from torch.nn import functional

import dtype_engine as de
from dtype_engine.core import dtypes
from dtype_engine.core.errors import KernelError
from dtype_engine.runtime.formats import dequantize as dequantizing
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes import promotion
from dtype_engine.runtime.modes.candidate import CandidateMode
from dtype_engine.runtime.modes.promotion import ImplicitCast
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.numerics.quantize import cast_or_quantize
from dtype_engine.runtime.passes.outputs import main_output

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
]


def call(module: nn.Module, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return main_output(module(**inputs) if isinstance(inputs, dict) else module(*inputs))[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("place", "name"), list(enumerate(architectures.ZOO)), ids=architectures.ZOO)
def test_every_architecture_runs_in_mixed_dtypes(place: int, name: str, device: str) -> None:
    """Of each palette one recipe: `python -m tests.helpers.architectures` has more."""
    module, inputs = architectures.make(name)
    session = de.open(module.to(device), inputs=inputs)
    for palette in architectures.PALETTES.values():
        session.apply(architectures.random_recipe(session, palette, place % architectures.RECIPES))
        output = session.drift().output
        assert output.nonfinite == 0
        assert output.sqnr_db > 15, "the result is near the reference"


def floats_as(inputs: Any, dtype: torch.dtype) -> Any:
    if isinstance(inputs, dict):
        return {key: floats_as(value, dtype) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(floats_as(value, dtype) for value in inputs)
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", architectures.ZOO)
def test_casting_all_weights_to_one_dtype_equals_plain_torch_bitwise(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand, inputs = architectures.make(name)
    target = getattr(torch, dtype)
    for tensor in (*by_hand.parameters(), *by_hand.buffers()):
        persistent = id(tensor) in {id(kept) for kept in by_hand.state_dict(keep_vars=True).values()}
        if tensor.is_floating_point() and persistent:
            tensor.data = tensor.data.to(target)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)  # no mode can see into torch's fast path
    try:
        expected = call(by_hand, floats_as(inputs, target))
    except RuntimeError as error:
        pytest.skip(f"plain torch can't run it: {error}")
    module, inputs = architectures.make(name)
    session = de.open(module, inputs=floats_as(inputs, target))
    session.cast("*", dtype)
    found: list[torch.Tensor] = []
    module.register_forward_hook(lambda module, args, output: found.append(main_output(output)[1]))
    session.drift()
    assert torch.equal(found[-1], expected)


def under_the_mode(model: nn.Module, run: Any, **dtypes: str) -> tuple[torch.Tensor, list[ImplicitCast]]:
    live = LiveModel.wrap(model, "test", torch.device("cpu"))
    live.apply({name: dtypes.get(name, tensor.dtype) for name, tensor in live.tree.tensors.items()})
    casts: list[ImplicitCast] = []
    mode = CandidateMode(live.by_id, torch.float32, torch.device("cpu"))
    mode.record = casts.append
    with torch.no_grad(), mode:
        return run(model), casts


def test_operation_on_mixed_dtypes_runs_in_the_widest_weight_dtype() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    out, casts = under_the_mode(nn.Linear(3, 3), lambda m: m(x), weight="bfloat16", bias="bfloat16")
    assert out.dtype == torch.bfloat16
    assert [(cast.operation, cast.source, cast.target, cast.elements) for cast in casts] == [
        ("linear", "float64", "bfloat16", 6)
    ]
    assert casts[0].torch_raises
    out, _ = under_the_mode(nn.Linear(3, 3), lambda m: m(x), weight="bfloat16", bias="float16")
    assert out.dtype == torch.float32
    out, _ = under_the_mode(nn.Linear(3, 3), lambda m: x @ m.weight.t(), weight="float16")
    assert out.dtype == torch.float16, "a view of a weight is a weight"


def test_operation_without_weights_runs_in_the_wider_dtype() -> None:
    a, b = torch.randn(2, 2).half(), torch.randn(2, 2)
    out, _ = under_the_mode(nn.Identity(), lambda m: a @ b)
    assert torch.equal(out, a.float() @ b)
    out, _ = under_the_mode(nn.Identity(), lambda m: a.bfloat16() @ a)
    assert out.dtype == torch.float32
    out, _ = under_the_mode(nn.Identity(), lambda m: a * torch.tensor(2.0))
    assert out.dtype == torch.float16, "a 0-d tensor has no say, as in torch"


def test_in_place_operation_keeps_the_dtype_of_its_destination() -> None:
    target, source = torch.zeros(3).bfloat16(), torch.ones(3)

    def write(_: nn.Module) -> torch.Tensor:
        target[torch.tensor([0, 2])] = source[:2]
        target.index_add_(0, torch.tensor([1]), source[:1])
        target.add_(source)
        return target

    out, _ = under_the_mode(nn.Identity(), write)
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [2, 2, 2]


def test_weights_in_storage_only_dtypes_are_dequantized_to_the_activation_dtype() -> None:
    x = torch.randn(2, 3).bfloat16()
    out, _ = under_the_mode(nn.Linear(3, 3, bias=False), lambda m: m(x), weight="float8_e4m3fn")
    assert out.dtype == torch.bfloat16
    out, _ = under_the_mode(nn.Embedding(4, 3), lambda m: m(torch.tensor([1])), weight="int8")
    assert out.dtype == torch.float32, "no activation: the compute dtype"
    out, _ = under_the_mode(nn.Linear(3, 3), lambda m: x.to(m.weight.dtype), weight="float8_e4m3fn")
    assert out.dtype == torch.float32, "a model that asks for the weight's dtype gets one that computes"


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_operation_on_mixed_dtypes_that_torch_promotes_gives_the_dtype_of_torch() -> None:
    x = torch.randn(2, 3)
    model = Scales()
    out, casts = under_the_mode(model, lambda m: m(x), scale="bfloat16")
    assert torch.equal(out, x * model.scale)
    assert out.dtype == torch.float32
    assert [(cast.operation, cast.source, cast.target, cast.torch_raises) for cast in casts] == [
        ("mul", "bfloat16", "float32", False)
    ]
    out, casts = under_the_mode(Scales(), lambda m: m(x.half()))
    assert out.dtype == torch.float32, "a float32 weight is not rounded"
    assert [(cast.source, cast.target) for cast in casts] == [("float16", "float32")]


def test_layer_norm_that_torch_runs_in_mixed_dtypes_is_not_listed_as_a_cast() -> None:
    x = torch.randn(2, 3).bfloat16()
    model = nn.LayerNorm(3)
    out, casts = under_the_mode(model, lambda m: m(x))
    assert torch.equal(out, functional.layer_norm(x, (3,), model.weight, model.bias))
    assert casts == []


def test_errors_of_operations_that_promotion_cannot_fix_are_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "_refused", set())
    given, source = torch.zeros(3).bfloat16(), torch.ones(2)

    def write(_: nn.Module) -> torch.Tensor:
        with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
            given.index_add_(0, torch.tensor([1, 7]), source)
        return given

    state = torch.get_rng_state()
    out, casts = under_the_mode(nn.Identity(), write)
    assert out.tolist() == [0, 0, 0]
    assert casts == []
    assert torch.equal(torch.get_rng_state(), state)


def test_call_repeated_in_another_dtype_draws_its_random_numbers_once() -> None:
    q, k = torch.randn(1, 4, 8), torch.randn(1, 4, 8).double()

    def attend(_: nn.Module) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, k, dropout_p=0.5)

    torch.manual_seed(0)
    out, casts = under_the_mode(nn.Identity(), attend)
    torch.manual_seed(0)
    expected = functional.scaled_dot_product_attention(q.double(), k, k, dropout_p=0.5)
    assert torch.equal(out, expected)
    assert casts[0].torch_raises


def test_combination_of_dtypes_that_torch_refuses_is_tried_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Asks(promotion._BeforeCall):
        def __init__(self, name: str, *rest: Any) -> None:
            asked.append(name)
            super().__init__(name, *rest)

    monkeypatch.setattr(promotion, "_BeforeCall", Asks)
    monkeypatch.setattr(promotion, "_refused", set())
    monkeypatch.setattr(promotion, "_accepted", set())
    x = torch.randn(2, 3)
    for _ in range(3):
        under_the_mode(nn.Linear(3, 3), lambda m: m(x) + m.weight.double()[:2], weight="bfloat16", bias="bfloat16")
    assert asked == ["linear", "add"]


def test_combination_of_dtypes_that_torch_refuses_is_remembered_for_each_memory_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A linear layer in bfloat16 accepts a float32 bias if its input is not contiguous, and refuses it otherwise."""
    contiguous, turned = torch.randn(2, 4, 3).bfloat16(), torch.randn(2, 3, 4).bfloat16().transpose(1, 2)
    for order in ((contiguous, turned), (turned, contiguous)):
        monkeypatch.setattr(promotion, "_refused", set())
        monkeypatch.setattr(promotion, "_accepted", set())
        for x in order:
            model = nn.Linear(3, 3)
            bias = model.bias.detach().clone()
            out, casts = under_the_mode(model, lambda m: m(x), weight="bfloat16")  # noqa: B023
            try:
                expected = functional.linear(x, model.weight, bias)
            except RuntimeError:
                expected = functional.linear(x.float(), model.weight.float(), bias)
            assert torch.equal(out, expected)
            assert out.dtype == expected.dtype == (torch.float32 if x is contiguous else torch.bfloat16)
            assert any(cast.torch_raises for cast in casts) == (x is contiguous)


def test_fast_path_of_torch_encoders_is_avoided_and_noted() -> None:
    module, inputs = architectures.make("torch_encoder")
    session = de.open(module, inputs=inputs)
    session.cast("embedding", "float64")
    (notice,) = session.drift().notices
    assert notice.startswith("torch's fast path of TransformerEncoder is off for reference and candidate")


def test_explicit_cast_in_model_code_gives_the_requested_dtype() -> None:
    out, casts = under_the_mode(nn.Linear(3, 3), lambda m: m.weight.double(), weight="bfloat16")
    assert out.dtype == torch.float64
    assert casts == []


class NoKernel(nn.Module):
    """`torch.linalg.cholesky` has no float16 kernel on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.forward = lambda x: torch.linalg.cholesky(x)  # type: ignore[method-assign]
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.weight * 1.0)


def test_missing_kernel_error_names_module_operation_dtype_and_device() -> None:
    session = de.open(NoKernel(), inputs=(torch.zeros(3, 3),))
    session.cast("*", "float16")
    with pytest.raises(KernelError) as caught:
        session.drift()
    error = caught.value
    assert (error.module, error.dtype, error.device, error.nearest) == ("inner", "float16", "cpu", "float32")
    assert "cholesky" in error.operation
    session.undo()
    assert session.drift().output.max_abs == 0


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("fft_rfft", torch.fft.rfft),
        ("stft", lambda x: torch.stft(x, 2, 1, window=x[0], return_complex=True)),
        ("linalg_inv", torch.linalg.inv),
        ("complex", lambda x: torch.complex(x, x).real),
        ("view_as_complex", lambda x: torch.view_as_complex(x).real),
        ("quantile", lambda x: torch.quantile(x, 0.5)),
        ("linalg_lstsq", lambda x: torch.linalg.lstsq(x, x).solution),
    ],
)
def test_missing_kernel_messages_of_torch_are_recognized(name: str, function: Any) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = function(self.weight * 1.0)
            return result.abs()

    session = de.open(Calls(), inputs=(torch.zeros(2, 2),), options=de.Options(device="cpu"))
    session.cast("*", "bfloat16")
    with pytest.raises(KernelError, match=f"{name} has no bfloat16 kernel on [a-z0-9:]+; float32 works there"):
        session.drift()


def test_reference_widens_at_most_two_weights_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widened weights live one at a time: the largest number alive at once is counted by a hook on allocation."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).bfloat16()
    live = LiveModel.wrap(model, "test", torch.device("cpu"))
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    widen = ReferenceMode.value_of

    def counted(self: Any, *given: Any) -> torch.Tensor:
        nonlocal most
        made = widen(self, *given)
        alive.append(weakref.ref(made))
        most = max(most, sum(ref() is not None for ref in alive))
        return made

    monkeypatch.setattr(ReferenceMode, "value_of", counted)
    with torch.no_grad(), ReferenceMode(live.by_id, torch.device("cpu")):
        out = model(torch.randn(1, 256))
    assert out.dtype == torch.float32
    assert len(alive) == 8
    assert most <= 2


@pytest.mark.parametrize("dtype", dtypes.STORED_FORMATS)
@pytest.mark.parametrize("ids", [[[1, 5, 1], [0, 99, 7]], [[3]], [[]]])
def test_only_looked_up_rows_of_an_embedding_are_dequantized(
    dtype: str, ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = torch.tensor(ids, dtype=torch.long)
    model = nn.Embedding(100, 4, padding_idx=0)
    kept, scale = cast_or_quantize(model.weight.data, dtype)
    assert scale is not None
    wanted = functional.embedding(taken, dequantize(kept, scale, torch.float32, dtypes.BY_NAME[dtype].blocks))
    brought = []

    def counted(data: torch.Tensor, *rest: Any) -> torch.Tensor:
        brought.append(len(data))
        return dequantize(data, *rest)

    monkeypatch.setattr(dequantizing, "dequantize", counted)
    out, _ = under_the_mode(model, lambda m: m(taken), weight=dtype)
    assert torch.equal(out, wanted)
    assert out.shape == wanted.shape
    assert brought == [taken.numel()]


def test_reference_looks_up_embedding_rows_in_float32() -> None:
    model = nn.Embedding(100, 4).bfloat16()
    live = LiveModel.wrap(model, "test", torch.device("cpu"))
    ids = torch.tensor([1, 5])
    with torch.no_grad(), ReferenceMode(live.by_id, torch.device("cpu")):
        out = model(ids)
    assert torch.equal(out, functional.embedding(ids, model.weight.float()))
