"""Finds the modules of a mixture of experts that were given rows of other tokens than in the reference.

A router sends each token to a few experts, whose modules get the rows of their tokens one after another. Where rounding sends a
token to another expert, the rows that follow belong to other tokens than in the reference, so that comparing elements says nothing.
Outputs with one row for each token, such as those of routers and of the module that holds the experts, are always compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dtype_engine.runtime.inputs.preprocessing import text_config
from dtype_engine.runtime.model.live import LiveModel

_ROUTER = re.compile(r"(^|[._])(gate|router|wg)$")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts")
"""Names that configurations have for the number of experts of a token."""
_BIASED = ("n_group", "e_score_correction_bias", "use_expert_bias", "moe_router_enable_expert_bias")
"""Where a configuration has one of these, more than the scores themselves decides which experts are chosen."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What a model's configuration says of its experts."""

    experts: frozenset[int]
    """Numbers of experts, of which a router's scores have one each."""
    chosen: int | None
    """How many of the largest scores decide; None where that is not known, or something else decides too."""

    @classmethod
    def of(cls, model: LiveModel) -> Routing | None:
        """None where the configuration does not speak of several experts."""
        config = getattr(model.module, "config", None)
        described = text_config(config).to_dict() if hasattr(config, "to_dict") else {}
        counts = [value for name, value in described.items() if "experts" in name and type(value) is int and value > 1]
        if not counts:
            return None
        chosen = next((described[name] for name in _CHOSEN if type(described.get(name)) is int), None)
        return cls(frozenset(counts), None if any(described.get(name) for name in _BIASED) else chosen)


class RoutingComparer:
    """Compares the choices of a candidate's routers with the reference's, as its pass goes by."""

    def __init__(self, routing: Routing | None, choices: Mapping[tuple[str, int], torch.Tensor]) -> None:
        """choices: the integers that the reference's routers returned, by (module, call)."""
        self._routing = routing
        self._choices = choices
        self._changed: dict[str, int] = {}

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        """Compare the integers that a router returned: the experts of each token."""
        kept = self._choices.get((module, call))
        if kept is not None and not torch.equal(kept, chosen):
            self.mark(module, len(chosen.reshape(-1, chosen.shape[-1])))

    def take_scores(self, module: str, call: int, reference: torch.Tensor, candidate: torch.Tensor) -> None:
        """Compare the scores [..., experts] of a router that returns nothing else."""
        width = candidate.shape[-1] if candidate.ndim else 0
        if self._routing is None or (module, call) in self._choices or not _ROUTER.search(module):
            return
        if width in self._routing.experts and reference.shape == candidate.shape:
            count = min(width, self._routing.chosen or width)
            orders = [scores.float().argsort(-1, descending=True)[..., :count] for scores in (reference, candidate)]
            if not torch.equal(*orders):
                self.mark(module, candidate.numel() // width)

    def mark(self, module: str, tokens: int) -> None:
        """Note that a router chose other experts for one of its `tokens`."""
        self._changed[module.rpartition(".")[0]] = tokens

    def rerouted_by(self, module: str) -> int:
        """How many tokens a router had that chose other experts for one of them; 0 for any other module."""
        return self._changed.get(module.rpartition(".")[0], 0) if _ROUTER.search(module) else 0

    def is_shifted(self, module: str, output: torch.Tensor) -> bool:
        """Whether rows of an output may belong to other tokens than in the reference."""
        for block, tokens in self._changed.items():
            if module.startswith(f"{block}." if block else "") and not _ROUTER.search(module):
                inside = module[len(block) :].split(".")[:-1]
                rows = output.numel() // max(1, output.shape[-1]) if output.ndim else 1
                if "experts" in inside or rows != tokens:
                    return True
        return False

    def restart(self) -> None:
        """Forget what was compared."""
        self._changed.clear()


def is_router(module: str) -> bool:
    """Whether a module's name is one that routers have."""
    return _ROUTER.search(module) is not None
