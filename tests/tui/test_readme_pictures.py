"""The program that draws the pictures of the README."""

from __future__ import annotations

import runpy

from tests.helpers.paths import ROOT

from dtype_tui.app import DtypeApp


async def test_pictures_of_the_readme_are_drawn_from_the_app_on_the_demo() -> None:
    app = runpy.run_path(str(ROOT / "screenshots" / "draw.py"))["demo_app"]()
    assert isinstance(app, DtypeApp)
    assert app.controller.experiment.model.title == "demo"
