"""The app: wires the tree, the panes and the prompts to one experiment and to the engine's worker."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, Protocol

from rich.text import Text
from textual import events as textual_events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.widgets import Static

from dtype_engine import dtypes, events
from dtype_engine.options import RunSettings
from dtype_engine.recipe import Recipe, Rule, generalisations, no_match
from dtype_engine.text import printable
from dtype_engine.tree import Tree

from . import scan_actions
from .cells import bar
from .experiment import Experiment
from .scan_screens import FRONT_KEYS, ScanScreen
from .screens import details, flow_screen, generation_screen, help_screen, speed_screen, weight_screen
from .settings_screen import SettingsScreen
from .widgets.module_tree import ModuleTree
from .widgets.panes import SidePanes, worst_modules
from .widgets.prompts import CastPrompt, FilterPrompt

DIGITS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", dtypes.STORED)
LOOKED_AT = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
SMALLEST = (60, 15)
NARROW_BELOW = 100
GENERATED_TOKENS = 48
_LOOK_EVERY_S = 0.1
_ONLY_THE_NEWEST = (events.Measuring, events.Memory, events.Casting, events.Loading, events.Working)


def _digit_words(dtype: str) -> str:
    return "Put the node back as stored" if dtype == dtypes.STORED else f"Cast the node to {dtype}"


class Engine(Protocol):
    """What the app asks of the worker."""

    def start(self) -> None: ...
    def set_recipe(self, recipe: Recipe) -> None: ...
    def measure(self) -> None: ...
    def set_settings(self, settings: RunSettings) -> None: ...
    def flow(self) -> None: ...
    def generate(self, tokens: int) -> None: ...
    def speed(self) -> None: ...
    def scan(self, dtypes: tuple[str, ...]) -> None: ...
    def pause(self, waiting: bool) -> None: ...
    def look_at(self, name: str, targets: tuple[str, ...]) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class DtypeApp(App[None]):
    """Explore a model, cast what a pattern takes, watch drift and memory."""

    CSS_PATH = "app.tcss"
    TITLE = "dtype-tui"
    ENABLE_COMMAND_PALETTE = True

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "cast", "Cast by pattern"),
        *(Binding(str(i), f"cast_node('{d}')", _digit_words(d), show=False) for i, d in enumerate(DIGITS, 1)),
        Binding("u", "undo", "Undo"),
        Binding("ctrl+r", "redo", "Redo"),
        Binding("x", "drop_rules", "Drop the node's rules"),
        Binding("m", "measure", "Measure again"),
        Binding("f", "flow", "Dtype flow: where dtypes silently change"),
        Binding("g", "generate", "Generate text with both, side by side"),
        Binding("t", "speed", "Time forward passes"),
        Binding("s", "scan", "Scan: how much every weight matters in every dtype"),
        Binding("o", "optimise", "Optimise: the best recipe for a budget, by the scan"),
        Binding("comma", "settings", "Settings of a run: autocast, inputs"),
        Binding("v", "values", "Values of the tensor: exponents, error in every dtype"),
        Binding("w", "worst", "Go to the module that drifts most"),
        Binding("slash", "filter", "Filter by name"),
        Binding("n", "match(1)", "Next match", show=False),
        Binding("N", "match(-1)", "Previous match", show=False),
        Binding("enter", "details", "Details of the node"),
        Binding("escape", "stop", "Stop what the engine does"),
        Binding("question_mark", "help", "Help"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(
        self,
        title: str,
        tree: Tree | None,
        engine: Callable[[Callable[[events.Event], None]], Engine],
        settings: RunSettings | None = None,
        whole: bool = True,
    ) -> None:
        super().__init__()
        self.experiment = Experiment(
            title, tree if tree is not None else Tree(()), settings=settings or RunSettings(), partial=not whole
        )
        self._has_tree = tree is not None
        self._arrived: deque[events.Event] = deque()
        self.engine = engine(self._arrived.append)
        self._activity = "opening"
        self._share: float | None = None
        self._busy = True
        self._open_error: str | None = None

    # -- layout --------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        with Container(id="main"):
            yield ModuleTree(self.experiment, id="tree")
            yield SidePanes(self.experiment)
        yield Static(id="status", markup=False)
        yield Static(id="keys", markup=False)
        yield CastPrompt(self.experiment)
        yield FilterPrompt(lambda: len(self.tree_view.matches))
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
        self.tree_view.focus()
        self._show_all()
        self.set_interval(_LOOK_EVERY_S, self._look)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.exit)
        # The first paint comes first: starting the engine imports torch.
        self.call_after_refresh(self.engine.start)

    def on_unmount(self) -> None:
        self.engine.close()

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
        self.call_after_refresh(self._show_all)

    def _show_all(self) -> None:
        if not self.is_running:
            return
        self.tree_view.refresh()
        self._show_panes()
        self._show_status()
        message = self.query_one("#message", Static)
        message.display = not self._has_tree
        if not self._has_tree:
            words = self._open_error or f"{self._activity}…\nThe tree appears when the model is there."
            message.update(words)

    def _show_panes(self) -> None:
        node = self.tree_view.current.name if self.tree_view.rows else ""
        self.side.show(self._activity if self._busy else "", node)

    def _show_status(self) -> None:
        width = self.size.width
        left = Text(" ")
        if self._busy:
            left.append(self._activity)
            if self._share is not None:
                left.append(f" {100 * self._share:3.0f} % ")
                left.append(bar(self._share, 12), style="bold")
            left.append("  Esc stops", style="dim")
        elif self._open_error:
            left.append("no engine: planning only")
        else:
            left.append("ready")
        experiment = self.experiment
        about = " · ".join(
            part for part in (printable(experiment.title, 40), experiment.class_name, experiment.device) if part
        )
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append_text(left)
        line.append(" " * max(1, width - left.cell_len - len(about) - 1))
        line.append(about, style="dim")
        self.query_one("#status", Static).update(line)
        keys = " c cast  1-8 dtype  u undo  / filter  Enter details  w worst  ? help  q quit"
        if self.tree_view.filter_text:
            keys = " n next match  N previous  Esc clears the filter  c cast  1-8 dtype  ? help  q quit"
        self.query_one("#keys", Static).update(Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))

    # -- what the engine says ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take what has arrived from the engine; of readings that replace each other only the newest counts."""
        if not self._arrived:
            return
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        newest = {type(event): event for event in arrived}
        for event in arrived:
            if not isinstance(event, _ONLY_THE_NEWEST) or newest[type(event)] is event:
                self._hear(event)
        self._show_all()

    def _hear(self, event: events.Event) -> None:
        experiment = self.experiment
        if isinstance(event, events.Loading):
            self._busy, self._activity, self._share = True, event.step, None
        elif isinstance(event, events.ModelReady):
            self._model_ready(event)
        elif isinstance(event, events.HeadersRead):
            experiment.partial = False
            experiment.replace_tree(event.tree)
            self._has_tree = True
            self.tree_view.new_tree()
            for notice in event.notices:
                self._say(notice, "information")
            self._warn_unmatched()
        elif isinstance(event, events.OpenFailed):
            self._open_error = event.message
            experiment.no_forward, experiment.partial = event.message, False
            self._say(event.message, "warning" if self._has_tree else "error")
        elif isinstance(event, events.Idle):
            self._busy, self._share = False, None
            if experiment.scan.running:
                experiment.scan.stopped()
        elif isinstance(event, events.Scanned):
            experiment.scan.put(experiment.tree, event.report, event.finished)
        elif event.recipe != experiment.recipe:
            return
        elif isinstance(event, events.Memory):
            experiment.memory = event.reading
        elif isinstance(event, events.Casting):
            self._busy, self._activity, self._share = True, f"casting {event.total:,} tensors", event.done / event.total
        elif isinstance(event, events.CastDone):
            experiment.notes = event.notes
            self._say_lost(event)
        elif isinstance(event, events.Measuring):
            self._busy, self._activity = True, f"measuring: {event.run}"
            self._share = event.done / event.total if event.total else None
        elif isinstance(event, events.ModulesMeasured):
            experiment.modules.update((reading.name, reading) for reading in event.modules)
        elif isinstance(event, events.Measured):
            if event.report.settings == str(experiment.settings):
                experiment.report = event.report
                experiment.modules = {reading.name: reading for reading in event.report.modules}
                experiment.scan.note_measured(experiment.tree, experiment.plan, event.report)
        elif isinstance(event, events.Working):
            self._busy, self._activity, self._share = True, event.what, event.done / event.total
        elif isinstance(event, events.Generated):
            self.push_screen(generation_screen(event.texts))
        elif isinstance(event, events.Timed):
            self.push_screen(speed_screen(event.report))
        elif isinstance(event, events.Flowed):
            self.push_screen(flow_screen(event.casts))
        elif isinstance(event, events.WeightLookedAt):
            self.push_screen(weight_screen(experiment, event.name, event.reading))
        elif isinstance(event, events.Failed):
            experiment.failure, experiment.failed_module = event.message, event.module
            self._say(event.message, "error")
        elif isinstance(event, events.Stopped):
            self._say("stopped; m measures again", "information")

    def _model_ready(self, event: events.ModelReady) -> None:
        experiment = self.experiment
        experiment.class_name, experiment.device, experiment.inputs = event.class_name, event.device, event.inputs
        experiment.no_forward, experiment.live = event.no_forward, True
        experiment.replace_tree(event.tree)
        self._has_tree = True
        self.tree_view.new_tree()
        for notice in event.notices:
            self._say(notice, "warning")
        if event.no_forward:
            self._say(event.no_forward, "warning")
        self._warn_unmatched()

    def _say_lost(self, event: events.CastDone) -> None:
        overflowed = [note for note in event.notes if note.overflowed]
        if overflowed:
            first = overflowed[0]
            more = f" and in {len(overflowed) - 1} more tensors" if len(overflowed) > 1 else ""
            self._say(
                f"{first.overflowed:,} values of {first.name} overflow to infinity in {first.dtype}{more}", "warning"
            )

    def _say(self, text: str, severity: str) -> None:
        self.notify(printable(text, 500), severity=severity, markup=False)  # type: ignore[arg-type]

    # -- recipes -------------------------------------------------------------------------------------------------

    def start_with(self, recipe: Recipe) -> None:
        """Begin with a recipe (from the command line)."""
        if self.experiment.push(recipe):
            self.engine.set_recipe(recipe)

    def _changed(self) -> None:
        """The recipe in force is another: tell the engine, and show what is known at once."""
        self.engine.set_recipe(self.experiment.recipe)
        if self._open_error is None:
            self._busy, self._activity, self._share = True, "casting", None
        self._show_all()

    def add_rule(self, rule: Rule) -> None:
        """Put one more rule in force."""
        if not self.experiment.push(self.experiment.recipe.then(rule)):
            self._say(f"{rule} is in force already", "information")
            return
        self._changed()
        self._warn_unmatched()
        broken = self.experiment.broken_islands(len(self.experiment.recipe) - 1)
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            self._say(f"{broken[0]}{more} should stay in float32, as the model's own code declares", "warning")

    def _warn_unmatched(self) -> None:
        plan = self.experiment.plan
        for place in plan.unmatched:
            pattern = self.experiment.recipe.rules[place].pattern
            self._say(f"rule {place + 1}: {no_match(self.experiment.tree, pattern, plan.selections[place])}", "warning")

    def action_cast(self) -> None:
        if self.tree_view.rows:
            self.query_one(CastPrompt).open(self.tree_view.current.name)

    def action_cast_node(self, dtype: str) -> None:
        self.add_rule(Rule.make(generalisations(self.tree_view.current.name)[0], dtype))

    def action_undo(self) -> None:
        if self.experiment.undo():
            self._changed()
        else:
            self._say("nothing left to undo", "information")

    def action_redo(self) -> None:
        if self.experiment.redo():
            self._changed()
        else:
            self._say("nothing to redo", "information")

    def action_drop_rules(self) -> None:
        node = self.tree_view.current.name
        inside, beyond = self.experiment.rules_within(node)
        if inside:
            self.experiment.push(self.experiment.recipe.without(inside))
            self._changed()
        elif beyond:
            self._say(
                f"rule {beyond[-1] + 1} reaches beyond this node; go to a node above it, or cast this one (8: as stored)",
                "warning",
            )
        else:
            self._say("no rule takes this node", "information")

    # -- keys ----------------------------------------------------------------------------------------------------

    def action_measure(self) -> None:
        self.experiment.forget_readings()
        self.engine.measure()
        self._show_all()

    def action_flow(self) -> None:
        self._ask_engine("tracing casts", self.engine.flow)

    def action_generate(self) -> None:
        self._ask_engine("generating", lambda: self.engine.generate(GENERATED_TOKENS))

    def action_speed(self) -> None:
        self._ask_engine("timing", self.engine.speed)

    def action_scan(self) -> None:
        scan_actions.scan(self)

    def action_pause_scan(self) -> None:
        scan_actions.pause(self)

    def action_optimise(self) -> None:
        scan_actions.optimise(self)

    def _ask_engine(self, activity: str, ask: Callable[[], None]) -> None:
        """Ask for something that needs forward passes; where there are none, say why."""
        if self.experiment.no_forward:
            self._say(self.experiment.no_forward, "warning")
        else:
            ask()
            self._expect(activity)

    def _expect(self, activity: str) -> None:
        """Something was asked of the engine: it is on the screen before the engine says so."""
        if self._busy:
            self._say(f"next: {activity}", "information")
        else:
            self._busy, self._activity, self._share = True, activity, None
            self._show_status()

    def action_values(self) -> None:
        row = self.tree_view.current
        if row.tensor is None:
            self._say("values are those of a tensor: go to one", "information")
        else:
            self.engine.look_at(row.tensor.name, LOOKED_AT)
            self._expect("reading the values")

    def action_settings(self) -> None:
        self.push_screen(SettingsScreen(self.experiment.settings), self._settings_chosen)

    def _settings_chosen(self, settings: RunSettings | None) -> None:
        if settings is None or settings == self.experiment.settings:
            return
        self.experiment.set_settings(settings)
        self.engine.set_settings(settings)
        self._show_all()

    def action_stop(self) -> None:
        if self.tree_view.filter_text:
            self.tree_view.set_filter("")
            self._show_all()
        elif self._busy:
            self.engine.cancel()

    def action_worst(self) -> None:
        worst = worst_modules(self.experiment, 1)
        if not worst:
            self._say("no module drifts yet", "information")
        else:
            self.tree_view.go_to(worst[0].name)

    def action_filter(self) -> None:
        self.query_one(FilterPrompt).open(self.tree_view.filter_text)

    def action_match(self, step: int) -> None:
        if not self.tree_view.next_match(step):
            self._say("no match: / filters by name", "information")

    def action_details(self) -> None:
        self.push_screen(details(self.experiment, self.tree_view.current.name))

    def action_next_pane(self) -> None:
        self.side.next_pane()
        self._show_panes()

    def action_help(self) -> None:
        words = [(str(pane.border_title), pane.HELP) for pane in self.side.panes] + [("Sensitivity", ScanScreen.HELP)]
        sections = [
            ("Casting and measuring", _described(self.BINDINGS)),
            ("In the tree", _described(ModuleTree.BINDINGS)),
            ("In the cast prompt", _described(CastPrompt.BINDINGS)),
            ("In the settings", _described(SettingsScreen.BINDINGS)),
            ("In the scan", _described(ScanScreen.BINDINGS)),
            ("Along the front", _described(FRONT_KEYS)),
        ]
        self.push_screen(help_screen(sections, words))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for binding in self.BINDINGS:
            if isinstance(binding, Binding) and binding.action not in ("quit", "help"):
                yield SystemCommand(binding.description, f"key {_key(binding.key)}", self._runner(binding.action))
        yield from super().get_system_commands(screen)

    def _runner(self, action: str) -> Callable[[], object]:
        return lambda: self.call_later(self.run_action, action)

    # -- messages ------------------------------------------------------------------------------------------------

    def on_module_tree_moved(self, message: ModuleTree.Moved) -> None:
        self.side.panes[2].show("", message.name)

    def on_cast_prompt_previewed(self, message: CastPrompt.Previewed) -> None:
        self.tree_view.show_preview(message.preview)

    def on_cast_prompt_applied(self, message: CastPrompt.Applied) -> None:
        self.tree_view.focus()
        self.add_rule(message.rule)

    def on_cast_prompt_left(self) -> None:
        self.tree_view.focus()

    def on_filter_prompt_changed(self, message: FilterPrompt.Changed) -> None:
        self.tree_view.set_filter(message.text)

    def on_filter_prompt_done(self, message: FilterPrompt.Done) -> None:
        if not message.keep:
            self.tree_view.set_filter("")
        elif self.tree_view.matches:
            self.tree_view.next_match(1)
        self.tree_view.focus()
        self._show_all()


def _described(bindings: Iterable[BindingType]) -> Iterator[tuple[str, str]]:
    for binding in bindings:
        if isinstance(binding, Binding):
            yield ", ".join(map(_key, binding.key.split(","))), binding.description


def _key(name: str) -> str:
    """A key as it stands on the keyboard."""
    named = {
        "slash": "/", "less_than_sign": "<", "greater_than_sign": ">", "comma": ",", "question_mark": "?", "escape": "Esc",
        "enter": "Enter", "tab": "Tab", "shift+tab": "Shift+Tab", "left_square_bracket": "[", "right_square_bracket": "]",
        "pageup": "PgUp", "pagedown": "PgDn", "home": "Home", "end": "End", "up": "↑", "down": "↓", "left": "←", "right": "→",
        "space": "Space",
    }  # fmt: skip
    return named.get(name, name.replace("ctrl+", "Ctrl+"))
