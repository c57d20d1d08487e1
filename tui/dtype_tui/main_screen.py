"""The main screen: the tree, the panes, the prompts, and the keys. Keys that change the experiment call the controller."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from textual.actions import parse
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.geometry import Size
from textual.widgets import Static

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.service import events
from dtype_engine.service.commands import READ_ONLY, Download, OpenOverMemory
from dtype_engine.service.jobs import GENERATE, TOKENS, VALUES, Ask, InspectTensor
from dtype_tui.config.bindings import HIDDEN, MAIN_KEYS
from dtype_tui.process.gc_policy import resume_gc
from dtype_tui.rendering.hint_keys import with_keys
from dtype_tui.screens.engine_event import EngineEvent
from dtype_tui.state.controller import Controller
from dtype_tui.state.engine_life import STOP_WAIT_S, Severity
from dtype_tui.widgets.header import header_line
from dtype_tui.widgets.line import Line
from dtype_tui.widgets.module_tree import ModuleTree
from dtype_tui.widgets.panes.side import SidePanes
from dtype_tui.widgets.status import key_line, next_keys, status_line
from dtype_tui.widgets.tree_rows import ORDERS
from dtype_tui.windows import OpensWindows

# Importing these would delay the first paint. They are imported in `MainScreen.complete`, or where they are used.
if TYPE_CHECKING:
    from dtype_tui.main_commands import CommandWords
    from dtype_tui.screens.help import HelpScreen
    from dtype_tui.state.commands import Command
    from dtype_tui.widgets.bottom_prompt import BottomPrompt
    from dtype_tui.widgets.panes.base import Pane
    from dtype_tui.widgets.panes.depth import DepthPane
    from dtype_tui.widgets.panes.trade_off import TradeOffPane

SMALLEST = (60, 15)
NARROW_BELOW = 100
DEPTH_FROM = (120, 36)
"""The smallest (columns, lines) with room for the plot of drift over depth below the tree."""
TRADE_OFF_FROM = 180
"""Minimum number of columns for the plot of drift against bytes, next to the plot of drift over depth."""
PAUSE_S = 0.01
"""Seconds between the steps that follow the first paint: importing the panes, mounting them, starting the engine. In between, the
effects of keys are drawn. A frame takes 8 ms.
"""
MOST_WINDOWS = 6
"""If this many screens are open, a result opens no further window. Textual draws all screens, one over the other: with twenty
windows of 200 rows, a redraw takes eight seconds, in which no key is handled.
"""


def message_text(sentence: str) -> str:
    """Return a sentence for the screen: hints such as `{hint:download}` filled in, control characters escaped, shortened."""
    return printable(with_keys(sentence), 500)


class MainScreen(OpensWindows):
    """Shows the module tree, drift, memory and rules.

    chosen_keys: the user's own keys, by binding id, such as {"measure": "f5"}. cursor: the node to start at, or None for the root.
    next_event: returns the oldest waiting event of the engine, or None.
    """

    BINDINGS: ClassVar[list[BindingType]] = MAIN_KEYS
    draw_every_s = 0.1
    """Minimum seconds between two redraws for events. Ten a second look smooth, and leave a slow connection time for keys."""

    def __init__(
        self,
        controller: Controller,
        chosen_keys: Mapping[str, str],
        cursor: str | None,
        next_event: Callable[[], events.Event | None],
    ) -> None:
        super().__init__(controller, chosen_keys)
        self._next_event = next_event
        self._wanted_cursor = cursor
        """The node of the resumed session's cursor, until the cursor has reached it or the user has moved it."""
        self._worst = ""
        """The module to which the action `worst` last moved the cursor."""
        self.side = SidePanes(controller)
        self.depth: DepthPane
        self.trade_off: TradeOffPane
        self._too_small = Static(id="too-small", markup=False)
        self._message = Static(id="message", markup=False)
        self._completing = asyncio.Lock()
        self._has_panes = False
        """Whether the panes and prompts exist. If `_is_complete`, they are also mounted."""
        self._is_complete = False
        self.draw_is_due = False
        """Whether a redraw for events of the engine is scheduled."""
        self._drawn_at = 0.0

    # -- layout --------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Line("header")
        with Container(id="main"):
            with Vertical(id="left"):
                yield self.tree_view
                yield Horizontal(id="below")
            yield self.side
        yield Line("status")
        yield Line("keys")

    def on_mount(self) -> None:
        self.lay_out(self.app.size)
        self.set_focus(self.tree_view)
        self._go_to_wanted_cursor()

    def on_screen_resume(self) -> None:
        self.show_all()  # for the first paint, and after a window was closed, since some windows change the baseline

    async def complete(self) -> None:
        """Mount the panes and the prompts, unless they are mounted. The first paint and the keys of the tree do not need them."""
        async with self._completing:
            if self._is_complete:
                return
            from dtype_tui.widgets.command_line import CommandLine
            from dtype_tui.widgets.panes.depth import DepthPane
            from dtype_tui.widgets.panes.trade_off import TradeOffPane
            from dtype_tui.widgets.prompts import CastPrompt, FilterPrompt

            completer = self._words.completer(self.chosen_keys)
            self.side.make_panes()
            self.depth = DepthPane(self.experiment, "depth")
            self.trade_off = TradeOffPane(self.experiment, "trade-off")
            await asyncio.sleep(PAUSE_S)
            if self.app.return_code is not None or not self.tree_view.is_attached:
                return  # the app is ending, and nothing can be mounted any more
            self._has_panes = True
            rest = [
                self.side.mount_panes(),
                self.query_one("#below").mount(self.depth, self.trade_off),
                self.mount(
                    self._too_small,
                    self._message,
                    CastPrompt(self.experiment, self.controller.add_rule),
                    CommandLine(self.experiment, completer, self._run),
                    FilterPrompt(
                        self.tree_view.set_filter,
                        lambda: len(self.tree_view.matches),
                        lambda: self.tree_view.next_match(1),
                    ),
                ),
            ]
            self.lay_out(self.app.size)
            for mounted in rest:
                await mounted
            self._is_complete = True

    @cached_property
    def _words(self) -> CommandWords:
        from dtype_tui.main_commands import CommandWords

        return CommandWords(self.controller, self.tree_view)

    def lay_out(self, size: Size) -> None:
        self.set_class(size.width < SMALLEST[0] or size.height < SMALLEST[1], "small")
        narrow = size.width < NARROW_BELOW
        self.set_class(narrow, "narrow")
        self.side.set_class(narrow, "narrow")
        self.set_class(size.width >= TRADE_OFF_FROM, "wide")
        if self._has_panes:
            needs, has = f"{SMALLEST[0]} x {SMALLEST[1]}", f"{size.width} x {size.height}"
            words = f"dtype-tui needs {needs}; this terminal is {has}. Enlarge it, or press q."
            self._too_small.update(words)
        self.call_after_refresh(self.show_all)

    # -- drawing -------------------------------------------------------------------------------------------------

    def show_all(self) -> None:
        """Redraw every part of the screen whose content has changed."""
        if not self.is_running:
            return
        self.tree_view.refresh_changed()
        self._show_status()
        if not self._has_panes:
            return
        self._show_panes()
        self._message.display = not self.experiment.model.has_tree
        if not self.experiment.model.has_tree:
            waiting = f"{self.controller.activity.what}…\nThe tree appears when the model's tensors are known."
            self._message.update(self.controller.life.no_engine_words or self.controller.open_error or waiting)

    def _show_panes(self) -> None:
        node = self.tree_view.current.name if self.tree_view.rows else ""
        activity = self.controller.life.current_activity()[0] or self.controller.life.no_engine_words
        (width, height), (least, lowest) = self.app.size, DEPTH_FROM
        can_run = self.experiment.model.no_forward is None
        self.query_one("#below").display = width >= least and height >= lowest and can_run
        self.on_bottom_prompt_resized()  # the tree may reach down to an open prompt now
        for pane in (*self.side.panes, self.depth, self.trade_off):
            pane.show(activity, node)

    def _show_status(self) -> None:
        experiment, life, width = self.experiment, self.controller.life, self.app.size.width
        idle = life.idle_words(self.controller.open_error is not None)
        chosen = self.chosen_keys
        header, status, keys = (self.query_one(id, Line) for id in ("#header", "#status", "#keys"))
        header.show(header_line(experiment, width))
        status.show(status_line(experiment, life.current_activity(), life.activity, idle, width, chosen))
        pairs = next_keys(experiment, bool(self.tree_view.filter_text), life.activity, life.error is not None)
        hidden = HIDDEN if self.controller.read_only else frozenset()
        keys.show(key_line([pair for pair in pairs if pair[0] not in hidden], width, chosen))

    def _draw_soon(self) -> None:
        """Schedule a redraw, unless one is scheduled already. A single redraw then shows the effects of many engine events."""
        if self.draw_is_due:
            return
        self.draw_is_due = True
        wait = self._drawn_at + self.draw_every_s - time.monotonic()
        if wait > 0:
            self.set_timer(wait, self._draw)
        else:
            self.call_later(self._draw)

    def _draw(self) -> None:
        self.draw_is_due, self._drawn_at = False, time.monotonic()
        self.show_all()
        from dtype_tui.screens.modal import ModalScreen

        for window in self.app.screen_stack[1:]:
            if isinstance(window, ModalScreen) and window.is_mounted:
                window.show_figures()
        for window in self.app.screen_stack[1:-1]:
            window.refresh()  # a window below another caches a picture of what is below it

    def say(self, text: str, severity: Severity) -> None:
        self.notify(message_text(text), severity=severity, markup=False)

    # -- events of the engine ------------------------------------------------------------------------------------

    def on_event_waits(self) -> None:
        """Pass the oldest waiting event to the controller, then to every open window."""
        event = self._next_event()
        if event is None or self.app.return_code is not None:
            return  # a newer event has replaced it, or the app is ending
        if events.is_opened(event):
            resume_gc()
        if not self.controller.handle(event):
            return
        match event:
            case events.HeadersRead() | events.ModelReady():
                self.tree_view.new_tree()
                if (prompt := self._open_prompt) is not None:
                    prompt.typed(prompt.field.value)  # its preview was made for the old tree
                self._go_to_wanted_cursor()
            case events.Measured() if self.tree_view.order == "drift":
                self.tree_view.rebuild()
            case events.JobDone() if (texts := events.result_of(event, GENERATE)) is not None:
                self.keep_texts(texts)
            case events.JobDone() if (choices := events.result_of(event, TOKENS)) is not None:
                self.keep_texts(choices)
            case events.JobDone() if len(self.app.screen_stack) < MOST_WINDOWS:
                self.open_result(event)
        for window in self.app.screen_stack[1:]:
            window.post_message(EngineEvent(event))
        self._draw_soon()

    # -- the cursor ----------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> str | None:
        """The node to save as the position of the cursor, or None while the model is unknown."""
        if self._wanted_cursor is not None or not self.experiment.model.has_tree:
            return self._wanted_cursor
        # The widget exists longer than the screen, so this works while the app is ending, and the last keys count.
        return self.tree_view.current.name if self.tree_view.rows else ""

    def _go_to_wanted_cursor(self) -> None:
        if self._wanted_cursor is not None and self.experiment.model.has_tree:
            there = self.tree_view.go_to(self._wanted_cursor)
            if there or self.experiment.model.live or self.controller.open_error:
                self._wanted_cursor = None

    def on_module_tree_moved(self, message: ModuleTree.Moved) -> None:
        self._wanted_cursor = None
        if self._has_panes:
            self.side.recipe.show("", message.name)

    def action_worst(self) -> None:
        """Go to the module whose code first makes values infinite or NaN. Without one, go to the module with the largest drift.
        Each further press goes to the module with the next smaller drift, and from the last module to the first.
        """
        results = self.experiment.results
        names = list(dict.fromkeys([results.origin, *(drift.name for drift in results.worst_modules())]))
        names = [name for name in names if name]
        if not names:
            self.say("no module drifts yet", "information")
            return
        self._leave_zoom()
        again = self._worst in names and self._worst == self.tree_view.current.name
        self._worst = names[(names.index(self._worst) + 1) % len(names)] if again else names[0]
        self.tree_view.go_to(self._worst)

    # -- recipes -------------------------------------------------------------------------------------------------

    def action_cast(self) -> None:
        from dtype_tui.widgets.prompts import CastPrompt

        if self.has_tensors() and self.tree_view.rows:
            self.query_one(CastPrompt).open(self.tree_view.current.name)

    def on_bottom_prompt_resized(self) -> None:
        """Keep the tree and the messages above the prompt. Its first two lines cover only the status line and the keys."""
        lines = max(0, self._open_prompt.lines - 2) if self._open_prompt is not None else 0
        self.side.keep_free(lines)
        below = self.side.size.height if self.side.is_narrow else lines if self.query_one("#below").display else 0
        self.tree_view.styles.margin = (0, 0, max(0, lines - below), 0)

    def on_bottom_prompt_previewed(self, message: BottomPrompt.Previewed) -> None:
        self.tree_view.show_preview(message.preview)
        if message.preview is None:  # the prompt may have been closed
            self._draw_soon()

    def action_cast_node(self, dtype: str) -> None:
        self.controller.cast_node(self.tree_view.current.name, dtype)

    def action_undo(self) -> None:
        self.controller.undo()

    def action_redo(self) -> None:
        self.controller.redo()

    def action_drop_rules(self) -> None:
        self.controller.drop_rules(self.tree_view.current.name)

    def action_remedy(self) -> None:
        self.controller.apply_remedy()

    # -- measuring -----------------------------------------------------------------------------------------------

    def action_measure(self) -> None:
        self.controller.measure()

    def action_ask(self, job: str) -> None:
        """Ask for a job without parameters. Its result opens a window."""
        self.controller.ask_once(Ask(job))

    def action_download_model(self) -> None:
        self.controller.ask_once(Download())

    def action_estimate_activations(self) -> None:
        self.controller.estimate_activations()

    def action_over_memory(self) -> None:
        memory = self.experiment.memory
        if memory is not None and memory.read_bytes is not None:
            self.say("the model runs from the disk already", "information")  # the engine would say so after its jobs
            return
        self.controller.ask_once(OpenOverMemory())

    def action_values(self) -> None:
        tensor = self.tree_view.current.tensor
        if tensor is None:
            self.say("only tensors have values: go to one", "information")
            return
        from dtype_tui.screens.weight_values import cast_to

        planned = self.experiment.plan.dtypes.get(tensor.name, tensor.dtype)
        self.controller.ask_once(VALUES.ask(InspectTensor(tensor.name, cast_to(planned))))

    # -- copying --------------------------------------------------------------------------------------

    def action_copy_name(self) -> None:
        self._copy(self.tree_view.current.name or "*", "the name")

    def action_copy_rules(self) -> None:
        rules = self.experiment.recipe.rules
        self._copy(" ".join(f"--cast {shlex.quote(str(rule))}" for rule in rules), "the rules as --cast options")

    def _copy(self, text: str, what: str) -> None:
        """Copy a text to the clipboard of the user's own machine (OSC 52). what: what the message calls it, such as "the name"."""
        if text:
            self.app.copy_to_clipboard(text)
            self.say(f"copied {what}: {text}", "information")
        else:
            self.say("no rules to copy: every tensor is as stored", "information")

    # -- stopping, filtering, sorting ----------------------------------------------------------------------------

    def action_stop(self) -> None:
        if (left_open := self._open_prompt) is not None:  # open, but a click on the tree took its focus
            left_open.action_cancel()
        elif self.tree_view.filter_text:
            self.tree_view.set_filter("")
            self.show_all()
        else:
            self.controller.stop()
            self.set_timer(STOP_WAIT_S, self.controller.life.check_stopped)

    @property
    def _open_prompt(self) -> BottomPrompt | None:
        from dtype_tui.widgets.bottom_prompt import BottomPrompt

        return next((prompt for prompt in self.query(BottomPrompt) if prompt.is_open), None)

    def action_restart_engine(self) -> None:
        self.controller.restart_engine()

    def action_filter(self) -> None:
        from dtype_tui.widgets.prompts import FilterPrompt

        self._leave_zoom()
        self.query_one(FilterPrompt).open(self.tree_view.filter_text)

    def action_match(self, step: int) -> None:
        if not self.tree_view.next_match(step):
            self.say("no match: / filters by name", "information")

    def action_next_order(self) -> None:
        self._words.sort_by(ORDERS[(ORDERS.index(self.tree_view.order) + 1) % len(ORDERS)])

    def action_fold(self) -> None:
        """Switch between one row for all neighbors that are alike and a row for each of them."""
        self.tree_view.fold(not self.tree_view.folds)
        words = "neighbors that are alike share a row" if self.tree_view.folds else "every layer has a row of its own"
        self.say(words, "information")

    def action_next_pane(self) -> None:
        """Move the focus from the tree to the first pane, from a pane to the next, and from the last to the tree. If there is room
        for only one pane, show the next pane instead.
        """
        side = self.side
        focused = next((pane for pane in side.panes if pane.has_focus), None)
        if side.is_narrow or self.has_class("zoomed"):
            side.activate(side.after(side.active) or side.panes[0])
            self.set_focus(side.active if self.has_class("zoomed") else self.tree_view)
            self.call_after_refresh(self._show_panes)
        else:
            self.set_focus((side.after(focused) or self.tree_view) if focused is not None else side.panes[0])

    def action_jump(self) -> None:
        """Show a label on each pane and each visible row of the tree, and go to the pane or row whose label the user types."""
        others = [pane for pane in (self.depth, self.trade_off) if pane.region]
        panes = [*self.side.places(), *((pane, pane.region.offset) for pane in others)]
        rows = list(self.tree_view.rows_on_screen()) if self.tree_view.region else []

        def go(index: int | None) -> None:
            if index is None:
                return
            if index < len(panes):
                self._go_to_pane(panes[index][0])
            else:
                self.set_focus(self.tree_view)
                self.tree_view.go_to_row(rows[index - len(panes)][0])

        if panes or rows:
            from dtype_tui.screens.jump import JumpScreen

            self.app.push_screen(JumpScreen([place for _, place in (*panes, *rows)]), go)

    def _go_to_pane(self, pane: Pane) -> None:
        if pane in self.side.panes:
            self.side.activate(pane)
        self.set_focus(pane)
        self.call_after_refresh(self._show_panes)

    def action_rules(self) -> None:
        """Focus the list of rules, and put its cursor on the rule that decides the dtype of the node under the tree's cursor."""
        self.side.activate(self.side.recipe)
        self.set_focus(self.side.recipe)
        self.side.recipe.go_to_deciding_rule(self.tree_view.current.name if self.tree_view.rows else "")

    def action_edit_rule(self) -> None:
        """Open the cast prompt with the rule under the cursor of the Recipe pane. The entered rule replaces that rule."""
        from dtype_tui.widgets.prompts import CastPrompt

        row, rule = self.side.recipe.cursor, self.side.recipe.current
        if self.side.recipe.has_rule() and rule is not None:
            self.query_one(CastPrompt).edit(rule, lambda changed: self.controller.change_rule(row, changed))

    def action_zoom(self) -> None:
        """Show the active pane alone or, if a pane is already shown alone, everything again."""
        zoomed = not self.has_class("zoomed")
        self.set_class(zoomed, "zoomed")
        self.side.zoom(zoomed)
        self.set_focus(self.side.active if zoomed else self.tree_view)

    def action_to_tree(self) -> None:
        self._leave_zoom()
        self.set_focus(self.tree_view)

    def _leave_zoom(self) -> None:
        if self.has_class("zoomed"):
            self.action_zoom()

    def action_help(self, wanted: str = "") -> None:
        """Show the help or, if a word is given, what the help says about it."""
        self.app.push_screen(self.help(wanted))

    def help(self, wanted: str = "") -> HelpScreen:
        from dtype_tui.screens.help import HelpScreen, keys_for_node

        experiment, node, node_keys = self.experiment, "", []
        if self.tree_view.rows:
            node, node_keys = self.tree_view.current.name, keys_for_node(experiment, self.tree_view.current)
        words = [(pane.TITLE, pane.HELP) for pane in (*self.side.panes, self.depth, self.trade_off)]
        hidden = HIDDEN if self.controller.read_only else frozenset()
        return HelpScreen(node or experiment.model.title, node_keys, self.chosen_keys, words, hidden, wanted)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is available. A read-only session hides the actions in `HIDDEN`."""
        return not (self.controller.read_only and action.replace("_", "-") in HIDDEN)

    # -- the command line ----------------------------------------------------------------------------------------

    def action_command(self, begun: str = "") -> None:
        from dtype_tui.widgets.command_line import CommandLine

        self.query_one(CommandLine).open(begun)

    async def _run(self, command: Command, arguments: tuple[str, ...]) -> None:
        if self.controller.read_only and command.is_refused(arguments):
            self.say(READ_ONLY, "warning")
            return
        action = command.action
        try:
            if action in self._words.actions:
                self._words.actions[action](*arguments)
            else:
                destination, name, given = parse(action)
                await self.app.run_action((destination, name, (*given, *arguments)), self)
        except UserError as error:
            self.say(error.sentence, "error")
