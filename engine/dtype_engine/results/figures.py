"""The figures of a drift, each as one row: its name, label and unit, how it is written, and where the program shows it.

Everything that shows, saves or limits figures of the main output reads these rows. `runtime/numerics/compare/` computes the values,
except those that follow from other values, which a row computes itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from dtype_engine.core.units import decibels, percent_with_error, perplexity_text, scientific, signed, with_error

if TYPE_CHECKING:
    from dtype_engine.results.drift import Extent, OutputDrift

View = Literal[
    "text", "report", "repr", "details", "pane", "pane without KL", "comparison", "history", "recipe",
]  # fmt: skip
"""Where figures are shown: the text of `dtype-engine drift`; reports as HTML or Markdown; the `repr` of a drift report; all figures
in the app's details; its Drift pane, for outputs with and without a mean KL; the windows that compare recipes and list those
measured; and recipe files, which have the value itself.
"""
About = Literal["values", "distribution", "predictions"]


class Shown(msgspec.Struct, frozen=True):
    """How one view shows a figure, where that differs from the figure's own label and form."""

    label: str | None = None
    """`{item}` in a label becomes "token" or, if positions are not tokens of a text, "class"."""
    form: Callable[[float], str] | None = None
    text: Callable[[OutputDrift, Extent], str | None] | None = None
    """Returns the text in place of `form`, for example with an error or another figure. None: the view leaves the figure out."""
    order: int = 0
    """Figures with a lower number come first. Those with the same number have the order of the table."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table. By default every view shows the figure."""

    name: str
    """The figure's key in JSON and in recipe files, and its name for `--min` and `--max`."""
    label: str
    form: Callable[[float], str] = "{:.4e}".format
    """Formats the value with its unit."""
    unit: str = ""
    """The unit in which messages about limits write the value, after a space. With " %", the value is a share from 0 to 1."""
    better: Literal["less", "more"] | None = None
    """Which values are better. None if neither is."""
    about: About = "values"
    """What the figure compares: all values of the output; the distributions, if the output has one at each position; or the
    predicted classes and the probabilities of the correct next tokens.
    """
    what: str = ""
    """What the figure is, in the last column of reports. `{positions}` becomes the number of positions."""
    comment: str = ""
    """What the figure is, as a comment in recipe files."""
    short: Callable[[float], str] | None = None
    """Formats the value under the baseline recipe, next to the current value. None: the baseline's value is not shown."""
    option: str = ""
    """The command-line option that limits only this figure, such as `max_kl`, if there is one."""
    compute: Callable[[OutputDrift], float | None] | None = None
    """Computes the value from those of a measurement. None: it is measured."""
    shown: Mapping[View, Shown] | None = None
    """The views that show the figure. None: all."""

    def of(self, output: OutputDrift) -> float | None:
        """Return the value of this figure, or None if it was not measured."""
        return self.compute(output) if self.compute is not None else getattr(output, self.name, None)

    def worsened(self, before: float, now: float) -> bool:
        """Return whether `now` is a worse value than `before`."""
        return now > before if self.better == "less" else now < before

    def label_in(self, view: View, of_tokens: bool = True) -> str:
        """Return the label of the figure in a view. of_tokens: whether the positions of the output are tokens of a text."""
        label = self._shown(view).label
        return (self.label if label is None else label).format(item="token" if of_tokens else "class")

    def text_in(self, view: View, output: OutputDrift, extent: Extent) -> str | None:
        """Return the figure as text for a view, or None if the view leaves it out, usually because it was not measured."""
        shown, value = self._shown(view), self.of(output)
        if shown.text is not None:
            return shown.text(output, extent)
        return None if value is None else (shown.form or self.form)(value)

    def order_in(self, view: View) -> int:
        """Return the number by which a view sorts its figures."""
        return self._shown(view).order

    def _shown(self, view: View) -> Shown:
        return Shown() if self.shown is None else self.shown[view]


class Cell(NamedTuple):
    """A figure as a view shows it."""

    figure: Figure
    label: str
    text: str


def figures_in(view: View, *about: About) -> list[Figure]:
    """Return the figures that a view shows, in order. about: only those about one of these, or all if none is given."""
    rows = (row for row in FIGURES if row.shown is None or view in row.shown)
    return sorted((row for row in rows if not about or row.about in about), key=lambda row: row.order_in(view))


def cells(view: View, output: OutputDrift, extent: Extent, *about: About) -> list[Cell]:
    """Return the figures of an output as a view shows them, without those that were not measured. extent: the inputs that were run.
    about: only figures about one of these, or all if none is given.
    """
    texts = ((row, row.text_in(view, output, extent)) for row in figures_in(view, *about))
    return [Cell(row, row.label_in(view, extent.of_tokens), text) for row, text in texts if text is not None]


def figure_named(name: str) -> Figure | None:
    """Return the figure with this name, or None if there is none."""
    return next((row for row in FIGURES if row.name == name), None)


def all_values(output: OutputDrift) -> dict[str, float | None]:
    """Return everything that is measured of an output, and the figures that follow from it, by name."""
    return output.by_name() | {row.name: row.of(output) for row in FIGURES}


def figures_with_option() -> list[Figure]:
    """Return the figures that a command-line option of their own limits, ordered by the options."""
    return sorted((row for row in FIGURES if row.option), key=lambda row: row.option)


def figure_names() -> frozenset[str]:
    """Return the names of all figures."""
    return frozenset(row.name for row in FIGURES)


def has_kl(output: OutputDrift) -> bool:
    """Return whether a mean KL was measured and is a number."""
    return output.kl_mean is not None and not math.isnan(output.kl_mean)


def kl_error(output: OutputDrift, extent: Extent) -> float | None:
    """Return the standard error of the mean KL in nats, or None if it is unknown. If all inputs were run, this is the error over
    positions; otherwise, the error of the estimate for all inputs.
    """
    if extent.whole:
        return output.kl_mean_se
    return None if output.kl_mean is None or extent.kl_error is None else abs(output.kl_mean) * extent.kl_error


def kl_text(output: OutputDrift, extent: Extent) -> str | None:
    """Return the mean KL ± its standard error, as in `1.234e-03 ± 2e-05 nats`, or None if there is none."""
    error = kl_error(output, extent)
    return None if output.kl_mean is None else f"{output.kl_mean:.3e}{'' if error is None else f' ± {error:.0e}'} nats"


def sqnr_error_text(output: OutputDrift, extent: Extent) -> str:
    """Return ` ± 0.40`: the standard error with which the SQNR of some inputs estimates that of all, in dB. "" if there is none."""
    if extent.whole or extent.rel_l2_error is None or not math.isfinite(output.sqnr_db):
        return ""
    return f" ± {20 / math.log(10) * extent.rel_l2_error:.2f}"


def sqnr_text(output: OutputDrift, extent: Extent) -> str:
    """Return the SQNR as `43.17 dB`, with the error of the estimate if not all inputs were run: `43.17 dB ± 0.40`."""
    return decibels(output.sqnr_db) + sqnr_error_text(output, extent)


def main_text(output: OutputDrift, extent: Extent) -> str:
    """Return the figure that stands for a drift: `KL 1.234e-03 ± 2e-05 nats` or, without a mean KL, `SQNR 43.17 dB`."""
    return f"KL {kl_text(output, extent)}" if has_kl(output) else f"SQNR {sqnr_text(output, extent)}"


def _kl_with_error(output: OutputDrift, _: Extent) -> str | None:
    return None if output.kl_mean is None else with_error(output.kl_mean, output.kl_mean_se)


def _kl_over_positions(output: OutputDrift, extent: Extent) -> str | None:
    mean = _kl_with_error(output, extent)
    return mean and f"mean {mean} nats over {output.positions} positions"


def _kl_percentiles(output: OutputDrift, _: Extent) -> str | None:
    if output.kl_mean is None:
        return None
    values = ((words, getattr(output, f"kl_{name}")) for name, words in _TAIL.items())
    return ", ".join(f"{words} {value:.3e}" for words, value in values if value is not None)


def _kl_extremes(output: OutputDrift, _: Extent) -> str | None:
    values = (("p99", output.kl_p99), ("max", output.kl_max))
    return "  ".join(f"{words} {value:.1e}" for words, value in values if value is not None) if has_kl(output) else None


def _top1(output: OutputDrift, _: Extent) -> str | None:
    share = output.top1_agreement
    return None if share is None else percent_with_error(share, output.top1_agreement_se)


def _perplexities(output: OutputDrift, _: Extent) -> str | None:
    reference, candidate = output.perplexity_reference, output.perplexity_candidate
    return None if reference is None or candidate is None else " → ".join(map(perplexity_text, (reference, candidate)))


def _log_ratio(output: OutputDrift, extent: Extent) -> str | None:
    known = _perplexities(output, extent) is not None
    return with_error(output.log_ratio or 0.0, output.log_ratio_se) if known else None


def _perplexities_and_ratio(output: OutputDrift, extent: Extent) -> str | None:
    both = _perplexities(output, extent)
    return both and f"{both}, ln ratio {_log_ratio(output, extent)}"


def _perplexity_change(output: OutputDrift, _: Extent) -> str | None:
    reference, candidate = output.perplexity_reference, output.perplexity_candidate
    return f"{signed(100 * (candidate / reference - 1), 2)} %" if reference and candidate is not None else None


def _dp_mean_and_rms(output: OutputDrift, extent: Extent) -> str | None:
    mean, rms = output.dp_mean, output.dp_rms
    if mean is None or rms is None or _perplexities(output, extent) is None:
        return None
    return f"mean {100 * mean:.4f} %, RMS {100 * rms:.4f} %"


def _psnr_and_ssim(output: OutputDrift, _: Extent) -> str | None:
    if output.psnr_db is None:
        return None
    return f"PSNR {decibels(output.psnr_db)}" + ("" if output.ssim is None else f", SSIM {output.ssim:.6f}")


def _ssim_or_blank(output: OutputDrift, _: Extent) -> str | None:
    """Return the SSIM, or "" for a picture that is too small for one, so that the PSNR keeps its place in two columns."""
    ssim = "" if output.ssim is None else f"{output.ssim:.5f}"
    return None if output.psnr_db is None else ssim


def _finite_decibels(output: OutputDrift, _: Extent) -> str:
    return "not finite" if output.nonfinite else decibels(output.sqnr_db).removesuffix(" dB")


def _or_not_finite(form: Callable[[float], str]) -> Callable[[float], str]:
    return lambda value: "not finite" if math.isnan(value) else form(value)


def _percent(digits: int) -> Callable[[float], str]:
    return lambda share: f"{100 * share:.{digits}f} %"


def _in(*views: View) -> dict[View, Shown]:
    return dict.fromkeys(views, Shown())


_TAIL = {"median": "median", "p95": "p95", "p99": "p99", "p999": "p99.9", "max": "max"}
"""The percentiles of KL that texts and reports show: their labels, keyed by the end of their names."""
_TAIL_IN_VIEWS: Mapping[str, Mapping[View, Shown]] = {
    "median": {"text": Shown(label="", text=_kl_percentiles)},
    "p99": {
        "details": Shown("KL tail", text=_kl_extremes),
        "pane": Shown("KL p99", lambda value: scientific(value, 1), order=1),
        "recipe": Shown(),
    },
    "max": _in("recipe"),
}

SQNR = Figure(
    name="sqnr_db", label="SQNR", form=decibels, unit=" dB", better="more", option="min_sqnr", short=decibels,
    what="power of the reference over that of the difference", comment="decibels",
    shown=_in("text", "report", "pane", "comparison", "recipe") | {
        "repr": Shown(order=-1),
        "details": Shown(text=sqnr_text, order=-1),
        "history": Shown("SQNR dB", text=_finite_decibels),
    },
)  # fmt: skip
KL_MEAN = Figure(
    name="kl_mean", label="mean KL", unit=" nats", better="less", about="distribution", option="max_kl",
    short="{:.1e} nats".format, comment="nats per position",
    what="nats per position, {positions:,} positions, ± standard error",
    shown=_in("recipe") | {
        "text": Shown("KL", text=_kl_over_positions),
        "report": Shown("KL, mean", text=_kl_with_error),
        "repr": Shown("KL", text=lambda output, extent: (mean := _kl_with_error(output, extent)) and f"{mean} nats", order=-2),
        "details": Shown("KL mean", text=lambda output, extent: kl_text(output, extent) if has_kl(output) else None),
        "comparison": Shown("KL mean", text=kl_text),
        "history": Shown("KL nats", _or_not_finite("{:.3e}".format)),
    },
)  # fmt: skip
FIGURES: tuple[Figure, ...] = (
    Figure(
        name="mean_abs", label="mean |Δ|", better="less", what="mean absolute difference of the output",
        comment="of the main output, against the reference",
        shown=_in("text", "report", "details", "recipe") | {"pane without KL": Shown(form=scientific, order=-2)},
    ),
    Figure(
        name="max_abs", label="max |Δ|", better="less", what="largest absolute difference", short="{:.1e}".format,
        shown=_in("text", "report", "repr", "details", "recipe") | {
            "comparison": Shown(order=1),
            "pane": Shown(form="{:.3g}".format, order=1),
            "pane without KL": Shown(form="{:.3g}".format, order=-3),
        },
    ),
    Figure(
        name="rel_l2", label="rel. L2", better="less", what="norm of the difference over that of the reference",
        shown=_in("text", "recipe") | {
            "report": Shown("relative L2"),
            "details": Shown(form="{:.2e}".format),
            "pane without KL": Shown(form=scientific, order=-1),
        },
    ),
    SQNR,
    Figure(
        name="cosine", label="cosine", form="{:.8f}".format, better="more", what="between both outputs",
        shown=_in("text", "report", "recipe") | {
            "details": Shown(form="{:.6f}".format),
            "pane": Shown(form="{:.6f}".format),
            "pane without KL": Shown(form="{:.6f}".format, order=-4),
        },
    ),
    Figure(
        name="nonfinite", label="non-finite", form="{:,}".format, better="less",
        what="values that are finite in the reference but not here",
        shown=_in("recipe") | {"report": Shown(text=lambda output, _: f"{output.nonfinite:,} of {output.elements:,}")},
    ),
    Figure(
        name="psnr_db", label="PSNR", form=decibels, unit=" dB", better="more", what="of the picture, by its full range",
        shown=_in("report", "details", "pane without KL") | {"text": Shown("picture", text=_psnr_and_ssim)},
    ),
    Figure(
        name="ssim", label="SSIM", form="{:.6f}".format, better="more",
        what="structural similarity of the pictures, at most 1",
        shown=_in("report", "details") | {"pane without KL": Shown(text=_ssim_or_blank)},
    ),
    KL_MEAN,
    Figure(
        name="kl_mean_se", label="standard error of the mean KL", unit=" nats", better="less", about="distribution",
        comment="its standard error", shown=_in("recipe"),
    ),
    *(
        Figure(
            name=f"kl_{name}", label=f"KL {words}", unit=" nats", better="less", about="distribution", what="nats",
            comment="nats", shown={"report": Shown(f"KL, {words}"), **_TAIL_IN_VIEWS.get(name, {})},
        )
        for name, words in _TAIL.items()
    ),
    Figure(
        name="top1_agreement", label="same top-1", form=_percent(2), unit=" %", better="more", about="predictions",
        option="min_top1", short=lambda share: f"{100 * share:.2f}", what="of positions",
        comment="share of positions, 1 is all",
        shown=_in("comparison", "history", "recipe") | {
            "text": Shown(text=lambda output, extent: (share := _top1(output, extent)) and f"{share} of positions"),
            "report": Shown("same top-1 {item}", text=_top1),
            "details": Shown(text=_top1),
            "pane": Shown(form=_percent(1)),
        },
    ),
    Figure(
        name="perplexity_reference", label="perplexity of the reference", form=perplexity_text, about="predictions",
        shown=_in("recipe"),
    ),
    Figure(
        name="perplexity_candidate", label="perplexity", form=perplexity_text, better="less", about="predictions",
        what="reference → candidate",
        shown=_in("comparison", "recipe") | {
            "text": Shown(text=_perplexities_and_ratio),
            "report": Shown(text=_perplexities),
            "details": Shown(text=_perplexities),
            "pane": Shown(text=_perplexity_change),
            "history": Shown(form=_or_not_finite(perplexity_text)),
        },
    ),
    Figure(
        name="log_ratio", label="ln ratio", better="less", about="predictions",
        what="of the perplexities, ± standard error", shown={"report": Shown(text=_log_ratio)},
    ),
    Figure(
        name="dp_mean", label="Δp, mean", form=_percent(4), unit=" %", about="predictions",
        what="change of the right token's probability",
        shown=_in("report") | {"text": Shown("Δp", text=_dp_mean_and_rms)},
    ),
    Figure(
        name="dp_rms", label="Δp, RMS", form=_percent(4), unit=" %", better="less", about="predictions",
        shown=_in("report"),
    ),
)  # fmt: skip
