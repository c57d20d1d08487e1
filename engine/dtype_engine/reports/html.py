"""A report as one HTML file: nothing is fetched, nothing runs, and every text in it is escaped."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from dtype_engine.core.text import printable
from dtype_engine.reports.blocks import Name, Report, Shares, Table
from dtype_engine.reports.svg import profile_svg, shares_svg

if TYPE_CHECKING:
    from jinja2 import Template


def as_html(report: Report) -> str:
    """The whole document, by `page.html.jinja`. A policy in it forbids scripts and every fetch, whatever came into it."""
    return _page().render(report=report)


@cache
def _page() -> Template:
    import jinja2  # only who writes a report waits for it
    from markupsafe import Markup

    def shown(value: object) -> object:
        """Texts that the template did not make itself, before they are escaped as HTML."""
        return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value, len(value))

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dtype_engine", "reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        keep_trailing_newline=True,
    )
    environment.tests |= {
        "identifier": lambda block: isinstance(block, Name),
        "table": lambda block: isinstance(block, Table),
        "stacked_bars": lambda block: isinstance(block, Shares),
    }
    environment.filters |= {
        "stacked_bars": lambda chart: Markup(shares_svg(chart)),
        "bar_chart": lambda chart: Markup(profile_svg(chart)),
    }
    return environment.get_template("page.html.jinja")
