"""Numbers in configs that no real model has are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dtype_engine.checkpoint.plausible import refuse_large_tables
from dtype_engine.core.errors import NoForward

REAL: dict[str, tuple[dict[str, Any], int]] = {
    "PixArt of 2,048 pixels": ({"sample_size": 256, "patch_size": 2, "num_attention_heads": 16, "attention_head_dim": 72}, 0),
    "SD 3.5 Large": (
        {"sample_size": 128, "pos_embed_max_size": 192, "patch_size": 2, "num_attention_heads": 38, "attention_head_dim": 64},
        192 * 192 * 2432,
    ),
    "SD 3.5 Medium": ({"pos_embed_max_size": 384, "num_attention_heads": 24, "attention_head_dim": 64}, 384 * 384 * 1536),
    "a VAE": ({"sample_size": 1024, "block_out_channels": [128, 256, 512, 512], "scaling_factor": 0.13025}, 0),
    "sound": ({"sample_size": 131072, "sample_rate": 48000}, 0),
    "Wan": ({"rope_max_seq_len": 1024, "num_attention_heads": 40, "attention_head_dim": 128, "eps": 1e-06}, 0),
    "a base of rotary embeddings": ({"theta": 10_000_000, "rope_theta": 5e8, "axes_dims_rope": [16, 56, 56]}, 0),
    "a scheduler": ({"num_train_timesteps": 1000, "beta_end": 0.012, "max_shift": 1.15, "sigma_max": 1e9}, 0),
    "bounds that are never reached": ({"lambda_min_clipped": -math.inf, "sigma_max": math.inf, "shift": math.nan}, 0),
    "a stated absence": ({"sample_size": None, "patch_size": None, "num_attention_heads": None}, 0),
}  # fmt: skip
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "time steps": ({"num_train_timesteps": 10**9}, "num_train_timesteps is 1000000000, and no model of diffusers has over 100,000"),
    "time steps, as a float": ({"num_train_timesteps": 1e9}, "num_train_timesteps is 1000000000"),
    "below zero": ({"steps_offset": -(10**9)}, "steps_offset is -1000000000"),
    "beyond floats": ({"in_channels": 10**400}, "in_channels is beyond 1e300"),
    "nested": ({"vae": {"z_dim": 10**9}}, "vae.z_dim is 1000000000"),
    "in a list": ({"axes_dims_rope": [10**9, 4, 8]}, "axes_dims_rope is 1000000000"),
    "in a list with others": ({"axes_dims_rope": [4, None, math.nan, "8", 10**9]}, "axes_dims_rope is 1000000000"),
    "in lists in a list": ({"block_out_channels": [[4, 8], [[10**9, 8]]]}, "block_out_channels is 1000000000"),
    "below zero in a list": ({"dim_mult": [1, -(10**9)]}, "dim_mult is -1000000000"),
    "in a mapping in a list": ({"blocks": [{"dim": 4}, {"dim": 10**9}]}, "blocks.dim is 1000000000"),
    "an area": (
        {"sample_size": 100_000, "patch_size": 4, "num_attention_heads": 2, "attention_head_dim": 8},
        "sample_size is 100000, which makes a table of positions of 74.51 GiB; at most 160.00 MiB are made",
    ),
    "an area that takes 1.8 GB to build": (
        {"sample_size": 8188, "patch_size": 4, "num_attention_heads": 2, "attention_head_dim": 8},
        "sample_size is 8188, which makes a table of positions of 511.50 MiB",
    ),
    "an area of two sides": (
        {"sample_size": [100_000, 100_000], "num_attention_heads": 2, "attention_head_dim": 8},
        "sample_size is .100000, 100000., which makes a table of positions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_configs_of_real_models_are_accepted(name: str) -> None:
    config, most = REAL[name]
    refuse_large_tables(config, "config.json", most)


def test_table_of_positions_may_take_as_much_memory_as_the_weights() -> None:
    sana = {"sample_size": 128, "patch_size": 1, "num_attention_heads": 70, "attention_head_dim": 32}
    refuse_large_tables(sana, "config.json", weights_bytes=3_200_000_000)
    with pytest.raises(NoForward, match=r"a table of positions of 280.00 MiB; at most 190.73 MiB are made"):
        refuse_large_tables(sana, "config.json", weights_bytes=200_000_000)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_config_numbers_that_need_too_much_memory_are_refused(name: str) -> None:
    config, words = IMPOSSIBLE[name]
    with pytest.raises(NoForward, match=f"config.json: {words}"):
        refuse_large_tables(config, "config.json")
