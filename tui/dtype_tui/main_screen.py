"""Which screens the keys ask for, what they are given, and what comes of what was chosen there.

The screens' modules are imported when one is asked for: the first paint does not wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtype_tui.app import DtypeApp
    from dtype_tui.state.measurement_log import MeasuredRecipe


def causes(app: DtypeApp) -> None:
    """Drift over depth, and the modules that it arises in."""
    experiment = app.experiment
    if experiment.report is None:
        app.say(experiment.no_forward or "not measured yet: the causes are those of a drift", "information")
        return
    if experiment.causes is None:
        app.run_forward_task("causes", app.engine.causes)
    from dtype_tui.screens.causes import CausesScreen

    app.push_screen(CausesScreen(experiment, app.doing, app.waits, lambda: app.engine.cancel("causes")))


def measured(app: DtypeApp) -> None:
    """Every measured recipe; one may be gone back to."""
    if not app.experiment.measured:
        app.say("nothing was measured yet", "information")
        return
    from dtype_tui.screens.history import MeasurementsScreen

    def go_back_to(chosen: MeasuredRecipe | None) -> None:
        if chosen is None:
            return
        if chosen.settings != str(app.experiment.settings):
            app.say(f"that was measured with {chosen.settings}; the settings of now stay", "information")
        if app.experiment.push(chosen.recipe):
            app.recipe_changed()

    app.push_screen(MeasurementsScreen(app.experiment), go_back_to)


def inputs(app: DtypeApp, line: str) -> None:
    """Run on what the line names; without one, show what the model is run on."""
    experiment = app.experiment
    if not experiment.live:
        app.say(app.open_error or "the inputs are known when the model is there", "information")
        return
    if line:
        app.engine.set_inputs(line)
        app.expect("inputs")
        return
    from dtype_tui.screens.inputs import InputsScreen

    compared = experiment.report.output.positions if experiment.report is not None else None
    app.push_screen(InputsScreen(experiment.inputs_reading, experiment.no_forward, compared, app.engine.set_inputs))


def presets(app: DtypeApp) -> None:
    """The presets; one may be put in force."""
    if not app.has_tree:
        return
    from dtype_tui.recipe_actions import replace_all
    from dtype_tui.screens.presets import PresetsScreen

    app.push_screen(
        PresetsScreen(app.experiment.tree), lambda recipe: replace_all(app, recipe) if recipe is not None else None
    )


def leave_with(app: DtypeApp) -> None:
    """What to leave with; a wish goes to the engine."""
    experiment = app.experiment
    if not app.has_tree:
        return
    from dtype_tui.screens.save import SaveScreen

    app.push_screen(
        SaveScreen(experiment.title, len(experiment.recipe), experiment.report, lambda: experiment.lost),
        lambda wish: app.wish(wish) if wish is not None else None,
    )
    app.engine.plan_export()


def details(app: DtypeApp) -> None:
    """All that is known of the node under the cursor."""
    from dtype_tui.screens.details import details_screen

    app.push_screen(details_screen(app.experiment, app.tree_view.current.name))


def help(app: DtypeApp) -> None:
    """Every key, and what the panes' words mean."""
    from dtype_tui.screens.help import help_screen, sections

    words = [(str(pane.border_title), pane.HELP) for pane in app.side.panes]
    app.push_screen(help_screen(*sections(app.BINDINGS, app.chosen_keys, words)))
