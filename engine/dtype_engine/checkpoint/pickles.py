"""Reads PyTorch's own files (`.pt`, `.pth`, `.bin`, `.ckpt`), which are pickles. Code in them runs only if the user trusts them."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import stat
import sys
import warnings
import zipfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtype_engine.checkpoint.pickle_size import check_legacy, cut_in_pickle
from dtype_engine.checkpoint.pickle_zip import check_archive, refuse_cut_zip
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.foreign_code import foreign_code
from dtype_engine.core.regular_files import reading
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes, plural

if TYPE_CHECKING:
    import torch

_NESTED = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "net",
    "network",
    "params",
    "params_ema",
    "ema",
    "weights",
)
_PACKED = "_packed_params._packed_params"
"""The end of the name under which a quantized layer of torch.ao saves its weight and its bias as one value."""
_AVERAGES = frozenset({"model_ema", "ema_model", "params_ema", "ema", "module_ema", "ema_module"})
"""Prefixes that trainers give to the names of averages of weights over training steps ("exponential moving average")."""


def read_pickles(
    files: tuple[Path, ...], trust: bool
) -> tuple[dict[str, CheckpointTensor], dict[str, torch.Tensor], dict[str, str], tuple[str, ...]]:
    """Return (the headers of all tensors in pickles; the values, memory-mapped if possible; for each further name of a tensor, its
    first name; sentences for the user). trust: whether the files may run code. Raises UserError.
    """
    tensors: dict[str, CheckpointTensor] = {}
    values: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    notices: list[str] = []
    for file in files:
        held, notes = state_dict(load_pickle(file, trust), file)
        notices += notes
        firsts: dict[Any, str] = {}
        for name, tensor in held.items():
            if name in values:
                raise UserError(f"tensor {printable(name)} is in {tensors[name].file.name} and again in {file.name}")
            tensors[name] = _specification(name, tensor, file)
            values[name] = tensor
            if (key := _storage_key(tensor)) is not None and (first := firsts.setdefault(key, name)) != name:
                aliases[name] = first
        quantized = [name for name, tensor in held.items() if tensor.is_quantized]
        if quantized:
            what = plural(len(quantized), "tensor")
            first = f"{printable(quantized[0])}: {tensors[quantized[0]].refusal}"
            notices.append(f"{file.name}: {what} can't be cast and exported, first {first}")
    return tensors, values, aliases, tuple(notices)


def _specification(name: str, tensor: torch.Tensor, file: Path) -> CheckpointTensor:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    refusal: str | None = None
    shape: tuple[int, ...] = ()
    nbytes = 0
    if tensor.is_nested:
        refusal, shape, nbytes = "is a nested tensor", (tensor.numel(),), int(tensor.nbytes)
    elif tensor.layout != torch.strided:
        refusal = f"is sparse ({str(tensor.layout).removeprefix('torch.')})"
        shape, nbytes = tuple(tensor.shape), sum(part.nbytes for part in _sparse_parts(tensor))
    elif tensor.is_meta:
        refusal, shape = "has no data (it was saved on the meta device)", tuple(tensor.shape)
    else:
        shape, nbytes = tuple(tensor.shape), tensor.nbytes
        if tensor.is_quantized:
            refusal = f"is quantized by torch ({dtype}), with a scale of its own kind"
        elif dtype not in dtypes.BY_NAME:
            refusal = f"is {dtype}"
        elif dtype == "float4_e2m1fn_x2" and shape:
            shape = (*shape[:-1], 2 * shape[-1])
        elif _past_the_end(tensor):
            raise UserError(f"{file}: tensor {printable(name)} is larger than its storage: the file is damaged")
        elif nbytes > max(_LARGEST_REPEATED, _MOST_REPEATED * tensor.untyped_storage().nbytes()):
            held = human_bytes(tensor.untyped_storage().nbytes())
            refusal = f"repeats {held} of its file until they are {human_bytes(nbytes)}"
    return CheckpointTensor(name, shape, dtype, file, None, nbytes, refusal=refusal)


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of which a sparse tensor consists, such as its indices and values."""
    import torch

    _, (_, parts), *_ = tensor.detach().__reduce_ex__(2)  # type: ignore[no-untyped-call]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _past_the_end(tensor: torch.Tensor) -> bool:
    if not tensor.numel():
        return False
    last = int(tensor.storage_offset()) + sum(
        (extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes()


def _storage_key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for two tensors of one tied weight. None if the tensor is empty, nested, sparse or on meta."""
    import torch

    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return (
        tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def load_pickle(path: Path, trust: bool) -> Any:
    """Return the object that a pickle file holds. trust: whether the file may run code. Raises UserError."""
    with reading(path):
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is not a regular file")
        zipped = zipfile.is_zipfile(path)
        with open(path, "rb") as file:
            begins = file.read(1)
    compressed, scripted = check_archive(path, trust) if zipped else (False, False)
    if scripted:
        raise UserError(f"{path} is a TorchScript archive, whose code is compiled: export its state_dict() instead")
    if not zipped and begins != b"\x80":
        refuse_cut_zip(path)
        raise UserError(f"{path} is no PyTorch file: it is neither a zip archive nor a pickle")
    if not zipped and not trust:
        with reading(path):
            check_legacy(path)
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What is compressed can't be mapped; torch's reader inflates it.
            mapped = zipped and not compressed
            with _modules_of_this_folder() if trust else contextlib.nullcontext(), foreign_code():
                return torch.load(path, map_location="cpu", mmap=mapped, weights_only=not trust)
    except (ImportError, AttributeError) as error:
        if not trust:
            raise UserError(_refused(path, error)) from None
        raise UserError(
            f"{path} holds objects of classes whose code is not found: {printable(str(error), 200)}. Put the folder of that "
            "code into PYTHONPATH, or start in it"
        ) from None
    except Exception as error:  # torch.load meets damage in many places, each with an error of its own
        if isinstance(error, UnicodeEncodeError):
            raise UserError(f"{path}: this name is not UTF-8, which torch needs to read a file: rename it") from None
        if "unexpected EOF" in str(error):
            raise UserError(f"{path} is cut short: its last tensors are missing; copy or download it again") from None
        if isinstance(error, EOFError) or "pickle data was truncated" in str(error):
            raise cut_in_pickle(path) from None
        if isinstance(error, pickle.UnpicklingError):
            raise UserError(_refused(path, error)) from None
        raise UserError(f"{path} is no PyTorch file, or it is damaged: {one_line(error, with_type=True)}") from None


@contextlib.contextmanager
def _modules_of_this_folder() -> Iterator[None]:
    """A context manager in which imports find modules in the current folder: a trusted pickle may refer to its author's modules."""
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _refused(path: Path, error: Exception) -> str:
    text = str(error)
    for marker in ("Unsupported global: GLOBAL ", "Unsupported class "):
        if marker in text:
            name = printable(text.partition(marker)[2].split()[0], 100)
            return (
                f"{path} holds Python objects beside tensors (first: {name}); loading them can run any code, so it is "
                "done only with --trust-pickle (in Python: Options(trust_pickle=True))"
            )
    if "Weights only load failed" in text:
        return (
            f"{path} holds something that is not plain tensors; loading it can run any code: only with --trust-pickle "
            "(in Python: Options(trust_pickle=True))"
        )
    return f"{path} is no PyTorch file, or it is damaged"


def state_dict(loaded: Any, path: Path) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the model's weights in the content of a pickle, by name, and notices for the user: which entry of the file was chosen,
    and how many tensors other entries hold. Raises UserError if there are no tensors, or if two have the same name.
    """
    import torch
    from torch import nn

    if isinstance(loaded, nn.Module):
        return _tensors(loaded.state_dict(), path), ()
    if isinstance(loaded, torch.Tensor):
        return {"tensor": loaded.detach()}, ()
    if not isinstance(loaded, Mapping):
        raise UserError(f"{path} holds a {type(loaded).__name__}, not a state dict of tensors by name")
    best, entry = _weights(loaded)
    if not _count(best):
        raise UserError(f"{path} holds no tensors by name: it is no checkpoint")
    notices = []
    if entry:
        notices.append(f"{path.name}: the weights are its entry {printable(entry)!r}")
    unpacked = _unpacked(best, path)
    others, first = _unchosen_tensors(loaded, best, {id(value) for key, value in best.items() if key not in unpacked})
    if others:
        what = "1 other tensor in it is" if others == 1 else f"{others} other tensors in it are"
        notices.append(f"{path.name}: {what} not among the weights, first {printable(first)}")
    named = _tensors(unpacked, path)
    return named, (*notices, *_average_notices(named, path))


def _unpacked(mapping: Mapping[Any, Any], path: Path) -> Mapping[Any, Any]:
    """Return a state dict with the packed parameters of torch.ao as two tensors each, weight and bias. Raises UserError."""
    import torch

    found: dict[Any, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, torch.ScriptObject):
            raise UserError(
                f"{path}: {printable(str(key), 200)} holds packed parameters of torch.ao, which can't be read: save the model "
                "before it is quantized"
            )
        name = str(key)
        layer = name.removesuffix(_PACKED)
        if layer == name or not isinstance(value, (tuple, list)) or not any(isinstance(x, torch.Tensor) for x in value):
            found[key] = value
            continue
        for kind, part in zip(("weight", "bias"), value, strict=False):
            if isinstance(part, torch.Tensor):
                found[layer + kind] = part
    return found


def _average_notices(tensors: Mapping[str, torch.Tensor], path: Path) -> Iterator[str]:
    """Yield a notice if a state dict holds a second copy of the weights under a prefix that names averages over training steps."""
    groups: dict[str, Counter[tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(name.partition(".")[0], Counter())[() if tensor.is_nested else tuple(tensor.shape)] += 1
    for prefix in sorted(_AVERAGES & groups.keys()):
        if any(groups[prefix] - shapes == Counter() for other, shapes in groups.items() if other != prefix):
            yield (
                f"{path.name}: the tensors under {printable(prefix)} have the shapes of others in the file: they seem to be "
                "averages of the same weights, and are counted as weights of their own"
            )


def _weights(loaded: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], str]:
    """Return (the mapping in `loaded` with the most tensors, its path in `loaded`, such as `model.state_dict`, or "" for `loaded`
    itself).
    """
    best, most, entry = loaded, _count(loaded), ""
    level = [("", loaded)]
    for _ in range(_DEEPEST):
        inside = list(itertools.islice(_nested(level), _MOST_LOOKED_AT))
        for place, mapping in inside:
            count = _count(mapping)
            if count > most or (count and not entry and count == most):
                best, most, entry = mapping, count, place
                if place.rpartition(".")[2] in _NESTED:
                    return best, entry
        level = inside
    return best, entry


def _nested(level: Iterable[tuple[str, Mapping[Any, Any]]]) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield (path, content) for each mapping or module directly inside the given (path, mapping) pairs. A module's content is its
    state dict. In each mapping, entries with usual names, such as `state_dict`, come first.
    """
    from torch import nn

    for place, mapping in level:
        for key in dict.fromkeys((*_NESTED, *(key for key in mapping if isinstance(key, str)))):
            inside = mapping.get(key)
            if isinstance(inside, nn.Module):
                inside = inside.state_dict()
            if isinstance(inside, Mapping):
                yield f"{place}.{key}" if place else key, inside


def _count(mapping: Mapping[Any, Any]) -> int:
    import torch

    return sum(isinstance(value, torch.Tensor) for value in mapping.values())


def _tensors(mapping: Mapping[Any, Any], path: Path) -> dict[str, torch.Tensor]:
    import torch

    named: dict[str, torch.Tensor] = {}
    for key, value in mapping.items():
        if not isinstance(value, torch.Tensor):
            continue
        name = str(key)
        if not name:
            raise UserError(f"{path} has a tensor without a name")
        if name in named:
            raise UserError(
                f"{path} has two tensors whose names are both written {printable(name)!r}, such as 1 and '1'"
            )
        # A view that is conjugated or negated as it is read has other bytes in its storage.
        plain = value.layout == torch.strided and not value.is_nested and not value.is_quantized
        named[name] = value.detach().resolve_conj().resolve_neg() if plain else value.detach()
    return named


_LARGEST_REPEATED, _MOST_REPEATED = 1 << 32, 64
"""Limits on a tensor that repeats the bytes of its storage, as `expand` makes it: a size in bytes, and a multiple of the storage's
size. A tensor that exceeds both is refused: no weight is such a tensor, and reading it would take days.
"""
_MOST_LOOKED_AT = 1_000_000
_DEEPEST = 3
"""The maximum depth at which weights are looked for. `model.state_dict` in a trainer's file has depth two."""
_LONGEST_PLACE = 200


def _unchosen_tensors(loaded: Any, chosen: Any, taken: set[int]) -> tuple[int, str]:
    """Return (how many tensors are not in `chosen`, the path of the first). taken: the ids of containers that count as chosen."""
    import torch

    waiting: deque[tuple[Any, str]] = deque([(loaded, "")])
    seen = set(taken)
    count, first = 0, ""
    while waiting and len(seen) < _MOST_LOOKED_AT:
        holder, place = waiting.popleft()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        parts = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
        for key, value in parts:
            inner = f"{place}.{key}" if place and len(place) < _LONGEST_PLACE else place or str(key)
            if isinstance(value, torch.Tensor):
                if holder is not chosen:
                    count, first = count + 1, first or inner
            elif isinstance(value, (Mapping, list, tuple)):
                waiting.append((value, inner))
    return count, first
