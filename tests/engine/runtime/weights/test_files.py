"""Mapping weights, each of which takes a file descriptor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers import preloaded

LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({}, {})); " + preloaded.COMMAND


@pytest.mark.slow
def test_model_with_more_weights_than_the_limit_on_open_files_is_measured(make_llama: Callable[..., Path]) -> None:
    folder = str(make_llama(num_hidden_layers=12))  # 109 weights
    done = preloaded.run(LIMITED.format(80, 1000), "drift", folder)
    assert done.returncode == 0, done.stderr
    refused = preloaded.run(LIMITED.format(80, 80), "drift", folder)
    assert (refused.returncode, refused.stdout) == (2, "")
    file = Path(folder, "model.safetensors")
    assert (
        refused.stderr
        == f"dtype-engine: can't read {file}: Too many open files: raise the limit, as by `ulimit -n 1024`\n"
    )
