"""How many tokens the experts of a mixture got, as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dtype_engine.core.roundings import FEWEST_TOKENS
from dtype_engine.core.text import Name, printable
from dtype_engine.core.units import plural

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """How many tokens each expert of one module got in reference runs over the inputs."""

    module: Name
    """The module that holds the experts, such as `model.layers.0.mlp.experts`."""
    tokens: tuple[int, ...]
    """The numbers of tokens, by expert. A token that is sent to two experts counts in both."""

    @property
    def few(self) -> tuple[int, ...]:
        """The experts that got fewer than 16 tokens, which say little about the tokens that they will get."""
        return tuple(index for index, count in enumerate(self.tokens) if count < FEWEST_TOKENS)

    @property
    def spread(self) -> tuple[str, str, str]:
        """The fewest, the median and the most tokens of an expert, as text."""
        return f"{min(self.tokens):,}", f"{statistics.median(self.tokens):,g}", f"{max(self.tokens):,}"


def few_words(experts: Sequence[ExpertTokens]) -> tuple[str, ...]:
    """Return a sentence for the user that names the experts which got too few tokens, or () if there are none."""
    some = [each for each in experts if each.few]
    if not some:
        return ()
    few, whole = (sum(map(len, lists)) for lists in ((each.few for each in some), (each.tokens for each in experts)))
    numbers = ", ".join(map(str, some[0].few[:_SHOWN])) + (", …" if len(some[0].few) > _SHOWN else "")
    more = f", and some of {plural(len(some) - 1, 'layer')} more" if len(some) > 1 else ""
    return (
        f"{few:,} of {plural(whole, 'expert')} got fewer than {FEWEST_TOKENS} tokens of the inputs: {numbers} of "
        f"{printable(some[0].module)}{more}; their scores say little, so give more text",
    )
