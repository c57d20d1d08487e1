"""The app: wires the tree, the panes and the prompts to one experiment and to the engine's worker."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import events as textual_events
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.widget import AwaitMount
from textual.widgets import Input, Static

from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import History, Recipe, Rule, generalisations
from dtype_engine.worker import events
from dtype_tui import (
    command_actions,
    node_actions,
    recipe_actions,
    scan_actions,
)
from dtype_tui import (
    main_screen as screen_actions,
)
from dtype_tui.base_app import BaseApp
from dtype_tui.config.bindings import DIGITS, KEYS
from dtype_tui.config.config import Config
from dtype_tui.config.key_names import keys_of, on_keyboard
from dtype_tui.process.gc_policy import pause_gc, resume_gc
from dtype_tui.rendering.job_names import WORDS, queue_words
from dtype_tui.state.commands import Command
from dtype_tui.state.engine import Engine
from dtype_tui.state.experiment import Experiment
from dtype_tui.widgets.bottom_prompt import BottomPrompt
from dtype_tui.widgets.command_line import CommandLine
from dtype_tui.widgets.module_tree import ORDERS, ModuleTree
from dtype_tui.widgets.panes.side import SidePanes
from dtype_tui.widgets.prompts import CastPrompt, FilterPrompt
from dtype_tui.widgets.status import next_keys, status_line

if TYPE_CHECKING:
    from dtype_engine.worker.save_requests import SaveRequest
    from dtype_tui.state.session_saver import SessionSaver
    from dtype_tui.state.session_store import SavedSession

__all__ = ["DIGITS", "DtypeApp", "Engine"]

SMALLEST = (60, 15)
NARROW_BELOW = 100
GENERATED_TOKENS = 48
_LOOK_EVERY_S = 0.1
_KEEP_EVERY_S = 0.2
_SERVER_EVERY_S = 1.0
_ONLY_THE_NEWEST = (
    events.MeasuringProgress,
    events.Memory,
    events.CastingProgress,
    events.LoadingProgress,
    events.WorkingProgress,
)


class DtypeApp(BaseApp[None]):
    """Explore a model, cast what a pattern takes, watch drift and memory."""

    CSS_PATH = "app.tcss"
    TITLE = "dtype-tui"
    ENABLE_COMMAND_PALETTE = True

    BINDINGS: ClassVar[list[BindingType]] = KEYS

    def __init__(
        self,
        title: str,
        tree: Tree | None,
        engine: Callable[[Callable[[events.Event], None]], Engine],
        settings: RunSettings | None = None,
        whole: bool = True,
        config: Config | None = None,
    ) -> None:
        config = config or Config()
        super().__init__(config)
        self.chosen_keys = config.keys
        self.set_keymap(dict(config.keys))
        self.experiment = Experiment(
            title, tree if tree is not None else Tree(()), settings=settings or RunSettings(), partial=not whole
        )
        self.has_tree = tree is not None
        self._arrived: deque[events.Event] = deque()
        self.engine = engine(self._arrived.append)
        self.activity = "opening"
        self.share: float | None = None
        self.running = ""
        """The engine's job, by its name in `jobs.JobName`."""
        self.waiting: tuple[str, ...] = ()
        """The jobs that wait behind it."""
        self.busy = True
        self.open_error: str | None = None
        self.keeper: SessionSaver | None = None
        self.begin_keeping: Callable[[], SessionSaver] | None = None
        self._cursor_wanted: str | None = None
        self.worst = ""
        """Where the key to the worst module last went."""
        self._tree: ModuleTree | None = None
        self.preset_wanted: str | None = None
        self.after_preset = Recipe()
        self.saving = self.quit_asked = False
        self._prompts: AwaitMount | None = None

    # -- layout --------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        with Container(id="main"):
            self._tree = ModuleTree(self.experiment, id="tree")
            yield self._tree
            yield SidePanes(self.experiment)
        yield Static(id="status", markup=False)
        yield Static(id="keys", markup=False)
        yield Static(id="too-small", markup=False)
        yield Static(id="message", markup=False)

    @property
    def tree_view(self) -> ModuleTree:
        return self.query_one(ModuleTree)

    @property
    def side(self) -> SidePanes:
        return self.query_one(SidePanes)

    def on_mount(self) -> None:
        self._fit(self.size.width, self.size.height)
        # At once, unlike focus(): a prompt that a key opens in the first moment must not lose the focus again.
        self.screen.set_focus(self.tree_view)
        self.show_all()
        self.set_interval(_LOOK_EVERY_S, self.look)
        self.find_cursor()
        self.set_interval(_KEEP_EVERY_S, self._keep_now)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))
        if self.is_web:
            self.set_interval(_SERVER_EVERY_S, self._end_with_the_server)
        # The first paint comes first: starting the engine imports torch.
        self.call_after_refresh(self._begin)

    async def ensure_prompts(self) -> None:
        """Mount the prompts, which the first paint does not wait for; a key that wants one may come before that."""
        if self._prompts is None:
            self._prompts = self.mount(
                CastPrompt(self.experiment),
                CommandLine(self.experiment, command_actions.completer(self)),
                FilterPrompt(lambda: len(self.tree_view.matches)),
            )
        await self._prompts
        for field in self.query(Input):
            field.cursor_blink = False  # every blink goes over the wire

    async def _begin(self) -> None:
        await self.ensure_prompts()
        if self.begin_keeping is not None:
            self.keeper = self.begin_keeping()
        if self.keeper is not None:
            self.keeper.say = lambda trouble: self.say(trouble, "warning")
        pause_gc()
        self.engine.start()

    def _end_with_the_server(self) -> None:
        from dtype_tui.process.terminal import server_disconnected

        if server_disconnected():
            self.exit()

    def on_unmount(self) -> None:
        self._keep_now()
        if self.keeper is not None:
            self.keeper.close()
        self.engine.close()
        resume_gc()

    def on_resize(self, event: textual_events.Resize) -> None:
        self._fit(event.size.width, event.size.height)

    def _fit(self, width: int, height: int) -> None:
        small = width < SMALLEST[0] or height < SMALLEST[1]
        self.screen_stack[0].set_class(small, "small")
        narrow = width < NARROW_BELOW
        self.screen_stack[0].set_class(narrow, "narrow")
        self.side.set_narrow(narrow)
        words = f"dtype-tui needs {SMALLEST[0]} x {SMALLEST[1]}; this terminal is {width} x {height}. Enlarge it, or press q."
        self.query_one("#too-small", Static).update(words)
        self.call_after_refresh(self.show_all)

    def show_all(self) -> None:
        if not self.is_running:
            return
        self.tree_view.refresh_changed()
        self._show_panes()
        self.show_status()
        message = self.query_one("#message", Static)
        message.display = not self.has_tree
        if not self.has_tree:
            words = self.open_error or f"{self.activity}…\nThe tree appears when the model is there."
            message.update(words)

    def _show_panes(self) -> None:
        node = self.tree_view.current.name if self.tree_view.rows else ""
        self.side.show(self.activity if self.busy else "", node)

    def doing(self) -> tuple[str, float | None]:
        """What the engine does ("" while nothing), and how much of it is done."""
        return (self.activity, self.share) if self.busy else ("", None)

    def waits(self, job: str) -> bool:
        """Whether the engine was asked for this and has not begun."""
        return job in self.waiting

    def show_status(self) -> None:
        experiment, width = self.experiment, self.size.width
        waiting = queue_words(self.running, self.waiting)
        self._put("#status", status_line(experiment, self.doing(), waiting, self.open_error is not None, width))
        keys = next_keys(experiment, bool(self.tree_view.filter_text), self.busy, width)
        self._put("#keys", Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))

    def _put(self, id: str, words: Text) -> None:
        """Show a line, if it says anything new: what is drawn again goes over the wire again."""
        line = self.query_one(id, Static)
        if line.content != words:
            line.update(words)

    # -- what the engine says ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take what has arrived from the engine; of readings that replace each other only the newest counts."""
        if not self._arrived:
            return
        from dtype_tui.rendering.engine_messages import heard_in_the_app
        from dtype_tui.state.controller import hear

        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        newest = {type(event): event for event in arrived}
        for event in arrived:
            if not isinstance(event, _ONLY_THE_NEWEST) or newest[type(event)] is event:
                hear(self, heard_in_the_app(event))
        self.show_all()

    def say(self, text: str, severity: str) -> None:
        self.notify(printable(text, 500), severity=severity, markup=False)  # type: ignore[arg-type]

    # -- the palette -----------------------------------------------------------------------------------

    def action_command_palette(self) -> None:
        from dtype_tui.screens.modal import CommandPalette

        if not any(isinstance(screen, CommandPalette) for screen in self.screen_stack):
            self.push_screen(CommandPalette())  # no id: the last one may still be going

    def search_themes(self) -> None:
        from textual.theme import ThemeProvider

        from dtype_tui.screens.modal import CommandPalette

        self.push_screen(CommandPalette(providers=[ThemeProvider], placeholder="Search for themes…"))

    # -- the session that is kept --------------------------------------------------------------------------------

    def restore(self, saved: SavedSession) -> None:
        """Go on with a session that was kept."""
        self.experiment.restore(History.of(saved.recipes, saved.at))
        self.experiment.measured[:] = saved.valid_measurements
        self.engine.set_recipe(self.experiment.recipe)
        self._cursor_wanted = saved.cursor

    def _keep_now(self) -> None:
        if self.keeper is None or not (self.has_tree or self._cursor_wanted is not None):
            return
        cursor = self._cursor_wanted
        if cursor is None:
            # The widget itself, which outlives the screen: the last keys count although the app is ending.
            cursor = self._tree.current.name if self._tree is not None and self._tree.rows else ""
        self.keeper.note(self.experiment, cursor)

    def find_cursor(self) -> None:
        """Go to the node where the session that was taken up stood, once there is a tree with it."""
        if self._cursor_wanted is not None and self.has_tree:
            found = self.tree_view.go_to(self._cursor_wanted)
            if found or self.experiment.live or self.open_error:
                self._cursor_wanted = None

    # -- recipes -------------------------------------------------------------------------------------------------

    def start_with(self, recipe: Recipe, preset: str | None = None) -> None:
        """Begin with a recipe (from the command line), after the rules of a preset where one was asked for."""
        recipe_actions.start_with(self, recipe, preset)

    def start_with_preset(self) -> None:
        """Put the preset in force that the command line asks for; most wait for module classes to be known."""
        recipe_actions.start_with_preset(self)

    def recipe_changed(self) -> None:
        """The recipe in force is another: tell the engine, and show what is known at once."""
        if self.experiment.same_plan and not self.busy:
            self.engine.follow_recipe(self.experiment.recipe)
            self.show_all()
            return
        self.engine.set_recipe(self.experiment.recipe)
        if self.open_error is None:
            self.busy, self.activity, self.share = True, "casting", None
        self.show_all()

    def add_rule(self, rule: Rule) -> None:
        """Put one more rule in force."""
        recipe_actions.add(self, rule)

    def warn_unmatched(self) -> None:
        recipe_actions.warn_unmatched(self)

    async def action_cast(self) -> None:
        await self.ensure_prompts()
        if self.tree_view.rows:
            self.query_one(CastPrompt).open(self.tree_view.current.name)

    def action_cast_node(self, dtype: str) -> None:
        self.add_rule(Rule.make(generalisations(self.tree_view.current.name)[0], dtype))

    def action_undo(self) -> None:
        if self.experiment.undo():
            self.recipe_changed()
        else:
            self.say("nothing left to undo", "information")

    def action_redo(self) -> None:
        if self.experiment.redo():
            self.recipe_changed()
        else:
            self.say("nothing to redo", "information")

    def action_drop_rules(self) -> None:
        recipe_actions.drop(self)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The three prompts open before the next key is looked at: what is typed ahead, on a slow line say, is theirs. So
        their keys come before those of widgets, and then only in the tree.
        """
        if action in ("cast", "filter", "command"):
            # In its first moment nothing has the focus yet.
            return len(self.screen_stack) == 1 and (self.focused is None or isinstance(self.focused, ModuleTree))
        return True

    # -- keys ----------------------------------------------------------------------------------------------------

    def action_measure(self) -> None:
        self.experiment.forget_readings()
        self.engine.measure()
        self.show_all()

    def action_flow(self) -> None:
        self.run_forward_task("flow", self.engine.flow)

    def action_causes(self) -> None:
        screen_actions.causes(self)

    def action_remedy(self) -> None:
        recipe_actions.remedy(self)

    def action_history(self) -> None:
        screen_actions.measured(self)

    def action_generate(self) -> None:
        self.run_forward_task("generate", lambda: self.engine.generate(GENERATED_TOKENS))

    def action_speed(self) -> None:
        self.run_forward_task("speed", self.engine.speed)

    def action_scan(self) -> None:
        scan_actions.scan(self)

    def action_pause_scan(self) -> None:
        scan_actions.pause(self)

    def action_optimise(self) -> None:
        scan_actions.optimise(self)

    def run_forward_task(self, job: str, ask: Callable[[], None]) -> None:
        """Ask for a job that needs forward passes; where there are none, say why."""
        if self.experiment.no_forward:
            self.say(self.experiment.no_forward, "warning")
        else:
            ask()
            self.expect(job)

    def expect(self, job: str) -> None:
        """A job was asked of the engine: it is on the screen before the engine says so."""
        if not self.busy:
            self.busy, self.activity, self.share = True, WORDS[job][0], None
        elif job not in self.waiting:
            self.waiting += (job,)
        self.show_status()

    def action_values(self) -> None:
        node_actions.values(self)

    def action_inputs(self, line: str = "") -> None:
        """Run on what the line names; without one, show what the model is run on."""
        screen_actions.inputs(self, line)

    def action_settings(self) -> None:
        from dtype_tui.screens.settings import SettingsScreen

        self.push_screen(SettingsScreen(self.experiment.settings), self._settings_chosen)

    def _settings_chosen(self, settings: RunSettings | None) -> None:
        if settings is None or settings == self.experiment.settings:
            return
        self.experiment.set_settings(settings)
        self.engine.set_settings(settings)
        self.show_all()

    def action_presets(self) -> None:
        screen_actions.presets(self)

    def action_leave_with(self) -> None:
        screen_actions.leave_with(self)

    def wish(self, wish: SaveRequest) -> None:
        """Have the engine write something."""
        self.engine.save(wish)
        self.expect("write")

    async def action_quit(self) -> None:
        if self.saving and not self.quit_asked:
            self.quit_asked = True
            self.say("writing is not done: Esc stops it, and q again leaves without it", "warning")
        else:
            await super().action_quit()

    def action_stop(self) -> None:
        if self.tree_view.filter_text:
            self.tree_view.set_filter("")
            self.show_all()
        elif self.busy:
            self.engine.cancel()

    def action_worst(self) -> None:
        node_actions.go_to_worst(self)

    async def action_filter(self) -> None:
        await self.ensure_prompts()
        self.query_one(FilterPrompt).open(self.tree_view.filter_text)

    def action_match(self, step: int) -> None:
        if not self.tree_view.next_match(step):
            self.say("no match: / filters by name", "information")

    def action_next_order(self) -> None:
        self.action_sort_by(ORDERS[(ORDERS.index(self.tree_view.order) + 1) % len(ORDERS)])

    def action_copy_name(self) -> None:
        node_actions.copy(self, self.tree_view.current.name or "*", "the name")

    def action_copy_rules(self) -> None:
        node_actions.copy_rules(self)

    # -- the command line ----------------------------------------------------------------------------------------

    async def action_command(self) -> None:
        await self.ensure_prompts()
        self.query_one(CommandLine).open()

    async def _do(self, command: Command, arguments: tuple[str, ...]) -> None:
        try:
            await self.run_action(("", command.action, arguments))
        except UserError as error:
            self.say(str(error), "error")

    def action_cast_as(self, pattern: str, dtype: str) -> None:
        self.add_rule(Rule.make(pattern, dtype))

    def action_filter_by(self, text: str = "") -> None:
        command_actions.filter_by(self, text)

    def action_go_to(self, name: str) -> None:
        command_actions.go_to(self, name)

    def action_sort_by(self, order: str) -> None:
        command_actions.sort_by(self, order)

    def action_show_columns(self, words: str = "") -> None:
        command_actions.show_columns(self, words)

    def action_use_theme(self, name: str) -> None:
        command_actions.use_theme(self, name)

    def action_export_to(self, folder: str) -> None:
        command_actions.leave_with(self, "checkpoint", folder)

    def action_save_recipe_to(self, file: str) -> None:
        command_actions.leave_with(self, "recipe", file)

    def action_save_report_to(self, file: str) -> None:
        command_actions.leave_with(self, "report", file)

    def action_use_preset(self, name: str) -> None:
        command_actions.use_preset(self, name)

    def action_details(self) -> None:
        screen_actions.details(self)

    def action_next_pane(self) -> None:
        self.side.next_pane()
        self._show_panes()

    def action_help(self) -> None:
        screen_actions.help(self)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for binding in self.BINDINGS:
            if isinstance(binding, Binding) and binding.action not in ("quit", "help", "command_palette"):
                yield SystemCommand(
                    binding.description,
                    f"key {on_keyboard(keys_of(binding, self.chosen_keys))}",
                    self._runner(binding.action),
                )
        yield from super().get_system_commands(screen)

    def _runner(self, action: str) -> Callable[[], object]:
        return lambda: self.call_later(self.run_action, action)

    # -- messages ------------------------------------------------------------------------------------------------

    def on_module_tree_moved(self, message: ModuleTree.Moved) -> None:
        self._cursor_wanted = None
        self.side.panes[2].show("", message.name)

    def on_bottom_prompt_previewed(self, message: BottomPrompt.Previewed) -> None:
        self.tree_view.show_preview(message.preview)

    def on_bottom_prompt_cancelled(self) -> None:
        self.tree_view.focus()
        self.show_all()

    def on_cast_prompt_submitted(self, message: CastPrompt.Submitted) -> None:
        self.tree_view.focus()
        self.add_rule(message.rule)

    async def on_command_line_submitted(self, message: CommandLine.Submitted) -> None:
        self.tree_view.focus()
        await self._do(message.command, message.arguments)

    def on_filter_prompt_changed(self, message: FilterPrompt.Changed) -> None:
        self.tree_view.set_filter(message.text)

    def on_filter_prompt_submitted(self) -> None:
        if self.tree_view.matches:
            self.tree_view.next_match(1)
        self.tree_view.focus()
        self.show_all()
