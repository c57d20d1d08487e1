"""Fills the cells of a form."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

from .commands import Cell, where
from .expected import OF_SCHEMES, REFUSED, REFUSED_SCHEMES, WAYS
from .forms import Made, made
from .screens import SCREENS, walk
from .ways import NO_NAME, go


def commands(ways: Sequence[str], model: Made, work: Path) -> dict[str, Cell | str]:
    """The cells without a screen: what each came to, or in a line what went wrong."""
    cells: dict[str, Cell | str] = {}
    for way in ways:
        try:
            cells[way] = go(way, model, work)
        except Exception as error:
            cells[way] = where(error)
    return cells


def screens(ways: Sequence[str], model: Made, work: Path) -> dict[str, Cell | str]:
    """These cells of the app."""
    if model.live:
        return dict.fromkeys(ways, Cell(refusal=NO_NAME))
    if not ways:
        return {}
    try:
        return asyncio.run(walk(ways, model, work))
    except Exception as error:
        return dict.fromkeys(ways, where(error))


def wrong(form: str, cells: dict[str, Cell | str]) -> list[str]:
    """What is not as the table has it, a line for each cell."""
    found = []
    for way, cell in cells.items():
        words = REFUSED.get(form, REFUSED_SCHEMES.get(form, {})).get(way)
        if isinstance(cell, str):
            found.append(f"{form} x {way}: {cell}")
        elif words is None and cell.refusal:
            found.append(f"{form} x {way}: refused: {cell.refusal}")
        elif words is not None and not cell.refusal:
            found.append(f"{form} x {way}: worked, and the table has it refused")
        elif words is not None and words not in cell.refusal:
            found.append(f"{form} x {way}: the reason has no {words!r}: {cell.refusal}")
    return found


def fill(
    form: str, folder: Path, in_the_app: Sequence[str] = SCREENS, left_out: Collection[str] = ()
) -> dict[str, Cell | str]:
    """The row of a form, without the ways left out; of the app's cells only those named."""
    model = made(form, folder / "made")
    ways = [way for way in WAYS if way not in SCREENS and way not in left_out]
    return {**commands(ways, model, folder / "work"), **screens(in_the_app, model, folder / "app")}


def fill_scheme(scheme: str, folder: Path, ways: Sequence[str] = OF_SCHEMES) -> dict[str, Cell | str]:
    """The row of a scheme of quantized weights, or these ways of it."""
    return commands(ways, made(scheme, folder / "made"), folder / "work")
