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
    perplexity correlation of -ln p and -ln q over the scored tokens

The distribution figures are all those of llama.cpp's `llama-perplexity --kl-divergence` (tools/perplexity), with the same
definitions; a mean's standard error is s / √n, and that of a function of means is carried on to first order: exp(m) has
exp(m) times that of m, RMS Δp that of the mean square over 2 RMS, and PPL(c) - PPL(r) takes their covariance off. What differs:
KL and top-1 are over all positions, also the last, which has no next token; all of p counts, where llama.cpp leaves out
p < e^-16; and everything is float64, where llama.cpp keeps the reference in 16 bits a value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from dtype_engine.results.drift import OutputDrift

_CHUNK_ELEMENTS = 1 << 17  # float64 chunks of 1 MiB stay in the cache, which makes this five times as fast
FEWEST_FOR_PERCENTILES = 100
_KL_PERCENTILES = {
    "p999": 0.999, "p99": 0.99, "p95": 0.95, "p90": 0.9, "p10": 0.1, "p5": 0.05, "p1": 0.01, "p01": 0.001,
}  # fmt: skip
_DP_PERCENTILES = {**_KL_PERCENTILES, "p75": 0.75, "p25": 0.25}


class OutputComparison:
    """Compares outputs sequence by sequence, in chunks, so that no second copy of the logits is needed.

    The figures do not depend on the order in which sequences are added: sums are taken in the order of their numbers.

    distribution: whether the last dimension holds the logits of a distribution.
    """

    def __init__(self, distribution: bool) -> None:
        self.distribution = distribution
        self.sequences: dict[int, SequenceComparison] = {}
        """What was added, by its number."""

    def add(
        self,
        reference: torch.Tensor,
        candidate: torch.Tensor,
        next_tokens: torch.Tensor | None = None,
        number: int | None = None,
    ) -> None:
        """One sequence: two outputs of the same shape; for distributions [..., classes] and next_tokens [...] (-100:
        none). number: its place among all; by default after those that were added.
        """
        if reference.shape != candidate.shape:
            raise ValueError(
                f"reference {tuple(reference.shape)} and candidate {tuple(candidate.shape)} differ in shape"
            )
        width = reference.shape[-1] if reference.ndim else 1
        rows_r, rows_c = reference.reshape(-1, width), candidate.reshape(-1, width)
        labels = next_tokens.reshape(-1).to(reference.device) if next_tokens is not None else None
        step = max(1, _CHUNK_ELEMENTS // max(1, width))
        # One tensor for each result of all positions: small ones kept from every chunk would lie between the chunks' freed
        # temporaries and keep the allocator from using those again, gigabytes of them for a large vocabulary.
        positions = _Positions.of(rows_r.shape[0], labels) if self.distribution else None
        sequence = SequenceComparison(rows_r.shape[0], positions)
        for start in range(0, rows_r.shape[0], step):
            r, c = _in_float64(rows_r[start : start + step], rows_c[start : start + step])
            sequence.add(r, c)
            if positions is not None:
                positions.compare(slice(start, start + step), r, c)
        if positions is not None:
            positions.keep_scored()
        self.sequences[len(self.sequences) if number is None else number] = sequence

    def result(self) -> OutputDrift:
        """The figures over everything added so far."""
        sequences = [sequence for _, sequence in sorted(self.sequences.items())]
        sums = ElementSums()
        for sequence in sequences:
            for chunk in sequence.chunks:
                sums.add(chunk)
        count = max(1, sums.elements)
        identical = sums.noise == 0.0
        norms = math.sqrt(sums.energy) * math.sqrt(sums.energy_candidate)
        figures: dict[str, Any] = {
            "elements": sums.elements,
            "mean_abs": sums.sum_abs / count,
            "max_abs": sums.max_abs,
            "rel_l2": _relative(sums.noise, sums.energy),
            "sqnr_db": sqnr_db(sums.energy, sums.noise),
            "cosine": 1.0 if identical else sums.product / norms if norms and math.isfinite(sums.noise) else math.nan,
            "nonfinite": sums.nonfinite,
            "nonfinite_reference": sums.nonfinite_reference,
        }
        of_positions = [sequence.positions for sequence in sequences if sequence.positions is not None]
        if of_positions:
            kl = torch.cat([positions.kl for positions in of_positions])
            same = torch.cat([positions.same_top for positions in of_positions]).double()
            agreement = float(same.mean())
            figures |= {
                "positions": len(kl),
                "kl_mean": float(kl.mean()),
                "kl_mean_se": _standard_error(kl),
                **_spread("kl", kl, _KL_PERCENTILES),
                "top1_agreement": agreement,
                "top1_agreement_se": math.sqrt(agreement * (1 - agreement) / (len(same) - 1))
                if len(same) > 1
                else None,
            }
        scored = [positions for positions in of_positions if positions.labels is not None]
        if sum(len(positions.log_p) for positions in scored):
            log_p = torch.cat([positions.log_p for positions in scored])
            log_q = torch.cat([positions.log_q for positions in scored])
            dp = log_q.exp() - log_p.exp()
            figures |= {
                "scored_tokens": len(dp),
                "dp_mean": float(dp.mean()),
                "dp_mean_se": _standard_error(dp),
                **_root_mean_square(dp),
                **_spread("dp", dp, _DP_PERCENTILES),
                "log_ratio": float((log_p - log_q).mean()),
                "log_ratio_se": _standard_error(log_p - log_q),
                **_perplexities(log_p, log_q),
            }
        if sums.nonfinite_reference and not sums.energy:
            # Nothing was left to compare: no drift, but no agreement either.
            figures |= {
                "mean_abs": math.nan,
                "max_abs": math.nan,
                "rel_l2": math.nan,
                "sqnr_db": math.nan,
                "cosine": math.nan,
            }
        return OutputDrift(**figures)


@dataclass(slots=True)
class ElementSums:
    """Sums over elements of Δ = c - r: |Δ|, the largest |Δ|, Δ², r², c², rc, and counts of what is not finite."""

    elements: int = 0
    nonfinite: int = 0
    nonfinite_reference: int = 0
    sum_abs: float = 0.0
    max_abs: float = 0.0
    noise: float = 0.0
    energy: float = 0.0
    energy_candidate: float = 0.0
    product: float = 0.0

    def add(self, other: ElementSums) -> None:
        """Take in the sums of further elements."""
        self.elements += other.elements
        self.nonfinite += other.nonfinite
        self.nonfinite_reference += other.nonfinite_reference
        self.sum_abs += other.sum_abs
        self.max_abs = max(self.max_abs, other.max_abs)
        self.noise += other.noise
        self.energy += other.energy
        self.energy_candidate += other.energy_candidate
        self.product += other.product


def _element_sums(r: torch.Tensor, c: torch.Tensor) -> ElementSums:
    """Of one chunk, in float64; `c` is `r` where they are equal."""
    equal = c is r
    r, c = r.reshape(-1), c.reshape(-1)
    sums = ElementSums(elements=r.numel())
    if equal and math.isfinite(energy := float(torch.dot(r, r))):
        sums.energy = sums.energy_candidate = sums.product = energy
        return sums
    delta = c - r
    noise = float(torch.dot(delta, delta))
    if not math.isfinite(noise):
        # Infinities that both have (masked logits) are no drift; where only one is not finite, all figures are.
        finite = torch.isfinite(r) & torch.isfinite(c)
        same = (r == c) | (torch.isnan(r) & torch.isnan(c))
        sums.nonfinite = int((~torch.isfinite(c) & ~same).sum())
        sums.nonfinite_reference = int((torch.isnan(r) | torch.isposinf(r)).sum())
        if bool((~finite & ~same).any()):
            sums.sum_abs = sums.max_abs = sums.noise = math.inf
        r, c = r[finite], c[finite]
        delta = c - r
        noise = float(torch.dot(delta, delta))
    sums.noise += noise
    sums.energy = float(torch.dot(r, r))
    sums.energy_candidate = float(torch.dot(c, c))
    sums.product = float(torch.dot(r, c))
    absolute = delta.abs_()
    sums.sum_abs += float(absolute.sum())
    sums.max_abs = max(sums.max_abs, float(absolute.max()) if absolute.numel() else 0.0)
    return sums


class SequenceComparison:
    """What one sequence gave: the sums of its chunks, and the figures of its positions where they have distributions.

    rows: how many positions it has. sums: over all its chunks; those over several sequences are taken chunk by chunk.
    """

    def __init__(self, rows: int, positions: _Positions | None) -> None:
        self.rows = rows
        self.positions = positions
        self.chunks: list[ElementSums] = []
        self.sums = ElementSums()

    def add(self, r: torch.Tensor, c: torch.Tensor) -> None:
        """Take in a chunk, in float64; `c` is `r` where they are equal."""
        chunk = _element_sums(r, c)
        self.chunks.append(chunk)
        self.sums.add(chunk)


@dataclass(slots=True)
class _Positions:
    """The figures of each position of one sequence: KL, whether the likeliest class is the same, ln p and ln q of the label."""

    labels: torch.Tensor | None
    kl: torch.Tensor
    same_top: torch.Tensor
    log_p: torch.Tensor
    log_q: torch.Tensor

    @classmethod
    def of(cls, count: int, labels: torch.Tensor | None) -> _Positions:
        kl, log_p, log_q = (torch.zeros(count, dtype=torch.float64) for _ in range(3))
        return cls(labels, kl, torch.zeros(count, dtype=torch.bool), log_p, log_q)

    def keep_scored(self) -> None:
        """Once all rows are filled in: keep ln p and ln q of positions with a label alone."""
        if self.labels is not None:
            scored = (self.labels >= 0).cpu()
            self.log_p, self.log_q = self.log_p[scored], self.log_q[scored]

    def compare(self, rows: slice, r: torch.Tensor, c: torch.Tensor) -> None:
        """Fill in some rows from their logits, float64 [rows, classes]."""
        log_p = torch.log_softmax(r, -1)
        if c is r:
            log_q = log_p
            self.same_top[rows] = True  # and the KL of zero is there already
        else:
            log_q = torch.log_softmax(c, -1)
            p, ratio = log_p.exp(), log_p - log_q
            kl = (p * ratio).sum(-1)
            if not bool(torch.isfinite(kl).all()):
                # 0 ln 0 = 0: a class that the reference rules out adds nothing, whatever the candidate says of it.
                kl = torch.where(p > 0, p * ratio, torch.zeros_like(p)).sum(-1)
            self.kl[rows] = kl.cpu()
            self.same_top[rows] = _likeliest(r) == _likeliest(c)
        if self.labels is not None:
            index = self.labels[rows].clamp(min=0)[:, None]
            self.log_p[rows] = log_p.gather(1, index)[:, 0].cpu()
            self.log_q[rows] = log_q.gather(1, index)[:, 0].cpu()


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest of each row, on the CPU: numpy's argmax there takes a sixth of the time of torch's."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1).cpu()


def _in_float64(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float64; the very same tensor twice where they are equal, which spares most of the arithmetic."""
    r = reference.double()
    equal = reference.dtype == candidate.dtype and torch.equal(reference, candidate)
    return r, r if equal else candidate.double()


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
    rank = q * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    bottom, top = float(ordered[low]), float(ordered[high])
    return bottom if low == high or bottom == top else bottom + (rank - low) * (top - bottom)


def _spread(prefix: str, values: torch.Tensor, percentiles: dict[str, float]) -> dict[str, float | None]:
    """Smallest, median, largest, and the percentiles asked for by the end of their field's name."""
    return {
        f"{prefix}_min": float(values.min()),
        f"{prefix}_median": _quantile(values, 0.5, fewest=1),
        f"{prefix}_max": float(values.max()),
        **{f"{prefix}_{name}": _quantile(values, q) for name, q in percentiles.items()},
    }


def _root_mean_square(dp: torch.Tensor) -> dict[str, float | None]:
    squares = dp.square()
    rms = float(squares.mean().sqrt())
    error = _standard_error(squares)
    return {"dp_rms": rms, "dp_rms_se": None if error is None else 0.5 * error / rms if rms else 0.0}


def _perplexities(log_p: torch.Tensor, log_q: torch.Tensor) -> dict[str, float | None]:
    """Perplexity of both, their ratio and difference, with standard errors; ln p and ln q of the right tokens [tokens]."""
    reference, candidate = _exp(-float(log_p.mean())), _exp(-float(log_q.mean()))
    ratio = _exp(float((log_p - log_q).mean()))
    figures: dict[str, float | None] = {
        "perplexity_reference": reference,
        "perplexity_candidate": candidate,
        "perplexity_ratio": ratio,
        "perplexity_difference": candidate - reference,
    }
    se_p, se_q, se_ratio = (_standard_error(values) for values in (log_p, log_q, log_p - log_q))
    if se_p is None or se_q is None or se_ratio is None:
        return figures
    # Of the two means: the covariance of single tokens over their number.
    covariance = float(((log_p - log_p.mean()) * (log_q - log_q.mean())).sum()) / (len(log_p) - 1) / len(log_p)
    variance = (candidate * se_q) ** 2 + (reference * se_p) ** 2 - 2 * candidate * reference * covariance
    return figures | {
        "perplexity_reference_se": reference * se_p,
        "perplexity_candidate_se": candidate * se_q,
        "perplexity_correlation": covariance / (se_p * se_q) if se_p and se_q else None,
        "perplexity_ratio_se": ratio * se_ratio,
        "perplexity_difference_se": math.sqrt(max(0.0, variance)) if not math.isnan(variance) else math.nan,
    }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
