"""Configs of diffusers of a few bytes that would exhaust the memory or make passes endless."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.pipelines import save_pipeline

import dtype_engine as de
from dtype_engine.core.errors import UserError

pytest.importorskip("diffusers")
LARGE = 10**9
CASES: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "scheduler": ("sd15", "", "scheduler/scheduler_config.json", {"num_train_timesteps": LARGE}, "num_train_timesteps is"),
    "scheduler of flows": ("flux", "", "scheduler/scheduler_config.json", {"num_train_timesteps": LARGE}, "num_train_timesteps is"),
    "tokenizer": ("sd15", "", "tokenizer/tokenizer_config.json", {"model_max_length": LARGE}, "model_max_length is 1,000,000,000"),
    "tokenizer of several": ("sd3", "", "tokenizer_2/tokenizer_config.json", {"model_max_length": LARGE}, "model_max_length is"),
    "table of positions": ("dit", "transformer", "transformer/config.json", {"sample_size": 10**5}, "sample_size is 100000"),
    "rotary table": ("wan", "transformer", "transformer/config.json", {"rope_max_seq_len": LARGE}, "rope_max_seq_len is"),
    "rotary axes": ("flux", "transformer", "transformer/config.json", {"axes_dims_rope": [LARGE, 4, 8]}, "axes_dims_rope is"),
    "text": ("sd15", "unet", "unet/config.json", {"cross_attention_dim": LARGE}, "cross_attention_dim is"),
    "layers": ("sd15", "unet", "unet/config.json", {"layers_per_block": LARGE}, "layers_per_block is"),
    "index": ("sd15", "", "model_index.json", {"force_zeros": LARGE}, "force_zeros is"),
}  # fmt: skip


def changed(folder: Path, file: str, more: dict[str, Any]) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_impossible_number_in_a_pipeline_config_is_refused_by_name(tmp_path: Path, name: str) -> None:
    family, part, file, more, words = CASES[name]
    folder = save_pipeline(family, tmp_path)
    changed(folder, file, more)
    with pytest.raises(UserError, match=f"{file}: {words}"):
        de.open(str(folder / part))


@pytest.mark.slow
def test_warnings_of_a_scheduler_with_strange_numbers_are_not_shown(tmp_path: Path) -> None:
    folder = save_pipeline("flux", tmp_path)
    changed(folder, "scheduler/scheduler_config.json", {"shift": float("inf")})
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with contextlib.suppress(UserError):
            de.open(str(folder)).drift()
    assert not [each for each in shown if "scheduling" in str(each.filename)]


@pytest.mark.slow
def test_picture_size_of_a_pipeline_is_limited_by_the_size_of_the_latents(tmp_path: Path) -> None:
    """If a VAE has few steps between latents and pixels, latents of 64 x 64 would take 1.2 GB, and of 256 x 256 hours."""
    folder = save_pipeline("sd15", tmp_path)
    changed(folder, "unet/config.json", {"sample_size": 10**5})
    kwargs = de.open(str(folder)).inputs.batches[0].kwargs
    assert (kwargs["height"], kwargs["width"]) == (64, 64)  # of 32 x 32 latents
