"""A scan's autograd graph holds no copies of weights if these take too much memory, and the scores stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.runtime.scan.test_scan import Odd
from tests.helpers import architectures

import dtype_engine as de
from dtype_engine.runtime.modes.reference import copied_bytes
from dtype_engine.runtime.scan.scan import Scan

KINDS = ("float16", "float8_e4m3fn", "int8")


def scores(session: Any, budget: int) -> dict[tuple[str, str], float]:
    return Scan(session.model, session.inputs, KINDS, draws=3, budget=budget).run().scores()


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "mixtral", "torch_convolutional", "vit", "whisper", "mamba"])
def test_scores_do_not_depend_on_what_the_graph_holds(name: str) -> None:
    module, inputs = architectures.make(name)
    session = de.open(module.bfloat16(), inputs=inputs)
    assert copied_bytes(session.model) > 1
    assert scores(session, 1) == scores(session, 1 << 30)


def test_views_of_weights_are_made_again() -> None:
    torch.manual_seed(0)
    session = de.open(Odd().half(), inputs=[torch.randn(3, 8), torch.randn(5, 8)])
    assert scores(session, 1) == scores(session, 1 << 30)
