"""Loading an export does not make a second copy of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers import preloaded
from tests.helpers.exporting import export_checkpoint

from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint

MIXED = Recipe((Rule("*.mlp", "float16"), Rule("*.self_attn", "float32")))
SCALED = Recipe((Rule("*.mlp", "float8_e4m3fn"),))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell what memory is anonymous")
@pytest.mark.parametrize("recipe", [MIXED, SCALED], ids=["plain", "scaled"])
def test_load_pretrained_of_an_export_needs_no_second_copy_of_the_weights(
    make_llama: Any, tmp_path: Path, recipe: Recipe
) -> None:
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8}
    for name, source in (("small", make_llama()), ("large", make_llama("big", dtype="bfloat16", **large))):
        export_checkpoint(open_checkpoint(source), name, recipe, tmp_path / name)
    done = preloaded.run(
        preloaded.module("tests.helpers.load_memory"), str(tmp_path / "small"), str(tmp_path / "large")
    )
    highest, left, weights = map(int, done.stdout.split())
    if recipe is MIXED:
        assert weights > 50 << 20
        assert highest < 16 << 20  # the weights stay mapped from the file
    else:
        # Scaled weights are values again, in memory, brought back piece by piece: never one of them in float32 as well.
        values = 2 * 3 * 2 * 1024 * 4096
        assert left < values + (16 << 20)
        assert highest < values + (32 << 20)  # each thread has buffers of some MiB; a second copy would be 48 MiB
