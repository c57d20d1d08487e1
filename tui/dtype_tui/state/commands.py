"""The commands of the `:` line, such as `cast *.mlp bf16`, and their completion. Actions of keys without arguments are commands,
too.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from textual.binding import Binding, BindingType

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.suggest import nearest
from dtype_engine.core.text import is_printable, printable
from dtype_engine.core.user_folders import expanded
from dtype_tui.config.bindings import refuses
from dtype_tui.config.key_names import keys_of, name_of, on_keyboard
from dtype_tui.config.questions import questions_without_keys

MOST_COMPLETIONS = 200
PATHS = ("folder", "file")
"""The kinds of arguments that are a single path, which may contain spaces."""
WITH_PATHS = (*PATHS, "line")
"""The kinds of arguments in which paths are completed. A `line` is a prompt or the paths of files."""
_EXACT = 4
"""The rank of a command that is found by a whole word."""


@dataclass(frozen=True)
class Command:
    name: str
    action: str
    """The app's action, which receives the arguments as strings."""
    arguments: tuple[str, ...] = ()
    """The kind of each argument, such as ("pattern", "dtype"), by which `Completer` completes it."""
    meaning: str = ""
    needs: int | None = None
    """Minimum number of arguments. If None, all arguments are required."""
    also: str = ""
    """Words that find the command, besides its name and those of `meaning`."""
    keys: tuple[str, ...] = ()
    """The labels of its keys, such as `Ctrl+p`."""

    @property
    def least(self) -> int:
        return len(self.arguments) if self.needs is None else self.needs

    def is_refused(self, arguments: Sequence[str]) -> bool:
        """Return whether a read-only session refuses the command with these arguments."""
        return refuses(self.action) or (bool(arguments) and any(kind in WITH_PATHS for kind in self.arguments))

    @property
    def usage(self) -> str:
        words = [
            kind.upper() if index < self.least else f"[{kind.upper()}]" for index, kind in enumerate(self.arguments)
        ]
        return " ".join((self.name, *words))

    @property
    def hint(self) -> str:
        """How else to run the command, and the words that find it: `key e, also export, write`."""
        how = (
            f"key {' or '.join(self.keys)}"
            if self.keys
            else " ".join((f"command :{self.name}", *map(str.upper, self.arguments)))
        )
        return f"{how}, also {', '.join(self.also.split())}" if self.also else how

    def rank(self, wanted: str) -> int:
        """Return how well a text finds the command: 5 by its name or key, 4 by a word of `also`, 3 and 2 by the beginning of a
        name or of such a word, 1 by the beginning of a word of `meaning`, 0 not at all. Each of several words must find it.
        """
        return min(map(self._rank_of, wanted.split()), default=0)

    def _rank_of(self, word: str) -> int:
        begun, also = word.lower().removeprefix(":") or word, self.also.split()
        longer = [key.lower() for key in self.keys if len(key) > 1]
        ways = (
            word in self.keys or begun in (self.name, *longer),
            begun in also,
            any(part.startswith(begun) for part in (self.name, *self.name.split("-"))),
            any(part.startswith(begun) for part in also),
            any(part.startswith(begun) for part in re.findall(r"[\w.:-]+", self.meaning.lower())),
        )
        return next((len(ways) - index for index, found in enumerate(ways) if found), 0)


DOWNLOAD = "Download the model of which only the headers are here"
WITH_ARGUMENTS = (
    Command(
        "cast",
        "cast_as",
        ("pattern", "dtype"),
        "Cast the tensors that a pattern matches",
        also="quantize convert",
    ),
    Command("filter", "filter_by", ("text",), "Show only names that contain this; alone: show all", 0, "find search"),
    Command("go", "go_to", ("node",), "Go to a node by its name", also="goto module"),
    Command("sort", "sort_by", ("order",), "Sort children by this", also="order"),
    Command(
        "context",
        "use_context",
        ("tokens", "sequences"),
        "Show KV caches at this many tokens and sequences",
        1,
        "length batch",
    ),
    Command(
        "budget", "use_budget", ("bytes",), "Show which context fits in this size; alone: show none", 0, "memory limit"
    ),
    Command("columns", "show_columns", ("columns",), "Show these columns; alone: show all", 0, "params bytes sqnr"),
    Command("theme", "use_theme", ("theme",), "Use this color theme", also="colors colours dark light"),
    Command("export", "export_to", ("folder",), "Write a checkpoint in the planned dtypes", also="safetensors"),
    Command("recipe", "save_recipe_to", ("file",), "Write the rules and their measurement", also="yaml"),
    Command("report", "save_report_to", ("file",), "Write a report, .html or .md", also="html markdown"),
    Command("preset", "use_preset", ("preset",), "Apply a preset, which replaces all rules"),
    Command(
        "activations", "estimate_activations", (), "Estimate the memory of activations at the context", also="peak"
    ),
    Command("download", "download_model", (), DOWNLOAD, also="fetch hub"),
    Command(
        "inputs", "inputs", ("line",), "Run on a prompt, or on a file; alone: show the current inputs", 0, "prompt text"
    ),
    Command("help", "help", ("text",), "Explain this word; alone: show all keys", 0, "words explain manual"),
)
"""The commands that are not made from a key's action. Most take arguments."""


def of_keys(bindings: Iterable[BindingType], chosen: Mapping[str, str]) -> list[Command]:
    """Return a command for each key's action. chosen: the user's own keys, by binding id."""
    return [
        Command(
            name_of(binding.action),
            binding.action,
            meaning=binding.description,
            also=binding.tooltip,
            keys=tuple(map(on_keyboard, keys_of(binding, chosen).split(","))),
        )
        for binding in bindings
        if isinstance(binding, Binding)
    ]


def without_keys() -> list[Command]:
    """Return the commands that no key runs: the questions without one, and those that take arguments."""
    asked = [Command(row.job, row.action, meaning=row.meaning, also=row.also) for row in questions_without_keys()]
    return [*asked, *WITH_ARGUMENTS]


def all_commands(keys: Iterable[Command]) -> dict[str, Command]:
    """Return every command of the `:` line by name. One with arguments has the keys and words of the key that asks for them. keys:
    the commands `of_keys`.
    """
    plain = (command for command in keys if "(" not in command.action or command.action.startswith("ask("))
    found = {command.name: command for command in plain}
    for command in without_keys():
        if (key := found.get(command.name)) is not None:
            command = dataclasses.replace(command, keys=key.keys, also=f"{key.also} {command.also}".strip())
        found[command.name] = command
    return found


def find(name: str, commands: Mapping[str, Command]) -> Command | None:
    """Return the command with a name, or the only one that has it as a key or as a word of `also`. None if there is none."""
    found = _meant(name, commands)
    return found[0] if len(found) == 1 else None


def _meant(name: str, commands: Mapping[str, Command]) -> list[Command]:
    """Return the command with a name. If there is none, return those that have it as a key or as a word of `also`."""
    if name in commands:
        return [commands[name]]
    return [command for command in commands.values() if command.rank(name) >= _EXACT and len(name.split()) == 1]


def parse(line: str, commands: dict[str, Command]) -> tuple[Command, tuple[str, ...]]:
    """Return the command of a line and its arguments. The last argument may contain spaces. Raises UserError."""
    name, _, rest = line.strip().removeprefix(":").strip().partition(" ")
    found = _meant(name, commands)
    if len(found) != 1:
        near = " or ".join(command.name for command in found) or nearest(name, commands)
        hint = f"did you mean {near}?" if near else "Tab shows all"
        raise UserError(f"no command {printable(name, 40)!r}; {hint}")
    (command,) = found
    rest = rest.strip()
    if not command.arguments:
        if rest:
            raise UserError(f"{command.name} takes no arguments")
        return command, ()
    arguments = tuple(rest.split(None, len(command.arguments) - 1)) if rest else ()
    if command.name == "cast" and len(arguments) == 1 and "=" in arguments[0]:
        arguments = tuple(part.strip() for part in arguments[0].rpartition("=")[::2])
    if len(arguments) < command.least:
        raise UserError(f"write {command.usage}")
    return command, arguments


@dataclass(frozen=True)
class Completer:
    """Completes a partly typed line. Names, patterns and words come from functions, because the tree and the cursor change."""

    commands: dict[str, Command]
    names: Callable[[], Sequence[str]]
    patterns: Callable[[], Sequence[str]]
    """Returns patterns that match the node under the cursor."""
    choices: Callable[[str], Sequence[str]]
    """Returns the possible words of an argument, given its kind: `order`, `columns`, `theme` or `preset`."""
    read_only: bool = False
    """Whether to complete no paths, and no commands that a read-only session refuses."""

    def __call__(self, line: str) -> list[str]:
        """Return completions of a line, each a whole line, the most likely first."""
        words = line.split(" ")
        if len(words) == 1:
            offered = (
                name
                for name, command in self.commands.items()
                if not (self.read_only and command.is_refused(command.arguments[: command.needs]))
            )
            return self._names(words[0], list(offered))
        command = find(words[0], self.commands)
        if command is None or not command.arguments:
            return []
        index = min(len(words) - 2, len(command.arguments) - 1)
        first = index + 1 if command.arguments[index] in PATHS else len(words) - 1
        before, begun = " ".join(words[:first]), " ".join(words[first:])
        return [f"{before} {word}" for word in self._words(command.arguments[index], begun)][:MOST_COMPLETIONS]

    def _names(self, begun: str, offered: Sequence[str]) -> list[str]:
        """Return the names that begin so. If none does, those of the commands that these letters find best."""
        if named := sorted(name for name in offered if name.startswith(begun)):
            return named
        ranks = {name: self.commands[name].rank(begun) for name in offered}
        best = max(ranks.values(), default=0)
        return sorted(name for name in offered if ranks[name] == best > 0)

    def _words(self, kind: str, begun: str) -> list[str]:
        if kind == "dtype":
            return _dtypes(begun)
        if kind in WITH_PATHS:
            return [] if self.read_only else _paths(begun, only_folders=kind == "folder")
        if kind in ("pattern", "node"):
            general = [pattern for pattern in self.patterns() if pattern.startswith(begun)] if kind == "pattern" else []
            return list(dict.fromkeys((*general, *_next_parts(self.names(), begun))))
        return [word for word in self.choices(kind) if word.startswith(begun)]


def _dtypes(begun: str) -> list[str]:
    """Return the dtypes that begin so, by their short names. Those with a rounding are among them after a colon."""
    offered = dtypes.CASTABLE_DTYPES if ":" in begun else dtypes.UNROUNDED_DTYPES
    return [word for word in (*map(dtypes.short_name, offered), dtypes.STORED) if word.startswith(begun)]


def _next_parts(names: Sequence[str], begun: str) -> list[str]:
    """Return completions of a dotted name up to the next dot: `model.layers` for `model.la`, its children for `model.layers.`."""
    length = len(begun)
    parts: dict[str, None] = {}
    for name in names:
        if name.startswith(begun):
            end = name.find(".", length + 1) if length else name.find(".")
            parts[name if end < 0 else name[:end]] = None
            if len(parts) >= MOST_COMPLETIONS:
                break
    parts.pop(begun, None)
    parts.pop("", None)
    return list(parts)


def _paths(begun: str, only_folders: bool = False) -> list[str]:
    """Return the paths that begin with `begun`, folders with a final slash. Hidden ones are omitted unless a dot is typed."""
    head = begun[: begun.rfind("/") + 1]
    last = begun[len(head) :]
    try:
        with os.scandir(expanded(head)) as entries:
            names = [
                entry.name + ("/" if entry.is_dir() else "")
                for entry in entries
                if entry.name.startswith(last) and is_printable(entry.name)
            ]
    except (OSError, ValueError):  # no such folder, not readable; a null byte
        return []
    return [
        head + name
        for name in sorted(names)
        if (name.endswith("/") or not only_folders) and (last.startswith(".") or not name.startswith("."))
    ]
