"""The `quantization_config` of an export in GPTQ's layout, and which of them transformers reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dtype_engine.core import dtypes
from dtype_engine.core.file_layouts import FileLayout
from dtype_engine.core.fused import fused_groups, fused_name, siblings
from dtype_engine.core.text import printable
from dtype_engine.core.version import __version__
from dtype_engine.runtime.export.contents import Contents, ExportTensor
from dtype_engine.runtime.export.experts import expert_layer, targets_of

_Numbers = tuple[int, int]
"""(the bits of a code, the size of a group)."""
_IN_A_BLOCK = re.compile(r"(transformer\.h|gpt_neox\.layers|model\.(decoder\.|language_model\.)?layers)\.\d+\.")
"""The names of layers that transformers looks for codes in (`BLOCK_PATTERNS` in `optimum/gptq/constants.py`)."""


def gptq_settings(contents: Contents, layout: FileLayout) -> dict[str, Any]:
    """Return the settings with which other programs read weights in GPTQ's layout, in the keys of GPTQModel's `QuantizeConfig`
    (`gptqmodel/quantization/config.py`).

    The bits and the group size are those of most weights. `dynamic` has a pattern for the layers with others ("+:"), and one for
    linear layers without codes ("-:"). GPTQModel, vLLM (`get_dynamic_override` in `quantization/utils/gptq_utils.py`) and SGLang
    read it. vLLM and transformers also read the names of all layers with codes.
    """
    coded = [item for item in contents.items if item.file_layout is not None]
    by_numbers: dict[_Numbers, list[str]] = {}
    for item in coded:
        by_numbers.setdefault(_numbers(item), []).append(item.name.removesuffix(".weight"))
    usual = max(by_numbers, key=lambda numbers: len(by_numbers[numbers]))
    names = [name for of_numbers in by_numbers.values() for name in of_numbers]
    linears = {*contents.linears, *names}
    with_codes = set(names)
    others = [name for name in contents.linears if name not in with_codes]
    dynamic: dict[str, dict[str, int]] = {}
    if others:
        dynamic[_pattern("-:", others, linears)] = {}
    for (bits, size), of_numbers in by_numbers.items():
        if (bits, size) != usual:
            dynamic[_pattern("+:", of_numbers, linears)] = {"bits": bits, "group_size": size}
    settings = {
        "quant_method": "gptq",
        "bits": usual[0],
        "group_size": usual[1],
        "desc_act": False,
        "sym": not any(_has_zero_points(item) for item in coded),
        "lm_head": any(name.rpartition(".")[2] == "lm_head" for name in names),
        "checkpoint_format": layout.name,
        "pack_dtype": "int32",
        "modules_in_block_to_quantize": [names],
        "meta": {"quantizer": [f"dtype-engine:{__version__}"]},
    }
    return settings | ({"dynamic": dynamic} if dynamic else {})


def _numbers(item: ExportTensor) -> _Numbers:
    row = dtypes.BY_NAME[item.dtype]
    assert row.blocks is not None
    return row.bits, row.blocks.columns


def _has_zero_points(item: ExportTensor) -> bool:
    blocks = dtypes.BY_NAME[item.dtype].blocks
    return blocks is not None and blocks.zero_points


def _pattern(sign: str, modules: Sequence[str], linears: set[str]) -> str:
    """Return a pattern for the layers `modules` and no other of `linears`. It also matches the name that vLLM and SGLang give to a
    layer that they fuse from some of them, and that of a layer's experts, if all experts are among them.
    """
    rest = linears.difference(modules)
    entries = targets_of(modules, rest, str)
    named = [re.escape(name) if name in linears else rf"{re.escape(name)}(?:\..+)?" for name in entries]
    split = {sibling for name in rest for sibling in siblings(f"{name}.weight")}
    groups = fused_groups(f"{name}.weight" for name in modules)
    fused = [fused_name(group) for group in groups if group[0] not in split]
    named += [re.escape(name) for name in fused if name and not expert_layer(name)]
    return f"{sign}(?:{'|'.join(named)})$"


def why_not_transformers(items: Sequence[ExportTensor]) -> str:
    """Return why `from_pretrained` of transformers does not read the weights in GPTQ's layout among `items`, or "".

    It replaces the linear layers that it finds in the repeated blocks of the model by layers of one format (`GPTQQuantizer` of
    optimum). Codes of other layers, and of experts, which it packs, it would ignore, and make such weights at random.
    """
    coded = [item for item in items if item.file_layout is not None and not item.of_draft]
    if len({_numbers(item) for item in coded}) > 1:
        return "it reads one number of bits and one size of groups for all weights"
    if any(item.packed_into for item in coded):
        return "it reads no experts in this layout"
    outside = next((item.name for item in coded if not _IN_A_BLOCK.match(item.name)), None)
    return f"it reads codes in the repeated blocks alone, and {printable(outside)} is outside" if outside else ""
