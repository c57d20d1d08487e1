"""The figures of drift, each from its definition. r is the reference, c the candidate, both in float64.

    mean |Δ|, max |Δ|      of Δ = c - r
    relative L2            ‖Δ‖ / ‖r‖
    SQNR                   20 log10(‖r‖ / ‖Δ‖), in dB, as torch.ao.ns computes it
    cosine                 r·c / (‖r‖ ‖c‖)
    KL                     Σ p (ln p - ln q) a position, p = softmax(r), q = softmax(c), in nats
    top-1 agreement        share of positions whose largest logit is the same class
    Δp                     q - p of the correct next token
    perplexity             exp of the mean of -ln p of the correct next token
    log ratio              mean of ln p - ln q of the correct next token: ln(PPL(c) / PPL(r))

The distribution figures are those of llama.cpp's `llama-perplexity --kl-divergence`, with the same definitions
over every scored position; a mean's standard error is s / √n.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .readings import OutputDrift

_CHUNK_ELEMENTS = 1 << 17  # float64 chunks of 1 MiB stay in the cache, which makes this five times as fast
FEWEST_FOR_PERCENTILES = 100


class OutputComparison:
    """Compares outputs sequence by sequence, in chunks, so that no second copy of the logits is needed.

    distribution: whether the last dimension holds the logits of a distribution.
    """

    def __init__(self, distribution: bool) -> None:
        self.distribution = distribution
        self.elements = 0
        self.nonfinite = 0
        self.sum_abs = self.max_abs = 0.0
        self.noise = self.energy = self.energy_candidate = self.product = 0.0
        self._kl: list[torch.Tensor] = []
        self._same_top: list[torch.Tensor] = []
        self._log_p: list[torch.Tensor] = []
        self._log_q: list[torch.Tensor] = []

    def add(self, reference: torch.Tensor, candidate: torch.Tensor, next_tokens: torch.Tensor | None = None) -> None:
        """One sequence: two outputs of the same shape; for distributions [..., classes] and next_tokens [...] (-100:
        none).
        """
        if reference.shape != candidate.shape:
            raise ValueError(
                f"reference {tuple(reference.shape)} and candidate {tuple(candidate.shape)} differ in shape"
            )
        width = reference.shape[-1] if reference.ndim else 1
        rows_r, rows_c = reference.reshape(-1, width), candidate.reshape(-1, width)
        labels = next_tokens.reshape(-1).to(reference.device) if next_tokens is not None else None
        step = max(1, _CHUNK_ELEMENTS // max(1, width))
        for start in range(0, rows_r.shape[0], step):
            r, c = rows_r[start : start + step].double(), rows_c[start : start + step].double()
            self._add_elements(r, c)
            if self.distribution:
                self._add_positions(r, c, None if labels is None else labels[start : start + step])

    def _add_elements(self, r: torch.Tensor, c: torch.Tensor) -> None:
        r, c = r.reshape(-1), c.reshape(-1)
        self.elements += r.numel()
        delta = c - r
        noise = float(torch.dot(delta, delta))
        if not math.isfinite(noise):
            # Infinities that both have (masked logits) are no drift; where only one is not finite, all figures are.
            finite = torch.isfinite(r) & torch.isfinite(c)
            same = (r == c) | (torch.isnan(r) & torch.isnan(c))
            self.nonfinite += int((~torch.isfinite(c) & ~same).sum())
            if bool((~finite & ~same).any()):
                self.sum_abs = self.max_abs = self.noise = math.inf
            r, c = r[finite], c[finite]
            delta = c - r
            noise = float(torch.dot(delta, delta))
        self.noise += noise
        self.energy += float(torch.dot(r, r))
        self.energy_candidate += float(torch.dot(c, c))
        self.product += float(torch.dot(r, c))
        absolute = delta.abs_()
        self.sum_abs += float(absolute.sum())
        self.max_abs = max(self.max_abs, float(absolute.max()) if absolute.numel() else 0.0)

    def _add_positions(self, r: torch.Tensor, c: torch.Tensor, labels: torch.Tensor | None) -> None:
        log_p, log_q = torch.log_softmax(r, -1), torch.log_softmax(c, -1)
        p, ratio = log_p.exp(), log_p - log_q
        kl = (p * ratio).sum(-1)
        if not bool(torch.isfinite(kl).all()):
            # 0 ln 0 = 0: a class that the reference rules out adds nothing, whatever the candidate says of it.
            kl = torch.where(p > 0, p * ratio, torch.zeros_like(p)).sum(-1)
        self._kl.append(kl.cpu())
        self._same_top.append((r.argmax(-1) == c.argmax(-1)).cpu())
        if labels is not None:
            scored = labels >= 0
            index = labels.clamp(min=0)[:, None]
            self._log_p.append(log_p.gather(1, index)[:, 0][scored].cpu())
            self._log_q.append(log_q.gather(1, index)[:, 0][scored].cpu())

    def result(self) -> OutputDrift:
        """The figures over everything added so far."""
        count = max(1, self.elements)
        identical = self.noise == 0.0
        norms = math.sqrt(self.energy) * math.sqrt(self.energy_candidate)
        figures: dict[str, Any] = {
            "elements": self.elements,
            "mean_abs": self.sum_abs / count,
            "max_abs": self.max_abs,
            "rel_l2": _relative(self.noise, self.energy),
            "sqnr_db": sqnr_db(self.energy, self.noise),
            "cosine": 1.0 if identical else self.product / norms if norms and math.isfinite(self.noise) else math.nan,
            "nonfinite": self.nonfinite,
        }
        if self._kl:
            kl = torch.cat(self._kl)
            same = torch.cat(self._same_top).double()
            agreement = float(same.mean())
            figures |= {
                "positions": len(kl),
                "kl_mean": float(kl.mean()),
                "kl_mean_se": _standard_error(kl),
                "kl_median": _quantile(kl, 0.5, fewest=1),
                "kl_p95": _quantile(kl, 0.95),
                "kl_p99": _quantile(kl, 0.99),
                "kl_p999": _quantile(kl, 0.999),
                "kl_max": float(kl.max()),
                "top1_agreement": agreement,
                "top1_agreement_se": math.sqrt(agreement * (1 - agreement) / (len(same) - 1))
                if len(same) > 1
                else None,
            }
        if self._log_p and sum(map(len, self._log_p)):
            log_p, log_q = torch.cat(self._log_p), torch.cat(self._log_q)
            dp = log_q.exp() - log_p.exp()
            figures |= {
                "scored_tokens": len(dp),
                "dp_mean": float(dp.mean()),
                "dp_mean_se": _standard_error(dp),
                "dp_rms": float(dp.square().mean().sqrt()),
                "dp_p1": _quantile(dp, 0.01),
                "dp_p99": _quantile(dp, 0.99),
                "perplexity_reference": _exp(-float(log_p.mean())),
                "perplexity_candidate": _exp(-float(log_q.mean())),
                "log_ratio": float((log_p - log_q).mean()),
                "log_ratio_se": _standard_error(log_p - log_q),
            }
        return OutputDrift(**figures)


def sqnr_db(energy: float, noise: float) -> float:
    """10 log10(Σr² / ΣΔ²) in dB: infinity where nothing differs, minus infinity where only noise is left."""
    if noise == 0.0:
        return math.inf
    if math.isnan(noise) or math.isinf(noise):
        return -math.inf
    if energy == 0.0:
        return -math.inf
    return 10.0 * (math.log10(energy) - math.log10(noise))


def _relative(noise: float, energy: float) -> float:
    if noise == 0.0:
        return 0.0
    return math.sqrt(noise / energy) if energy else math.inf


def _standard_error(values: torch.Tensor) -> float | None:
    return float(values.std(unbiased=True)) / math.sqrt(len(values)) if len(values) > 1 else None


def _quantile(values: torch.Tensor, q: float, fewest: int = FEWEST_FOR_PERCENTILES) -> float | None:
    """Linear between the two nearest ranks; None under `fewest` values. (torch.quantile stops at 2^24 values.)"""
    if len(values) < fewest:
        return None
    ordered = values.sort().values
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    bottom, top = float(ordered[low]), float(ordered[high])
    return bottom if low == high or bottom == top else bottom + (place - low) * (top - bottom)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
