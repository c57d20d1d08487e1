"""What is imported when, according to sys.modules in a new interpreter."""

from __future__ import annotations

import ast
import graphlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dtype_engine
import dtype_tui
from dtype_engine import checkpoint, cli, core, evaluation, recipe, reports, results, search, service

TORCH_FREE = [
    "dtype_engine",
    *(
        module.name
        for room in (core, results, checkpoint, recipe, search, reports, evaluation, service, cli)
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    ),
    "dtype_tui.app",
    "dtype_tui.cli.command",
]
"""All packages of the engine except `runtime`, which alone may import torch, and what the app imports before it opens a model."""


def loaded_after(statement: str, *names: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(' '.join(n for n in {names!r} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_packages_other_than_runtime_do_not_import_torch() -> None:
    assert len(TORCH_FREE) > 80
    assert loaded_after(f"import {', '.join(TORCH_FREE)}", "torch", "transformers", "numpy") == set()


@pytest.mark.slow
def test_first_paint_imports_neither_jinja2_nor_soxr() -> None:
    statement = "import dtype_tui.app, dtype_tui.cli.command, dtype_engine.service.worker"
    assert loaded_after(statement, "jinja2", "soxr") == set()


_PAINTED = """
import asyncio
from dtype_engine.checkpoint.source import locate
from dtype_tui.app import DtypeApp
from dtype_tui.state.launch import Launch

class Silent:
    host, can_restart = "", False

    def __getattr__(self, name):
        return lambda *request: None

async def paint():
    app = DtypeApp(Launch("demo", locate("demo").peek()[0]), lambda emit, _: Silent())
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause()
        assert any("embed_tokens" in strip.text for strip in app.screen._compositor.render_strips())

asyncio.run(paint())
"""
"""The app after its first paint, before its engine has sent anything."""


@pytest.mark.slow
def test_first_paint_imports_no_modules_of_results() -> None:
    """It takes milliseconds to define dataclasses with many fields."""
    names = ("dtype_engine.results.drift", "dtype_engine.results.attribution", "dtype_engine.results.memory")
    assert loaded_after(f"import dtype_tui.cli.command\n{_PAINTED}", *names, "torch") == set()


@pytest.mark.slow
def test_app_start_without_workers_imports_no_multiprocessing() -> None:
    """From the start to what draws the screen: the engine is a thread here, which nothing has started yet."""
    statement = (
        "import sys, dtype_tui.app; from dtype_tui.cli.main import main\n"
        "drawn = []; dtype_tui.app.DtypeApp.run = lambda app: drawn.append(app)\n"
        "sys.argv = ['dtype-tui', 'demo', '--in-process']\n"
        "import os, pty; ours, terminal = pty.openpty(); output = os.dup(1); _ = [os.dup2(terminal, n) for n in range(3)]\n"
        "try: main()\nexcept SystemExit: assert drawn\nos.dup2(output, 1)"
    )
    names = ("dtype_engine.evaluation", "multiprocessing", "psutil", "importlib.metadata", "email", "torch")
    names += ("dtype_engine.search",)
    assert loaded_after(statement, *names) == set()


@pytest.mark.slow
def test_the_engine_does_not_import_textual() -> None:
    assert (
        loaded_after(
            "import dtype_engine.runtime.session.session, dtype_engine.service.worker, dtype_engine.cli",
            "textual",
            "dtype_tui",
        )
        == set()
    )


def test_the_headers_of_the_demo_are_read_without_torch() -> None:
    statement = (
        "from dtype_engine.checkpoint.source import locate; assert len(locate(None).open().tree().tensors) == 56"
    )
    assert loaded_after(statement, "torch", "numpy") == set()


def imported_by(file: Path, name: str, modules: dict[str, Path]) -> set[str]:
    """Return those of `modules` that a module imports anywhere, even inside functions or for type checkers."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {inner if (inner := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return found & modules.keys() - {name}


@pytest.mark.parametrize("package", [dtype_engine, dtype_tui], ids=lambda package: package.__name__)
def test_modules_have_no_circular_imports(package: ModuleType) -> None:
    folder = Path(package.__path__[0])
    modules = {
        ".".join((package.__name__, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): file
        for file in folder.rglob("*.py")
    }
    graph = {name: imported_by(file, name, modules) for name, file in modules.items()}
    assert sum(map(len, graph.values())) > len(modules)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the modules of the circle
