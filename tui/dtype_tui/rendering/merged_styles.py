"""Draws blanks in the style of the text next to them. Each change of style costs some 25 bytes, much on a slow connection."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter


class MergedStyles(LineFilter):
    """Draws each run of blanks in the style of the text before or after it, if blanks look the same in both styles."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        merged: list[Segment] = []
        for segment in segments:
            before = merged[-1] if merged else None
            if before is not None and before.style == segment.style:
                merged[-1] = Segment(before.text + segment.text, before.style)
            elif before is None or not _looks_alike(before.style, segment.style):
                merged.append(segment)
            elif not segment.text.strip(" "):
                merged[-1] = Segment(before.text + segment.text, before.style)
            elif not before.text.strip(" "):
                merged[-1] = Segment(before.text + segment.text, segment.style)
            else:
                merged.append(segment)
        return merged


def _looks_alike(one: Style | None, other: Style | None) -> bool:
    """Return whether a blank looks the same in both styles: on the same background, and without a line through or below it."""
    if one is None or other is None:
        return False
    return one.bgcolor == other.bgcolor and not (_marks_blanks(one) or _marks_blanks(other)) and one.meta == other.meta


def _marks_blanks(style: Style) -> bool:
    return bool(style.reverse or style.underline or style.strike or style.overline or style.link)
