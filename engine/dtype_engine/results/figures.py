"""The figures of a drift, one row for each: its name, label and unit, how it is written, and which views show it.

Whatever shows, saves or limits figures of the main output reads `FIGURES`. `runtime/numerics/compare/` computes the values, except
those that follow from others, which their row computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from dtype_engine.core.units import decibels, percent_with_error, perplexity_text, scientific, signed, with_error
from dtype_engine.results.groups import CONFIDENT

if TYPE_CHECKING:
    from dtype_engine.results.drift import Extent, OutputDrift

View = Literal[
    "text", "report", "repr", "details", "pane", "pane_without_kl", "comparison", "history", "recipe", "card"
]
"""The places that show figures: the text of `dtype-engine drift`; reports; the `repr` of a drift report; the app's details of the
model, its Drift pane with and without a mean KL, its windows that compare and that list recipes; recipe files; and model cards.
"""
About = Literal["values", "distribution", "predictions"]


class Shown(msgspec.Struct, frozen=True):
    """How a view shows a figure, if this differs from the figure's row."""

    label: str | None = None
    """The label. `{item}` in it becomes "token" or, if positions are not tokens of a text, "class"."""
    form: Callable[[float], str] | None = None
    text: Callable[[OutputDrift, Extent], str | None] | None = None
    """A function that returns the text, in place of `form`, or None to leave the figure out."""
    around: str = "{}"
    """A template into which the text is put. `{positions}` is the number of positions."""
    order: int = 0
    """Figures with lower numbers come first, figures with equal numbers in the order of the table."""


class Figure(msgspec.Struct, frozen=True):
    """A number that describes a drift. It is a row of the table `FIGURES`."""

    name: str
    """The key in JSON and in recipe files, and the name for `--min` and `--max`."""
    label: str
    form: Callable[[float], str] = "{:.4e}".format
    """Formats the value with its unit."""
    with_error: Callable[[float, float | None], str] | None = None
    """Formats the value with its standard error, whose name ends in `_se`, in views without a form of their own."""
    unit: str = ""
    """The unit after values in messages about limits. " %": the value is a share from 0 to 1."""
    better: Literal["less", "more"] | None = None
    about: About = "values"
    """What the figure compares: values of the output, its distributions at each position, or its predictions of the next token."""
    what: str = ""
    """What the figure is, for reports. `{positions}` is the number of positions."""
    comment: str = ""
    """What the figure is, for recipe files."""
    baseline: Callable[[float], str] | None = None
    """Formats the value of the baseline recipe, beside the current one in the app's details."""
    setting: str = ""
    """The field of `RunSettings` that asks for this figure, or "" if it is always measured."""
    of_some: bool = False
    """Whether only models of some kind have this figure, without a setting that asks for it."""
    option: str = ""
    """The command-line option, besides `--min` and `--max`, that limits this figure, such as `max_kl`, or ""."""
    compute: Callable[[OutputDrift], float | None] | None = None
    """A function that computes the value from other figures, or None if the value is measured."""
    error: Callable[[OutputDrift], float | None] | None = None
    """A function that returns the standard error, or None if it is the metric whose name ends in `_se`, where there is one."""
    shown: Mapping[str, Shown] | None = None
    """The views that show the figure. None: all views show it as this row says."""

    @property
    def is_always_measured(self) -> bool:
        """Whether tables may have a column for this figure before it was measured."""
        return not self.setting and not self.of_some

    def of(self, output: OutputDrift) -> float | None:
        """Return the figure's value for an output, or None if it was not measured."""
        return self.compute(output) if self.compute is not None else getattr(output, self.name, None)

    def error_of(self, output: OutputDrift) -> float | None:
        """Return the standard error of the figure for an output, in the figure's unit, or None if it is not known."""
        return self.error(output) if self.error is not None else getattr(output, f"{self.name}_se", None)

    def in_column(self, output: OutputDrift | None) -> str:
        """Return the figure's value for an output as a cell of a table, which is "" if it was not measured."""
        value = None if output is None else self.of(output)
        return "" if value is None else self.form(value)

    def worsened(self, before: float, now: float) -> bool:
        return now > before if self.better == "less" else now < before

    def shown_in(self, view: View) -> Shown:
        return Shown() if self.shown is None else self.shown[view]

    def label_in(self, view: View, of_tokens: bool = True) -> str:
        """Return the label in a view. of_tokens: whether positions are tokens of a text."""
        label = self.shown_in(view).label
        return (self.label if label is None else label).format(item="token" if of_tokens else "class")

    def text_in(self, view: View, output: OutputDrift, extent: Extent) -> str | None:
        """Return the figure as a view shows it, or None if the figure was not measured or the view leaves it out for this
        output.
        """
        shown, value = self.shown_in(view), self.of(output)
        if shown.text is not None:
            return shown.text(output, extent)
        if value is None:
            return None
        text = (shown.form or self.form)(value)
        if self.with_error is not None and shown.form is None:
            text = self.with_error(value, self.error_of(output))
        return shown.around.format(text, positions=output.positions)


class Cell(NamedTuple):
    figure: Figure
    label: str
    text: str


def figures_in(view: View, *about: About) -> list[Figure]:
    """Return the figures that a view shows, in its order. about: if given, only figures whose `about` is one of these are
    returned.
    """
    rows = (row for row in FIGURES.values() if row.shown is None or view in row.shown)
    return sorted((row for row in rows if not about or row.about in about), key=lambda row: row.shown_in(view).order)


def cells(view: View, output: OutputDrift, extent: Extent, *about: About) -> list[Cell]:
    """Return the figures of an output as a view shows them. extent: the inputs that were run. about: as in `figures_in`."""
    texts = ((row, row.text_in(view, output, extent)) for row in figures_in(view, *about))
    return [Cell(row, row.label_in(view, extent.of_tokens), text) for row, text in texts if text is not None]


def not_always_measured(outputs: Iterable[OutputDrift | None]) -> list[Figure]:
    """Return the figures that not all measurements have, and that one of the outputs has. They get a column of their own."""
    known = [output for output in outputs if output is not None]
    rows = (row for row in FIGURES.values() if not row.is_always_measured)
    return [row for row in rows if any(row.of(output) is not None for output in known)]


def has_kl(output: OutputDrift) -> bool:
    """Return whether there is a mean KL, and it is a number."""
    return output.kl_mean is not None and not math.isnan(output.kl_mean)


def kl_error(output: OutputDrift, extent: Extent) -> float | None:
    """Return the standard error of the mean KL in nats, or None if unknown. If all inputs were run, it is the error over positions.
    Otherwise, the mean KL is an estimate for all inputs, and its error is returned.
    """
    if extent.whole:
        return output.kl_mean_se
    return None if output.kl_mean is None or extent.kl_error is None else abs(output.kl_mean) * extent.kl_error


def kl_text(output: OutputDrift, extent: Extent) -> str | None:
    """Return the mean KL, such as `1.234e-03 ± 2e-05 nats`, or None if it was not measured."""
    error = kl_error(output, extent)
    return None if output.kl_mean is None else f"{output.kl_mean:.3e}{'' if error is None else f' ± {error:.0e}'} nats"


def sqnr_error(output: OutputDrift, extent: Extent) -> str:
    """Return the error in dB of an SQNR that is estimated from a part of the inputs, such as ` ± 0.40`. Returns "" if all inputs
    were run or the error is unknown.
    """
    known = not extent.whole and extent.rel_l2_error is not None and math.isfinite(output.sqnr_db or 0.0)
    return f" ± {20 / math.log(10) * (extent.rel_l2_error or 0.0):.2f}" if known else ""


def sqnr_text(output: OutputDrift, extent: Extent) -> str:
    """Return the SQNR as `43.17 dB` or, if it is an estimate, as `43.17 dB ± 0.40`."""
    return decibels(output.sqnr_db) + sqnr_error(output, extent)


def main_text(output: OutputDrift, extent: Extent) -> str:
    """Return the main figure of the drift as text: `KL 1.234e-03 ± 2e-05 nats` or, without KL, `SQNR 43.17 dB`."""
    return f"KL {kl_text(output, extent)}" if has_kl(output) else f"SQNR {sqnr_text(output, extent)}"


def _listed(values: Mapping[str, float | None], form: str, between: str) -> str:
    return between.join(f"{name} {value:{form}}" for name, value in values.items() if value is not None)


def _kl_percentiles(output: OutputDrift, _: Extent) -> str | None:
    median, p95, p99, p999 = output.kl_median, output.kl_p95, output.kl_p99, output.kl_p999
    values = {"median": median, "p95": p95, "p99": p99, "p99.9": p999, "max": output.kl_max}
    return None if output.kl_mean is None else _listed(values, ".3e", ", ")


def _kl_tail(output: OutputDrift, _: Extent) -> str | None:
    return _listed({"p99": output.kl_p99, "max": output.kl_max}, ".1e", "  ") if has_kl(output) else None


def _kl_confident(output: OutputDrift) -> float | None:
    group = output.group(CONFIDENT)
    return None if group is None else group.kl_mean


def _kl_confident_error(output: OutputDrift) -> float | None:
    group = output.group(CONFIDENT)
    return None if group is None else group.kl_mean_se


def confident_stands_out(output: OutputDrift) -> bool:
    """Return whether the output drifts where the reference is sure (`CONFIDENT`): the mean KL there is above the mean over all
    positions, or the most likely class is another one at a position there.
    """
    group = output.group(CONFIDENT)
    if group is None or output.kl_mean is None or math.isnan(output.kl_mean):
        return False
    return group.kl_mean > output.kl_mean or group.top1_agreement < 1


def _confident_in_pane(output: OutputDrift, _: Extent) -> str | None:
    kl = _kl_confident(output)
    return scientific(kl, 1) if kl is not None and confident_stands_out(output) else None


def _p99_in_pane(output: OutputDrift, _: Extent) -> str | None:
    """Return the 99th percentile, or None if the mean where the reference is sure takes its place, as the pane has few lines."""
    return scientific(output.kl_p99, 1) if output.kl_p99 is not None and not confident_stands_out(output) else None


def _perplexities(output: OutputDrift, _: Extent) -> str | None:
    reference, candidate = output.perplexity_reference, output.perplexity_candidate
    return None if reference is None or candidate is None else " → ".join(map(perplexity_text, (reference, candidate)))


def _perplexities_and_ratio(output: OutputDrift, extent: Extent) -> str | None:
    both = _perplexities(output, extent)
    return both and f"{both}, ln ratio {with_error(output.log_ratio or 0.0, output.log_ratio_se)}"


def _perplexity_change(output: OutputDrift, _: Extent) -> str | None:
    reference, candidate = output.perplexity_reference, output.perplexity_candidate
    return f"{signed(100 * (candidate / reference - 1), 2)} %" if reference and candidate is not None else None


def _dp_mean_and_rms(output: OutputDrift, _: Extent) -> str | None:
    mean, rms = output.dp_mean, output.dp_rms
    return None if mean is None or rms is None else f"mean {100 * mean:.4f} %, RMS {100 * rms:.4f} %"


def psnr_and_ssim(output: OutputDrift) -> str | None:
    """Return `PSNR 31.25 dB, SSIM 0.912000` for an output that is a picture, otherwise None."""
    ssim = "" if output.ssim is None else f", SSIM {output.ssim:.6f}"
    return None if output.psnr_db is None else f"PSNR {decibels(output.psnr_db)}{ssim}"


def _ssim_or_blank(output: OutputDrift, _: Extent) -> str | None:
    """Return the SSIM as text, "" if the picture is too small for an SSIM (columns then stay aligned), or None without pictures."""
    ssim = "" if output.ssim is None else f"{output.ssim:.5f}"
    return None if output.psnr_db is None else ssim


def _bare_sqnr(output: OutputDrift, _: Extent) -> str:
    return decibels(output.sqnr_db).removesuffix(" dB") if output.is_finite else "not finite"


def _or_not_finite(form: Callable[[float], str]) -> Callable[[float], str]:
    return lambda value: "not finite" if math.isnan(value) else form(value)


def _percent(digits: int, unit: str = " %") -> Callable[[float], str]:
    return lambda share: f"{100 * share:.{digits}f}{unit}"


def _in(*views: View, **others: Shown) -> dict[str, Shown]:
    """Return how each view shows a figure. views: the views that show it as its row says. others: a `Shown` for each other view."""
    return {**dict.fromkeys(views, Shown()), **others}


def _kl(name: str, label: str, *views: View, **others: Shown) -> Figure:
    return Figure(name, f"KL {label}", unit=" nats", better="less", about="distribution", what="nats", comment="nats",
                  shown=_in(*views, report=Shown(f"KL, {label}"), **others))  # fmt: skip


FIGURES: dict[str, Figure] = {row.name: row for row in (
    Figure("mean_abs", "mean |Δ|", better="less", what="mean absolute difference of the output",
           comment="of the main output, against the reference",
           shown=_in("text", "report", "details", "recipe", pane_without_kl=Shown(form=scientific, order=-2))),
    Figure("max_abs", "max |Δ|", better="less", what="largest absolute difference", baseline="{:.1e}".format,
           shown=_in("text", "report", "repr", "details", "recipe", comparison=Shown(order=1),
                     pane=Shown(form="{:.3g}".format, order=1), pane_without_kl=Shown(form="{:.3g}".format, order=-3))),
    Figure("rel_l2", "rel. L2", better="less", what="norm of the difference over that of the reference",
           shown=_in("text", "recipe", report=Shown("relative L2"), details=Shown(form="{:.2e}".format),
                     pane_without_kl=Shown(form=scientific, order=-1))),
    Figure("sqnr_db", "SQNR", decibels, unit=" dB", better="more", option="min_sqnr", baseline=decibels, comment="decibels",
           what="power of the reference over that of the difference",
           shown=_in("text", "report", "pane", "comparison", "recipe", card=Shown(order=1), repr=Shown(order=-1),
                     details=Shown(text=sqnr_text, order=-1), history=Shown("SQNR dB", text=_bare_sqnr))),
    Figure("cosine", "cosine", "{:.6f}".format, better="more", what="between both outputs",
           shown=_in("details", "pane", "recipe", text=Shown(form="{:.8f}".format), report=Shown(form="{:.8f}".format),
                     pane_without_kl=Shown(order=-4))),
    Figure("recall_at_10", "recall@10", _percent(2), percent_with_error, unit=" %", better="more", of_some=True,
           what="of each input's 10 nearest others by cosine, ± standard error over inputs", baseline=_percent(2, ""),
           comment="share of each input's 10 nearest others that stay the same, 1 is all",
           shown=_in("report", "repr", "details", "recipe", text=Shown(around="{} of each input's 10 nearest others"),
                     pane=Shown(form=_percent(2)), pane_without_kl=Shown(form=_percent(2), order=-4),
                     comparison=Shown(form=_percent(2)), history=Shown(form=_percent(2)))),
    Figure("nonfinite", "non-finite", "{:,}".format, better="less",
           what="values that are NaN or infinite",
           shown=_in("recipe", report=Shown(text=lambda output, _: output.nonfinite_text))),
    Figure("psnr_db", "PSNR", decibels, unit=" dB", better="more", what="of the picture, by its full range",
           shown=_in("report", "details", "pane_without_kl", text=Shown("picture", text=lambda output, _: psnr_and_ssim(output)))),
    Figure("ssim", "SSIM", "{:.6f}".format, better="more", what="structural similarity of the pictures, at most 1",
           shown=_in("report", "details", pane_without_kl=Shown(text=_ssim_or_blank))),
    Figure("kl_mean", "mean KL", with_error=with_error, unit=" nats", better="less", about="distribution", option="max_kl",
           what="nats per position, {positions:,} positions, ± standard error", comment="nats per position",
           baseline="{:.1e} nats".format,
           shown=_in("recipe", "card", text=Shown("KL", around="mean {} nats over {positions} positions"), report=Shown("KL, mean"),
                     repr=Shown("KL", around="{} nats", order=-2), comparison=Shown("KL mean", text=kl_text),
                     details=Shown("KL mean", text=lambda *of: kl_text(*of) if has_kl(of[0]) else None),
                     history=Shown("KL nats", _or_not_finite("{:.3e}".format)))),
    Figure("kl_mean_se", "standard error of the mean KL", unit=" nats", better="less", about="distribution",
           comment="its standard error", shown=_in("recipe")),
    _kl("kl_median", "median", text=Shown("", text=_kl_percentiles)),
    _kl("kl_p95", "p95"),
    _kl("kl_p99", "p99", "recipe", details=Shown("KL tail", text=_kl_tail),
        pane=Shown("KL p99", text=_p99_in_pane, order=1)),
    _kl("kl_p999", "p99.9"),
    _kl("kl_max", "max", "recipe"),
    Figure("kl_confident", "mean KL (confident)", unit=" nats", better="less", about="distribution",
           comment="nats per position where the reference gives a class 0.95 or more",
           compute=_kl_confident, error=_kl_confident_error,
           shown=_in("recipe", "card", pane=Shown("confident", text=_confident_in_pane, order=1))),
    Figure("acceptance", "acceptance", _percent(2), percent_with_error, unit=" %", better="more", about="predictions",
           setting="acceptance", what="mean of Σ min(p, q): how often a drafted token is kept",
           comment="mean of Σ min(p, q), 1 is all", baseline=_percent(2, ""),
           shown=_in("repr", "details", "recipe", "card", text=Shown(around="{}, the mean of Σ min(p, q)"),
                     report=Shown("acceptance of drafts"), pane=Shown(form=_percent(2)), comparison=Shown(form=_percent(2)),
                     history=Shown(form=_percent(2)))),
    Figure("top1_agreement", "same top-1", _percent(2), percent_with_error, unit=" %", better="more", about="predictions",
           option="min_top1", what="of positions", comment="share of positions, 1 is all", baseline=_percent(2, ""),
           shown=_in("details", "recipe", "card", text=Shown(around="{} of positions"), report=Shown("same top-1 {item}"),
                     pane=Shown(form=_percent(1)), comparison=Shown(form=_percent(2)), history=Shown(form=_percent(2)))),
    Figure("perplexity_reference", "perplexity of the reference", perplexity_text, about="predictions", shown=_in("recipe")),
    Figure("perplexity_candidate", "perplexity", perplexity_text, better="less", about="predictions",
           what="reference → candidate",
           shown=_in("comparison", "recipe", text=Shown(text=_perplexities_and_ratio), report=Shown(text=_perplexities),
                     details=Shown(text=_perplexities), pane=Shown(text=_perplexity_change),
                     history=Shown(form=_or_not_finite(perplexity_text)))),
    Figure("log_ratio", "ln ratio", with_error=with_error, better="less", about="predictions",
           what="of the perplexities, ± standard error", shown=_in("report")),
    Figure("dp_mean", "Δp, mean", _percent(4), unit=" %", about="predictions",
           what="change of the right token's probability", shown=_in("report", text=Shown("Δp", text=_dp_mean_and_rms))),
    Figure("dp_rms", "Δp, RMS", _percent(4), unit=" %", better="less", about="predictions", shown=_in("report")),
)}  # fmt: skip
"""All figures, by name."""
