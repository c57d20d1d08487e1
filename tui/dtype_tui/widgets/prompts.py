"""The prompt that casts the tensors matching a pattern, with a live preview, and the prompt that filters the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.timer import Timer
from textual.widgets import Static

from dtype_engine.core import dtypes, kv_formats
from dtype_engine.core.errors import UserError
from dtype_engine.core.roundings import ROUNDINGS
from dtype_engine.core.units import human_bytes, human_count, plural
from dtype_engine.recipe import Rule
from dtype_tui.state.experiment import Experiment
from dtype_tui.state.folds import patterns_for
from dtype_tui.state.preview import Preview, cache_change, preview
from dtype_tui.widgets.bottom_prompt import BottomPrompt
from dtype_tui.widgets.tree_rows import MOST_MATCHES

_PREVIEW_AFTER_S = 0.04
"""Number of seconds that must pass after the last key press before the preview is computed."""


class CastPrompt(BottomPrompt):
    """The prompt for a rule `PATTERN=DTYPE`. The initial pattern matches the node under the cursor. While the user types, the hint
    says which nodes the rule would match, and the tree highlights them.
    """

    HELP = (
        "Tab completes the name of a format; otherwise it generalizes the pattern from the node to its kind: model.layers.3.mlp, "
        "model.layers.*.mlp, *.mlp, type:LlamaMLP."
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "generalise(1)", "More general", priority=True, show=False),
        Binding("shift+tab", "generalise(-1)", "Less general", priority=True, show=False),
        Binding("escape", "cancel", "Close", priority=True, show=False),
    ]

    def __init__(self, experiment: Experiment, cast: Callable[[Rule], None]) -> None:
        """cast: called with the rule when the user presses Enter."""
        super().__init__("cast")
        self.experiment = experiment
        self._cast = self._enter = cast
        self._steps: list[str] = []
        self._step = 0
        self._dtype = "bf16"
        self._timer: Timer | None = None
        self._completions: list[str] = []
        self._completion = ""
        """The text of the line after the last completion. If the line still has this text, Tab shows the next completion."""

    def compose(self) -> ComposeResult:
        yield Static(Text(" cast PATTERN=DTYPE  Tab widens  Enter casts  Esc closes", style="dim"))
        yield from super().compose()

    def edit(self, rule: Rule, replace: Callable[[Rule], None]) -> None:
        """Show the prompt with an existing rule. replace: called with the changed rule when the user presses Enter."""
        self._enter = replace
        self._steps, self._step = [str(rule.pattern)], 0
        self.show_with(f"{rule.pattern}={dtypes.short_name(rule.dtype) if rule.dtype != dtypes.STORED else rule.dtype}")

    def open(self, node: str) -> None:
        self._enter = self._cast
        steps = patterns_for(self.experiment.tree, node)
        found = preview(self.experiment.tree, self.experiment.plan, Rule(steps[0], dtypes.STORED))
        # Every pattern is more general than the one before, so if the first matches something, all do.
        self._steps = steps if found.tensors or found.caches else steps[:1]
        self._step = 0
        self.show_with(self._rule_text, select=True)

    def close(self) -> None:
        self._stop_timer()
        super().close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.stop()

    @property
    def _rule_text(self) -> str:
        return f"{self._steps[self._step]}={self._dtype}"

    def action_generalise(self, step: int) -> None:
        if self._complete(step):
            return
        _, equals, dtype = self.field.value.rpartition("=")
        if equals and dtype.strip():
            self._dtype = dtype.strip()
        self._step = (self._step + step) % len(self._steps)
        self.field.put(self._rule_text)

    def _complete(self, step: int) -> bool:
        """Complete the dtype's name after `=`, or show the next (step > 0) or previous one. Returns False if there is none."""
        pattern, equals, begun = self.field.value.rpartition("=")
        if self.field.value == self._completion and len(self._completions) > 1:
            index = (self._completions.index(begun) + step) % len(self._completions)
        else:
            self._completions = _completions(pattern, begun) if equals and begun.strip() else []
            index = 0 if step > 0 else -1
            if not self._completions or begun.strip().lower() in self._completions or _is_target(pattern, begun):
                self._completions = []
                return False
        self._completion = f"{pattern}={self._completions[index]}"
        self.field.put(self._completion)
        return True

    def typed(self, line: str) -> None:
        self._stop_timer()
        self._timer = self.set_timer(_PREVIEW_AFTER_S, self._preview)

    def _preview(self) -> None:
        if not self.is_open:
            return
        shown: Preview | None = None
        try:
            rule = Rule.parse(self.field.value)
            shown = preview(self.experiment.tree, self.experiment.plan, rule)
        except UserError as error:
            pattern, _, begun = (part.strip() for part in self.field.value.rpartition("="))
            names = _completions(pattern, begun) if begun and not _is_target(pattern, begun) else []
            words = f"Tab: {'  '.join(names)}{_rounding_words(pattern, names)}" if names else str(error)
            self.hint(Text(f" {words}", style="" if names else "bold", no_wrap=bool(names), overflow="ellipsis"))
        else:
            self.hint(Text(f" {preview_words(shown, cache_change(self.experiment, shown, rule.dtype))}"))
        self.post_message(self.Previewed(shown))

    def entered(self, line: str) -> None:
        try:
            rule = Rule.parse(line)
            refused = self.experiment.refusal(rule)
        except UserError as error:
            refused = str(error)
        if refused is not None:
            self._stop_timer()  # the preview would replace the refusal, which says more
            self.hint(Text(f" {refused}", style="bold"))
            return
        self._dtype = line.rpartition("=")[2].strip()
        self.close()
        self._enter(rule)


def _completions(pattern: str, begun: str) -> list[str]:
    return kv_formats.completions(pattern, begun) if _of_caches(pattern) else dtypes.completions(begun)


def _of_caches(pattern: str) -> bool:
    """Return whether a pattern names KV caches, and nothing else."""
    return kv_formats.names_caches(pattern) or kv_formats.names_states_alone(pattern)


def _rounding_words(pattern: str, names: Sequence[str]) -> str:
    """Return words about the roundings that some of the dtypes `names` take, or "" if none does, or the pattern names KV caches."""
    if _of_caches(pattern) or any(":" in name for name in names):
        return ""
    taken = [name for name in ROUNDINGS if any(dtypes.rounded(dtypes.parse_target(each), name) for each in names)]
    return f"  then {' or '.join(f':{name}' for name in taken)}" if taken else ""


def _is_target(pattern: str, text: str) -> bool:
    try:
        (kv_formats.parse_format if _of_caches(pattern) else dtypes.parse_target)(text)
    except UserError:
        return False
    return True


def preview_words(preview: Preview, of_caches: str = "") -> str:
    """Return a description of a preview, as in `matches 12 tensors · 3.2 M parameters · 12.80 MiB → 6.40 MiB`. of_caches: the bytes
    of its KV caches before and after.
    """
    caches = f"{plural(len(preview.caches), 'tensor')} of KV caches · {of_caches}" if preview.caches else ""
    if preview.caches and not preview.tensors:
        return f"matches {caches}"
    if preview.uncastable_count and not preview.tensors:
        return f"casts nothing: leaves {plural(preview.uncastable_count, 'tensor')} as stored ({preview.uncastable})"
    if not preview.tensors:
        return "matches nothing in this model"
    more = f" · overrides {preview.overrides}" if preview.overrides else ""
    more += f" · {preview.fused}" if preview.fused else ""
    more += f" · and {caches}" if caches else ""
    return (
        f"matches {plural(len(preview.tensors), 'tensor')} · {human_count(preview.elements)} parameters · "
        f"{human_bytes(preview.bytes_before)} → {human_bytes(preview.bytes_after)}{more}"
    )


class FilterPrompt(BottomPrompt):
    """The prompt that filters the tree by name while the user types. Enter keeps the filter, Esc clears it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Clear", priority=True, show=False)]

    def __init__(
        self, filter_by: Callable[[str], None], count: Callable[[], int], go_to_first: Callable[[], object]
    ) -> None:
        """filter_by: called with the text after each change. count: returns how many nodes match. go_to_first: called on Enter."""
        super().__init__("filter", "part of a name, or a glob")
        self._filter_by = filter_by
        self._count = count
        self._go_to_first = go_to_first

    def open(self, text: str) -> None:
        self.show_with(text)
        self._show_count()

    def _show_count(self) -> None:
        count = self._count()
        shown = f", the first {MOST_MATCHES:,} shown" if count > MOST_MATCHES else ""
        words = f" {count:,} matches{shown} · Enter keeps the filter, then n and N walk · Esc clears"
        self.hint(Text(words, style="dim"))

    def typed(self, line: str) -> None:
        if self.is_open:
            self._filter_by(line)
            self._show_count()

    def entered(self, line: str) -> None:
        self.close()
        self._go_to_first()

    def action_cancel(self) -> None:
        self._filter_by("")
        super().action_cancel()
