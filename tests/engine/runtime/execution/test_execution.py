"""Drift between two executions of the same weights, against plain transformers run twice with these settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dtype_engine as de
from dtype_engine.core.execution import parse_execution
from dtype_engine.results.drift import first_different as first_different_module

LENGTHS = (20, 13, 24, 9)
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MODELS = ("llama", "experts", "sliding window", "encoder")
AXES = (
    "attention=eager",
    "attention=math",
    "batch=2",
    "batch=4 padding=left",
    "decode=yes",
    "mkldnn=no",
    "matmul=medium",
    "threads=2",
)


def made(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))
    if name == "experts":
        config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
        return transformers.MixtralForCausalLM(config)
    if name == "sliding window":
        return transformers.MistralForCausalLM(
            transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8)
        )
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


@dataclass
class Stored:
    """A checkpoint, opened by this program and by transformers."""

    name: str
    session: de.Session
    model: Any
    reference: list[torch.Tensor]
    """The logits of each sequence that plain transformers computes without settings."""


@pytest.fixture(scope="module")
def ids() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 128, (1, length), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module", params=[(name, dtype) for name in MODELS for dtype in ("float32", "bfloat16")], ids=str)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ids: list[torch.Tensor]) -> Stored:
    name, dtype = request.param
    folder, module = tmp_path_factory.mktemp("model"), made(name).to(getattr(torch, dtype))
    module.save_pretrained(folder)
    options = de.Options(device="cpu", threads=1, reference="stored", modules="exact")
    session = de.open(str(folder), options=options, inputs=[{"input_ids": each} for each in ids])
    model = type(module).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return Stored(name, session, model, plain(model, ids, ""))


@contextlib.contextmanager
def observed(model: Any) -> Iterator[dict[str, list[torch.Tensor]]]:
    """In the `with` block, collect the outputs of all modules of a plain model, in the order of their first calls."""
    seen: dict[str, list[torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def keep(_: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                seen.setdefault(name, []).append(first.clone())

        return keep

    hooks = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield seen
    finally:
        for each in hooks:
            each.remove()


def first_different(stored: Stored, ids: Sequence[torch.Tensor], axes: str) -> str | None:
    """The first module whose output differs in plain transformers, for executions that keep the sequences apart."""
    found = []
    for each in ("", axes):
        with observed(stored.model) as seen:
            plain(stored.model, ids, each)
        found.append(seen)
    return next(
        (
            name
            for name, outputs in found[0].items()
            if any(not torch.equal(*pair) for pair in zip(outputs, found[1][name], strict=True))
        ),
        None,
    )


def joined(model: Any, ids: Sequence[torch.Tensor], left: bool) -> list[torch.Tensor]:
    """The logits of each sequence, of one batch with padding."""
    width = max(each.shape[1] for each in ids)
    sides = [((width - each.shape[1], 0) if left else (0, width - each.shape[1])) for each in ids]
    padded = torch.cat([nn.functional.pad(each, side) for each, side in zip(ids, sides, strict=True)])
    mask = torch.cat([nn.functional.pad(torch.ones_like(each), side) for each, side in zip(ids, sides, strict=True)])
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if left else {}
    logits = model(padded, attention_mask=mask, **positions).logits
    return [logits[row : row + 1, before : width - after] for row, (before, after) in enumerate(sides)]


def decoded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache, found = None, []
    for token in range(ids.shape[1]):
        output = model(ids[:, token : token + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, 1)


def plain(model: Any, ids: Sequence[torch.Tensor], axes: str) -> list[torch.Tensor]:
    """The logits of each sequence that plain transformers computes under these settings."""
    given = dict(each.split("=") for each in axes.split())
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with torch.no_grad(), contextlib.ExitStack() as contexts:
        contexts.callback(torch.set_num_threads, threads)
        contexts.callback(torch.set_float32_matmul_precision, precision)
        torch.set_num_threads(int(given.get("threads", 1)))
        torch.set_float32_matmul_precision(given.get("matmul", "highest"))
        if given.get("attention") == "eager":
            model.set_attn_implementation("eager")
            contexts.callback(model.set_attn_implementation, "sdpa")
        if given.get("attention") == "math":
            contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
        if given.get("mkldnn") == "no":
            contexts.enter_context(torch.backends.mkldnn.flags(enabled=False))
        if "batch" in given:
            size, left = int(given["batch"]), given.get("padding") == "left"
            groups = [ids[first : first + size] for first in range(0, len(ids), size)]
            return [each for group in groups for each in joined(model, group, left)]
        if given.get("decode"):
            return [decoded(model, each) for each in ids]
        return [model(each).logits for each in ids]


def mean_kl(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> float:
    total, count = 0.0, 0
    for one, other in zip(reference, candidate, strict=True):
        p, q = one.double().log_softmax(-1), other.double().log_softmax(-1)
        total, count = total + float((p.exp() * (p - q)).sum()), count + one.shape[0] * one.shape[1]
    return total / count


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("axes", AXES)
def test_drift_of_an_execution_equals_that_of_plain_transformers(
    stored: Stored, ids: list[torch.Tensor], axes: str
) -> None:
    if axes == "decode=yes" and stored.name == "encoder":
        pytest.skip("an encoder does not decode")
    stored.session.settings = de.RunSettings(execution=parse_execution(axes.split()))
    report = stored.session.drift()
    candidate = plain(stored.model, ids, axes)
    pairs = list(zip(stored.reference, candidate, strict=True))
    assert report.output.max_abs == pytest.approx(
        max(float((one.double() - other.double()).abs().max()) for one, other in pairs), rel=1e-6
    )
    assert report.output.kl_mean == pytest.approx(mean_kl(stored.reference, candidate), rel=1e-6, abs=1e-15)
    assert report.settings == axes
    if not axes.startswith(("batch", "decode")) and stored.name != "experts":  # an expert may get other tokens
        assert first_different_module(report.modules) == first_different(stored, ids, axes)
    assert report.sequences.done == len(LENGTHS)
