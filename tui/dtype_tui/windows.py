"""The part of the main screen that opens windows, and acts on the user's choice in them. A window's module is imported when it
opens, so that the first paint does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec
from textual.screen import Screen, ScreenResultType

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.service import events
from dtype_engine.service.jobs import CAUSES, GENERATE, TOKENS, GenerateText
from dtype_tui.config.questions import row_of
from dtype_tui.state.controller import Controller
from dtype_tui.widgets.module_tree import ModuleTree

if TYPE_CHECKING:
    from dtype_engine.results.inputs import InputsSummary
    from dtype_engine.results.runs import Generation
    from dtype_engine.results.token_choices import TokenReport


class _LastGeneration(msgspec.Struct):
    """What the window for generated text showed last."""

    wanted: GenerateText | None = None
    """The request, or None if nothing was generated yet."""
    free: bool = False
    """Whether the window showed both texts as they are decoded freely, and not every token of the reference's text."""
    found: TokenReport | tuple[Generation, ...] | None = None
    """What the engine has answered: with `free`, a tuple of texts."""
    made_with: tuple[Recipe, RunSettings, InputsSummary | None] | None = None
    """The recipe, the settings and the inputs with which `found` was made."""


class OpensWindows(Screen[None]):
    """A screen whose keys open windows. chosen_keys: the user's own keys, by binding id, such as {"measure": "f5"}."""

    def __init__(self, controller: Controller, chosen_keys: Mapping[str, str]) -> None:
        super().__init__()
        self.controller = controller
        self.experiment = controller.experiment
        self.chosen_keys = chosen_keys
        self.tree_view = ModuleTree(self.experiment, id="tree")
        self.generation = _LastGeneration()

    def _open(self, window: Screen[ScreenResultType], use: Callable[[ScreenResultType], object]) -> None:
        """Open a window. use: called with the window's result when the window closes, unless the result is None."""

        def closed(result: ScreenResultType | None) -> None:
            if result is not None:
                use(result)

        self.app.push_screen(window, closed)

    def open_result(self, done: events.JobDone) -> None:
        """Open the window that shows the results of a job, if there is one for this kind of job."""
        module, _, function = row_of(done.ask.job).window.rpartition(".")
        if module:
            from dtype_tui.screens.overlay import Answer

            answer = Answer(done.result, done.ask.parameters, self.experiment, self.app.size.width)
            self._open(getattr(import_module(module), function)(answer), self.controller.ask_once)

    def _inputs_of_texts(self) -> tuple[Recipe, RunSettings, InputsSummary | None]:
        experiment = self.experiment
        return experiment.recipe, experiment.settings, experiment.model.inputs_summary

    def keep_texts(self, found: TokenReport | tuple[Generation, ...]) -> None:
        """Store what the engine has answered about generated texts, which the next window of generated texts shows."""
        self.generation.found, self.generation.made_with = found, self._inputs_of_texts()

    def action_generate(self) -> None:
        """Open the window of pictures if the model makes pictures, otherwise the window of generated texts. The last texts are
        shown again if the recipe, the settings and the inputs are the same.
        """
        controller, last, model = self.controller, self.generation, self.experiment.model
        report = self.experiment.results.report
        if report is not None and report.pictures:
            from dtype_tui.screens.pictures import PicturesScreen

            self.app.push_screen(PicturesScreen(self.experiment))
            return
        if why := model.no_forward or model.no_text:
            controller.notify(why, "warning")
            return
        from dtype_tui.screens.generation import GenerationScreen

        def start(wanted: GenerateText, free: bool) -> bool:
            last.wanted, last.free, last.found = wanted, free, None
            controller.ask((GENERATE if free else TOKENS).ask(wanted))
            return controller.activity.busy

        def stop() -> None:
            controller.life.stop((GENERATE if last.free else TOKENS).name)

        found = last.found if self._inputs_of_texts() == last.made_with else None
        self.app.push_screen(GenerationScreen(last.wanted, last.free, found, start, stop))

    def has_tensors(self) -> bool:
        """Return whether the model's tensors are known. If they are not, tell the user."""
        if not self.experiment.model.has_tree:
            words = self.controller.open_error or "the model's tensors are not known yet"
            self.controller.notify(words, "information")
        return self.experiment.model.has_tree

    def action_presets(self) -> None:
        if self.has_tensors():
            from dtype_tui.screens.presets import PresetsScreen

            self._open(PresetsScreen(self.experiment), self.controller.replace_rules)

    def action_history(self) -> None:
        if not self.experiment.measured:
            self.controller.notify("nothing has been measured yet", "information")
            return
        from dtype_tui.screens.history import MeasurementsScreen

        self._open(MeasurementsScreen(self.controller), self.controller.go_back_to)

    def action_causes(self) -> None:
        """Open the plot of drift over depth. If the causes are unknown, measure them."""
        results = self.experiment.results
        if results.report is None:
            why = self.experiment.model.no_forward or "causes need a complete measurement: m measures"
            self.controller.notify(why, "information")
            return
        if results.causes is None:
            self.controller.ask(CAUSES.ask(None))
        from dtype_tui.screens.causes import CausesScreen

        self._open(CausesScreen(self.controller), self.tree_view.go_to)

    def action_inputs(self, line: str = "") -> None:
        """Run the model on the inputs that `line` names. Without a line, open the window with the current inputs."""
        if not self.experiment.model.live:
            why = self.controller.open_error or "the inputs are known when the model is loaded"
            self.controller.notify(why, "information")
        elif line:
            self.controller.set_inputs(line)
        else:
            from dtype_tui.screens.inputs import InputsScreen

            self.app.push_screen(InputsScreen(self.controller))

    def action_settings(self) -> None:
        from dtype_tui.screens.settings import SettingsScreen

        self._open(SettingsScreen(self.experiment.settings), self.controller.set_settings)

    def action_scan(self) -> None:
        """Open the results of the scan or, for a new scan, the choice of dtypes. Open nothing while results are awaited."""
        match self.controller.next_of_scan():
            case "choose":
                self._choose_scan()
            case "show":
                from dtype_tui.screens.scan import ScanScreen

                self._open(ScanScreen(self.controller), self._leave_scan)

    def _choose_scan(self) -> None:
        from dtype_tui.screens.scan_setup import ScanSetup

        self._open(ScanSetup(self.experiment), self.controller.start_scan)

    def _leave_scan(self, where: str) -> None:
        from dtype_tui.screens.scan import ScanScreen

        if where != ScanScreen.AGAIN:
            self.tree_view.go_to(where)
        elif not self.controller.resume_scan():
            self._choose_scan()

    def action_optimise(self) -> None:
        """Open the Pareto front, or say why there is none: it needs a scan of the current inputs and settings."""
        controller, experiment, scan = self.controller, self.experiment, self.experiment.scan
        if scan.report is None and experiment.model.no_forward:
            words = f"the Pareto front comes from a scan, and none can be made: {experiment.model.no_forward}"
            controller.notify(words, "warning")
            return
        if scan.report is None or experiment.why_scan_is_stale:
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

        self.app.push_screen(OptimiseScreen(controller))

    def action_leave_with(self) -> None:
        if self.has_tensors():
            from dtype_tui.screens.save import SaveScreen

            self._open(SaveScreen(self.controller), self.controller.save)
            self.controller.engine.plan_export()

    def action_details(self) -> None:
        if not self.has_tensors():
            return
        from dtype_tui.screens.details import details_screen

        self.app.push_screen(details_screen(self.experiment, self.tree_view.current.name))

    def action_jobs(self) -> None:
        from dtype_tui.screens.jobs import JobsScreen

        self.app.push_screen(JobsScreen(self.controller))
