"""Which output is compared, and which can't be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtype_engine as de
from dtype_engine.runtime.passes.outputs import main_output

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.mark.parametrize(
    "logits",
    [X.argmax(-1), torch.complex(X, X), X.to_sparse(), [X], None],
    ids=["integers", "complex", "sparse", "list", "none"],
)
def test_integer_logits_are_not_the_main_output(logits: Any) -> None:
    name, tensor = main_output({"logits": logits, "y": X})
    assert name == ("logits" if isinstance(logits, list) else "y")
    assert tensor is X


class Cuts(nn.Module):
    def __init__(self, of: slice | tuple[slice, slice], in_dict: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)
        self.of, self.in_dict = of, in_dict

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)[self.of]
        return {"logits": y} if self.in_dict else y


class Around(nn.Module):
    """A model with a module that gives nothing."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.cuts, self.head = Cuts(of, False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x) + self.cuts(x).sum()


@pytest.mark.parametrize("of", [slice(0, 0), (slice(None), slice(0, 0)), (slice(0, 0), slice(0, 0))])
def test_module_with_an_empty_output_has_zero_drift(of: Any) -> None:
    session = de.open(Around(of), inputs=X)
    session.cast("cuts", "bfloat16")
    (found,) = [each for each in session.drift().modules if each.name == "cuts"]
    assert (found.max_abs, found.nonfinite) == (0.0, 0)


@pytest.mark.parametrize("of", [slice(0, 0), (slice(None), slice(0, 0))], ids=["no rows", "no width"])
@pytest.mark.parametrize("in_dict", [False, True])
def test_empty_main_output_is_refused_in_one_sentence(of: Any, in_dict: bool) -> None:
    shape, name = ((0, 8) if isinstance(of, slice) else (4, 0)), "logits" if in_dict else "output"
    expected = f"the model's output ({name}, {shape}) has no values, so there is nothing to compare"
    session = de.open(Cuts(of, in_dict), inputs=X)
    session.cast("a", "bfloat16")
    with pytest.raises(de.UserError) as raised:
        session.drift()
    assert expected in str(raised.value)
