"""Checks by numbers alone whether a configuration and the tensors next to it can belong to one model.

`config.json` determines the time and memory for building a module, so a file of a few bytes could demand any amount. A module has
at least one tensor per layer, and a tensor with at least as many elements as its width. The shapes in the headers therefore limit
the numbers in a genuine configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.errors import NoForward
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes


class ImpossibleConfig(NoForward):
    """Raised if a configuration has numbers that no model has, or that contradict the tensors next to it."""


_COUNTS = re.compile(r"(.*_)?((n|num)_layers?|layers|blocks|depths?|experts)$")
"""Matches keys of config.json that count modules: `num_hidden_layers`, `encoder_layers`, `n_layer`, `num_local_experts`."""
_WIDTHS = re.compile(
    r"(.*(hidden|intermediate|vocab|embed|embedding|ffn?|inner|state|model)_(size|dim)|d_model|d_ff|d_kv|n_embd|n_inner|dim"
    r"|.*(n|num)_(.*_)?heads?|.*_heads|head_dim|num_labels)$"
)
"""Matches keys of config.json that determine tensors' sizes: `hidden_size`, `vocab_size`, `d_model`, `num_attention_heads`."""
_POSITIONS = re.compile(r".*positions?(_embeddings)?$")
_ALWAYS_COUNTS = 1_000
_ALWAYS_WIDTH = 1_000_000
_MOST_POSITIONS = 100_000_000
"""Ten times the longest context of any model in 2026. Some models compute a row of a table for each position."""
_DEEPEST = 20
_FACTORS = re.compile(r".*(theta|period|scale|shift|sigma\w*|_eps|epsilon)$")
"""Matches keys in configurations of diffusers whose numbers are factors, which may be large."""
_ROWS = re.compile(r".*(seq_len|seq_length|timesteps|positions?(_embeddings)?|rope\w*|axes_dims?\w*|max_length)$")
"""Matches keys in configurations of diffusers that give the number of rows of a table, such as `rope_max_seq_len`."""
_SIDES = ("sample_size", "pos_embed_max_size")
"""The keys in configurations of diffusers whose square is the number of rows of a table."""
_MOST_OF_DIFFUSERS = 1_000_000
_MOST_ROWS = 100_000
_LARGEST_TABLE = 160 << 20
"""The most bytes of a table of the positions in a picture, if the weights have fewer. PixArt's of 2,048 x 2,048 pixels has 151 MB,
and Sana's of 4,096 x 4,096 has 294 MB beside 3.2 GB of weights. Computing a table takes 2.6 times its size.
"""
_FLOAT64 = 8


def refuse_impossible(config: Mapping[str, Any], checkpoint: Checkpoint, where: str) -> None:
    """Raise ImpossibleConfig if a number in `config` contradicts the checkpoint's tensors. where: the beginning of the message."""
    tensors = len(checkpoint.weights)
    most = max((math.prod(tensor.shape) for tensor in checkpoint.weights.values()), default=0)
    for name, value in _numbers(config):
        if name.startswith("quantization_config."):  # `dim` is an axis there, and no size of the model
            continue
        key = name.rpartition(".")[2]
        shown = f"{value:.17g}" if -1e300 < value < 1e300 else "beyond 1e300"  # a larger int has no float
        if _COUNTS.fullmatch(key):
            limit, of_files = max(_ALWAYS_COUNTS, tensors), f"{tensors} tensors"
        elif _WIDTHS.fullmatch(key):
            limit, of_files = max(_ALWAYS_WIDTH, most), f"at most {most} elements in a tensor"
        elif _POSITIONS.fullmatch(key):
            if value > _MOST_POSITIONS:
                raise ImpossibleConfig(
                    f"{where}: {printable(name, 100)} is {shown}, and no model has over {_MOST_POSITIONS}"
                )
            continue
        else:
            continue
        if value > limit:
            raise ImpossibleConfig(
                f"{where}: {printable(name, 100)} is {shown}, and there are {of_files} beside it: these are not one model"
            )
        if value < 0 and (key.startswith(("num_", "n_")) or _WIDTHS.fullmatch(key)):
            raise ImpossibleConfig(f"{where}: {printable(name, 100)} is {shown}, which no model has")


def refuse_large_tables(config: Mapping[str, Any], where: str, most_elements: int = 0, weights_bytes: int = 0) -> None:
    """Raise NoForward if a number in a configuration of diffusers would make the model's class compute a table that takes more
    memory than any real model needs. The files do not contain such tables. where: the file name with which the message begins.
    most_elements: the number of elements of the largest tensor in the files. weights_bytes: the size of all tensors there.
    """
    for name, value in _numbers(config):
        if isinstance(value, float) and not math.isfinite(value):
            continue  # a bound that is never reached, such as the lambda_min_clipped of schedulers
        key = name.rpartition(".")[2]
        most = _MOST_ROWS if _ROWS.fullmatch(key) else _MOST_OF_DIFFUSERS
        if abs(value) > max(most, most_elements) and not _FACTORS.fullmatch(key):
            shown = f"{value:.17g}" if abs(value) < 1e300 else "beyond 1e300"
            raise NoForward(f"{where}: {printable(name, 100)} is {shown}, and no model of diffusers has over {most:,}")
    width = math.prod(_whole(config.get(key)) for key in ("num_attention_heads", "attention_head_dim"))
    for key in _SIDES:
        patch = max(1, _whole(config.get("patch_size"))) if key == "sample_size" else 1
        side = config.get(key)
        sides = side if isinstance(side, list) and len(side) == 2 else [side, side]
        table = math.prod(_whole(each) // patch for each in sides) * width * _FLOAT64
        most_bytes = max(_LARGEST_TABLE, most_elements * _FLOAT64, weights_bytes)
        if table > most_bytes:
            raise NoForward(
                f"{where}: {key} is {printable(str(side), 40)}, which makes a table of positions of {human_bytes(table)}; at most "
                f"{human_bytes(most_bytes)} are made for these files"
            )


def _whole(value: object) -> int:
    """Return a number truncated to an integer, or 0 for anything else."""
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0


def _numbers(config: Mapping[str, Any], before: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    """Yield (dotted name, number) for every number in a configuration, nested mappings included. A list yields the largest absolute
    number in it and in the lists in it. before: the beginning of names. depth: how many mappings enclose this one.
    """
    for key, value in config.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _numbers(value, f"{name}.", depth + 1)
        elif _is_number(value):
            yield name, value
        elif isinstance(value, list):
            items = [*_items(value)]
            for item in items if depth < _DEEPEST else ():
                if isinstance(item, Mapping):
                    yield from _numbers(item, f"{name}.", depth + 1)
            finite = [item for item in items if _is_number(item) and not (item != item or abs(item) == math.inf)]
            if finite:
                yield name, max(finite, key=abs)


def _items(values: list[Any], depth: int = 0) -> Iterator[Any]:
    """Yield the items of a list, and of the lists in it. depth: how many lists enclose this one."""
    for value in values:
        if isinstance(value, list):
            yield from _items(value, depth + 1) if depth < _DEEPEST else ()
        else:
            yield value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
