"""What the tests of hubs share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a model of two tensors."""
    # Here, because pytest reads this file in the process that only hands out the tests, too.
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "small"
    folder.mkdir()
    save_file({"a.weight": torch.ones(64, 8), "b.weight": torch.ones(8)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder
