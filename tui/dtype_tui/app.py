"""The app: wires the tree, the panes and the prompts to one experiment and to the engine's worker."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, Protocol

from rich.text import Text
from textual import events as textual_events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.widget import AwaitMount
from textual.widgets import Input, Static

from dtype_engine import dtypes, events, history
from dtype_engine.errors import UserError
from dtype_engine.options import RunSettings
from dtype_engine.recipe import History, Recipe, Rule, generalisations, no_match
from dtype_engine.text import printable
from dtype_engine.tree import Tree

from . import command_actions, scan_actions
from .ascii import AsciiFilter, wants_ascii
from .cells import bar
from .commands import Command, Completer, all_commands
from .config import Config
from .experiment import Experiment
from .hints import next_keys
from .keys import keys_of, on_keyboard, with_ids
from .start import collect_again
from .themes import HIGH_CONTRAST
from .widgets.command_line import CommandLine
from .widgets.module_tree import COLUMNS, ORDERS, ModuleTree
from .widgets.panes import SidePanes, worst_modules
from .widgets.prompts import CastPrompt, FilterPrompt

if TYPE_CHECKING:
    from dtype_engine.sessions import SavedSession
    from dtype_engine.wishes import Wish

    from .keeping import SessionKeeper

DIGITS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", dtypes.STORED)
LOOKED_AT = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
SMALLEST = (60, 15)
NARROW_BELOW = 100
GENERATED_TOKENS = 48
_LOOK_EVERY_S = 0.1
_KEEP_EVERY_S = 0.2
_ONLY_THE_NEWEST = (events.Measuring, events.Memory, events.Casting, events.Loading, events.Working)


def _digit_words(dtype: str) -> str:
    return "Put the node back as stored" if dtype == dtypes.STORED else f"Cast the node to {dtype}"


class Engine(Protocol):
    """What the app asks of the worker."""

    def start(self) -> None: ...
    def set_recipe(self, recipe: Recipe) -> None: ...
    def measure(self) -> None: ...
    def set_settings(self, settings: RunSettings) -> None: ...
    def set_inputs(self, line: str) -> None: ...
    def flow(self) -> None: ...
    def causes(self) -> None: ...
    def generate(self, tokens: int) -> None: ...
    def speed(self) -> None: ...
    def plan_export(self) -> None: ...
    def save(self, wish: Wish) -> None: ...
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

    BINDINGS: ClassVar[list[BindingType]] = with_ids(
        [
            Binding("c", "cast", "Cast by pattern", priority=True),
            *(Binding(str(i), f"cast_node('{d}')", _digit_words(d), show=False) for i, d in enumerate(DIGITS, 1)),
            Binding("u", "undo", "Undo"),
            Binding("ctrl+r", "redo", "Redo"),
            Binding("x", "drop_rules", "Drop the node's rules"),
            Binding("m", "measure", "Measure again"),
            Binding("d", "causes", "Drift over depth, and the modules that it arises in"),
            Binding("a", "remedy", "Apply what makes the output finite"),
            Binding("H", "history", "History: every measured recipe, to compare and go back to"),
            Binding("f", "flow", "Dtype flow: where dtypes silently change"),
            Binding("g", "generate", "Generate text with both, side by side"),
            Binding("t", "speed", "Time forward passes"),
            Binding("s", "scan", "Scan: how much every weight matters in every dtype"),
            Binding("o", "optimise", "Optimise: the best recipe for a budget, by the scan"),
            Binding("p", "presets", "Presets: what each would do to this model"),
            Binding("e", "leave_with", "Leave with a checkpoint, a recipe, a report"),
            Binding("i", "inputs", "Inputs: what the model is run on, and others"),
            Binding("comma", "settings", "Settings of a run: autocast, inputs"),
            Binding("v", "values", "Values of the tensor: exponents, error in every dtype"),
            Binding("w", "worst", "Go to the module that drifts most"),
            Binding("slash", "filter", "Filter by name", priority=True),
            Binding("n", "match(1)", "Next match", show=False),
            Binding("N", "match(-1)", "Previous match", show=False),
            Binding("colon", "command", "Command line", priority=True),
            Binding("z", "next_order", "Order of children: the model's, by bytes, by drift"),
            Binding("y", "copy_name", "Copy the node's name"),
            Binding("Y", "copy_rules", "Copy the rules as --cast options"),
            Binding("enter", "details", "Details of the node"),
            Binding("escape", "stop", "Stop what the engine does"),
            Binding("question_mark", "help", "Help"),
            Binding("ctrl+p", "command_palette", "Palette: every action by its name"),
            Binding("ctrl+z", "suspend_process", "Suspend; fg in the shell comes back"),
            Binding("q", "quit", "Quit"),
        ]
    )

    def __init__(
        self,
        title: str,
        tree: Tree | None,
        engine: Callable[[Callable[[events.Event], None]], Engine],
        settings: RunSettings | None = None,
        whole: bool = True,
        config: Config | None = None,
    ) -> None:
        super().__init__()
        config = config or Config()
        self.register_theme(HIGH_CONTRAST)
        if config.theme is not None:
            self.theme = config.theme
        if wants_ascii(config.ascii):
            self._filters.append(AsciiFilter())
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
        self.busy = True
        self.open_error: str | None = None
        self.keeper: SessionKeeper | None = None
        self.begin_keeping: Callable[[], SessionKeeper] | None = None
        self._cursor_wanted: str | None = None
        self._worst = ""
        self._tree: ModuleTree | None = None
        self._preset_wanted: str | None = None
        self._after_preset = Recipe()
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
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.exit)
        # The first paint comes first: starting the engine imports torch.
        self.call_after_refresh(self._begin)

    async def _have_prompts(self) -> None:
        """Mount the prompts, which the first paint does not wait for; a key that wants one may come before that."""
        if self._prompts is None:
            self._prompts = self.mount(
                CastPrompt(self.experiment),
                CommandLine(self.experiment, self._completer()),
                FilterPrompt(lambda: len(self.tree_view.matches)),
            )
        await self._prompts
        for field in self.query(Input):
            field.cursor_blink = False  # every blink goes over the wire

    async def _begin(self) -> None:
        collect_again()
        await self._have_prompts()
        if self.begin_keeping is not None:
            self.keeper = self.begin_keeping()
        if self.keeper is not None:
            self.keeper.say = lambda trouble: self.say(trouble, "warning")
        self.engine.start()

    def on_unmount(self) -> None:
        self._keep_now()
        if self.keeper is not None:
            self.keeper.close()
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

    def show_status(self) -> None:
        width = self.size.width
        left = Text(" ")
        if self.busy:
            left.append(self.activity)
            if self.share is not None:
                left.append(f" {100 * self.share:3.0f} % ")
                left.append(bar(self.share, 12), style="bold")
            left.append("  Esc stops", style="dim")
        elif self.open_error:
            left.append("no engine: planning only")
        else:
            left.append("ready")
        experiment = self.experiment
        parts = [part for part in (printable(experiment.title, 40), experiment.class_name, experiment.device) if part]
        while len(parts) > 1 and left.cell_len + len(" · ".join(parts)) + 2 > width:
            parts.pop(1)  # the class goes first, then the device
        about = " · ".join(parts)
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append_text(left)
        line.append(" " * max(1, width - left.cell_len - len(about) - 1))
        line.append(about, style="dim")
        self._put("#status", line)
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
        from .hearing import hear

        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        newest = {type(event): event for event in arrived}
        for event in arrived:
            if not isinstance(event, _ONLY_THE_NEWEST) or newest[type(event)] is event:
                hear(self, event)
        self.show_all()

    def say(self, text: str, severity: str) -> None:
        self.notify(printable(text, 500), severity=severity, markup=False)  # type: ignore[arg-type]

    # -- the session that is kept --------------------------------------------------------------------------------

    def take_up(self, saved: SavedSession) -> None:
        """Go on with a session that was kept."""
        self.experiment.take_up(History.of(saved.recipes, saved.at))
        self.experiment.measured[:] = saved.still_true
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
        if self.experiment.push(recipe):
            self.engine.set_recipe(recipe)
        self._preset_wanted, self._after_preset = preset, recipe
        if preset is None:
            return
        from dtype_engine.recipe.presets import PRESETS

        if self.experiment.tree.has_classes or (not PRESETS[preset].needs_classes and self.has_tree):
            self.start_with_preset()

    def start_with_preset(self) -> None:
        """Put the preset in force that the command line asks for; most wait for module classes to be known."""
        if self._preset_wanted is None:
            return
        from dtype_engine.recipe.presets import PRESETS

        name, self._preset_wanted = self._preset_wanted, None
        try:
            made = PRESETS[name].recipe(self.experiment.tree)
        except UserError as error:
            self.say(str(error), "warning")
            return
        if self.experiment.push(Recipe((*made.rules, *self._after_preset.rules))):
            self.engine.set_recipe(self.experiment.recipe)

    def recipe_changed(self) -> None:
        """The recipe in force is another: tell the engine, and show what is known at once."""
        self.engine.set_recipe(self.experiment.recipe)
        if self.open_error is None:
            self.busy, self.activity, self.share = True, "casting", None
        self.show_all()

    def add_rule(self, rule: Rule) -> None:
        """Put one more rule in force."""
        if not self.experiment.push(self.experiment.recipe.then(rule)):
            self.say(f"{rule} is in force already", "information")
            return
        self.recipe_changed()
        self.warn_unmatched()
        broken = self.experiment.broken_islands(len(self.experiment.recipe) - 1)
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            self.say(f"{broken[0]}{more} should stay in float32, as the model's own code declares", "warning")

    def warn_unmatched(self) -> None:
        plan = self.experiment.plan
        for place in plan.unmatched:
            pattern = self.experiment.recipe.rules[place].pattern
            self.say(f"rule {place + 1}: {no_match(self.experiment.tree, pattern, plan.selections[place])}", "warning")

    async def action_cast(self) -> None:
        await self._have_prompts()
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
        node = self.tree_view.current.name
        inside, beyond = self.experiment.rules_within(node)
        if inside:
            self.experiment.push(self.experiment.recipe.without(inside))
            self.recipe_changed()
        elif beyond:
            self.say(
                f"rule {beyond[-1] + 1} reaches beyond this node; go to a node above it, or cast this one (8: as stored)",
                "warning",
            )
        else:
            self.say("no rule takes this node", "information")

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
        self._ask_engine("tracing casts", self.engine.flow)

    def action_causes(self) -> None:
        if self.experiment.report is None:
            self.say(self.experiment.no_forward or "not measured yet: the causes are those of a drift", "information")
            return
        if self.experiment.causes is None:
            self._ask_engine("running each module as cast by itself", self.engine.causes)
        from .drift_screens import CausesScreen  # the plots' library is not for the first paint

        self.push_screen(CausesScreen(self.experiment, self._under_way, self.action_stop))

    def _under_way(self) -> tuple[str, float | None]:
        return (self.activity, self.share) if self.busy else ("", None)

    def action_remedy(self) -> None:
        found = self.experiment.nonfinite
        if found is not None and found.remedy is not None:
            self.add_rule(Rule.parse(found.remedy))
        else:
            self.say(found.reason if found is not None else "there is nothing to mend", "information")

    def action_history(self) -> None:
        if self.experiment.measured:
            from .history_screen import HistoryScreen

            self.push_screen(HistoryScreen(self.experiment), self._go_back_to)
        else:
            self.say("nothing was measured yet", "information")

    def _go_back_to(self, chosen: history.MeasuredRecipe | None) -> None:
        if chosen is None:
            return
        if chosen.settings != str(self.experiment.settings):
            self.say(f"that was measured with {chosen.settings}; the settings of now stay", "information")
        if self.experiment.push(chosen.recipe):
            self.recipe_changed()

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
            self.say(self.experiment.no_forward, "warning")
        else:
            ask()
            self.expect(activity)

    def expect(self, activity: str) -> None:
        """Something was asked of the engine: it is on the screen before the engine says so."""
        if self.busy:
            self.say(f"next: {activity}", "information")
        else:
            self.busy, self.activity, self.share = True, activity, None
            self.show_status()

    def action_values(self) -> None:
        row = self.tree_view.current
        if row.tensor is None:
            self.say("values are those of a tensor: go to one", "information")
        else:
            self.engine.look_at(row.tensor.name, LOOKED_AT)
            self.expect("reading the values")

    def action_inputs(self, line: str = "") -> None:
        """Run on what the line names; without one, show what the model is run on."""
        experiment = self.experiment
        if not experiment.live:
            self.say(self.open_error or "the inputs are known when the model is there", "information")
            return
        if line:
            self.engine.set_inputs(line)
            self.expect("preparing the inputs")
            return
        from .inputs_screen import InputsScreen

        compared = experiment.report.output.positions if experiment.report is not None else None
        self.push_screen(
            InputsScreen(experiment.inputs_reading, experiment.no_forward, compared, self.engine.set_inputs)
        )

    def action_settings(self) -> None:
        from .settings_screen import SettingsScreen

        self.push_screen(SettingsScreen(self.experiment.settings), self._settings_chosen)

    def _settings_chosen(self, settings: RunSettings | None) -> None:
        if settings is None or settings == self.experiment.settings:
            return
        self.experiment.set_settings(settings)
        self.engine.set_settings(settings)
        self.show_all()

    def action_presets(self) -> None:
        from .presets_screen import PresetsScreen

        if self.has_tree:
            self.push_screen(PresetsScreen(self.experiment.tree), self._preset_chosen)

    def _preset_chosen(self, recipe: Recipe | None) -> None:
        if recipe is not None:
            self.put_in_force(recipe)

    def put_in_force(self, recipe: Recipe) -> None:
        """The recipe of a preset, in place of all rules."""
        if self.experiment.push(recipe):
            self.recipe_changed()
        else:
            self.say("this preset is in force already", "information")

    def action_leave_with(self) -> None:
        experiment = self.experiment
        if not self.has_tree:
            return
        from .leaving_screen import LeavingScreen

        self.push_screen(LeavingScreen(experiment.title, len(experiment.recipe), experiment.report), self._wished)
        self.engine.plan_export()

    def _wished(self, wish: Wish | None) -> None:
        if wish is not None:
            self.wish(wish)

    def wish(self, wish: Wish) -> None:
        """Have the engine write something."""
        self.engine.save(wish)
        self.expect("writing")

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
        names = [reading.name for reading in worst_modules(self.experiment)]
        if not names:
            self.say("no module drifts yet", "information")
            return
        again = self._worst in names and self._worst == self.tree_view.current.name
        self._worst = names[(names.index(self._worst) + 1) % len(names)] if again else names[0]
        self.tree_view.go_to(self._worst)

    async def action_filter(self) -> None:
        await self._have_prompts()
        self.query_one(FilterPrompt).open(self.tree_view.filter_text)

    def action_match(self, step: int) -> None:
        if not self.tree_view.next_match(step):
            self.say("no match: / filters by name", "information")

    def action_next_order(self) -> None:
        self.action_sort_by(ORDERS[(ORDERS.index(self.tree_view.order) + 1) % len(ORDERS)])

    def action_copy_name(self) -> None:
        self._copy(self.tree_view.current.name or "*", "the name")

    def action_copy_rules(self) -> None:
        rules = self.experiment.recipe.rules
        self._copy(" ".join(f"--cast {shlex.quote(str(rule))}" for rule in rules), "the rules as --cast options")

    def _copy(self, text: str, what: str) -> None:
        """To the clipboard of the terminal, which over SSH is the one of the person who looks at it (OSC 52)."""
        if text:
            self.copy_to_clipboard(text)
            self.say(f"copied {what}: {text}", "information")
        else:
            self.say("no rules to copy: every tensor is as stored", "information")

    # -- the command line ----------------------------------------------------------------------------------------

    def _completer(self) -> Completer:
        actions = [
            (binding.action, binding.description)
            for binding in self.BINDINGS
            if isinstance(binding, Binding) and binding.action not in ("command", "filter", "cast")
        ]
        return Completer(
            all_commands(actions),
            lambda: self.experiment.tree.names[0],
            lambda: generalisations(self.tree_view.current.name, self._class_here()),
            self._choices,
        )

    def _class_here(self) -> str | None:
        module = self.experiment.tree.modules.get(self.tree_view.current.name)
        return module.class_name if module is not None else None

    def _choices(self, kind: str) -> list[str]:
        if kind == "preset":
            from dtype_engine.recipe.presets import PRESETS  # not for the first paint

            return list(PRESETS)
        found = {"order": ORDERS, "columns": COLUMNS, "theme": sorted(self.available_themes)}
        return list(found.get(kind, ()))

    async def action_command(self) -> None:
        await self._have_prompts()
        self.query_one(CommandLine).open()

    async def _do(self, command: Command, arguments: tuple[str, ...]) -> None:
        try:
            await self.run_action(("", command.action, arguments))
        except UserError as error:
            self.say(str(error), "error")

    def action_cast_as(self, pattern: str, dtype: str) -> None:
        self.add_rule(Rule.make(pattern, dtype))

    def action_filter_by(self, text: str = "") -> None:
        self.tree_view.set_filter(text)
        if self.tree_view.matches:
            self.tree_view.next_match(1)
        elif text:
            self.say(f"no name has {text} in it", "information")

    def action_go_to(self, name: str) -> None:
        if not self.tree_view.go_to(name):
            raise UserError(f"there is no {printable(name, 200)} in this model")

    def action_sort_by(self, order: str) -> None:
        if order not in ORDERS:
            raise UserError(f"children are sorted by {', '.join(ORDERS)}")
        self.tree_view.sort_by(order)
        self.say(f"children in order of {'the model' if order == 'model' else order}", "information")

    def action_show_columns(self, words: str = "") -> None:
        wanted = words.replace(",", " ").split() or list(COLUMNS)
        if not set(wanted) <= set(COLUMNS):
            raise UserError(f"columns are {', '.join(COLUMNS)}; the name and the dtype are always there")
        self.tree_view.hide(frozenset(COLUMNS) - set(wanted))

    def action_use_theme(self, name: str) -> None:
        if name not in self.available_themes:
            raise UserError(
                f"there is no theme {printable(name, 40)}; there are {', '.join(sorted(self.available_themes))}"
            )
        self.theme = name

    def action_export_to(self, folder: str) -> None:
        command_actions.leave_with(self, "checkpoint", folder)

    def action_save_recipe_to(self, file: str) -> None:
        command_actions.leave_with(self, "recipe", file)

    def action_save_report_to(self, file: str) -> None:
        command_actions.leave_with(self, "report", file)

    def action_use_preset(self, name: str) -> None:
        command_actions.use_preset(self, name)

    def action_details(self) -> None:
        from .screens import details

        self.push_screen(details(self.experiment, self.tree_view.current.name))

    def action_next_pane(self) -> None:
        self.side.next_pane()
        self._show_panes()

    def action_help(self) -> None:
        from .help import sections
        from .screens import help_screen

        words = [(str(pane.border_title), pane.HELP) for pane in self.side.panes]
        self.push_screen(help_screen(*sections(self.BINDINGS, self.chosen_keys, words)))

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

    def on_cast_prompt_previewed(self, message: CastPrompt.Previewed) -> None:
        self.tree_view.show_preview(message.preview)

    def on_cast_prompt_applied(self, message: CastPrompt.Applied) -> None:
        self.tree_view.focus()
        self.add_rule(message.rule)

    def on_command_line_previewed(self, message: CommandLine.Previewed) -> None:
        self.tree_view.show_preview(message.preview)

    def on_command_line_left(self) -> None:
        self.tree_view.focus()

    async def on_command_line_entered(self, message: CommandLine.Entered) -> None:
        self.tree_view.focus()
        await self._do(message.command, message.arguments)

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
        self.show_all()
