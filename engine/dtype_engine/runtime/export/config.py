"""The `config.json` of an export: its dtype, and the quantization settings with which other programs read weights with scales."""

from __future__ import annotations

import copy
from typing import Any

from dtype_engine.checkpoint.schemes.configuration import declared
from dtype_engine.checkpoint.weight_sets import NAMED_WEIGHTS, NO_WEIGHTS
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.recipe.schemes import activation_scheme, layout, weight_scheme
from dtype_engine.runtime.export.contents import Contents, own_layout
from dtype_engine.runtime.export.experts import misread, targets_of
from dtype_engine.runtime.export.gptq_settings import gptq_settings, why_not_transformers
from dtype_engine.runtime.export.layout import NAMES_DTYPE


def export_dtype(contents: Contents) -> str:
    """Return the dtype that `config.json` must name: the widest in the export, so that a loader can hold all values unrounded. If
    the export copies weights that another program quantized, return the dtype that the source's `config.json` names, if it names
    one.
    """
    if any(item.copied for item in contents.items):
        named = (contents.config or {}).get("dtype") or (contents.config or {}).get("torch_dtype")
        if named in dtypes.COMPUTE_DTYPES:  # the program that quantized the weights decodes them to this dtype
            return str(named)
    return dtypes.widest(item.dtype for item in contents.items)


def changed_configs(contents: Contents) -> dict[str, dict[str, Any]]:
    """Return the new content of every `config.json` that the export changes, by its path in the export.

    The top `config.json` gets the dtype and the quantization settings of the export. If transformers would load other values from
    the export without an error, it also gets an entry that makes `from_pretrained` raise. The `config.json` of a pipeline's
    component gets a new dtype if it names a dtype. Raises UserError if the export has weights with scales, but the source is
    quantized already by a method that can't describe these weights.
    """
    configs: dict[str, dict[str, Any]] = {}
    if contents.config is not None and contents.layout.kind == "model":
        config = configs["config.json"] = copy.deepcopy(contents.config)
        _set_dtype(config, export_dtype(contents))
        config.pop(NAMED_WEIGHTS, None)  # the weights are in a file that has the usual name, whatever the source's had
        if transformers_would_misread(contents):
            config[NAMED_WEIGHTS] = NO_WEIGHTS
        before = config.get("quantization_config")
        scaled = [item for item in contents.items if item.has_scales]
        if before is not None and scaled and not any(item.source_bytes for item in scaled):
            method = printable(str(before.get("quant_method") if isinstance(before, dict) else before), 40)
            raise UserError(
                f"this checkpoint is quantized already ({method}): weights can't be given scales of another kind in it"
            )
        if scaled or contents.cache_scheme is not None:
            config.pop("quantization_config", None)
            if (declared := quantization_config(contents)) is not None:
                config["quantization_config"] = declared
    for part in contents.layout.parts:
        if part.config is not None:
            of_part = (item.dtype for item in contents.items if item.name.startswith(part.prefix))
            config = configs[part.path("config.json")] = copy.deepcopy(part.config)
            if NAMES_DTYPE.intersection(config):
                _set_dtype(config, dtypes.widest(of_part))
    return configs


def transformers_would_misread(contents: Contents) -> bool:
    """Return whether `from_pretrained` of transformers would load other values from an export without an error."""
    if contents.file_layout is not None:
        return bool(why_not_transformers(contents.items))
    loaded = [item for item in own_layout(contents.items) if not item.of_draft]
    return bool(loaded) or misread(contents.items) is not None or has_undeclared_codes(contents)


def has_undeclared_codes(contents: Contents) -> bool:
    """Return whether an export copies codes of another program, such as msModelSlim, that `config.json` does not declare, so that
    transformers would take them for values.
    """
    copied = any(item.coded is not None and not item.coded.own for item in contents.items if item.copied)
    return copied and contents.config is not None and not declared(contents.config)


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype in a configuration and in its nested ones, such as those for the text and vision parts of a composite model."""
    config["dtype"] = dtype
    if "torch_dtype" in config:
        config["torch_dtype"] = dtype
    for part in config.values():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part) and "model_type" in part:
            _set_dtype(part, dtype)


def quantization_config(contents: Contents) -> dict[str, Any] | None:
    """Return the `quantization_config` with which other programs read the export's weights with scales and the scales of its KV
    caches, or None if it has neither.

    If the weights are in the fp8 layout of DeepSeek or in GPTQ's, the result names this layout. Otherwise, it is a configuration of
    compressed-tensors. It has a group for each weight format, or two if the inputs of only some of the layers in this format are
    quantized. All other linear modules are listed as not quantized, so that no program looks for their scales.
    """
    if contents.file_layout is not None:
        return gptq_settings(contents, contents.file_layout)
    groups: dict[tuple[str, bool], list[str]] = {}
    for item in contents.items:
        if item.portable:
            groups.setdefault((item.dtype, item.quantised_inputs), []).append(item.name.removesuffix(".weight"))
    if not groups:
        return None if contents.cache_scheme is None else _compressed_tensors("dense", contents.cache_scheme, [], {})
    targeted = {module for modules in groups.values() for module in modules}
    others = [module for module in contents.linears if module not in targeted]
    first, _ = next(iter(groups))
    blocks = dtypes.BY_NAME[first].blocks
    if blocks is not None and blocks.layout == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [blocks.rows, blocks.columns],
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": targets_of(others, targeted, str),
        }
    formats = {dtype: layout(dtype) for dtype, _ in groups}
    form = formats[first] if len(set(formats.values())) == 1 else "mixed-precision"
    config_groups = {
        f"group_{index}": {
            "targets": targets_of(modules, {*others, *targeted}.difference(modules)),
            "format": formats[dtype],
            "weights": weight_scheme(dtype),
            "input_activations": activation_scheme(dtype) if inputs else None,
            "output_activations": None,
        }
        for index, ((dtype, inputs), modules) in enumerate(groups.items())
    }
    return _compressed_tensors(form, contents.cache_scheme, targets_of(others, targeted), config_groups)


def _compressed_tensors(
    form: str, cache_scheme: dict[str, Any] | None, ignore: list[str], config_groups: dict[str, Any]
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": cache_scheme,
        "ignore": ignore,
        "config_groups": config_groups,
    }
