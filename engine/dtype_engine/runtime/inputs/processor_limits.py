"""Checks the sizes in the settings of a model's preprocessing, so that a malicious or wrong setting can't make it allocate too much
memory. They are checked before the preprocessing is loaded, and again before it processes an input.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from dtype_engine.checkpoint.weight_files import read_beside
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.text import printable
from dtype_engine.runtime.model.live import LiveModel

FILES = ("processor_config.json", "preprocessor_config.json")
_LARGEST = 16 << 20
_HIGHEST_RATE = 1_000_000
_COUNTS = frozenset({"num_additional_image_tokens", "image_seq_length", "image_seq_len", "num_image_tokens"})
"""The names of the settings that are a number of tokens. Those in `_SIZES` are a number of pixels, samples, bins or seconds."""
_SIZES = frozenset(
    {
        "size", "crop_size", "pad_size", "image_size", "max_image_size", "height", "width", "shortest_edge", "longest_edge",
        "max_height", "max_width", "min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size",
        "image_grid_pinpoints", "sampling_rate", "feature_size", "n_fft", "fft_window_size", "hop_length", "chunk_length",
        "n_samples", "nb_max_samples", "max_patches", "max_num_patches", "max_image_tiles", "num_mel_bins", "max_length",
    }
)  # fmt: skip


def check_processor_files(model: LiveModel, limits: InputLimits) -> None:
    """Raise NoForward if a preprocessing file in the model's folder names a size that is no number or is over the limits. A file
    that can't be read is skipped, because transformers skips it, too.
    """
    for file in FILES if model.folder is not None else ():
        try:
            content = json.loads(read_beside(model.folder / file, _LARGEST))  # type: ignore[operator]
        except (OSError, UserError, ValueError, RecursionError):
            continue
        for settings in _objects(content):
            _check(model.title, file, settings, limits)


def made_values(processor: Any, width: int, height: int) -> int:
    """Return the approximate number of values that an image processor computes for a color picture of `width` x `height` pixels."""
    # A processor has a merge_size only if its `size` counts pixels instead of an edge's length, as in Qwen2-VL.
    multiple = _setting(processor, "merge_size", 0) * _setting(processor, "patch_size", 1)
    sizes = [getattr(processor, name, None) for name in ("size", "crop_size", "pad_size")]
    pinpoints = getattr(processor, "image_grid_pinpoints", None)
    sizes += pinpoints if isinstance(pinpoints, list) else []
    areas = [_area(size, width, height, multiple) for size in sizes if size is not None]
    areas += [] if getattr(processor, "do_resize", True) else [width * height]
    return 3 * max(areas, default=width * height) * _setting(processor, "temporal_patch_size", 1)


def made_features(extractor: Any, samples: int) -> int:
    """Return the approximate number of values that a feature extractor computes for audio: for each window, its samples or its
    frequency bins, whichever are more.
    """
    padded = max(samples, _setting(extractor, "n_samples", 0))
    hop, window, bins = (_setting(extractor, name, 1) for name in ("hop_length", "n_fft", "feature_size"))
    return max(padded, padded // hop * max(window, bins))


def _setting(processor: Any, name: str, default: int) -> int:
    value = getattr(processor, name, None)
    return int(value) if value and isinstance(value, (int, float)) else default


def _objects(content: object) -> Iterator[dict[str, Any]]:
    if isinstance(content, dict):
        yield content
    for inner in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _objects(inner)


def _check(title: str, file: str, settings: dict[str, Any], limits: InputLimits) -> None:
    """Raise NoForward if a size in a JSON object of a preprocessing file is no number or is over the limits, or if a product of
    sizes is over the limits, such as `chunk_length` times `sampling_rate`, because a processor allocates that many values.
    """
    for name in (_SIZES | _COUNTS) & settings.keys():
        for value in _leaves(settings[name]):
            what = f"{name} in {file}"
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < float("inf"):
                _refuse(title, f"{what} is {printable(repr(value), 40)}, not a number of at least 1")
            if name == "sampling_rate" and value > _HIGHEST_RATE:
                _refuse(title, f"{what} is {value:,}, and the highest rate is {_HIGHEST_RATE:,} Hz")
            limits.refuse_model("tokens" if name in _COUNTS else "values", title, what, value)
    numbers = {name: next(_leaves(settings.get(name)), 1) for name in _SIZES}
    padded = numbers["chunk_length"] * numbers["sampling_rate"]
    limits.refuse_model("values", title, f"chunk_length times sampling_rate in {file}", padded)
    patches = max(numbers[name] for name in ("max_patches", "max_num_patches", "max_image_tiles"))
    area = max(numbers["patch_size"] ** 2, _area(settings.get("size") or 1, 1, 1) if patches > 1 else 1)
    limits.refuse_model("values", title, f"the number of patches in {file}", 3 * patches * area)
    window = max(numbers["n_fft"], numbers["fft_window_size"])
    limits.refuse_model("values", title, f"n_fft times feature_size in {file}", window * numbers["feature_size"])


def _leaves(value: object) -> Iterator[Any]:
    """Yield the single values, numbers or anything else, in a setting, which may be nested lists and objects."""
    if isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    elif value is not None:
        yield value


def _refuse(title: str, why: str) -> None:
    raise NoForward(f"{title}: no forward pass: {why}; {hint('tensors')}")


def _area(size: Any, width: int, height: int, multiple: int = 0) -> int:
    """Return the number of pixels of a picture of `width` x `height` after an image processor has resized it.

    size: the processor's setting, a number, a list or an object. multiple: if not 0, `shortest_edge` and `longest_edge` in it limit
    the number of pixels of the whole picture, as in Qwen2-VL, instead of the length of an edge, and each edge is rounded to a
    multiple of this number of pixels, at least to one.
    """
    if isinstance(size, (int, float)):
        return int(size * size)
    pairs = zip(("height", "width"), size, strict=False) if isinstance(size, (list, tuple)) else dict(size).items()
    named = {name: value for name, value in pairs if isinstance(value, (int, float))}
    edge, longest = named.get("shortest_edge"), named.get("longest_edge")
    if named.get("height") and named.get("width"):
        return int(named["height"] * named["width"])
    if multiple and edge:
        pixels = width * height
        scale = math.sqrt(max(edge, min(pixels, longest or pixels)) / pixels)
        return math.prod(multiple * math.ceil(length * scale / multiple) for length in (width, height))
    if edge:
        area = edge * edge * max(width, height) / max(1, min(width, height))
        return int(min(area, longest * longest) if longest else area)
    if longest:
        return int(longest * longest)
    return int((named.get("max_height") or height) * (named.get("max_width") or width))
