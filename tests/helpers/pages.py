"""The pages of the manual as data: their fenced blocks, and whether an output is the one that a page shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import ROOT

MANUAL = [ROOT / "README.md", *sorted((ROOT / "tui/docs").glob("*.md")), *sorted((ROOT / "engine/docs").glob("*.md"))]
"""The README and every page of the manual."""
TOLERANCE = 0.1
"""How far a figure may be from the one on the page, as a share of it: processors and versions of torch round differently."""

_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# file: (\S+)\n")
_FIGURE = re.compile(r"(?<![\w.])-?(?:\d[\d,]*\.\d+(?:e[-+]\d+)?|\d+e[-+]\d+|inf)(?![\w.]*\w)(?! [KMG]?i?B\b)")
"""A number with a decimal point that is no size in bytes: sizes and whole numbers have to be the same."""

_ANYTHING = re.compile(r" ?\.\.\. ?")
_MOST_SHOWN = 60
"""Lines of an output that a failure shows."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    words: tuple[str, ...]
    """What follows the language on the opening line: `no-run`, or `needs=PACKAGE`."""
    text: str
    line: int
    """The line of the page on which the block opens."""

    @property
    def file(self) -> str | None:
        """The file that the block is the text of, as its first line says: `# file: net.py`."""
        named = _FILE.match(self.text)
        return named[1] if named else None

    @property
    def runs(self) -> bool:
        return "no-run" not in self.words

    @property
    def package(self) -> str | None:
        """The package that has to be installed for the block to run."""
        return next((word.removeprefix("needs=") for word in self.words if word.startswith("needs=")), None)

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """The commands of a console block, each with the lines of its output."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found and found[-1][0].endswith("\\"):
                found[-1] = (f"{found[-1][0][:-1].rstrip()} {line.strip()}", [])
            else:
                assert found, f"line {self.line}: an output without a command"
                found[-1][1].append(line)
        return found


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(block[1], tuple(block[2].split()), block[3], text.count("\n", 0, block.start()) + 1)
        for block in _BLOCK.finditer(text)
    ]


def differs(shown: Sequence[str], output: Sequence[str]) -> str | None:
    """Where an output is another than the one that a page shows; None where it is the same.

    On a page `...` is any text, and a line of it alone any number of lines. Blanks count as one, and figures may differ by
    `TOLERANCE`. A command that shows no output may have any.
    """
    shown, output = _stripped(shown), _stripped(output)
    if not shown or _matches(shown, output):
        return None
    return "\n".join(("the page shows", *shown, "and the output is", *output[:_MOST_SHOWN]))


def _stripped(lines: Sequence[str]) -> list[str]:
    text = "\n".join(" ".join(line.split()) for line in lines).strip("\n")
    return text.split("\n") if text else []


def _matches(shown: list[str], output: list[str]) -> bool:
    if not shown:
        return not output
    if shown[0] == "...":
        return any(_matches(shown[1:], output[begin:]) for begin in range(len(output) + 1))
    return bool(output) and _same_line(shown[0], output[0]) and _matches(shown[1:], output[1:])


def _same_line(shown: str, line: str) -> bool:
    figures = _FIGURE.findall(shown)
    words = [".*".join(map(re.escape, _ANYTHING.split(between))) for between in _FIGURE.sub("\0", shown).split("\0")]
    found = re.fullmatch(f"({_FIGURE.pattern})".join(words), line)
    return found is not None and all(map(_is_near, figures, found.groups()))


def _is_near(shown: str, measured: str) -> bool:
    expected, value = float(shown.replace(",", "")), float(measured.replace(",", ""))
    return expected == value or abs(value - expected) <= TOLERANCE * abs(expected)
