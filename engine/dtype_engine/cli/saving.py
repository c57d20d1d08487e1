"""`--save-recipe`: the rules of a run with what they were measured to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtype_engine.results.drift import DriftReport

if TYPE_CHECKING:
    from dtype_engine.runtime.session import Session

save_recipe_options = [
    click.option(
        "-o",
        "--save-recipe",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Keep the rules, the settings and the figures measured in this recipe file.",
    ),
    click.option("--force", is_flag=True, help="Replace a recipe file that is there."),
]


def may_save(file: Path | None, force: bool) -> None:
    """Raises UserError, before anything is measured, where the file can't be written."""
    if file is not None:
        from dtype_engine.core.atomic_write import check_target

        check_target(file, force)


def save_measured(session: Session, report: DriftReport, file: Path | None, force: bool) -> None:
    """Write the recipe in force with a measurement of it. Raises UserError."""
    if file is None:
        return
    from dtype_engine.core.atomic_write import write_text_atomic
    from dtype_engine.recipe.provenance import recipe_text
    from dtype_engine.reports.versions import versions

    text = recipe_text(session.tree, session.plan, session.model.title, session.settings, report, versions())
    write_text_atomic(file, text, replace=force)
