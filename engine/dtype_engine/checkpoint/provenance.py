"""How a checkpoint was quantized, as far as its files say: `config.json`, `hf_quant_config.json`, `quantize_config.json`,
`recipe.yaml` of llm-compressor, the metadata of safetensors headers, and the fields of GGUF headers. Nothing is derived from the
weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.export_folder import is_export
from dtype_engine.checkpoint.schemes.configuration import mapping
from dtype_engine.checkpoint.schemes.own import SCALED_KEY
from dtype_engine.checkpoint.schemes.registry import schemes
from dtype_engine.checkpoint.schemes.small_tensors import json_object
from dtype_engine.checkpoint.weight_files import read_beside
from dtype_engine.core.errors import UserError
from dtype_engine.core.plain_yaml import load_yaml
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes, plural

_LARGEST_FILE = 16 << 20
_LARGEST_RECIPE = 1 << 16
"""The most bytes of a recipe.yaml. Those of llm-compressor have a few thousand, and YAML takes up to 20 s per MB to read."""
_LONGEST = 120
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the files of a checkpoint say about its quantization."""

    method: str | None = None
    """The method or layout, in the words of the program that wrote it, such as "gptq", "modelopt NVFP4" or "GGUF Q4_K_M"."""
    codes: tuple[str, ...] = ()
    """The layouts of the codes, such as "4-bit int, groups of 128, symmetric". There are several if layers differ."""
    scale_rule: str | None = None
    """How scales were chosen, such as "memoryless_minmax"."""
    calibration: str | None = None
    """The data with which scales or codes were calibrated, such as "wikitext2, 128 samples of 2048 tokens"."""
    ignored: tuple[str, ...] = ()
    """The modules that were not quantized: names or patterns, such as "re:.*gate", as the program that wrote the file has them."""
    producer: str | None = None
    """The program that wrote the file, with its version, such as "auto-round 0.5.1"."""

    def __bool__(self) -> bool:
        return self != Provenance()

    def lines(self) -> tuple[str, ...]:
        """Return the facts as one or two lines to show to a user, or () if nothing is known."""
        left = len(self.codes) - _SHOWN
        more_codes = f"and {plural(left, 'more layout')}" if left > 0 else ""
        made = "; ".join(filter(None, (self.method, *self.codes[:_SHOWN], more_codes)))
        made += f"; scales by {self.scale_rule}" if self.scale_rule else ""
        made += f"; calibrated with {self.calibration}" if self.calibration else ""
        parts = [f"written by {self.producer}"] if self.producer else []
        if self.ignored:
            more = f" and {len(self.ignored) - _SHOWN} more" if len(self.ignored) > _SHOWN else ""
            parts.append(f"not quantized: {', '.join(self.ignored[:_SHOWN])}{more}")
        return tuple(line for line in (made, "; ".join(parts)) if line)


def provenance(folder: Path, config: Mapping[str, Any] | None, metadata: Mapping[str, str]) -> Provenance:
    """Return what the files in a folder say about how the weights were quantized. config: the content of config.json. metadata: of
    safetensors headers, or the fields of a GGUF header. Files that can't be read are ignored.
    """
    declared = dict(_declared(folder, config or {}))
    if "general.architecture" in metadata:
        return _of_gguf(metadata)
    recipe = _recipe(folder)
    return Provenance(
        _method(declared, recipe),
        tuple(dict.fromkeys(filter(None, map(_codes, _groups(declared))))),
        _scale_rule(declared),
        _calibration(declared),
        _ignored(declared),
        _producer(declared, metadata),
    )


def _declared(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the quantization settings in all files. Those of config.json come last and replace others."""
    for scheme in reversed(schemes()):
        for name in scheme.settings_files:
            with suppress(OSError, UserError):
                yield from _with_nested(json_object(read_beside(folder / name, _LARGEST_FILE)))
    yield from _with_nested(mapping(config.get("quantization_config")) or mapping(config.get("quantization")))


def _with_nested(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from settings.items()
    for scheme in schemes():
        nested = settings if scheme.nested_settings else {}
        for key in scheme.nested_settings:
            nested = mapping(nested.get(key))
        yield from nested.items()


def _method(declared: Mapping[str, Any], recipe: tuple[str, ...]) -> str | None:
    name = _text(declared.get("quant_method")) or _text(declared.get("method"))
    if name is None and "mode" in declared and "bits" in declared:
        name = "mlx"
    kind = declared.get("quant_type")
    kind = mapping(mapping(kind).get("default")).get("_type") or kind
    form = declared.get("checkpoint_format") or declared.get("packing_format") or declared.get("format")
    details = (_text(each) for each in (declared.get("quant_algo"), declared.get("mode"), kind, form))
    known = dict.fromkeys(each for each in (name, *details) if each)
    return " ".join(known) + (f" ({', '.join(recipe)})" if recipe else "") if known or recipe else None


def _groups(declared: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = mapping(declared.get("config_groups"))
    found = [mapping(mapping(group).get("weights")) for group in groups.values()]
    if found:
        return found
    nested = list(_nested(mapping(declared.get("quant_type"))))
    layers = mapping(declared.get("quantized_layers"))
    others = [each for each in (*layers.values(), *declared.values()) if mapping(each).get("bits")]
    return [{**declared, **dict(nested)}, *map(mapping, others)]


def _nested(settings: Any, depth: int = 6) -> Iterator[tuple[str, Any]]:
    for name, value in mapping(settings).items():
        inner = mapping(value).get("_data", value)
        if isinstance(inner, Mapping) and depth:
            yield from _nested(inner, depth - 1)
        elif not isinstance(inner, (Mapping, list)):
            yield str(name), inner


def _codes(group: Mapping[str, Any]) -> str:
    bits = next((group[name] for name in ("bits", "num_bits", "nbits", "w_bit") if _number(group.get(name))), None)
    kind = next(
        (each for name in ("type", "data_type", "weight_dtype", "dtype", "fmt") if (each := _text(group.get(name)))), ""
    )
    if group.get("load_in_4bit"):
        bits, kind = 4, _text(group.get("bnb_4bit_quant_type")) or ""
    elif group.get("load_in_8bit"):
        bits, kind = 8, "int"
    words = [f"{bits}-bit {kind}".strip() if bits is not None else kind]
    size, block = group.get("group_size"), group.get("weight_block_size") or group.get("block_structure")
    if isinstance(block, list) and len(block) == 2:
        words.append(f"blocks of {block[0]} x {block[1]}")
    elif size is not None and _number(size):
        words.append(f"groups of {size}" if size > 0 else "a scale for each channel")
    elif strategy := _text(group.get("strategy")) or _text(group.get("qscheme")):
        words.append(f"a scale for each {strategy.removeprefix('per_')}")
    symmetric = next((group[name] for name in ("sym", "symmetric") if isinstance(group.get(name), bool)), None)
    if symmetric is None and isinstance(zero := group.get("zero_point"), bool):
        symmetric = not zero
    kind_of_map = _text(group.get("mapping_type"))
    words.append(kind_of_map.lower() if kind_of_map else {True: "symmetric", False: "asymmetric", None: ""}[symmetric])
    words.append("activation order" if group.get("desc_act") or group.get("actorder") else "")
    words.append("quantized scales" if group.get("bnb_4bit_use_double_quant") and group.get("load_in_4bit") else "")
    scale = _text(group.get("scale_fmt"))
    words.append(f"scales as {scale}" if scale else "")
    return ", ".join(filter(None, words))


def _scale_rule(declared: Mapping[str, Any]) -> str | None:
    groups = _groups(declared)
    rules = (_text(group.get("observer")) or _text(group.get("observer_cls")) for group in groups)
    found = [*dict.fromkeys(filter(None, rules))]
    meta = mapping(declared.get("meta"))
    found += [f"error power {meta['mse']}"] if _number(meta.get("mse")) and meta["mse"] else []
    found += [f"{declared['iters']} steps of tuning"] if _number(declared.get("iters")) else []
    return ", ".join(found) or None


def _calibration(declared: Mapping[str, Any]) -> str | None:
    data = declared.get("dataset")
    named = _text(data) if isinstance(data, str) else "a list of texts" if isinstance(data, list) and data else None
    samples, length = declared.get("nsamples"), declared.get("seqlen") or declared.get("model_seqlen")
    words = f"{samples} samples" if _number(samples) else ""
    words += f" of {length} tokens" if words and _number(length) else ""
    return ", ".join(filter(None, (named, words))) or None


def _ignored(declared: Mapping[str, Any]) -> tuple[str, ...]:
    keys = (key for scheme in schemes() for key in scheme.ignored)
    found = (each for key in keys if isinstance(each := declared.get(key), list) and each)
    return tuple(text for each in next(found, []) if (text := _text(each)))


def _producer(declared: Mapping[str, Any], metadata: Mapping[str, str]) -> str | None:
    if named := mapping(declared.get("producer")):
        return " ".join(filter(None, (_text(named.get("name")), _text(named.get("version"))))) or None
    quantizer = mapping(declared.get("meta")).get("quantizer")
    first = quantizer[0] if isinstance(quantizer, list) and quantizer else quantizer
    if text := _text(first):
        return text.replace(":", " ")
    if version := _text(declared.get("autoround_version")):
        return f"auto-round {version}"
    method, version = _text(declared.get("quant_method")), _text(declared.get("version"))
    if method and version and version[0].isdigit():  # AWQ has the name of a layout there
        return f"{method} {version}"
    if metadata.get("format") == "mlx":
        return "mlx"
    return "dtype-tui" if any(key.startswith(SCALED_KEY) for key in metadata) else None


def _of_gguf(fields: Mapping[str, str]) -> Provenance:
    kind = _text(fields.get("general.file_type"))
    chunks, data = (_text(fields.get(f"quantize.imatrix.{name}")) for name in ("chunks_count", "dataset"))
    file = _text(fields.get("quantize.imatrix.file"))
    matrix = None
    if chunks or data or file:
        matrix = "an importance matrix" + (f" of {chunks} chunks" if chunks else "")
        matrix += f" of {data}" if data else f" from {file}" if file else ""
    return Provenance(
        f"GGUF {kind}" if kind else None,
        calibration=matrix,
        producer=_text(fields.get("general.quantized_by")),
    )


def _recipe(folder: Path) -> tuple[str, ...]:
    path = folder / "recipe.yaml"
    try:
        if (size := os.path.getsize(path)) > _LARGEST_RECIPE:
            note = f"recipe.yaml of {human_bytes(size)} is not read: at most {human_bytes(_LARGEST_RECIPE)} are"
            return () if is_export(folder) else (note,)  # the recipes of this program say nothing here
        content = load_yaml(read_beside(path, _LARGEST_RECIPE).decode())
    except (OSError, UserError, UnicodeDecodeError):
        return ()
    found = []
    for stage in mapping(content).values():
        for group in mapping(stage).values():
            for name, settings in mapping(group).items():
                scheme = _text(mapping(settings).get("scheme"))
                found += [" ".join(filter(None, (_text(name), scheme)))] if isinstance(settings, Mapping) else []
    return tuple(found[:_SHOWN])


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> str | None:
    if isinstance(value, str) or _number(value):
        return printable(str(value), _LONGEST).removeprefix("torch.") or None
    return None
