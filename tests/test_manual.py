"""The README and the manual do what they say: every block on them runs in a folder of its page's own, in order.

The blocks, by the word after the fence:

- `console`: commands after `$`, each with the output that follows. `dtype-engine` runs in this process, `dtype-tui` in a terminal
  until its screen is drawn, anything else in a shell.
- `python`: a cell of a notebook; a `text` block right after it shows what the cell prints and the value of its last expression.
- Any block whose first line is `# file: NAME` is written to that file, without this line, for the blocks after it.

`no-run` after the language is for commands that need another machine or the network: only their options are checked.
`needs=PACKAGE` is for blocks that run where that package is installed.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from tests.helpers import preloaded
from tests.helpers.hub_server import hub_of
from tests.helpers.pages import MANUAL, Block, blocks_of, differs
from tests.helpers.paths import ROOT
from tests.helpers.terminal import Terminal

from dtype_engine.checkpoint.source import DEMO
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.recipe.file import read_recipe_file
from dtype_tui.cli.command import command as app_command
from dtype_tui.cli.serve import serve
from dtype_tui.config.bindings import FRONT_KEYS, KEYS
from dtype_tui.config.key_names import on_keyboard
from dtype_tui.widgets.module_tree import ModuleTree

ADAPTERS = {"ray.md", "submitit.md"}
"""Pages with code for packages that are rarely installed. `tests/engine/evaluation/test_adapters.py` runs the code."""
PAGES = [page for page in MANUAL if page.name not in ADAPTERS]
MOST_WORDS = {"README.md": 700}
"""The most words that a page may have, for pages that may have other than 1,500."""
_BY_PACKAGE = [
    (page, package)
    for page in PAGES
    for package in sorted({block.package or "" for block in blocks_of(page) if block.runs})
]
_STARTED = r"\d+ (rows|modules|tensors)|Drift|Tour 1|Memory"
"""What the app's screen shows once it is drawn."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", MANUAL, ids=_name)
def test_manual_pages_are_short(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS.get(page.name, 1500)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_code_blocks_use_known_languages(page: Path) -> None:
    assert {block.language for block in blocks_of(page)} <= {"console", "python", "text", "yaml"}
    assert [line for line in page.read_text().splitlines() if line.startswith("```")].count("```") == len(
        blocks_of(page)
    )


@pytest.mark.parametrize("page", MANUAL, ids=_name)
def test_links_in_pages_lead_to_existing_headings(page: Path) -> None:
    for link, heading in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
        linked = (page.parent / link) if link else page
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
        assert heading in {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}, link


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page", "package"),
    _BY_PACKAGE,
    ids=[_name(page) + (f"-{package}" if package else "") for page, package in _BY_PACKAGE],
)
def test_examples_in_pages_give_the_shown_output(
    page: Path, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.syspath_prepend(str(tmp_path))
    if package:
        _copy_weights(package, tmp_path)
    reader = Reader(tmp_path, capsys)
    hub = hub_of(tmp_path / "cache", acme__tiny_coder=DEMO) if page.name == "hub.md" else contextlib.nullcontext()
    with hub:
        for block in blocks_of(page):
            if block.runs and (block.package or "") == package:
                reader.follow(block, f"{_name(page)}:{block.line}")


def _copy_weights(package: str, folder: Path) -> None:
    """Copy the weights that a package contains to the place that the page names."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    here = Path(found.origin).parent
    for part in ("assets/full.pth", "model"):
        if (here / part).is_dir():
            shutil.copytree(here / part, folder / part)
        elif (here / part).exists():
            shutil.copy(here / part, folder)


class Reader:
    """Does what a page says, in a folder of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.programs = folder / ".bin"
        """Where a shell finds the program, in a process that is forked with what it imports."""
        self.programs.mkdir()
        program = self.programs / "dtype-engine"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(preloaded.command(preloaded.COMMAND))} "$@"\n')
        program.chmod(0o755)
        self.capsys = capsys
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.status = 0
        self.shown: str | None = None
        """What the cell before has shown, None where the block before was no cell."""

    def follow(self, block: Block, where: str) -> None:
        """Do what a block says, and compare the result with the page."""
        shown, self.shown = self.shown, None
        if block.file is not None:
            self._write(block)
        elif block.language == "console":
            for line, output in block.commands:
                difference = differs(output, self._run(line, bool(output)).splitlines())
                assert difference is None, f"{where}: $ {line}\n{difference}"
                assert self.status in (0, 1) or output, f"{where}: $ {line} ended with {self.status}"
        elif block.language == "python":
            self.shown = self._cell(block.text, where)
        elif block.language == "text":
            assert shown is not None, f"{where}: a text that no cell has shown"
            difference = differs(block.text.splitlines(), shown.splitlines())
            assert difference is None, f"{where}: {difference}"
        else:
            raise AssertionError(f"{where}: begin with a line `# file: NAME`")

    def _write(self, block: Block) -> None:
        assert block.file is not None
        path = self.folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text.partition("\n")[2])
        if path.suffix == ".yaml" and path.name != "config.yaml":
            read_recipe_file(path)

    def _run(self, line: str, prints: bool) -> str:
        """Return what a command prints, standard output first. prints: whether the page shows the output."""
        words = shlex.split(line, comments=True)
        if words == ["echo", "$?"]:
            return str(self.status)
        if words[0] == "dtype-engine" and not {"|", ">", "&&"} & set(words):
            self.status = run(cli, "dtype-engine", words[1:])
            captured = self.capsys.readouterr()
            return captured.out + captured.err
        if words[0] == "dtype-tui" and not prints:
            return self._start(words[1:])
        environment = os.environ | {"PATH": f"{self.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
        self.status = done.returncode
        return done.stdout + done.stderr

    def _start(self, arguments: list[str]) -> str:
        """Start the app, wait until it has drawn its screen, and leave it."""
        terminal = Terminal(*arguments, environment={"XDG_CONFIG_HOME": str(self.folder / "config")}, forked=True)
        try:
            terminal.wait_for(_STARTED)
            terminal.press("q")
            self.status = terminal.exit_status()
        finally:
            terminal.close()
        return ""

    def _cell(self, text: str, where: str) -> str:
        """Run a cell as a notebook does. Returns what it prints, and then the value of its last expression unless that is None."""
        parsed = ast.parse(text)
        last = parsed.body.pop() if isinstance(parsed.body[-1], ast.Expr) else None
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(parsed, where, "exec"), self.names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), where, "eval"), self.names)
                if value is not None:
                    print(repr(value))
        return printed.getvalue()


@pytest.mark.parametrize("page", MANUAL, ids=_name)
def test_commands_in_pages_use_existing_options(page: Path) -> None:
    """Checked are the commands of all console blocks, `no-run` or not, and those within the text."""
    lines = [line for block in blocks_of(page) if block.language == "console" for line, _ in block.commands]
    lines += re.findall(r"`(dtype-(?:engine|tui) [^`]+)`", page.read_text())
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and words[0] not in ("dtype-engine", "dtype-tui"):
            words = words[1:]
        if words:
            known = _options(words)
            unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
            assert unknown == [], line


def _options(words: list[str]) -> set[str]:
    """Return the options of the command at the beginning of a line."""
    found: click.Command = cli if words[0] == "dtype-engine" else serve if words[1:2] == ["serve"] else app_command
    known = {"--help", "--version"}
    for word in words[1:]:
        if isinstance(found, click.Group):
            named = found.get_command(click.Context(found), word)
            if named is None:
                break
            found = named
    for parameter in [*found.params, *(app_command.params if found is serve else [])]:
        known |= set(parameter.opts) | set(parameter.secondary_opts)
    return known


def test_manual_page_of_keys_names_every_key() -> None:
    text = (ROOT / "tui/docs/keys.md").read_text()
    bindings = [*KEYS, *ModuleTree.BINDINGS, *FRONT_KEYS]
    missing = [key for binding in bindings for key in _keys(binding) if f"`{key}`" not in text]
    assert missing == []


def _keys(binding: Any) -> Iterator[str]:
    for key in binding.key.split(","):
        yield on_keyboard(key)


def test_comparison_of_pages_with_output_tolerates_a_tenth_only_in_measured_figures() -> None:
    assert differs(["KL mean 1.00e-03 nats"], ["KL  mean 1.09e-03 nats"]) is None
    assert differs(["KL mean 1.00e-03 nats"], ["KL mean 1.20e-03 nats"]) is not None
    assert differs(["planned 1.86 MiB"], ["planned 1.87 MiB"]) is not None
    assert differs(["855 positions"], ["856 positions"]) is not None
    assert differs(["a", "...", "d"], ["a", "b", "c", "d"]) is None
    assert differs(["a", "...", "d"], ["a", "b", "c"]) is not None
    assert differs(["peak ... MiB"], ["peak 510.89 MiB"]) is None
