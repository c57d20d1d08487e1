"""What the app makes of each event of the engine's worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtype_engine.reports.text_losses import loss_notice
from dtype_engine.worker import events
from dtype_tui.process.gc_policy import resume_gc
from dtype_tui.rendering.job_names import stopped_sentence
from dtype_tui.screens.flow import flow_screen
from dtype_tui.screens.generation import generation_screen
from dtype_tui.screens.inputs import InputsScreen
from dtype_tui.screens.save import SaveScreen
from dtype_tui.screens.speed import speed_screen
from dtype_tui.screens.weight_values import weight_screen
from dtype_tui.state import measurement_log as history

if TYPE_CHECKING:
    from dtype_tui.app import DtypeApp


def hear(app: DtypeApp, event: events.Event) -> None:
    """Take one event in: what the app knows, and what is on the screen because of it. Readings of another recipe than the one in
    force are passed over.
    """
    experiment = app.experiment
    if isinstance(event, (events.ModelReady, events.OpenFailed, events.Idle)):
        resume_gc()
    if isinstance(event, events.LoadingProgress):
        app.busy, app.activity, app.share = True, event.step, None
    elif isinstance(event, events.ModelReady):
        _model_ready(app, event)
    elif isinstance(event, events.HeadersRead):
        experiment.partial = False
        experiment.replace_tree(event.tree)
        app.has_tree = True
        app.tree_view.new_tree()
        app.find_cursor()
        for notice in event.notices:
            app.say(notice, "information")
        app.warn_unmatched()
        if app.open_error is not None:
            app.start_with_preset()
    elif isinstance(event, events.OpenFailed):
        app.open_error = event.message
        experiment.no_forward, experiment.partial = event.message, False
        if not event.classes_follow:
            app.start_with_preset()
        app.say(event.message, "warning" if app.has_tree else "error")
    elif isinstance(event, events.InputsReady):
        experiment.set_inputs(event.reading)
        if isinstance(app.screen, InputsScreen):
            app.screen.accepted(event.reading)
    elif isinstance(event, events.InputsRefused):
        app.say(event.message, "error")
        if isinstance(app.screen, InputsScreen):
            app.screen.refused(event.message)
    elif isinstance(event, events.Idle):
        app.busy, app.share, app.saving = False, None, False
        app.running, app.waiting = "", ()
        if experiment.scan.running:
            experiment.scan.stopped()
    elif isinstance(event, events.SavingProgress):
        app.saving = True
        app.busy, app.activity, app.share = True, event.what, event.done / max(1, event.total)
    elif isinstance(event, events.Saved):
        app.saving = app.quit_asked = False
        for sentence in (event.sentence, *event.notices):
            app.say(sentence, "information" if event.done else "warning")
    elif isinstance(event, events.FloorMeasured):
        experiment.floor = event.floor
    elif isinstance(event, events.ScanUpdated):
        experiment.scan.put(experiment.tree, event.report, event.finished)
    elif isinstance(event, events.Jobs):
        app.running, app.waiting = event.running, event.waiting
    elif isinstance(event, events.Refused):
        _refused(app, event)
    elif isinstance(event, events.Stopped):
        app.say(stopped_sentence(event.job, event.dropped), "information")
    elif event.recipe != experiment.recipe:
        return
    elif isinstance(event, events.Memory):
        experiment.memory = event.reading
    elif isinstance(event, events.CastingProgress):
        app.busy, app.activity, app.share = True, f"casting {event.total:,} tensors", event.done / event.total
    elif isinstance(event, events.CastDone):
        experiment.set_lost(event.lost, event.reason)
        if isinstance(app.screen, SaveScreen):
            app.screen.show_losses()
        _say_lost(app, event)
    elif isinstance(event, events.LossRemedyFound):
        experiment.loss_remedy = event.found
    elif isinstance(event, events.MeasuringProgress):
        app.busy, app.activity = True, f"measuring: {event.run}"
        app.share = event.done / event.total if event.total else None
    elif isinstance(event, events.ModulesMeasured):
        experiment.modules.update((reading.name, reading) for reading in event.modules)
    elif isinstance(event, events.Measured):
        if event.report.settings == str(experiment.settings):
            experiment.report = event.report
            experiment.modules = {reading.name: reading for reading in event.report.modules}
            if app.tree_view.order == "drift":
                app.tree_view.rebuild()
            if isinstance(app.screen, InputsScreen):
                app.screen.measured(event.report.output.positions)
            experiment.scan.note_measured(experiment.tree, experiment.plan, event.report)
            history.remember(experiment.measured, history.measured(event.report, experiment.plan.planned_bytes))
    elif isinstance(event, events.NonfiniteFound):
        experiment.nonfinite = event.found
    elif isinstance(event, events.AttributionReady):
        experiment.causes = event.report
    elif isinstance(event, events.WorkingProgress):
        app.busy, app.activity, app.share = True, event.what, event.done / event.total
    elif isinstance(event, events.Generated):
        app.push_screen(generation_screen(event.texts))
    elif isinstance(event, events.SpeedMeasured):
        app.push_screen(speed_screen(event.report))
    elif isinstance(event, events.ImplicitCastsTraced):
        app.push_screen(flow_screen(event.casts, app.size.width))
    elif isinstance(event, events.WeightInspected):
        app.push_screen(weight_screen(experiment, event.name, event.reading))
    elif isinstance(event, events.ExportPlanned):
        if isinstance(app.screen, SaveScreen):
            app.screen.show_plan(event)
    elif isinstance(event, events.Failed):
        experiment.failure, experiment.failed_module = event.message, event.module
        app.say(event.message, "error")


def _model_ready(app: DtypeApp, event: events.ModelReady) -> None:
    experiment = app.experiment
    experiment.class_name, experiment.device, experiment.inputs = event.class_name, event.device, event.inputs
    experiment.no_forward, experiment.live, experiment.partial = event.no_forward, True, False
    experiment.replace_tree(event.tree)
    app.has_tree = True
    app.tree_view.new_tree()
    app.find_cursor()
    app.start_with_preset()
    for notice in event.notices:
        app.say(notice, "warning")
    if event.no_forward:
        app.say(event.no_forward, "warning")
    app.warn_unmatched()


def _refused(app: DtypeApp, event: events.Refused) -> None:
    """What was asked for is not done; nothing that is on the screen goes because of it."""
    app.say(event.message, "error")
    # The palette may lie over the window that asked.
    for screen in app.screen_stack:
        if event.job == "inputs" and isinstance(screen, InputsScreen):
            screen.refused(event.message)
        elif event.job == "causes":
            from dtype_tui.screens.causes import CausesScreen

            if isinstance(screen, CausesScreen):
                screen.refused(event.message)


def _say_lost(app: DtypeApp, event: events.CastDone) -> None:
    """A word more than what the pane, the tree and the status line go on showing."""
    if words := loss_notice(event.lost or ()):
        app.say(words, "warning")
