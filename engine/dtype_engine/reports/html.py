"""A report as one HTML file: nothing is fetched, nothing runs, and every text in it is escaped."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from dtype_engine.core.text import printable
from dtype_engine.reports.blocks import Identifier, Report, StackedBars, Table
from dtype_engine.reports.svg import bar_chart_svg, stacked_bars_svg

if TYPE_CHECKING:
    from jinja2 import Template


def as_html(report: Report) -> str:
    """The whole document, by `page.html.jinja`. A policy in it forbids scripts and every fetch, whatever came into it."""
    return _page("page.html.jinja").render(report=report)


def as_fragment(report: Report) -> str:
    """The title, the summary and the sections alone, for a notebook's cell."""
    return f"<div>{_page('body.html.jinja').render(report=report)}</div>"


@cache
def _page(name: str) -> Template:
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
        "identifier": lambda block: isinstance(block, Identifier),
        "table": lambda block: isinstance(block, Table),
        "stacked_bars": lambda block: isinstance(block, StackedBars),
    }
    environment.filters |= {
        "stacked_bars": lambda chart: Markup(stacked_bars_svg(chart)),
        "bar_chart": lambda chart: Markup(bar_chart_svg(chart)),
    }
    return environment.get_template(name)
