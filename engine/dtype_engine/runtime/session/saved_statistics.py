"""Keeps the statistics of the inputs of a model's weights in a file, so that a later process need not run the calibration inputs.

The files are in `statistics` in the user's state folder, one for each model and calibration inputs. `_fingerprint` says what has to
be equal for a file to be used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
import shutil
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from dtype_engine.checkpoint import FileIdentity
from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import UserError
from dtype_engine.core.roundings import ROUNDINGS, Statistic
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes, plural
from dtype_engine.core.user_folders import state_folder
from dtype_engine.reports.versions import versions
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.roundings import WeightStatistics
from dtype_engine.runtime.scan.saved import hash_of_model
from dtype_engine.runtime.session.calibration import Calibration
from dtype_engine.runtime.session.statistics_file import Additions, SavedFile

MOST_BYTES = 8 << 30
"""The most bytes that all files of statistics may take."""
_VERSION = 1
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DAY_S = 86400
_THIS_PROGRAM = Path(__file__).resolve().parents[2]


@dataclass
class SavedStatistics:
    """Collects statistics as `Calibration` does, but runs the model only for the weights that the file lacks."""

    model: LiveModel
    calibration: Calibration
    read_only: bool = False
    """Whether files are only read."""
    most: int = MOST_BYTES
    """The most bytes that all files may take."""
    _notices: dict[str, str] = field(default_factory=dict)

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the user: which file was used, and what could not be read or saved."""
        return tuple(self._notices.values())

    def runs(self, rounded: Mapping[str, str]) -> int:
        """Return how many runs over one sequence `collect` makes. Raises UserError and NoForward as `Calibration.inputs` does."""
        with contextlib.closing(self._opened()) as saved:
            return self.calibration.runs(_missing(rounded, saved))

    def collect(
        self, rounded: Mapping[str, str], on_run: Callable[[], None], cancelled: IsCancelled
    ) -> Generator[dict[str, WeightStatistics]]:
        """Yield the statistics of weights as `Calibration.collect` does: first those in the file, one weight at a time. What the
        runs collect is added to the file when they end, also if they are cancelled. Raises UserError if the file can't be read any
        more, and what `Calibration.collect` raises.
        """
        with contextlib.closing(self._opened()) as saved:
            missing = _missing(rounded, saved)
            known = {name: dtype for name, dtype in rounded.items() if name not in missing}
            if known:
                self._note_reuse()
            for name, dtype in known.items():
                found = saved.read(name, _need(dtype), self.model.weights[name].tensor.device)
                if found is not None:
                    yield {name: found}
            if missing:
                yield from self._collected(missing, saved, on_run, cancelled)

    def _collected(
        self, missing: Mapping[str, str], saved: SavedFile, on_run: Callable[[], None], cancelled: IsCancelled
    ) -> Generator[dict[str, WeightStatistics]]:
        additions, left = self._additions(saved), dict(missing)
        try:
            with contextlib.closing(self.calibration.collect(missing, on_run, cancelled)) as collected:
                for found in collected:
                    for name, given in found.items():
                        left.pop(name, None)
                        if additions is not None and not self._added(additions, name, given):
                            additions = None
                    yield found
            if additions is not None:
                additions.add_unused(left)
        except UserError:  # the inputs of a weight that was added turned out to be incomplete
            if additions is not None:
                additions.close()
            additions = None
            raise
        finally:
            if additions is not None:
                self._write(additions)

    @functools.cached_property
    def path(self) -> Path | None:
        """The file of this model and these inputs. None if there is none, because `_fingerprint` finds none."""
        return None if self._fingerprint is None else _folder() / f"{self._fingerprint[:32]}.safetensors"

    @functools.cached_property
    def _fingerprint(self) -> str | None:
        return _fingerprint(self.model, self.calibration)

    def _opened(self) -> SavedFile:
        if self.path is None or self._fingerprint is None:
            return SavedFile()
        try:
            return SavedFile.open(self.path, self._fingerprint)
        except UserError as error:
            self._notices["read"] = f"{self.path} can't be used, so the calibration inputs are run again: {error}"
            return SavedFile()

    def _note_reuse(self) -> None:
        inputs = ", ".join(each.name for each in self.calibration.files) or self.calibration.inputs.description
        self._notices["reused"] = f"calibration statistics of {printable(inputs)} reused from {self.path}"
        if self.path is not None and not self.read_only:
            with contextlib.suppress(OSError):
                self.path.touch()  # the files that were not used for the longest time are removed first

    def _additions(self, saved: SavedFile) -> Additions | None:
        if self.path is None or self.read_only:
            return None
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            free = shutil.disk_usage(folder).free
            # Until the new file has replaced the old one, the disk has what is added twice, and the old file.
            return Additions(saved, folder, min(self.most - saved.nbytes, (free - saved.nbytes) // 3))
        except OSError as error:
            self._note_unsaved(f"can't write to {folder}: {error.strerror}")
            return None

    def _added(self, additions: Additions, name: str, given: WeightStatistics) -> bool:
        """Add the statistics of a weight. Returns False if nothing more can be saved."""
        try:
            additions.add(name, given)
        except OSError as error:
            additions.close()
            self._note_unsaved(f"can't write to {_folder()}: {error.strerror}")
            return False
        return True

    def _write(self, additions: Additions) -> None:
        assert self.path is not None
        assert self._fingerprint is not None
        with contextlib.closing(additions):
            if not additions:  # cancelled before the runs ended
                return
            try:
                additions.write(self.path, self._fingerprint)
            except UserError as error:
                self._note_unsaved(str(error))
                return
        removed = _make_room(self.path, self.most)
        limit = f"to keep the files in {self.path.parent} below {human_bytes(self.most)} and a third of the free disk"
        if additions.without_products:
            self._note_unsaved(
                f"those of {plural(len(additions.without_products), 'weight')}, first {additions.without_products[0]}, "
                f"{limit}"
            )
        if removed:
            self._notices["removed"] = f"{plural(removed, 'file')} of older calibration statistics removed, {limit}"

    def _note_unsaved(self, why: str) -> None:
        self._notices["unsaved"] = f"calibration statistics not saved: {why}"


def _folder() -> Path:
    return state_folder() / "statistics"


def _need(dtype: str) -> Statistic:
    return ROUNDINGS[dtypes.BY_NAME[dtype].rounding].needs


def _missing(rounded: Mapping[str, str], saved: SavedFile) -> dict[str, str]:
    return {name: dtype for name, dtype in rounded.items() if not saved.has(name, _need(dtype))}


def _make_room(newest: Path, most: int) -> int:
    """Remove the files that were not used for the longest time, until all take at most `most` bytes, and what killed processes have
    left behind. Returns how many files of statistics were removed. newest: the file that stays.
    """
    taken = removed = 0
    with contextlib.suppress(OSError):  # another process has removed one, or it may not be removed
        files = sorted(newest.parent.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in files:
            taken += path.stat().st_size
            if taken > most and path != newest:
                path.unlink()
                removed += 1
        for path in newest.parent.glob(".*.partial-*"):
            if path.stat().st_mtime < time.time() - _DAY_S:
                path.unlink()
    return removed


def _fingerprint(model: LiveModel, calibration: Calibration) -> str | None:
    """Return a hash of all that decides the statistics: the reference's values, the calibration inputs, the model's code and
    settings, the devices, and the versions of the libraries. None if the code can't be found, or if the weights are objects without
    bytes. Raises UserError and NoForward if the inputs can't be made.
    """
    code = _code(model.module)
    if code is None:
        return None
    try:
        values = hash_of_model(model)
    except (RuntimeError, TypeError):  # a subclass of `torch.Tensor` that can't be read as bytes
        return None
    sources = [source for weight in model.weights.values() for source in (weight.stored, weight.reference)]
    on_disk = {tensor.file for source in sources for tensor in source.in_files}
    config = getattr(model.module, "config", None)
    about = (
        _VERSION,
        versions(),
        calibration.fitted_to.fingerprint,
        values,
        [FileIdentity.of(file).state for file in sorted(on_disk)],
        sorted({weight.tensor.device.type for weight in model.weights.values()}),
        _ADDRESS.sub("", f"{model.module} {config}"),
        code,
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()


def _code(module: nn.Module) -> list[str] | None:
    """Return hashes of the Python files that define the classes of the modules. If one of them is in no installed package, also
    those of all other such files that this process has imported. None if a class is in no file, such as that of a notebook.
    """
    libraries = [sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()]
    installed = [_THIS_PROGRAM, *(Path(each).resolve() for each in (*libraries, sysconfig.get_path("scripts")))]

    def own(path: Path) -> bool:
        return not any(path.is_relative_to(each) for each in installed)

    try:
        files = {Path(inspect.getfile(kind)).resolve() for kind in set(map(type, module.modules()))}
        if any(map(own, files)):
            loaded = [getattr(each, "__file__", None) for each in list(sys.modules.values())]
            places = [Path(each).resolve() for each in loaded if isinstance(each, str) and Path(each).is_file()]
            files.update(filter(own, places))
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)]
    except (OSError, TypeError):  # a class without a file
        return None
