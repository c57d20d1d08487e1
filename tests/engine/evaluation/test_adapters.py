"""The adapters in the documentation, taken from its pages and run if the adapted library is installed."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.engine.evaluation.conftest import untimed
from tests.helpers.paths import ROOT

import dtype_engine as de
from dtype_engine.checkpoint.source import Source
from dtype_engine.runtime.session import opening

pytestmark = pytest.mark.slow


def adapter(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the code of a page as a module that other processes can import, too."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "engine" / "docs" / f"{page}.md").read_text(), re.DOTALL)
    (folder / f"{page}_adapter.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return import_module(f"{page}_adapter")


@pytest.fixture
def here(source: Source, options: de.Options) -> Any:
    """The scan in this process."""
    return untimed(opening.open_session(source, options).scan(["int8", "bfloat16"]))


def test_documented_submitit_example_gives_the_same_scan(
    here: Any, source: Source, options: de.Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitit = pytest.importorskip("submitit")
    code = adapter("submitit", tmp_path, monkeypatch)
    executor = submitit.LocalExecutor(tmp_path / "logs")
    executor.update_parameters(timeout_min=5)
    save = tmp_path / "scan.json"
    assert untimed(code.scan_by_jobs(str(source.path), options, ["int8", "bfloat16"], executor, 2, save)) == here
    assert save.exists()


def test_documented_ray_example_gives_the_same_scan(
    here: Any, source: Source, options: de.Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    code = adapter("ray", tmp_path, monkeypatch)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        save = tmp_path / "scan.json"
        assert untimed(code.scan_by_ray(str(source.path), options, ["int8", "bfloat16"], 2, save)) == here
        assert save.exists()
        with pytest.raises(de.UserError, match="no-such"):
            code.scan_by_ray(str(tmp_path / "no-such"), options, ["int8"], 1)
    finally:
        ray.shutdown()


def test_ray_repeats_the_work_of_a_lost_worker(
    here: Any, source: Source, options: de.Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    code = adapter("ray", tmp_path, monkeypatch)
    mark = tmp_path / "killed"

    class Dying(code.Evaluator):  # type: ignore[misc, name-defined]
        def evaluate(self, evaluation: Any) -> Any:
            import os
            import signal

            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().evaluate(evaluation)

    monkeypatch.setattr(code, "Evaluator", Dying)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        assert untimed(code.scan_by_ray(str(source.path), options, ["int8", "bfloat16"], 1)) == here
        assert mark.exists()
    finally:
        ray.shutdown()
