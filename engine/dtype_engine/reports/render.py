"""Renders a report as HTML or Markdown, according to the extension of its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dtype_engine.core.errors import UserError
from dtype_engine.reports.blocks import Report
from dtype_engine.reports.html import as_html
from dtype_engine.reports.markdown import as_markdown

FORMATS: dict[str, Callable[[Report], str]] = {
    ".html": as_html,
    ".htm": as_html,
    ".md": as_markdown,
    ".markdown": as_markdown,
}


def check_name(path: Path) -> None:
    """Raise UserError unless a file's extension is that of a report format: .html or .md."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"can't tell the format of {path}: name a report .html or .md")


def render(report: Report, path: Path) -> str:
    """Return the text of a report in the format of the path's extension. Raises UserError if the extension is of no format."""
    check_name(path)
    return FORMATS[path.suffix.lower()](report)
