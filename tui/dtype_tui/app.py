"""The app: its start and end, signals, session saving, and command palette. The main screen draws everything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rich.text import Text
from textual import events as textual_events
from textual.actions import ActionParseResult
from textual.app import SuspendNotSupported, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import Hit, Hits, Provider
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.system_commands import SystemCommandsProvider
from textual.widgets import Input

from dtype_engine.cli.program import ENDING_SIGNALS
from dtype_engine.core.errors import UserError
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import plural
from dtype_engine.service import events
from dtype_engine.service.commands import READ_ONLY
from dtype_engine.service.engine import CLOSE_WAIT_S, Engine
from dtype_tui.base_app import BaseApp
from dtype_tui.config.bindings import APP_KEYS, KEYS, refuses
from dtype_tui.config.key_names import keys_of, on_keyboard
from dtype_tui.main_screen import PAUSE_S, MainScreen, message_text
from dtype_tui.process.gc_policy import resume_gc
from dtype_tui.process.terminal import restore_at_once, server_disconnected, terminal_settings
from dtype_tui.screens.engine_event import EventWaits
from dtype_tui.state.controller import Controller
from dtype_tui.state.event_queue import EventQueue
from dtype_tui.state.experiment import Experiment, ModelFacts
from dtype_tui.state.launch import Launch
from dtype_tui.state.served import Served

# Importing these would delay the first paint, so they are imported where they are used.
if TYPE_CHECKING:
    from dtype_tui.state.commands import Command
    from dtype_tui.state.session_saver import SessionSaver
    from dtype_tui.tour_guide import TourGuide

_SAVE_EVERY_S = 0.2
_SERVER_EVERY_S = 1.0
"""Seconds between checks of whether the web server is still connected."""
_SIGNAL_WAIT_S = 0.3
"""Maximum seconds that the engine has to end after a signal, before the app kills it."""
_SIGNAL_MOST_S = 0.8
"""Maximum seconds, after a signal, for restoring the terminal and closing the engine. Then the process ends in any case."""
LONGEST_WITHOUT_GC_S = 60.0
StartEngine = Callable[[Callable[[events.Event], None], Callable[[], None]], Engine]


class PaletteSearch(SystemCommandsProvider):
    """Finds the commands of the palette as the `:` line does. If no word finds any, it offers what the help says about the word,
    and commands that have its letters in this order.
    """

    async def search(self, query: str) -> Hits:
        app, matcher = cast(DtypeApp, self.app), self.matcher(query)
        ranks = {command.meaning: command.rank(query) for command in app.palette_commands()}
        entries = list(app.get_system_commands(self.screen))
        found: list[float] = [ranks.get(entry.title, query.lower() in entry.title.lower()) for entry in entries]
        is_known = any(found)
        if not is_known:
            found = [matcher.match(entry.title) / 1000 for entry in entries]
        for rank, (title, hint, callback, _) in zip(found, entries, strict=True):
            if rank:
                yield Hit(rank, matcher.highlight(title), callback, help=hint)
        word = query.strip()
        searches = app.runner(f"help({word!r})")
        rank = 1.0 if not is_known and app.main.help().finds(word) else 0.0
        yield Hit(rank, Content(f"Search the help for {word}"), searches, help="command :help TEXT")


class DtypeApp(BaseApp[None]):
    """The app for exploring a model. start_engine(emit, wait): creates the engine, which calls `emit` with every event, from any
    thread. `wait` returns when no event waits to be handled.
    """

    CSS_PATH = "app.tcss"
    TITLE = "dtype-tui"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {PaletteSearch}
    BINDINGS: ClassVar[list[BindingType]] = APP_KEYS

    def __init__(self, launch: Launch, start_engine: StartEngine) -> None:
        super().__init__(launch.config)
        self.launch = launch
        self.set_keymap(dict(launch.config.keys))
        experiment = Experiment(
            ModelFacts(launch.title, has_tree=launch.tree is not None, partial=launch.partial, path=launch.path),
            launch.tree if launch.tree is not None else Tree(()),
            settings=launch.settings,
            thresholds=launch.thresholds,
            served=Served(launch.context, launch.batch, launch.budget),
        )
        self._events = EventQueue(self._tell_main)
        self.controller = Controller(
            experiment,
            start_engine(self._emit, self._events.wait_until_empty),
            lambda *said: self.main.say(*said),
            lambda: self.main.show_all(),
            launch.read_only,
            lambda sentence: self.withdraw(message_text(sentence)),
        )
        cursor = launch.saved.cursor if launch.saved is not None else None
        self.main = MainScreen(self.controller, launch.config.keys, cursor, self._events.take)
        self.main.tree_view.fold(launch.config.fold)
        self.controller.begin(launch)
        self._saver: SessionSaver | None = None
        self._has_begun = False
        """Whether `_complete` has called the tour's `begin`."""
        self._terminal = terminal_settings()
        self._ending = threading.Lock()
        """Acquired, and never released, by the thread that ends the process after a signal."""

    @cached_property
    def guide(self) -> TourGuide:
        from dtype_tui.tour_guide import TourGuide

        return TourGuide(self, self.main, self.controller, self.launch)

    def _emit(self, event: events.Event) -> None:
        """Queue an event for the main screen. The engine's threads call this, possibly after the app has ended."""
        if isinstance(event, events.HeadersRead | events.ModelReady):
            self.controller.experiment.prepare(event.tree)
        self._events.put(event)

    def _tell_main(self) -> None:
        with contextlib.suppress(RuntimeError):  # the app has ended, and its event loop is closed
            self.main.post_message(EventWaits())

    def get_default_screen(self) -> Screen[None]:
        return self.main

    # -- start and end -------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.set_interval(_SAVE_EVERY_S, self._save_session)
        if not self.is_headless:
            for number in ENDING_SIGNALS:
                signal.signal(number, self._end_by_signal)
        if self.is_web:
            self.set_interval(_SERVER_EVERY_S, self._end_with_the_server)
        # The engine starts after the first paint, because it imports torch. The worker leaves the app free to handle keys.
        self.call_after_refresh(lambda: self.run_worker(self._begin()))

    async def _begin(self) -> None:
        if self.return_code is None:  # otherwise the user has quit already, and nothing can be mounted any more
            await self._complete()
        await asyncio.sleep(PAUSE_S)
        if self.return_code is not None:
            return
        gc.disable()
        # In case the engine never sends the event after which `MainScreen` turns it on again.
        asyncio.get_running_loop().call_later(LONGEST_WITHOUT_GC_S, resume_gc, True)
        self.controller.engine.start()

    async def _complete(self) -> None:
        """Make the panes, prompts, session's saver and tour, unless they exist. Keys need them, the first paint does not."""
        await self.main.complete()
        if not self._has_begun and self.return_code is None:
            self._has_begun = True
            self._make_saver()
            self.guide.begin()

    def _end_with_the_server(self) -> None:
        if server_disconnected():
            self.exit()

    def _make_saver(self) -> None:
        if self._saver is None and self.launch.saver is not None:
            self._saver = self.launch.saver()
            self._saver.say = lambda trouble: self.main.say(trouble, "warning")

    def _save_session(self) -> None:
        cursor = self.main.cursor
        if self._saver is not None and cursor is not None:
            self._saver.update(self.controller.experiment, cursor)

    def _end_by_signal(self, number: int, frame: object) -> None:
        """Save the session, restore the terminal, close the engine, and end the process.

        This runs in the signal's handler, because the event loop may be busy with large windows for seconds. `exit` would also take
        seconds to unmount every widget.
        """
        status = 128 + number
        closing = threading.Thread(target=self._close_engine, args=[_SIGNAL_WAIT_S], daemon=True)
        closing.start()
        try:
            self._close_session()
            # If the terminal takes output slowly or not at all, suspending the app blocks. This timer then ends the process.
            last = threading.Timer(_SIGNAL_MOST_S, self._end_at_once, [status])
            last.daemon = True
            last.start()
            with contextlib.suppress(SuspendNotSupported), self.suspend():  # a browser has no terminal to restore
                closing.join()
                self._ending.acquire()
                os._exit(status)  # leaving this block would start the app in the terminal again
            closing.join()
        finally:
            self._ending.acquire()
            os._exit(status)

    def _end_at_once(self, status: int) -> None:
        self._ending.acquire()  # so that the process does not end in the main thread meanwhile
        if not self.is_web:
            restore_at_once(self._terminal)
        os._exit(status)

    def on_unmount(self) -> None:
        """Save the session and close the engine, even if the app ends before it has fully started."""
        self._close_session()
        self._close_engine(CLOSE_WAIT_S)
        resume_gc()

    def _close_session(self) -> None:
        self._make_saver()
        self._save_session()
        if self._saver is not None:
            self._saver.close()

    def _close_engine(self, wait_s: float) -> None:
        self._events.shut()
        self.controller.engine.close(wait_s)

    def on_resize(self, event: textual_events.Resize) -> None:
        self.main.lay_out(event.size)

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Run an action as Textual does, and report it to the tour. An action that a read-only session refuses only shows why."""
        # Actions of the tree need no panes, unlike those of others, such as `screen.next_pane`.
        if default_namespace is not self.main.tree_view or not isinstance(action, str) or "." in action:
            await self._complete()
        if self.launch.read_only and refuses(action if isinstance(action, str) else action[1]):
            self.main.say(READ_ONLY, "warning")
            return True
        if isinstance(action, str) and self.guide.closes_offer(action):
            return True
        try:
            handled = await super().run_action(action, default_namespace, namespaces)
        except UserError as error:  # such as a key that gives a KV cache a dtype that only weights can have
            self.main.say(str(error), "warning")
            return True
        if handled and isinstance(action, str):
            self.guide.acted(action)
        return handled

    def action_tour(self) -> None:
        self.guide.begin_or_leave()

    async def action_quit(self) -> None:
        """Quit. If the rules are only in the saved session, print how many, and how to restore them. If rules would be lost or
        files are being written, the first call only warns.
        """
        rules, is_kept = self.controller.unsaved_rules, self._saver is not None and self._saver.works
        if self.controller.life.may_quit(0 if is_kept else rules):
            words = f"{plural(rules, 'rule')} not saved to a file: `dtype-tui --resume` restores the session."
            self.exit(message=Text(words) if rules and is_kept and not self.is_web else None)

    @property
    def quit_words(self) -> str:
        (quit,) = (binding for binding in KEYS if isinstance(binding, Binding) and binding.action == "app.quit")
        keys = " or ".join(map(on_keyboard, keys_of(quit, self.launch.config.keys).split(",")))
        return f"Esc closes the line, then {keys} quits" if isinstance(self.focused, Input) else f"{keys} quits"

    def deliver_screenshot(self, *arguments: Any, **named: Any) -> str | None:
        """Save a picture of the screen as Textual does. A read-only session only warns, and returns None."""
        if self.launch.read_only:
            self.main.say(READ_ONLY, "warning")
            return None
        return super().deliver_screenshot(*arguments, **named)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is available. A read-only session hides the actions that it refuses."""
        return not (self.launch.read_only and refuses(action)) and super().check_action(action, parameters)

    def action_messages(self) -> None:
        from dtype_tui.rendering.plain_table import PlainTable
        from dtype_tui.screens.overlay import Overlay

        grid = PlainTable.labelled()
        for each in reversed(self.messages):
            style = "" if each.severity == "information" else "bold"
            grid.add_row(time.strftime("%H:%M:%S", time.localtime(each.raised_at)), Text(each.message, style=style))
        if not grid.row_count:
            grid.add_row("", "No messages yet.")
        self.push_screen(Overlay("Messages", grid))

    # -- the palette ---------------------------------------------------------------------------------------------

    def action_command_palette(self) -> None:
        from dtype_tui.screens.modal import CommandPalette

        if not any(isinstance(screen, CommandPalette) for screen in self.screen_stack):
            self.push_screen(CommandPalette())  # without an id, since the previous one may still be closing

    def search_themes(self) -> None:
        from textual.theme import ThemeProvider

        from dtype_tui.screens.modal import CommandPalette

        self.push_screen(CommandPalette(providers=[ThemeProvider], placeholder="Search for themes…"))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in self.palette_commands():
            first = command.arguments and f"command('{command.name} ')"
            yield SystemCommand(command.meaning, command.hint, self.runner(first or command.action))
        for entry in super().get_system_commands(screen):
            if entry.title not in ("Quit", "Keys") and not (self.launch.read_only and entry.title == "Screenshot"):
                yield entry

    def palette_commands(self) -> Iterable[Command]:
        """Return the commands that the palette offers: of keys, then others of the `:` line, whose arguments are typed there."""
        from dtype_tui.state.commands import of_keys, without_keys

        keys = of_keys(KEYS, self.launch.config.keys)
        names = {command.name for command in keys}
        offered = (*keys, *(command for command in without_keys() if command.name not in names))
        return [
            command
            for command in offered
            if command.action != "app.command_palette"
            and not (self.launch.read_only and command.is_refused(command.arguments[: command.needs]))
        ]

    def runner(self, action: str) -> Callable[[], object]:
        """Return a function that runs an action of the main screen, after the palette has closed."""
        return lambda: self.call_later(self.run_action, action, self.main)
