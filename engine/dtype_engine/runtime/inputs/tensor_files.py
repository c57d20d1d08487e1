"""Reads the arguments of a forward pass from a file of tensors, whose names are the argument names."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from dtype_engine.checkpoint.pickle_size import check_legacy
from dtype_engine.checkpoint.pickle_zip import check_archive, refuse_cut_zip, refuse_too_large
from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.text import printable
from dtype_engine.runtime.inputs.batch import Batch, Inputs, from_values
from dtype_engine.runtime.inputs.text import with_next_tokens, without_cache
from dtype_engine.runtime.inputs.validate import ID_ARGUMENTS, check_fits, with_labels
from dtype_engine.runtime.model.containers import named_tensors_in
from dtype_engine.runtime.model.live import LiveModel

_NUMBERED = re.compile(r"([0-9]{1,9})\.(.+)")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64)


def tensor_inputs(model: LiveModel, path: Path, limits: InputLimits, labelled: bool = False) -> Inputs:
    """Read the arguments of one or several forward passes (calls) from a `.safetensors`, `.npz` or `.pt` file. Token ids become
    int64.

    A call is a dictionary of arguments, a tuple of arguments, or a single tensor. A `.pt` file may hold a list of calls. In the
    other formats, a file with several calls has names that begin with the number of the call (`0.input_ids`, `1.input_ids`).
    labelled: whether tensors that the forward pass does not take are labels for the user's metrics. Raises UserError for a file
    that can't be read, for more token ids than the limit, and for tensors that do not fit the model's forward pass.
    """
    given = from_values(read_tensors(path), path.name)
    given = with_labels(model, given) if labelled else given
    batches = tuple(_as_ids(batch) for batch in given.batches)
    limits.refuse_file("tokens", str(path), sum(map(_count_ids, batches)))
    for number, batch in enumerate(batches, 1):
        where = f"{path}, call {number}" if len(batches) > 1 else str(path)
        check_fits(model, batch, where)
    calls = f"{len(batches)} calls" if len(batches) > 1 else "1 call"
    name = printable(path.name, 60)
    made_of = (f"tensors: {name}, unchanged",)
    inputs = Inputs(batches, f"tensors of {name}, {calls}", made=False, made_of=made_of)
    return without_cache(model, with_next_tokens(model, inputs))


def read_tensors(path: Path) -> Any:
    """Return a file's tensors: a dictionary by name, a tuple, a tensor, or a list of these. Raises UserError for a bad file."""
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        from safetensors.torch import load_file

        with failures_as(UserError, f"can't read the tensors of {path}"):
            tensors = load_file(path)
        return _calls(path, tensors)
    if suffix == ".npz":
        return _calls(path, _npz(path))
    if suffix in (".pt", ".pth"):
        return _checked(path, _pickle(path))
    raise UserError(f"{path}: tensors come from a file that ends in .safetensors, .npz or .pt")


def _npz(path: Path) -> dict[str, torch.Tensor]:
    import numpy as np

    tensors = {}
    with failures_as(UserError, f"can't read the tensors of {path}"):
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is not an .npz file, or it is cut short; numpy.savez writes one")
        refuse_too_large(path)
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                if name in tensors:
                    raise UserError(f"{path} has two arrays named {printable(name, 200)}")
                with archive.open(entry) as file:
                    _check_array(path, name, file, entry.file_size)
                with archive.open(entry) as file:
                    array = np.lib.format.read_array(file, allow_pickle=False)
                try:
                    tensors[name] = torch.from_numpy(
                        np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
                    )
                except TypeError:
                    raise UserError(f"{path}: {printable(name)} is {array.dtype}, which torch does not know") from None
                tensors[name] = tensors[name].reshape(array.shape)
    return tensors


def _check_array(path: Path, name: str, file: IO[bytes], nbytes: int) -> None:
    """Raise UserError unless `file`, an entry of `nbytes` bytes in an .npz file, holds exactly the array of numbers that its header
    describes.
    """
    from numpy.lib import format as npy

    what = f"{path}: {printable(name, 200)}"
    header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        shape, _, dtype = header[npy.read_magic(file)](file)
    except KeyError:
        raise UserError(f"{what} is in a version of NumPy's format that is not read; numpy.savez writes 1.0") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{what} is not an array ({one_line(error, 120)})") from None
    if dtype.hasobject:
        raise UserError(f"{what} holds Python objects, so it is not read: unpickling can run any code")
    stored = nbytes - file.tell()
    if not dtype.itemsize or min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != stored:
        of = f"{dtype} of shape {printable(str(shape), 120)}"
        raise UserError(f"{what} should be {of}, and {stored:,} bytes are stored of it; the file is damaged")


def _pickle(path: Path) -> Any:
    with failures_as(UserError, f"can't read the tensors of {path}"):
        if zipfile.is_zipfile(path):
            check_archive(path, trust=False)
        else:
            refuse_cut_zip(path)
            check_legacy(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise UserError(
                f"{path} holds more than tensors, lists, tuples and dictionaries, so it is not read: unpickling can run any code"
            ) from None
        except RuntimeError as error:
            if "unexpected EOF" in str(error):
                raise UserError(f"{path} is cut short: its last tensors are missing; copy or write it again") from None
            raise


def _calls(path: Path, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a dictionary for each pass if all names begin with a pass number, such as `0.input_ids`, otherwise `tensors`."""
    if not tensors:
        raise UserError(f"{path} has no tensors")
    numbered = {name: _NUMBERED.fullmatch(name) for name in tensors}
    if not all(numbered.values()):
        return tensors
    calls: dict[int, dict[str, torch.Tensor]] = {}
    for name, match in numbered.items():
        assert match is not None
        calls.setdefault(int(match[1]), {})[match[2]] = tensors[name]
    return [calls[number] for number in sorted(calls)]


def _checked(path: Path, value: Any) -> Any:
    """Return the content of a pickle if it holds the arguments of one or several forward passes. Raises UserError otherwise."""
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise UserError(f"{path} has no tensors")
    for call in calls:
        named = not isinstance(call, dict) or all(isinstance(key, str) for key in call)
        if not isinstance(call, (dict, tuple, torch.Tensor)) or not named or not any(named_tensors_in("", call)):
            raise UserError(
                f"{path} holds a {type(call).__name__} without tensors: a call is a dictionary by argument, a tuple, or a tensor"
            )
    return value


def _count_ids(batch: Batch) -> int:
    ids = (value for name, value in batch.kwargs.items() if name in ID_ARGUMENTS and isinstance(value, torch.Tensor))
    return max((each.numel() for each in ids), default=0)


def _as_ids(batch: Batch) -> Batch:
    kwargs = {
        name: value.long()
        if name in ID_ARGUMENTS and isinstance(value, torch.Tensor) and value.dtype in _INTEGERS
        else value
        for name, value in batch.kwargs.items()
    }
    return dataclasses.replace(batch, kwargs=kwargs)
