"""Draws a picture with half blocks: each cell of the terminal shows two pixels, one above the other."""

from __future__ import annotations

from rich.color import Color
from rich.style import Style
from rich.text import Text

from dtype_engine.results.pictures import Picture


def half_blocks(picture: Picture, columns: int, lines: int) -> Text:
    """Return a picture as text, as large as fits into `columns` x `lines` cells without distortion."""
    from PIL import Image  # imported here, because few models make pictures

    share = min(columns / picture.width, 2 * lines / picture.height)
    width, height = max(1, int(share * picture.width)), max(2, int(share * picture.height) // 2 * 2)
    whole = Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)
    pixels = whole.resize((width, height), Image.Resampling.BOX).tobytes()
    colours = [Color.from_rgb(*pixels[at : at + 3]) for at in range(0, len(pixels), 3)]
    text = Text(no_wrap=True)
    for row in range(0, height, 2):
        upper, lower = (colours[each * width : (each + 1) * width] for each in (row, row + 1))
        for one, other in zip(upper, lower, strict=True):
            text.append("▀", Style(color=one, bgcolor=other))
        text.append("\n")
    return text
