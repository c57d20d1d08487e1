"""A report as one HTML file: nothing is fetched, nothing runs, and every text in it is escaped."""

from __future__ import annotations

from html import escape

from dtype_engine.core.text import printable
from dtype_engine.reports.blocks import Name, Profile, Report, Section, Shares, Table
from dtype_engine.reports.svg import profile_svg, shares_svg

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; --mark: #c33; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .3rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .12rem .8rem .12rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--dim); }
.n { text-align: right; white-space: nowrap; }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
svg { max-width: 100%; height: auto; display: block; margin: .5rem 0 1rem; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
figcaption { color: var(--dim); } figure { margin: 0; }
"""


def as_html(report: Report) -> str:
    """The whole document. A policy inside it forbids scripts and every fetch, whatever came into it."""
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(report.title)}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(report.title)}</h1>",
        f"<p>{escape(report.summary)}</p>",
    ]
    for section in report.sections:
        lines += _section(section)
    return "\n".join([*lines, "</body>", "</html>"]) + "\n"


def _section(section: Section) -> list[str]:
    lines = [f"<h2>{escape(section.title)}</h2>"]
    for part in section.parts:
        if isinstance(part, str):
            lines.append(f"<p>{_text(part)}</p>")
        elif isinstance(part, Table):
            lines += _table(part)
        elif isinstance(part, Shares):
            lines += _figure(part.title, shares_svg(part))
        elif isinstance(part, Profile):
            lines += _figure(f"{part.title}, in {part.unit}", profile_svg(part))
    return lines


def _text(text: str) -> str:
    safe = escape(printable(text, len(text)))
    return f"<code>{safe}</code>" if isinstance(text, Name) else safe


def _figure(title: str, svg: str) -> list[str]:
    return ["<figure>", f"<figcaption>{escape(title)}</figcaption>", svg, "</figure>"] if svg else []


def _table(table: Table) -> list[str]:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(
            f'<{tag} class="n">{_text(cell)}</{tag}>'
            if 0 <= table.numbers <= column
            else f"<{tag}>{_text(cell)}</{tag}>"
            for column, cell in enumerate(row)
        )

    head = f"<thead><tr>{cells('th', table.head)}</tr></thead>" if any(table.head) else ""
    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return ['<div class="wide">', f"<table>{head}<tbody>", body, "</tbody></table>", "</div>"]
