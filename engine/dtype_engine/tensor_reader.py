"""The tensors themselves, mapped from the files of a checkpoint, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from .checkpoint import Checkpoint
from .errors import UserError
from .text import printable


class Reader(AbstractContextManager["Reader"]):
    """Gives tensors of a checkpoint by name, as they are stored; their bytes are read from the disk when they are used."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self._opened.clear()

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of this name. Raises UserError when its file can't be read, or keeps it in a form of its own."""
        if self._checkpoint.values is not None:
            found = self._checkpoint.values[name]
            assert isinstance(found, torch.Tensor)
            return found
        entry = self._checkpoint.tensors[name]
        if entry.packed:
            raise UserError(f"{printable(name)} is packed as {entry.dtype}, which only llama.cpp reads")
        try:
            if entry.file.suffix == ".gguf":
                return self._raw(entry.file, entry.start, entry.nbytes, entry.dtype, entry.shape)
            if entry.file not in self._opened:
                from safetensors import safe_open

                self._opened[entry.file] = self._stack.enter_context(safe_open(entry.file, framework="pt"))
            tensor = self._opened[entry.file].get_tensor(entry.key or name)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"can't read {printable(name)} from {entry.file}: {' '.join(str(error).split())}") from None
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _raw(self, file: Path, start: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A plain tensor of a GGUF file, mapped."""
        if file not in self._opened:
            self._opened[file] = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
        whole: torch.Tensor = self._opened[file]
        return whole[start : start + nbytes].view(getattr(torch, dtype)).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)


def read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every tensor by name, mapped. Raises UserError."""
    with Reader(checkpoint) as reader:
        return {name: reader[name] for name in reader}
