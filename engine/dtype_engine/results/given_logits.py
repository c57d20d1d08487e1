"""Outputs that stand in a file, in place of the reference or of the candidate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GivenLogits:
    """Which file has the outputs of the reference or of the candidate, and what it has of them."""

    run: Literal["reference", "candidate"]
    """Whose outputs the file has. The model of the session runs as the other of the two."""
    file: str
    form: str
    """Whose form the file has: "safetensors", "llama.cpp" or "vLLM"."""
    are_logits: bool
    """Whether the file has logits. If it has log-probabilities, no figure of the output's values is known, such as its SQNR."""
    kl_is_lower_bound: bool
    """Whether the file has the likeliest tokens of each position alone, so that every KL divergence is at least as large as the
    figure says. Figures of predictions, such as the same top-1 and the perplexity, are exact.
    """

    def __str__(self) -> str:
        what = "logits" if self.are_logits else "log-probabilities"
        if self.kl_is_lower_bound:
            what += " of the likeliest tokens alone, so the KL is at least this large"
        return f"{self.run} from {self.file} ({self.form}: {what})"
