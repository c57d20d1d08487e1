"""Defines which dtypes each runtime (vLLM, SGLang, llama.cpp) can mix in one model, and what else a runtime requires of a
recipe.
"""

from __future__ import annotations

import dataclasses

from dtype_engine.core import dtypes
from dtype_engine.core.fused import FUSED_LAYERS
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import select
from dtype_engine.recipe.serving import no_layout, whole_when_fused
from dtype_engine.search.pareto import Constraints, stays_wide

FAMILIES = {
    "vllm": ("bfloat16", "float8_e4m3fn", "fp8@128x128", "mxfp8", "int8@g128", "nvfp4", "mxfp4", "int4@g128"),
    "sglang": ("bfloat16", "float8_e4m3fn", "fp8@128x128"),
    "llama.cpp": ("bfloat16", "float16", "mxfp4:floor"),
}
"""The dtypes from which a search may choose, for each runtime. vLLM can read each layer in a different format. SGLang reads one
storage layout for the whole checkpoint, so its only quantized formats are the two fp8 formats that share a layout. llama.cpp has
only the formats that `recipe convert` can write exactly.
"""
FUSING = ("vllm", "sglang")
"""The runtimes that fuse sibling layers, such as q, k and v, into one."""


def family_constraints(tree: Tree, family: str, constraints: Constraints) -> Constraints:
    """Return constraints for a search whose result a runtime can load. To the user's `constraints`, they add that layers which the
    runtime fuses must have one format, and that a weight may have only formats that fit its shape. family: the name of the runtime.

    If a pattern of the user and a pattern of the runtime match the same weight, the user's pattern decides.
    """
    if family not in FUSING:
        return constraints
    groups = tuple(pattern for names in FUSED_LAYERS if select(tree, pattern := f"*.{{{','.join(names)}}}"))
    only = []
    for name, tensor in tree.tensors.items():
        if not (tensor.castable and tensor.counted) or len(tensor.shape) < 2:
            continue
        fits = tuple(dtype for dtype in FAMILIES[family] if _fits(tree, name, dtype))
        if len(fits) < len(FAMILIES[family]):
            only.append((name, (*fits, dtypes.STORED)))
    return dataclasses.replace(constraints, groups=(*groups, *constraints.groups), only=(*only, *constraints.only))


def _fits(tree: Tree, name: str, dtype: str) -> bool:
    if dtype not in dtypes.STORAGE_DTYPES:
        return True
    return not stays_wide(tree, name) and no_layout(tree, name, dtype) is None and whole_when_fused(tree, name, dtype)
