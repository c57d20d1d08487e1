"""Writes a report as one HTML file that downloads nothing, runs no scripts, and escapes all of its texts."""

from __future__ import annotations

import base64
import io
from functools import cache
from typing import TYPE_CHECKING

from dtype_engine.core.text import printable
from dtype_engine.reports.blocks import Identifier, Pictures, Report, StackedBars, Table
from dtype_engine.reports.svg import bar_chart_svg, stacked_bars_svg

if TYPE_CHECKING:
    from jinja2 import Template

    from dtype_engine.results.pictures import Picture


def as_html(report: Report) -> str:
    """Return a report as a complete HTML document. Its content security policy forbids scripts and downloads."""
    return _page("page.html.jinja").render(report=report)


def as_fragment(report: Report) -> str:
    """Return a report as HTML for a notebook cell, with the style of the tiles but without a page around it."""
    style = f"<style>{_page('tiles.css.jinja').render()}</style>" if report.tiles else ""
    return f"<div>{style}{_page('body.html.jinja').render(report=report)}</div>"


@cache
def _page(name: str) -> Template:
    import jinja2  # imported here, because only HTML reports need it
    from markupsafe import Markup

    def shown(value: object) -> object:
        return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value, len(value))

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dtype_engine", "reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        keep_trailing_newline=True,
    )
    kinds = {"identifier": Identifier, "table": Table, "stacked_bars": StackedBars, "pictures": Pictures}
    environment.tests |= {name: lambda block, kind=kind: isinstance(block, kind) for name, kind in kinds.items()}
    environment.filters |= {
        "stacked_bars": lambda chart: Markup(stacked_bars_svg(chart)),
        "bar_chart": lambda chart: Markup(bar_chart_svg(chart)),
    }
    environment.filters["png"] = _png
    return environment.get_template(name)


def _png(picture: Picture) -> str:
    """Return a picture as the address of an `img` element that contains the whole file."""
    from PIL import Image  # imported here, because few reports have pictures

    file = io.BytesIO()
    Image.frombytes("RGB", (picture.width, picture.height), picture.pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
