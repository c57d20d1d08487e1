"""What is imported when: a fresh interpreter, and a look at sys.modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = [
    "dtype_engine", "dtype_engine.checkpoint", "dtype_engine.tree", "dtype_engine.recipe", "dtype_engine.recipe.file",
    "dtype_engine.dtypes", "dtype_engine.events", "dtype_engine.readings", "dtype_engine.options", "dtype_engine.text",
    "dtype_engine.model.source", "dtype_engine.report_text", "dtype_engine.cli", "dtype_engine.worker", "dtype_tui.app",
    "dtype_tui.cli", "dtype_engine.input_files", "dtype_engine.readings_inputs",
    "dtype_engine.sessions", "dtype_engine.wishes", "dtype_engine.report", "dtype_engine.recipe.saved",
]  # fmt: skip


def loaded_after(statement: str, *names: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(' '.join(n for n in {names!r} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", TORCH_FREE)
def test_what_the_first_paint_needs_does_not_import_torch(module: str) -> None:
    assert loaded_after(f"import {module}", "torch", "transformers", "numpy") == set()


def test_the_engine_does_not_import_textual() -> None:
    assert (
        loaded_after("import dtype_engine.session, dtype_engine.worker, dtype_engine.cli", "textual", "dtype_tui")
        == set()
    )


def test_the_headers_of_the_demo_are_read_without_torch() -> None:
    statement = "from dtype_engine.model.source import locate; assert len(locate(None).open().tree().tensors) == 56"
    assert loaded_after(statement, "torch", "numpy") == set()
