"""Finds modules in a mixture of experts whose output rows belong to other tokens than in the reference.

A router sends each token to a few experts, and an expert's input has one row for each of its tokens. If rounding sends a token to
another expert, later rows of that input shift to other tokens, so comparing elements is meaningless. Outputs with one row for every
token, such as the outputs of routers and of the module that contains the experts, are always compared.
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
"""Keys of model configurations that give the number of experts per token."""
_BIASED = ("n_group", "e_score_correction_bias", "use_expert_bias", "moe_router_enable_expert_bias")
"""Names in model configurations of settings that affect which experts a router chooses, so that the scores alone do not decide."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What a model's configuration says about its routing: how many experts there are, and how many a token is routed to."""

    experts: frozenset[int]
    """All numbers of experts that the configuration states. A module whose outputs have one of these numbers of scores may be a
    router.
    """
    chosen: int | None
    """The number of experts to which a token is routed, if these are the experts with the largest scores. None if the number is
    unknown or other settings also affect the choice.
    """

    @classmethod
    def of(cls, model: LiveModel) -> Routing | None:
        """Return the routing of a model, or None if the configuration does not mention two or more experts."""
        config = getattr(model.module, "config", None)
        described = text_config(config).to_dict() if hasattr(config, "to_dict") else {}
        counts = [value for name, value in described.items() if "experts" in name and type(value) is int and value > 1]
        if not counts:
            return None
        chosen = next((described[name] for name in _CHOSEN if type(described.get(name)) is int), None)
        return cls(frozenset(counts), None if any(described.get(name) for name in _BIASED) else chosen)


class RoutingComparer:
    """Compares the experts that a candidate's routers choose with the reference's choices while the pass runs."""

    def __init__(self, routing: Routing | None, choices: Mapping[tuple[str, int], torch.Tensor]) -> None:
        """Prepare for one pass. choices: the experts that the reference's routers chose, keyed by (module, call)."""
        self._routing = routing
        self._choices = choices
        self._changed: dict[str, int] = {}

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        """Receive the indexes of the experts that a router chose for each token, and record the router if the reference chose other
        experts.
        """
        kept = self._choices.get((module, call))
        if kept is not None and not torch.equal(kept, chosen):
            self.mark(module, len(chosen.reshape(-1, chosen.shape[-1])))

    def take_scores(self, module: str, call: int, reference: torch.Tensor, candidate: torch.Tensor) -> None:
        """Receive the scores [..., experts] of a router that returns no choice, but only scores.

        For each token, the experts with the largest scores are its choice. If they, or their order, differ from those of the
        reference for any token, the router is recorded.
        """
        width = candidate.shape[-1] if candidate.ndim else 0
        if self._routing is None or (module, call) in self._choices or not _ROUTER.search(module):
            return
        if width in self._routing.experts and reference.shape == candidate.shape:
            count = min(width, self._routing.chosen or width)
            orders = [scores.float().argsort(-1, descending=True)[..., :count] for scores in (reference, candidate)]
            if not torch.equal(*orders):
                self.mark(module, candidate.numel() // width)

    def mark(self, module: str, tokens: int) -> None:
        """Record that a router sent at least one token to another expert than the reference did. tokens: the number of all tokens
        in this call.
        """
        self._changed[module.rpartition(".")[0]] = tokens

    def rerouted_by(self, module: str) -> int:
        """Return the number of all tokens in a router's call if the router sent at least one of them to another expert than in the
        reference. Otherwise, return 0.
        """
        return self._changed.get(module.rpartition(".")[0], 0) if _ROUTER.search(module) else 0

    def is_shifted(self, module: str, output: torch.Tensor) -> bool:
        """Return whether an output may have rows of other tokens than in the reference, because a router's choice has changed."""
        for block, tokens in self._changed.items():
            if module.startswith(f"{block}." if block else "") and not _ROUTER.search(module):
                inside = module[len(block) :].split(".")[:-1]
                rows = output.numel() // max(1, output.shape[-1]) if output.ndim else 1
                if "experts" in inside or rows != tokens:
                    return True
        return False


def is_router(module: str) -> bool:
    """Return whether a module has a name that routers usually have."""
    return _ROUTER.search(module) is not None
