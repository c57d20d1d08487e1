"""Finds modules in a mixture of experts whose output rows belong to other tokens than in the reference run.

A router sends each token to a few experts, and an expert's input has one row for each of its tokens. If rounding sends a token to a
different expert, later rows of that input shift to other tokens, so comparing elements is meaningless. Outputs with one row for
every token, such as those of routers and of the module that contains the experts, are always compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dtype_engine.checkpoint.token_reads import CHOSEN
from dtype_engine.runtime.inputs.preprocessing import text_config
from dtype_engine.runtime.model.live import LiveModel

_ROUTER = re.compile(r"(^|[._])(gate|router|wg)$")
_BIASED = ("n_group", "e_score_correction_bias", "use_expert_bias", "moe_router_enable_expert_bias")
"""Keys in the configurations of models for settings, other than the scores, that affect which experts a router chooses."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What a model's configuration says about its mixture of experts."""

    experts: frozenset[int]
    """All numbers of experts in the configuration. A module that outputs this many values for each token may be a router."""
    chosen: int | None
    """The number of experts to which a token is sent. None if unknown, or if a router does not choose by the largest scores."""

    @classmethod
    def of(cls, model: LiveModel) -> Routing | None:
        """Return what a model's configuration says about its experts, or None if it does not mention two or more."""
        config = getattr(model.module, "config", None)
        described = text_config(config).to_dict() if hasattr(config, "to_dict") else {}
        counts = [value for name, value in described.items() if "experts" in name and type(value) is int and value > 1]
        if not counts:
            return None
        chosen = next((described[name] for name in CHOSEN if type(described.get(name)) is int), None)
        return cls(frozenset(counts), None if any(described.get(name) for name in _BIASED) else chosen)


@dataclass(slots=True)
class RoutingComparer:
    """Compares, during a candidate's pass, the experts that its routers choose with those chosen in the reference run."""

    routing: Routing | None
    choices: Mapping[tuple[str, int], torch.Tensor]
    """The experts chosen in the reference run, by (router's name, number of its call)."""
    _changed: dict[str, int] = field(default_factory=dict)

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        """Receive the experts that a router chose for each token, and record the router if the reference run chose others."""
        kept = self.choices.get((module, call))
        if kept is not None and not torch.equal(kept, chosen):
            self.mark(module, len(chosen.reshape(-1, chosen.shape[-1])))

    def take_scores(self, module: str, call: int, reference: torch.Tensor, candidate: torch.Tensor) -> None:
        """Receive the values [..., experts] of a router that returns one score for each expert, in both runs. If the experts with
        the largest scores, or their order, differ for any token, the router is recorded.
        """
        width = candidate.shape[-1] if candidate.ndim else 0
        if self.routing is None or (module, call) in self.choices or not _ROUTER.search(module):
            return
        if width in self.routing.experts and reference.shape == candidate.shape:
            count = min(width, self.routing.chosen or width)
            orders = [scores.float().argsort(-1, descending=True)[..., :count] for scores in (reference, candidate)]
            if not torch.equal(*orders):
                self.mark(module, candidate.numel() // width)

    def mark(self, module: str, tokens: int) -> None:
        """Record that a router chose other experts for at least one token. tokens: the number of all tokens in this call."""
        self._changed[module.rpartition(".")[0]] = tokens

    def rerouted_by(self, module: str) -> int:
        """Return the number of tokens in a call of the router `module` that chose other experts for at least one, otherwise 0."""
        return self._changed.get(module.rpartition(".")[0], 0) if _ROUTER.search(module) else 0

    def is_shifted(self, module: str, output: torch.Tensor) -> bool:
        """Return whether the rows of an output may belong to other tokens than in the reference run."""
        for block, tokens in self._changed.items():
            if module.startswith(f"{block}." if block else "") and not _ROUTER.search(module):
                inside = module[len(block) :].split(".")[:-1]
                rows = output.numel() // max(1, output.shape[-1]) if output.ndim else 1
                if "experts" in inside or rows != tokens:
                    return True
        return False


def is_router(module: str) -> bool:
    """Return whether a module's name ends as the names of routers usually do, for example in `gate`."""
    return _ROUTER.search(module) is not None
