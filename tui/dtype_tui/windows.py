"""Opens the windows over the main screen when keys are pressed or results arrive, and acts on the user's choice in a window.

The module of a window is imported when the window opens, so that the first paint does not wait for the import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec
from textual.geometry import Offset

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.service import events
from dtype_engine.service.jobs import CAUSES, GENERATE, GenerateText
from dtype_tui.config.questions import window_of
from dtype_tui.state.answer import Answer
from dtype_tui.state.controller import Controller
from dtype_tui.widgets.module_tree import ModuleTree

if TYPE_CHECKING:
    from dtype_engine.results.inputs import InputsSummary
    from dtype_engine.results.runs import Generation
    from dtype_tui.widgets.panes.base import Pane


class _LastGeneration(msgspec.Struct):
    """The request and the texts that the window for generated text showed last."""

    wanted: GenerateText | None = None
    """The requested prompt and length, or None if nothing was generated yet."""
    texts: tuple[Generation, ...] = ()
    made_with: tuple[Recipe, RunSettings, InputsSummary | None] | None = None
    """The recipe, settings and inputs with which `texts` were generated."""


class Windows:
    """Opens windows. push: a function that shows a screen, and calls a given function with the screen's result when it closes."""

    def __init__(self, controller: Controller, tree: ModuleTree, push: Callable[..., object]) -> None:
        self._controller = controller
        self._experiment = controller.experiment
        self._tree = tree
        self._push = push
        self._generation = _LastGeneration()

    def keep_texts(self, texts: tuple[Generation, ...]) -> None:
        """Store generated texts, so that their window shows them when it is opened the next time."""
        experiment = self._experiment
        self._generation.texts = texts
        self._generation.made_with = experiment.recipe, experiment.settings, experiment.model.inputs_summary

    def open_result(self, done: events.JobDone, width: int) -> None:
        """Open the window for the result of a job, if it has one. width: the screen's width in cells."""
        module, _, function = window_of(done.ask.job).rpartition(".")
        if module:
            screen_of = getattr(import_module(module), function)
            self._push(screen_of(Answer(done.result, done.ask.parameters, self._experiment, width)))

    def generation(self) -> None:
        """Open the window that generates text. It starts with the prompt and length of the last request. It shows the texts of that
        request, too, if the recipe, the settings and the inputs are the same.

        If the model makes pictures, open the window with its pictures.
        """
        controller, last = self._controller, self._generation
        report = self._experiment.results.report
        if report is not None and report.pictures:
            from dtype_tui.screens.pictures import PicturesScreen

            self._push(PicturesScreen(self._experiment))
            return
        if why := self._experiment.model.no_forward or self._experiment.model.no_text:
            controller.notify(why, "warning")
            return
        from dtype_tui.screens.generation import GenerationScreen

        def start(wanted: GenerateText) -> bool:
            last.wanted, last.texts = wanted, ()
            controller.ask(GENERATE.ask(wanted))
            return controller.activity.busy

        experiment = self._experiment
        same = (experiment.recipe, experiment.settings, experiment.model.inputs_summary) == last.made_with
        texts = last.texts if same else ()
        self._push(GenerationScreen(last.wanted, texts, start, lambda: controller.life.stop(GENERATE.name)))

    def presets(self) -> None:
        """Open the list of presets. The chosen preset replaces all rules."""
        if not self._experiment.model.has_tree:
            return
        from dtype_tui.screens.presets import PresetsScreen

        replace = self._controller.replace_rules
        self._push(PresetsScreen(self._experiment), lambda recipe: recipe is not None and replace(recipe))

    def history(self) -> None:
        """Open the list of measured recipes, from which the user can return to one."""
        if not self._experiment.measured:
            self._controller.notify("nothing has been measured yet", "information")
            return
        from dtype_tui.screens.history import MeasurementsScreen

        go_back_to = self._controller.go_back_to
        screen = MeasurementsScreen(self._experiment, self._controller.measure_recipes)
        self._push(screen, lambda measured: measured is not None and go_back_to(measured))

    def causes(self) -> None:
        """Open the plot of drift over depth, in which the user can go to a cause. If the causes are unknown, measure them."""
        controller, experiment = self._controller, self._experiment
        if experiment.results.report is None:
            why = experiment.model.no_forward or "causes need a complete measurement: m measures"
            controller.notify(why, "information")
            return
        if experiment.results.causes is None:
            controller.ask(CAUSES.ask(None))
        from dtype_tui.screens.causes import CausesScreen

        go_to = self._tree.go_to
        self._push(CausesScreen(controller), lambda module: module is not None and go_to(module))

    def inputs(self, set_inputs: Callable[[str], None]) -> None:
        """Open the window of the model's inputs. set_inputs: called with the line in which the user names other inputs."""
        experiment = self._experiment
        from dtype_tui.screens.inputs import InputsScreen

        compared = experiment.results.report.output.positions if experiment.results.report is not None else None
        ask = None if self._controller.read_only else set_inputs
        self._push(InputsScreen(experiment.model.inputs_summary, experiment.model.no_forward, compared, ask))

    def settings(self) -> None:
        """Open the settings of a run. After a change, the engine measures with the chosen settings."""
        from dtype_tui.screens.settings import SettingsScreen

        set_settings = self._controller.set_settings
        self._push(
            SettingsScreen(self._experiment.settings), lambda settings: settings is not None and set_settings(settings)
        )

    def scan(self) -> None:
        """Open the window that sets up a scan or, if there is a scan, the window with its current results.

        Open nothing while the scan has no results.
        """
        match self._controller.next_of_scan():
            case "choose":
                self._choose_scan()
            case "show":
                self._show_scan()

    def _choose_scan(self) -> None:
        from dtype_tui.screens.scan_setup import ScanSetup

        self._push(
            ScanSetup(bool(self._experiment.tree.caches)),
            lambda dtypes: self._controller.start_scan(dtypes) if dtypes else None,
        )

    def _show_scan(self) -> None:
        from dtype_tui.screens.scan import ScanScreen

        def left(where: str | None) -> None:
            if where == ScanScreen.AGAIN:
                if not self._controller.resume_scan():
                    self._choose_scan()
            elif where is not None:
                self._tree.go_to(where)

        self._push(ScanScreen(self._experiment, self._controller.pause_scan), left)

    def optimise(self) -> None:
        """Open the Pareto front, if a scan of the current inputs and settings exists."""
        controller, experiment = self._controller, self._experiment
        if experiment.scan.report is None and experiment.model.no_forward:
            words = f"the Pareto front comes from a scan, and none can be made: {experiment.model.no_forward}"
            controller.notify(words, "warning")
            return
        if experiment.scan.report is None or experiment.why_scan_is_stale:
            scan = experiment.scan
            words = "s starts one"
            if scan.running:
                words = "the running scan has no estimates yet"
            elif experiment.why_scan_is_stale:
                words = f"{experiment.why_scan_is_stale}, so s starts another"
            elif scan.requested and not scan.finished:
                words = "s resumes the stopped one"
            controller.notify(f"the Pareto front comes from a scan: {words}", "information")
            return
        from dtype_tui.screens.optimise import OptimiseScreen

        self._push(OptimiseScreen(experiment, controller.apply_recipe, controller.measure_recipes, controller.undo))

    def save(self) -> None:
        """Open the window that saves files. The engine writes the files."""
        controller, experiment = self._controller, self._experiment
        if not experiment.model.has_tree:
            return
        from dtype_tui.screens.save import SaveScreen

        self._push(
            SaveScreen(
                experiment.model.title,
                len(experiment.recipe),
                experiment.results,
                lambda: experiment.results.losses.values,
                controller.engine.host,
                controller.engine.check_path,
                experiment.model.path,
            ),
            lambda request: controller.save(request) if request is not None else None,
        )
        controller.engine.plan_export()

    def details(self) -> None:
        """Open the details of the node under the cursor."""
        from dtype_tui.screens.details import details_screen

        self._push(details_screen(self._experiment, self._tree.current.name))

    def jobs(self, stopped: Callable[[], None]) -> None:
        """Open the list of jobs. stopped: a function that is called before a job is stopped."""
        from dtype_tui.screens.jobs import JobsScreen

        def stop(job: str) -> None:
            stopped()
            self._controller.stop_job(job)

        self._push(JobsScreen(self._controller.activity, stop))

    def jump(self, places: Sequence[Offset], go: Callable[[int | None], None]) -> None:
        """Put labels on places of the screen, given in cells from the upper left corner. go: called with the index of the place
        whose label the user types, or with None if the user types none.
        """
        from dtype_tui.screens.jump import JumpScreen

        self._push(JumpScreen(places), go)

    def help(self, chosen_keys: Mapping[str, str], panes: Sequence[Pane], hidden: Set[str]) -> None:
        """Open the help. chosen_keys: the user's own keys, by binding id. panes: the panes whose terms the help explains. hidden:
        the ids of bindings to leave out.
        """
        from dtype_tui.screens.help import HelpScreen, keys_for_node

        words = [(pane.TITLE, pane.HELP) for pane in panes]
        experiment = self._experiment
        if self._tree.rows:
            row = self._tree.current
            node, node_keys = row.name or experiment.model.title, keys_for_node(experiment, row)
        else:
            node, node_keys = experiment.model.title, []
        self._push(HelpScreen(node, node_keys, chosen_keys, words, hidden))
