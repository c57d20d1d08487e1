"""PyTorch's own files (`.pt`, `.pth`, `.bin`, `.ckpt`), read so that nothing in them can run, unless the user trusts them."""

from __future__ import annotations

import pickle
import stat
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..text import printable
from .safetensors_header import CheckpointTensor

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


def read_pickles(
    files: tuple[Path, ...], trust: bool
) -> tuple[dict[str, CheckpointTensor], dict[str, torch.Tensor], tuple[str, ...]]:
    """The tensors of one or several files: their specifications, the (mapped) tensors themselves, and notices.

    Raises UserError with the file and the reason.
    """
    tensors: dict[str, CheckpointTensor] = {}
    values: dict[str, torch.Tensor] = {}
    notices: list[str] = []
    for file in files:
        found, entry = state_dict(load_pickle(file, trust), file)
        if entry:
            notices.append(f"{file.name}: the weights are its entry {printable(entry)!r}")
        for name, tensor in found.items():
            if name in values:
                raise UserError(f"tensor {printable(name)} is in {tensors[name].file.name} and again in {file.name}")
            values[name] = tensor
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[name] = CheckpointTensor(name, tuple(tensor.shape), dtype, file, 0, tensor.nbytes)
    return tensors, values, tuple(notices)


def load_pickle(path: Path, trust: bool) -> Any:
    """What the file holds; `trust` runs whatever code it asks for. Raises UserError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is not a regular file")
        zipped = zipfile.is_zipfile(path)
        scripted = zipped and any(name.endswith("/constants.pkl") for name in zipfile.ZipFile(path).namelist())
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from None
    if scripted:
        raise UserError(f"{path} is a TorchScript archive, whose code is compiled: export its state_dict() instead")
    if not zipped and _first_byte(path) != b"\x80":
        raise UserError(f"{path} is no PyTorch file: it is neither a zip archive nor a pickle")
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", mmap=zipped, weights_only=not trust)
    except pickle.UnpicklingError as error:
        raise UserError(_refused(path, error)) from None
    except Exception as error:  # torch.load meets damage in many places, each with an error of its own
        reason = printable(" ".join(str(error).split()), 200)
        raise UserError(f"{path} is no PyTorch file, or it is damaged: {type(error).__name__}: {reason}") from None


def _first_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(1)


def _refused(path: Path, error: Exception) -> str:
    """What a pickle holds besides tensors, in a sentence."""
    text = str(error)
    for marker in ("Unsupported global: GLOBAL ", "Unsupported class "):
        if marker in text:
            name = printable(text.partition(marker)[2].split()[0], 100)
            return (
                f"{path} holds Python objects beside tensors (first: {name}); loading them can run any code, so it is "
                "done only with --trust-pickle"
            )
    if "Weights only load failed" in text:
        return (
            f"{path} holds something that is not plain tensors; loading it can run any code: only with --trust-pickle"
        )
    return f"{path} is no PyTorch file, or it is damaged"


def state_dict(found: Any, path: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """The tensors by name, and the entry they were nested under. Raises UserError when there are none."""
    import torch
    from torch import nn

    if isinstance(found, nn.Module):
        return dict(found.state_dict()), None
    if isinstance(found, torch.Tensor):
        return {"tensor": found}, None
    if not isinstance(found, Mapping):
        raise UserError(f"{path} holds a {type(found).__name__}, not a state dict of tensors by name")
    here = _tensors(found)
    best, entry = here, None
    for key in (*_NESTED, *(key for key in found if isinstance(key, str))):
        inside = found.get(key)
        if isinstance(inside, nn.Module):
            inside = inside.state_dict()
        if isinstance(inside, Mapping):
            nested = _tensors(inside)
            if len(nested) > len(best) or (nested and entry is None and len(nested) == len(best)):
                best, entry = nested, key
            if entry in _NESTED:
                break
    if not best:
        raise UserError(f"{path} holds no tensors by name: it is no checkpoint")
    return best, entry


def _tensors(found: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    import torch

    return {str(name): value.data for name, value in found.items() if name != "" and isinstance(value, torch.Tensor)}
