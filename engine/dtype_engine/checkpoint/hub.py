"""Reads the headers of a model on a hub without downloading the model, and downloads it on request.

The headers are saved as sparse files: each file has its full length, and all bytes after the header are a hole. The readers of
local files, with all their checks, therefore read them like any other checkpoint. Tensors whose values are missing are marked
(`CheckpointTensor.absent`).

The hub is the one that huggingface_hub uses (HF_ENDPOINT), with its tokens. Everything that the hub answers is untrusted.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Annotated
from urllib.parse import quote, unquote

import msgspec

from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.gguf_header import read_gguf_header
from dtype_engine.checkpoint.hub_cache import INCOMPLETE, CachedRepository, has_size, written
from dtype_engine.checkpoint.hub_reader import HubReader, hub_faults, hub_server
from dtype_engine.checkpoint.safetensors_header import LONGEST_HEADER, CheckpointTensor, read_header
from dtype_engine.checkpoint.schemes.gguf import ROPE_FACTORS
from dtype_engine.checkpoint.schemes.registry import schemes
from dtype_engine.checkpoint.weight_files import LARGEST_JSON, PICKLES, PIPELINE_INDEX, gguf_parts
from dtype_engine.checkpoint.weight_sets import weight_sets
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.export_lock import remove_stale_files
from dtype_engine.core.hints import hint
from dtype_engine.core.text import is_printable, printable
from dtype_engine.core.typed_data import json_as_type
from dtype_engine.core.units import human_bytes
from dtype_engine.core.user_folders import HEADERS, cache_folder, expanded

SCHEME = "hf://"
Progress = Callable[[str, int, int], None]
"""A function of (what is being done, the amount done, the total amount), called while something is read from a hub."""

_ADDRESS = re.compile(
    rf"{SCHEME}(?:models/)?(?P<repo>[\w.-]{{1,96}}/[\w.-]{{1,96}})(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[^/@]+))?"
    r"(?:/(?P<path>.+?))?/?"
)
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
_SIDE_FILES = ("config.json", PIPELINE_INDEX, "adapter_config.json", "recipe.yaml")
_INDEX_FILE = re.compile(r"[\w.-]+\.index(\.[\w-]+)?\.json")
_LARGEST_DESCRIPTION = 1 << 18
_FIRST_RANGE = 3 << 15
"""How many bytes are read first from a safetensors file. Few headers are longer: those of DeepSeek-V3 (671 B) have 70 kB."""
_FIRST_GGUF_RANGE = 1 << 20
_NEAR = 1 << 16
"""If two ranges of a file are at most this many bytes apart, one request reads both."""
_MOST_BYTES = 1 << 30
"""The most bytes to read for the headers of one model. A model of 671 billion parameters has 20 MB of headers and index."""
_MOST_SECONDS = 3600
"""The maximum time for reading the list of files, or the headers of one model, in seconds."""
_LARGEST_LISTING, _MOST_LISTED = 1 << 26, 200_000
"""The most bytes and files of a hub's list of files. A repository of 20,000 files has a list of 6 MB."""
_MOST_FILES = 20_000
_TOGETHER, _TOGETHER_IN_A_FILE = 16, 4
"""How many files are read at once, and how many ranges of each: 64 requests, fewer than the 100 connections of the HTTP client."""
_DOWNLOADS_TOGETHER = 8
_LONGEST_PATH = 1000
"""The most characters of the path of a file in a repository."""
_BRANCH = "main"
"""The branch that is used if an address names no revision."""
_MODEL_FILES = (".json", ".txt", ".model", ".py", ".jinja")
"""The files that a model needs in addition to its weights."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """The address of a model on a hub, `hf://org/name` or `hf://org/name@revision`, or of a file or folder in it,
    `hf://org/name/path`.
    """

    repo: str
    revision: str | None = None
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> HubAddress:
        """Parse an address such as `hf://org/name`. Raises UserError for any other text."""
        found = _ADDRESS.fullmatch(text)
        path = unquote(found["path"] or "") if found is not None else ""
        revision = unquote(found["revision"]) if found is not None and found["revision"] else None
        words = path.split("/") if path else ()
        if (
            found is None
            or not _is_repository(found["repo"])
            or not all(map(_is_name, words))
            or not is_printable(revision or "")
        ):
            raise UserError(
                f"{printable(text, 200)} is no address of a model on a hub: write {SCHEME}org/name, {SCHEME}org/name@revision or "
                f"{SCHEME}org/name/file.gguf"
            )
        return cls(found["repo"], revision, path)

    @classmethod
    def of_id(cls, text: str) -> HubAddress:
        """Return the address of a Hugging Face id, `org/name` or (of old models) `name`. Raises UserError for other texts."""
        if not _is_repository(text):
            raise UserError(f"{printable(text, 200)} is no id of a model on a hub: write org/name")
        return cls(text)

    def of_revision(self, revision: str) -> HubAddress:
        """Return the address of the same model in a branch, tag or commit. Raises UserError if this address names one already."""
        if self.revision is not None:
            raise UserError(f"{self} names a revision: leave out --revision")
        return HubAddress.parse(str(dataclasses.replace(self, revision=revision)))

    @property
    def title(self) -> str:
        """The name of the model on the screen and in reports."""
        return f"{self.repo}/{self.path}" if self.path else self.repo

    def __str__(self) -> str:
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        scheme = SCHEME if "/" in self.repo else ""  # an id without an organization is typed without it
        return f"{scheme}{self.repo}{revision}{f'/{self.path}' if self.path else ''}"

    def faults(self) -> AbstractContextManager[None]:
        """Return a context manager that turns the errors of huggingface_hub into a UserError with this address."""
        return hub_faults(str(self), self.revision or _BRANCH)

    def listing(self) -> HubModel:
        """Request the list of the model's files from the hub, and return it. Raises UserError."""
        with self.faults():
            endpoint, _ = hub_server()
            revision = quote(self.revision or _BRANCH, safe="")
            url = f"{endpoint}/api/models/{self.repo}/revision/{revision}?blobs=true"
            answer = _HeaderReader(self).read(url, 0, _LARGEST_LISTING)
            try:
                said = json_as_type(answer, _Repository)
            except UserError as error:
                raise UserError(f"{self}: the hub's list of files can't be read: {error}") from None
            if _COMMIT.fullmatch(said.sha) is None:
                raise UserError(f"{self}: the hub names no commit: {printable(said.sha)!r}")
            if len(said.siblings) > _MOST_LISTED:
                raise UserError(
                    f"{self}: the hub lists {len(said.siblings):,} files, over the limit of {_MOST_LISTED:,}"
                )
            named = {file.rfilename: file for file in said.siblings if _is_path(file.rfilename)}
            for words, following in pairwise(sorted(name.split("/") for name in named)):
                if following[: len(words)] == words:
                    both = printable("/".join(words), 200)
                    raise UserError(
                        f"{self}: the hub's list of files contradicts itself: {both} is a file and a folder"
                    )
            at = f"{self.path}/" if self.path else ""
            if self.path and not any(name == self.path or name.startswith(at) for name in named):
                raise UserError(f"{self}: there is no {printable(self.path, 200)} in this repository")
            others = {file.rfilename for file in said.siblings} - named.keys()
            return HubModel(
                self,
                said.sha,
                endpoint,
                {name: file.size for name, file in named.items()},
                {name: file.digest for name, file in named.items()},
                tuple(sorted(name for name in others if name.startswith(at) and _is_of_model(name))),
            )


class _LargeFile(msgspec.Struct):
    sha256: str | None = None


class _File(msgspec.Struct):
    rfilename: str
    size: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    blobId: str | None = None
    lfs: _LargeFile | None = None

    @property
    def digest(self) -> str | None:
        """The digest by which huggingface_hub names the file's content in its cache: the SHA-256 of a large file, or the SHA-1 of a
        git object. None if the hub's answer lacks it, or has something else in its place.
        """
        if self.lfs is not None:
            return self.lfs.sha256 if _SHA256.fullmatch(self.lfs.sha256 or "") else None
        return self.blobId if _SHA1.fullmatch(self.blobId or "") else None


class _Repository(msgspec.Struct):
    sha: str
    siblings: list[_File]


@dataclass(frozen=True)
class HubModel:
    """The list of files of a model on a hub, in one commit. Its methods read the headers or download the model."""

    address: HubAddress
    commit: str
    endpoint: str
    sizes: dict[str, int | None]
    """The size of each file in bytes, by the file's path in the repository; None if the hub does not tell it."""
    digests: dict[str, str | None] = field(default_factory=dict)
    """The digest of each file's content according to the hub, by the file's path. None if the hub gives none."""
    left_out: tuple[str, ...] = ()
    """The names (untrusted) of files that the model may need, and that are not read because their names are not safe here."""

    @property
    def notices(self) -> tuple[str, ...]:
        """A sentence about the files in `left_out`, if there are any."""
        names = ", ".join(printable(name, 60) for name in self.left_out[:3])
        more = f" and {len(self.left_out) - 3} more" if len(self.left_out) > 3 else ""
        return (f"files whose names are not safe here are left out: {names}{more}",) if names else ()

    def downloaded(self, cache: Path) -> Path | None:
        """Return the folder or file of the model in the Hugging Face cache, or None if some of its weights are missing there, or a
        file there has another content than the list says.
        """
        repository = CachedRepository(cache, self.address.repo)
        weights, snapshot = self._to_download(), repository.snapshot(self.commit)
        wanted = dict.fromkeys((*self._side_files(), *weights))
        if not wanted:
            return None
        wanted |= dict.fromkeys(name for name in self._beside(weights) if os.path.exists(snapshot / name))
        if not all(repository.holds(self.commit, name, self.sizes[name], self.digests.get(name)) for name in wanted):
            return None
        return snapshot / self.address.path

    def headers(self, on_progress: Progress = ignore) -> Path:
        """Save the headers that are not saved yet, and return the folder (or file) with all headers as sparse files. Raises
        UserError.
        """
        wanted, weights = self._side_files(), self._weight_files()
        readable = [name for name in weights if not name.endswith(PICKLES)]
        if not readable:
            what = "its weights are pickles, which have no header" if weights else "it has no weights in a known form"
            more = f"; {hint('download')}" if weights else ""
            raise UserError(f"{self.address}: {what}, so nothing can be read before it is downloaded{more}")
        if len(readable) > _MOST_FILES:
            raise UserError(
                f"{self.address}: it has {len(readable):,} files of weights, over the limit of {_MOST_FILES:,}"
            )
        place = quote(self.endpoint, safe="")  # a folder for each server, whose name is that of no other
        folder = cache_folder() / HEADERS / place / self.address.repo.replace("/", "--") / self.commit
        missing = [name for name in (*wanted, *readable) if not has_size(folder / name, self.sizes[name])]

        def save(name: str) -> None:
            reader.save_header(self._url(name), folder / name, self._size(name), self.digests.get(name))

        def on_done(count: int) -> None:
            on_progress("reading headers", count, len(missing))

        with self.address.faults():
            reader = _HeaderReader(self.address)
            remove_stale_files(folder.parent, INCOMPLETE)
            _in_threads(_TOGETHER, reader, save, missing, on_done)
        return folder / self.address.path

    def download(self, on_progress: Progress = ignore, cancelled: IsCancelled = never) -> Path:
        """Download the model into the Hugging Face cache, and return its folder or file there. Raises UserError and Cancelled."""
        from huggingface_hub import constants

        cache, names = expanded(constants.HF_HUB_CACHE), self._files_to_download()
        if not names:
            raise UserError(f"{self.address}: it has no files of a model, so there is nothing to download")
        total = sum(map(self._size, names))
        self._refuse_full_disk(cache, total)
        repository, lock, done = CachedRepository(cache, self.address.repo), threading.Lock(), 0

        def count(arrived: int) -> None:
            nonlocal done
            with lock:
                done += arrived
                on_progress("downloading", done, total)

        def fetch(name: str) -> None:
            size, digest = self._size(name), self.digests.get(name)
            if repository.holds(self.commit, name, size, digest):
                count(size)
                return

            def write(file: IO[bytes]) -> None:
                reader.save(self._url(name), size, digest, file, count)

            if not repository.add(self.commit, name, size, digest, write):
                count(size)

        with self.address.faults():
            repository.remove_stale()
            reader = HubReader(str(self.address), cancelled=cancelled)
            _in_threads(_DOWNLOADS_TOGETHER, reader, fetch, names)
            if self.address.revision is None and not self.address.path:
                repository.name_branch(_BRANCH, self.commit)
        return repository.snapshot(self.commit) / self.address.path

    def _refuse_full_disk(self, cache: Path, total: int) -> None:
        place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
        free = shutil.disk_usage(place).free
        if free < total:
            raise UserError(
                f"{self.address} has {human_bytes(total)} to download and the disk of {cache} has {human_bytes(free)} left; "
                "HF_HUB_CACHE names another folder"
            )

    @property
    def download_bytes(self) -> int:
        """The bytes of the weights that `download` fetches. Raises UserError if the hub does not say their sizes."""
        return sum(map(self._size, self._to_download()))

    @property
    def headers_alone(self) -> str:
        """A sentence which says that only the headers are on this machine, and how the model is downloaded."""
        size = human_bytes(self.download_bytes)
        return f"only the headers of {self.address} are here, not its {size} of weights: {hint('download')}"

    def _files_to_download(self) -> list[str]:
        """Return the files that the model needs, or only those with weights if the address names a file. Raises UserError."""
        weights = self._to_download()
        names = list(dict.fromkeys((*weights, *self._beside(weights))))
        if len(names) > _MOST_FILES:
            raise UserError(
                f"{self.address}: it has {len(names):,} files to download, over the limit of {_MOST_FILES:,}"
            )
        return names

    def _beside(self, weights: list[str]) -> list[str]:
        """Return the other files that the model needs, or [] if the address names one of `weights`."""
        at = f"{self.address.path}/" if self.address.path else ""
        others = [name for name in self.sizes if name.startswith(at) and name.endswith(_MODEL_FILES)]
        return [] if self.address.path in weights else others

    def _to_download(self) -> list[str]:
        weights = self._weight_files()
        return [name for name in weights if not name.endswith(PICKLES)] or weights

    def _weight_files(self) -> list[str]:
        found = self._files(lambda name: name.endswith((".safetensors", *PICKLES)))
        if self.address.path in self.sizes:
            return [part for part in gguf_parts(self.address.path) if part in self.sizes] or [self.address.path]
        at = f"{self.address.path}/" if self.address.path else ""
        sets = weight_sets([name.removeprefix(at) for name in self.sizes if name.startswith(at)], None)
        if sets and sets[0].pickled:  # transformers passes over any other file
            return [name for name in found if name.endswith(PICKLES)]
        gguf = self._files(lambda name: name.endswith(".gguf"))
        if found or not gguf:
            return found
        if len(gguf) > 1 and sorted(gguf) != gguf_parts(gguf[0]):
            raise UserError(
                f"{self.address} has {len(gguf)} GGUF files; name one of them, such as "
                f"{dataclasses.replace(self.address, path=min(gguf))}"
            )
        return gguf

    def _side_files(self) -> list[str]:
        wanted = {*_SIDE_FILES, *(name for scheme in schemes() for name in scheme.settings_files)}
        return self._files(
            lambda name: name in wanted or _INDEX_FILE.fullmatch(name) is not None,
            beside=self.address.path in self.sizes,
        )

    def _files(self, matches: Callable[[str], bool], beside: bool = False) -> list[str]:
        """Return the files in the address's folder whose names match. If the folder holds a pipeline, those in the folders of its
        components are returned, too. beside: whether the address names a file, whose folder is then searched.
        """
        folder = self.address.path.rpartition("/")[0] if beside else self.address.path
        at = f"{folder}/" if folder else ""
        deep = int(f"{at}{PIPELINE_INDEX}" in self.sizes)
        return [
            name
            for name in self.sizes
            if name.startswith(at) and name[len(at) :].count("/") <= deep and matches(name.rpartition("/")[2])
        ]

    def _size(self, name: str) -> int:
        size = self.sizes[name]
        if size is None or size < 0:
            raise UserError(f"{self.address}: the hub does not say how large {printable(name, 200)} is")
        return size

    def _url(self, name: str) -> str:
        return f"{self.endpoint}/{self.address.repo}/resolve/{self.commit}/{quote(name)}"


def with_absent_values(checkpoint: Checkpoint, model: HubModel) -> Checkpoint:
    """Return a checkpoint that was read from the headers of `model`, in which values that are on the hub are marked as absent."""
    ends = _describing()
    tensors = {
        name: each if _describes(each, ends) else msgspec.structs.replace(each, absent=True)
        for name, each in checkpoint.tensors.items()
    }
    return dataclasses.replace(checkpoint, tensors=tensors, headers_alone=model.headers_alone)


def _in_threads(
    threads: int,
    reader: HubReader,
    work: Callable[[str], None],
    names: list[str],
    on_done: Callable[[int], object] = ignore,
) -> None:
    """Call `work` for each name, and `on_done` with the number of finished calls. If a call raises, `reader` is stopped."""
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(work, name) for name in names]
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                on_done(done)
        except BaseException:
            reader.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _describing() -> tuple[str, ...]:
    """Return the ends of the names of small tensors whose values the schemes need, such as `_shape`."""
    return tuple(end for scheme in schemes() for end in scheme.describing)


def _describes(tensor: CheckpointTensor, ends: tuple[str, ...]) -> bool:
    return tensor.nbytes <= _LARGEST_DESCRIPTION and tensor.name.endswith(ends)


def _is_name(word: str) -> bool:
    return (
        word not in ("", ".", "..") and is_printable(word) and not set(word) & set("\\:") and len(word.encode()) < 200
    )


def _is_path(text: str) -> bool:
    """Return whether a text is the path of a file in a folder, without anything that could lead out of the folder."""
    return len(text) <= _LONGEST_PATH and all(map(_is_name, text.split("/")))


def _is_of_model(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", *PICKLES, *_MODEL_FILES))


def _is_repository(text: str) -> bool:
    """Return whether a text is `org/name` or `name`. It must have no `..`, and no `--`, which replaces the slash in the cache."""
    words = text.split("/")
    return (
        len(words) <= 2
        and all(map(_is_name, words))
        and all(re.fullmatch(r"[\w.-]{1,96}", word) for word in words)
        and "--" not in text
        and ".." not in text
    )


class _HeaderReader(HubReader):
    """Saves the headers of files as sparse files. Several threads may use it at once."""

    def __init__(self, address: HubAddress) -> None:
        super().__init__(str(address), _MOST_BYTES, _MOST_SECONDS)

    def save_header(self, url: str, path: Path, size: int, digest: str | None) -> None:
        """Save a file of `size` bytes: only the header, as a sparse file, if it is a weights file; otherwise all of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as partial:
            if path.suffix == ".safetensors":
                self._save_safetensors(url, partial, size)
            elif path.suffix == ".gguf":
                self._save_gguf(url, partial, size)
            else:
                if size > LARGEST_JSON:
                    raise UserError(f"{self.title}: {path.name} has {size:,} bytes, which are too many for such a file")
                with open(partial, "wb") as file:
                    self.save(url, size, digest, file)

    def _save_safetensors(self, url: str, partial: Path, size: int) -> None:
        start = self.read(url, 0, min(_FIRST_RANGE, size), size)
        length = 8 + int.from_bytes(start[:8], "little")
        if len(start) < length <= min(size, 8 + LONGEST_HEADER):  # the reader of the header refuses any other length
            start += self.read(url, len(start), length - len(start), size)
        _write_sparse(partial, start[:length], size)
        # A regular expression would take five times as long.
        if any(f'{end}"'.encode() in start for end in _describing()):
            self._add_descriptions(url, partial, read_header(partial)[0].values())

    def _save_gguf(self, url: str, partial: Path, size: int) -> None:
        """Save the header of a GGUF file. The header's length is unknown, so further ranges are read until the header is
        complete.
        """
        start, wanted = b"", _FIRST_GGUF_RANGE
        while True:
            start += self.read(url, len(start), min(wanted, size - len(start)), size)
            partial.write_bytes(start)
            try:
                read_gguf_header(partial)
            except UserError:
                if len(start) < min(size, LONGEST_HEADER):
                    wanted *= 2
                    continue
            break
        _write_sparse(partial, start, size)
        if any(name.encode() in start for name in ROPE_FACTORS):
            from dtype_engine.checkpoint.gguf import read_gguf

            self._add_descriptions(url, partial, read_gguf(partial)[0].values())

    def _add_descriptions(self, url: str, partial: Path, tensors: Iterable[CheckpointTensor]) -> None:
        spans, ends = list[tuple[int, int]](), _describing()
        for start, end in sorted(
            (each.start or 0, (each.start or 0) + each.nbytes) for each in tensors if _describes(each, ends)
        ):
            if spans and start - spans[-1][1] <= _NEAR:
                start = spans.pop()[0]
            spans.append((start, end))
        size = partial.stat().st_size
        with ThreadPoolExecutor(_TOGETHER_IN_A_FILE) as pool, open(partial, "r+b") as file:
            for (start, _), content in zip(
                spans, pool.map(lambda span: self.read(url, span[0], span[1] - span[0], size), spans), strict=True
            ):
                file.seek(start)
                file.write(content)


def _write_sparse(path: Path, start: bytes, size: int) -> None:
    try:
        with open(path, "wb") as file:
            file.write(start)
            file.truncate(size)
    except (OSError, OverflowError) as error:
        raise UserError(f"can't write headers to {path.parent}: {one_line(error)}") from None
