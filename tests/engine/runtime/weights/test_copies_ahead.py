"""Weights are copied to an accelerator before their block begins, and used only after their copies have ended.

Only the fake accelerator runs these: its streams make a copy when its event is waited for, and until then the values are NaN.
`test_device.py` runs them in every run of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import fake_accelerator, fake_streams
from tests.helpers.measured_on import DEVICE

import dtype_engine as de
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.weights.copies_ahead import CopiesAhead

pytestmark = pytest.mark.skipif(DEVICE != "fake", reason="DTYPE_TUI_TEST_DEVICE is not fake")
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
    "num_hidden_layers": 4,
}  # fmt: skip
INPUTS = [{"input_ids": torch.arange(length)[None]} for length in (5, 16, 3, 9)]
RULES = ("*.mlp=float8_e4m3fn", "*.self_attn=nvfp4", "*.layers.1=float16", "*norm*=float32", "*embed*=int8")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fake_streams.Stream]]:
    with fake_streams.streams(monkeypatch) as made:
        yield made


def opened(folder: Path, part: float = 1) -> de.Session:
    limit = {"fake:0": int(part * (folder / "model.safetensors").stat().st_size)} if part < 1 else {}
    return de.open(str(folder), options=de.Options(max_memory=limit, reference_bytes=0), inputs=INPUTS)


def figures(session: de.Session) -> list[str]:
    found = []
    for rules in (("*=bfloat16",), RULES):
        session.apply(de.Recipe.of(map(de.Rule.parse, rules)))
        report = session.drift()
        found += [str(report.output), str(report.modules)]
    return found


def in_memory_and_not(folder: Path, part: float, made: list[fake_streams.Stream]) -> tuple[list[str], list[str]]:
    inside = figures(opened(folder))
    assert not made
    return inside, figures(opened(folder, part))


@pytest.mark.parametrize(("stored", "part"), [("bfloat16", 0.25), ("codes", 0.9)])
def test_copying_weights_ahead_to_the_accelerator_does_not_change_the_drift(
    stored: str, part: float, make_llama: Callable[..., Path], tmp_path: Path, streams: list[fake_streams.Stream]
) -> None:
    folder = make_llama(dtype="bfloat16", **SIZES)
    if stored == "codes":
        source = opened(folder)
        source.apply(de.Recipe.of(map(de.Rule.parse, ("*.mlp=float8_e4m3fn", "*.self_attn=nvfp4"))))
        source.export(tmp_path / "codes")
        folder = tmp_path / "codes"
    inside, over = in_memory_and_not(folder, part, streams)
    assert over == inside
    assert "nan" not in over[0]
    # Seven weights in each of four layers, in two passes for each recipe, of which the first finds nothing to copy ahead.
    assert streams[0].events >= 3 * 4 * 7
    assert fake_accelerator.device.lent >= 3 * 4 * 7


def test_missing_wait_for_a_copy_to_the_accelerator_changes_the_drift(
    make_llama: Callable[..., Path], streams: list[fake_streams.Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait, the test above would fail."""
    monkeypatch.setattr(fake_streams.Stream, "waits", False)
    inside, over = in_memory_and_not(make_llama(dtype="bfloat16", **SIZES), 0.25, streams)
    assert over != inside


@pytest.fixture
def ahead(streams: list[fake_streams.Stream]) -> CopiesAhead:
    return CopiesAhead(torch.device("fake:0"))


def test_weight_whose_copy_was_not_started_or_failed_is_read_on_use(ahead: CopiesAhead) -> None:
    calls: list[str] = []

    def fails_at_first() -> str:
        calls.append("read")
        if len(calls) == 1:
            raise UserError("no memory")
        return "values"

    assert ahead.take("layer", "weight", lambda: "not begun") == "not begun"
    ahead.start("layer", {"weight": fails_at_first})
    assert ahead.take("layer", "weight", fails_at_first) == "values"
    assert calls == ["read", "read"]


def test_copy_of_a_weight_is_used_once_and_copies_of_other_blocks_are_dropped(ahead: CopiesAhead) -> None:
    def read() -> tuple[torch.Tensor, None]:
        return torch.ones(4).pin_memory().to("fake:0", non_blocking=True), None

    def other() -> Any:
        return "read again"

    for kept, found in (("layer", "copied"), ("other", "read again")):
        ahead.start("layer", {"weight": read})
        ahead.keep(kept)
        made = ahead.take("layer", "weight", other)
        assert (made if isinstance(made, str) else "copied") == found
        assert isinstance(made, str) or made[0].cpu().tolist() == [1, 1, 1, 1]
        assert ahead.take("layer", "weight", other) == "read again"
