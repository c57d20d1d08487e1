"""What the keys of scan and search do in the app."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtype_engine.recipe import Recipe
    from dtype_tui.app import DtypeApp


def scan(app: DtypeApp) -> None:
    """Start a scan, go on with one that was stopped, or show what there is."""
    experiment, view = app.experiment, app.experiment.scan
    if experiment.no_forward:
        app.say(experiment.no_forward, "warning")
    elif experiment.scan_is_of_other_inputs:
        app.say("the inputs are others than those of the scan: scan anew", "information")
        view.forget()
        _ask(app)
    elif view.asked and not view.running and not view.finished:
        start(app, view.asked)
        if view.report is not None:
            show(app)
    elif view.report is not None:
        show(app)
    elif view.running:
        app.say("scanning: the first estimates come with the first sequence", "information")
    else:
        _ask(app)


def _ask(app: DtypeApp) -> None:
    from dtype_tui.screens.scan_setup import ScanSetup

    app.push_screen(ScanSetup(), lambda dtypes: start(app, dtypes) if dtypes else None)


def start(app: DtypeApp, dtypes: tuple[str, ...]) -> None:
    """Have the engine scan in these dtypes, or go on where it was."""
    view = app.experiment.scan
    if view.paused:
        pause(app)
    if dtypes != view.asked:
        view.forget()
    view.asked, view.running, view.finished = dtypes, True, False
    app.engine.scan(dtypes)
    app.expect("scan")


def show(app: DtypeApp) -> None:
    """The ranking and the map."""
    from dtype_tui.screens.scan import ScanScreen

    def left(where: str | None) -> None:
        view = app.experiment.scan
        if where == ScanScreen.AGAIN:
            if view.asked and not view.running and not view.finished:
                start(app, view.asked)
            else:
                _ask(app)
        elif where is not None:
            app.tree_view.go_to(where)
        app.show_all()

    app.push_screen(ScanScreen(app.experiment), left)


def pause(app: DtypeApp) -> None:
    """Let a scan wait where it is, or go on."""
    view = app.experiment.scan
    if view.running or view.paused:
        view.paused = not view.paused
        view.version += 1
        app.engine.pause(view.paused)
        app.show_status()


def optimise(app: DtypeApp) -> None:
    """The Pareto front."""
    if app.experiment.scan.report is None and app.experiment.no_forward:
        app.say(f"the front comes from a scan, and none can be made: {app.experiment.no_forward}", "warning")
        return
    if app.experiment.scan.report is None or app.experiment.scan_is_of_other_inputs:
        app.say("the front comes from a scan: s starts one", "information")
        return
    from dtype_tui.screens.optimise import OptimiseScreen  # plots are imported when one is drawn

    def put_in_force(recipe: Recipe) -> bool:
        if not app.experiment.push(recipe):
            return False
        app.recipe_changed()
        return True

    app.push_screen(OptimiseScreen(app.experiment, put_in_force), lambda _: app.show_all())
