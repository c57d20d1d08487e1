"""Every architecture of the zoo in formats with blocks, and in mixes of all of them."""

from __future__ import annotations

import pytest
from tests.helpers import architectures, formats

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.core import dtypes

BLOCKS = list(formats.BLOCKS)
SERVED = ["float8_e4m3fn", "int8", *filter(dtypes.quantizes_activations, BLOCKS)]
PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), list(enumerate(architectures.ZOO)), ids=architectures.ZOO)
def test_every_architecture_runs_in_block_formats(place: int, name: str) -> None:
    """Alone, each architecture has an eighth of the formats, in turn; the mix draws a format for each tensor from all of them."""
    module, inputs = architectures.make(name)
    session = de.open(module, inputs=inputs)
    palette = ["float32", "bfloat16", *BLOCKS]
    recipes = [Recipe((Rule("*", dtype),)) for dtype in BLOCKS[place % PARTS :: PARTS]]
    recipes.append(architectures.random_recipe(session, palette, 0))
    for recipe in recipes:
        session.apply(recipe)
        output = session.drift().output
        assert output.nonfinite == 0
        assert output.sqnr_db > 2, f"{recipe}: the result has to do with the reference"
    session.settings = de.RunSettings(quantize_activations="weights")
    served = [dtype for dtype in SERVED if ":" not in dtype][place % PARTS :: PARTS]
    recipes = [Recipe((Rule("*", dtype),)) for dtype in served]
    for recipe in (*recipes, architectures.random_recipe(session, palette, 3)):
        session.apply(recipe)
        output = session.drift().output
        assert output.nonfinite == 0
        if output.elements > 1:  # one logit alone, a cosine, can be anywhere
            assert output.sqnr_db > 0, f"{recipe}: the result has to do with the reference, activations quantized too"
