"""The drift metrics, each computed from its definition. r is the reference, c the candidate.

    mean |Δ|, max |Δ|      of Δ = c - r
    relative L2            ‖Δ‖ / ‖r‖
    SQNR                   20 log10(‖r‖ / ‖Δ‖), in dB, as torch.ao.ns computes it
    cosine                 r·c / (‖r‖ ‖c‖)
    KL                     Σ p (ln p - ln q) at each position, p = softmax(r), q = softmax(c), in nats
    acceptance             Σ min(p, q) at each position
    top-1 agreement        share of positions whose largest logit belongs to the same class
    Δp                     q - p of the correct next token
    perplexity             exp of the mean of -ln p of the correct next token
    log ratio              mean of ln p - ln q of the correct next token: ln(PPL(c) / PPL(r))
    perplexity correlation of -ln p and -ln q over the scored tokens
    recall at 10           share of an input's ten nearest others, by cosine of c, that are among its ten nearest by cosine of r

The distribution metrics are those of llama.cpp's `llama-perplexity --kl-divergence` (tools/perplexity), with the same definitions.
The standard error of a mean is s / √n. The standard error of a function of means is its first-order propagation: for exp(m), it is
exp(m) times that of m; for RMS Δp, that of the mean square divided by 2 RMS; for PPL(c) - PPL(r), it includes their covariance.

There are three differences from llama.cpp. KL and top-1 cover all positions, including the last, which has no next token. KL covers
all of p, while llama.cpp omits p < e^-16. No value is rounded before the comparison, while llama.cpp stores each value of the
reference in 16 bits. All arithmetic is in float64.

If some values of the reference are NaN or infinite, the metrics of Δ cover the other values, and the distribution metrics are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtype_engine.results.drift import OutputDrift
from dtype_engine.runtime.numerics.compare import neighbors
from dtype_engine.runtime.numerics.compare.element_sums import ElementSums
from dtype_engine.runtime.numerics.compare.groups import grouped, positions_in_sequences
from dtype_engine.runtime.numerics.compare.pictures import PictureSums, picture_sums
from dtype_engine.runtime.numerics.compare.sequence_figures import SequenceFigures, sequence_figures

FEWEST_FOR_PERCENTILES = 100
_KL_PERCENTILES = {
    "p999": 0.999, "p99": 0.99, "p95": 0.95, "p90": 0.9, "p10": 0.1, "p5": 0.05, "p1": 0.01, "p01": 0.001,
}  # fmt: skip
_DP_PERCENTILES = {**_KL_PERCENTILES, "p75": 0.75, "p25": 0.25}


@dataclass
class OutputMetrics:
    """Compares the main outputs of the reference and the candidate, one sequence at a time, and computes metrics over all
    sequences. The sequences may be added in any order: sums are always computed in the order of the sequence numbers.
    """

    classes_dim: int | None
    """The output dimension along which logits lie, or None if the output is no distribution."""
    picture_range: tuple[float, float] | None = None
    """If the output is a picture, the pixel values of black and of full brightness."""
    acceptance: bool = False
    """Whether to compute the acceptance of distributions."""
    vectors_of: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None
    """Makes the vectors of inputs, float32 [inputs, width], of an output and of its mask of kept positions. None if the model has
    none.
    """
    sequences: dict[int, SequenceFigures] = field(default_factory=dict)
    """The comparison of the two outputs on each sequence, keyed by sequence number."""
    _pictures: dict[int, PictureSums] = field(default_factory=dict)

    def add(
        self,
        reference: torch.Tensor,
        candidate: torch.Tensor,
        next_tokens: torch.Tensor | None = None,
        number: int | None = None,
        kept: torch.Tensor | None = None,
    ) -> None:
        """Compare the reference's and the candidate's output for one sequence. Raises ValueError if their shapes differ.

        next_tokens: the id of the correct next token at each position, int64 [batch, positions], or -100 if there is none. number:
        the number of this sequence; if None, the number of sequences added before. kept: a mask that is True at the positions to
        compare, bool [batch, positions]; if None, all are compared.
        """
        if reference.shape != candidate.shape:
            raise ValueError(
                f"reference {tuple(reference.shape)} and candidate {tuple(candidate.shape)} differ in shape"
            )
        classes_dim = None if self.classes_dim is None else self.classes_dim % reference.ndim
        labels = next_tokens if classes_dim == reference.ndim - 1 else None
        if labels is not None:
            labels = labels.reshape(-1) if kept is None else labels[kept.to(labels.device)]
        rows, others = (compared_rows(output, classes_dim, kept) for output in (reference, candidate))
        figures = sequence_figures(rows, others, classes_dim is not None, labels, self.acceptance)
        if kept is not None:
            figures.left_out = kept.numel() - int(kept.sum())
            figures.sums.elements = reference.numel() // kept.numel() * int(kept.sum())
        if figures.positions is not None and classes_dim == 2 == reference.ndim - 1:
            figures.positions.position = positions_in_sequences(reference.shape[:2], kept)
        place = len(self.sequences) if number is None else number
        if self.vectors_of is not None and place * len(reference) < neighbors.MOST:
            figures.vectors = self.vectors_of(reference, kept), self.vectors_of(candidate, kept)
        self.sequences[place] = figures
        if self.picture_range is not None and reference.ndim >= 4:
            self._pictures[place] = picture_sums(reference, candidate, *self.picture_range)

    @property
    def inputs(self) -> int:
        """The number of inputs whose neighbors are compared."""
        pairs = [each.vectors for each in self.sequences.values() if each.vectors is not None]
        return min(neighbors.MOST, sum(len(reference) for reference, _ in pairs))

    def result(self, with_neighbors: bool = True) -> OutputDrift:
        """Return the metrics over all sequences that were added. with_neighbors: whether to compare neighbors, for which the time
        grows with the square of the number of inputs.
        """
        sequences = [sequence for _, sequence in sorted(self.sequences.items())]
        sums = ElementSums()
        for sequence in sequences:
            sums.add(sequence.sums)
        figures: dict[str, Any] = _of_elements(sums)
        if self._pictures:
            pictures = PictureSums()
            for _, each in sorted(self._pictures.items()):
                pictures.add(each)
            figures |= {"psnr_db": pictures.psnr_db, "ssim": pictures.ssim}
        positions = [sequence.positions for sequence in sequences if sequence.positions is not None]
        if positions:
            kl = torch.cat([each.kl for each in positions])
            same = torch.cat([each.same_top for each in positions]).double()
            log_p, log_q = (torch.cat([getattr(each, name) for each in positions]) for name in ("log_p", "log_q"))
            if sums.nonfinite_reference:
                kl, same, log_p, log_q = (torch.full_like(each, math.nan) for each in (kl, same, log_p, log_q))
            figures |= _of_distributions(kl, same)
            accepted = [each.accepted for each in positions if each.accepted is not None]
            if len(accepted) == len(positions):
                share = torch.cat(accepted)
                share = torch.full_like(share, math.nan) if sums.nonfinite_reference else share
                figures |= {"acceptance": float(share.mean()), "acceptance_se": _standard_error(share)}
            figures |= _of_next_tokens(log_p, log_q) if len(log_p) else {}
            if not sums.nonfinite_reference:
                figures["groups"] = grouped(positions)
        if with_neighbors and self.inputs >= neighbors.FEWEST:
            figures |= _of_neighbors([sequence.vectors for sequence in sequences if sequence.vectors is not None])
        return OutputDrift(**OutputDrift.fields_of(figures))


def _of_neighbors(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float | None]:
    """Return the recall at 10 with its standard error over inputs. pairs: the vectors of both sides, of each sequence."""
    both = (torch.cat(vectors)[: neighbors.MOST] for vectors in zip(*pairs, strict=True))
    share = neighbors.recall(*both)
    return {"recall_at_10": float(share.mean()), "recall_at_10_se": _standard_error(share)}


def _of_elements(sums: ElementSums) -> dict[str, float | None]:
    """Return the metrics of Δ by name. The metrics are NaN if there is nothing to compare."""
    names = ("nonfinite", "nonfinite_reference", "nonfinite_candidate")
    counts = {name: getattr(sums, name) for name in names}
    if sums.nonfinite_reference and not sums.energy:
        undefined = dict.fromkeys(("mean_abs", "max_abs", "rel_l2", "sqnr_db", "cosine"), math.nan)
        return {"elements": sums.elements, **undefined, **counts}
    norms = math.sqrt(sums.energy) * math.sqrt(sums.energy_candidate)
    cosine = sums.product / norms if norms and math.isfinite(sums.noise) else math.nan
    return {
        "elements": sums.elements,
        "mean_abs": sums.sum_abs / max(1, sums.elements - sums.nonfinite_reference),
        "max_abs": sums.max_abs,
        "rel_l2": relative_l2(sums.energy, sums.noise),
        "sqnr_db": sqnr_db(sums.energy, sums.noise),
        "cosine": 1.0 if sums.noise == 0.0 else cosine,
        **counts,
    }


def _of_distributions(kl: torch.Tensor, same: torch.Tensor) -> dict[str, float | None]:
    """Return the metrics of distributions by name. kl, same: the divergence at each position, and 1 where both outputs have the
    same most likely class, otherwise 0; float64 [positions].
    """
    agreement = float(same.mean())
    return {
        "positions": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_mean_se": _standard_error(kl),
        **_spread("kl", kl, _KL_PERCENTILES),
        "top1_agreement": agreement,
        "top1_agreement_se": math.sqrt(agreement * (1 - agreement) / (len(same) - 1)) if len(same) > 1 else None,
    }


def _of_next_tokens(log_p: torch.Tensor, log_q: torch.Tensor) -> dict[str, float | None]:
    """Return the metrics of the correct next tokens by name. log_p, log_q: their log-probabilities in reference and candidate."""
    dp = log_q.exp() - log_p.exp()
    squares = dp.square()
    rms, error = float(squares.mean().sqrt()), _standard_error(squares)
    return {
        "scored_tokens": len(dp),
        "dp_mean": float(dp.mean()),
        "dp_mean_se": _standard_error(dp),
        "dp_rms": rms,
        "dp_rms_se": None if error is None else 0.5 * error / rms if rms else 0.0,
        **_spread("dp", dp, _DP_PERCENTILES),
        "log_ratio": float((log_p - log_q).mean()),
        "log_ratio_se": _standard_error(log_p - log_q),
        **_perplexities(log_p, log_q),
    }


def compared_rows(output: torch.Tensor, classes_dim: int | None, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Return an output of any shape as a matrix: [positions, classes] if it holds logits of distributions, otherwise [rows, width].
    If `kept` is None and the classes are the last dimension, the matrix is a view.

    classes_dim: the dimension of the classes (from 0), or None. kept: a mask that is True at the positions to compare, for the
    first two dimensions of the output; if None, all are compared. In a model that finds an answer in a text, the classes are the
    positions at which the answer may start. Masked positions then get the logit minus infinity.
    """
    if kept is not None and classes_dim in (0, 1):
        output = output.masked_fill(~kept.reshape(*kept.shape, *[1] * (output.ndim - 2)), -math.inf)
    elif kept is not None:
        output = output[kept]
        classes_dim = None if classes_dim is None else classes_dim - 1
    if classes_dim is not None:
        output = output.movedim(classes_dim, -1)
    return output.reshape(-1, output.shape[-1] if output.ndim else 1)


def sqnr_db(energy: float, noise: float) -> float:
    """Return 10 log10(energy / noise) in dB: infinity without noise, minus infinity without energy or with infinite noise."""
    if noise == 0.0:
        return math.inf
    if not math.isfinite(noise) or energy == 0.0:
        return -math.inf
    return 10.0 * (math.log10(energy) - math.log10(noise))


def relative_l2(energy: float, noise: float) -> float:
    """Return sqrt(noise / energy), or 0 if both are 0."""
    if noise == 0.0:
        return 0.0
    return math.sqrt(noise / energy) if energy else math.inf


def _standard_error(values: torch.Tensor) -> float | None:
    return float(values.std(unbiased=True)) / math.sqrt(len(values)) if len(values) > 1 else None


def _quantile(ordered: torch.Tensor, q: float) -> float:
    """Return the quantile `q` (0 to 1) of sorted values, with linear interpolation. torch.quantile takes at most 2^24 values."""
    rank = q * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    bottom, top = float(ordered[low]), float(ordered[high])
    return bottom if low == high or bottom == top else bottom + (rank - low) * (top - bottom)


def _spread(prefix: str, values: torch.Tensor, percentiles: dict[str, float]) -> dict[str, float | None]:
    """Return the minimum, median, maximum and percentiles of values, by names that begin with `prefix`, such as "kl_max".

    percentiles: the quantiles (0 to 1) by name, such as "p999". With fewer than 100 values, the result has None for them.
    """
    ordered = values.sort().values
    enough = len(ordered) >= FEWEST_FOR_PERCENTILES
    return {
        f"{prefix}_min": float(values.min()),
        f"{prefix}_median": _quantile(ordered, 0.5),
        f"{prefix}_max": float(values.max()),
        **{f"{prefix}_{name}": _quantile(ordered, q) if enough else None for name, q in percentiles.items()},
    }


def _perplexities(log_p: torch.Tensor, log_q: torch.Tensor) -> dict[str, float | None]:
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
    # The covariance of the two means: that of single tokens, divided by their number.
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
    return math.inf if value >= 700 else math.exp(value)
