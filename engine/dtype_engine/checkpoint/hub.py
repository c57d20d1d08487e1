"""Reads the headers of a model on a hub without downloading the model, and downloads it on request.

The headers are saved as sparse files: each file has its full length, and all bytes after the header are a hole. The readers of
local files, with all their checks, therefore read them like any other checkpoint. Each tensor whose values are missing is
marked (`CheckpointTensor.absent`), so that no hole is taken for values.

The hub is the one that huggingface_hub uses (HF_ENDPOINT), with its tokens. Everything that the hub answers is untrusted.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.gguf_header import read_gguf_header
from dtype_engine.checkpoint.provenance import OWN_FILES
from dtype_engine.checkpoint.safetensors_header import LONGEST_HEADER, CheckpointTensor, read_header
from dtype_engine.checkpoint.schemes.gguf_rope import TENSORS as ROPE_FACTORS
from dtype_engine.checkpoint.weight_files import LARGEST_JSON, PICKLES, PIPELINE_INDEX, gguf_parts
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled, UserError, one_line
from dtype_engine.core.hints import hint
from dtype_engine.core.text import is_printable, printable
from dtype_engine.core.typed_data import as_type
from dtype_engine.core.units import human_bytes
from dtype_engine.core.user_folders import HEADERS, cache_folder

SCHEME = "hf://"
Progress = Callable[[str, int, int], None]
"""A callback for the progress of reading from a hub. It is called with (what is being done, the amount done, the total amount)."""

_ADDRESS = re.compile(
    rf"{SCHEME}(?:models/)?(?P<repo>[\w.-]{{1,96}}/[\w.-]{{1,96}})(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[^/@]+))?"
    r"(?:/(?P<path>.+?))?/?"
)
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SIDE_FILES = ("config.json", PIPELINE_INDEX, "adapter_config.json", "recipe.yaml", *OWN_FILES)
_INDEX_FILE = re.compile(r"[\w.-]+\.index(\.[\w-]+)?\.json")
_DESCRIBING = (
    "_shape", "_g_idx", ".weight_format", ".comfy_quant", *sorted(ROPE_FACTORS), ".nbits", ".axis", ".packing", ".shape",
    ".view_as_float", ".channel_wise", ".group_size", ".optimize", ".round_zero", ".quant_scale", ".quant_zero",
    ".unpack_view_dtype", ".offload_meta", ".compute_dtype",
)  # fmt: skip
"""The ends of the names of small tensors whose values the readers of quantized weights need, such as `x.weight_shape`, which holds
the shape of packed codes.
"""
_QUANT_STATE = ".quant_state."
"""A part of the names of other such tensors, which bitsandbytes writes."""
_DESCRIBED = (_QUANT_STATE.encode(), *(f'{end}"'.encode() for end in _DESCRIBING))
"""A header that has none of these in it has no such tensors. A regular expression would take five times as long."""
_LARGEST_DESCRIPTION = 1 << 18
_FIRST_RANGE = 3 << 15
"""Number of bytes that are read from the beginning of a safetensors file. The headers of most shards are shorter, so that one
request reads them: those of a model of 671 billion parameters have 70 kB.
"""
_FIRST_GGUF_RANGE = 1 << 20
_NEAR = 1 << 16
"""If two ranges of a file are at most this number of bytes apart, one request reads both."""
_MOST_BYTES = 1 << 30
"""Maximum number of bytes that are read from a hub for the headers of one model. A model of 671 billion parameters has 20 MB of
headers and index.
"""
_MOST_FILES = 20_000
_TOGETHER, _TOGETHER_IN_A_FILE = 16, 4
"""How many files are read at once, and how many ranges of each of them. Together these are 64 requests, fewer than the 100
connections of the HTTP client.
"""
_TRIES = 3
_PAUSE_S = 0.5
_MEANINGS = {
    401: "it asks for a token (HF_TOKEN, `hf auth login`)",
    403: "the token may not read it",
    404: "there is no such file",
    429: "it allows no more requests for now, and more with a token (HF_TOKEN, `hf auth login`)",
}
_SLOWEST = 1000
"""The minimum rate, in bytes per second, at which a hub must send an answer. A slower download is stopped with an error. The time
that may pass before the answer begins (HF_HUB_DOWNLOAD_TIMEOUT) is not counted.
"""
_ENCODINGS = ("identity", "gzip", "deflate")
"""The values of the header `Content-Encoding` that are accepted. With other compressions, or several on top of each other, a few
bytes can decompress to any size.
"""
_TRANSIENT = (429, 500, 502, 503, 504)
MODEL_FILES = ["*.json", "*.txt", "*.model", "*.py", "*.jinja"]
"""Patterns for the names of the files that a model needs in addition to its weights, such as its configuration."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """The address of a model on a hub: `hf://org/name`, `hf://org/name@revision`, or `hf://org/name/path` for a file or a folder of
    the repository.
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
        words = [*(found["repo"].split("/") if found is not None else ()), *(path.split("/") if path else ())]
        if found is None or not all(map(_is_name, words)) or not is_printable(revision or ""):
            raise UserError(
                f"{printable(text, 200)} is no address of a model on a hub: write {SCHEME}org/name, {SCHEME}org/name@revision or "
                f"{SCHEME}org/name/file.gguf"
            )
        return cls(found["repo"], revision, path)

    def of_revision(self, revision: str) -> HubAddress:
        """Return the address of the same model in `revision`, a branch, tag or commit. Raises UserError if this address names one
        already.
        """
        if self.revision is not None:
            raise UserError(f"{self} names a revision: leave out --revision")
        return HubAddress.parse(str(dataclasses.replace(self, revision=revision)))

    @property
    def title(self) -> str:
        """The name of the model, as it is shown on the screen and in reports."""
        return f"{self.repo}/{self.path}" if self.path else self.repo

    def __str__(self) -> str:
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return f"{SCHEME}{self.repo}{revision}{f'/{self.path}' if self.path else ''}"

    def listing(self) -> HubModel:
        """Ask the hub which files the model has, and return them. Raises UserError."""
        with _faults(self):
            from huggingface_hub import constants  # HfApi, which says the same, takes long to import

            endpoint = constants.ENDPOINT
            if not is_printable(endpoint) or not urlsplit(endpoint).hostname:
                raise UserError(f"HF_ENDPOINT is no address of a server: {printable(endpoint, 100)}")
            revision = quote(self.revision or "main", safe="")
            reader = _Reader(self)
            answer = reader.read(f"{endpoint}/api/models/{self.repo}/revision/{revision}?blobs=true", 0, LARGEST_JSON)
            try:
                said = as_type(msgspec.json.decode(answer), _Repository)
            except (UserError, msgspec.DecodeError, RecursionError) as error:
                raise UserError(f"{self}: the hub's list of files can't be read: {one_line(error)}") from None
            if _COMMIT.fullmatch(said.sha) is None:
                raise UserError(f"{self}: the hub names no commit: {printable(said.sha)!r}")
            files = {
                file.rfilename: file.size for file in said.siblings if all(map(_is_name, file.rfilename.split("/")))
            }
            model = HubModel(self, said.sha, endpoint, files)
            if self.path and not any(name == self.path or name.startswith(f"{self.path}/") for name in files):
                raise UserError(f"{self}: there is no {printable(self.path, 200)} in this repository")
            return model


class _File(msgspec.Struct):
    rfilename: str
    size: int | None = None


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
    """The size of each file in bytes, by the file's path in the repository. None if the hub does not tell the size."""

    def downloaded(self, cache: Path) -> Path | None:
        """Return the folder or file of the model in the Hugging Face cache, or None unless all its weights are there. cache: the
        folder of the cache.
        """
        folder = cache / f"models--{self.address.repo.replace('/', '--')}" / "snapshots" / self.commit
        wanted = [*self._side_files(), *self._to_download()]
        for name in wanted:
            try:
                if os.path.getsize(folder / name) != self.sizes[name]:
                    return None
            except OSError:
                return None
        return folder / self.address.path if wanted else None

    def headers(self, on_progress: Progress = ignore) -> Path:
        """Return the path of a folder (or file) that holds the headers of the model as sparse files. Headers that were read before
        are not read again. Raises UserError.
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
        place = re.sub(r"\W+", "-", self.endpoint.partition("://")[2])
        folder = cache_folder() / HEADERS / place / self.address.repo.replace("/", "--") / self.commit
        missing = [name for name in (*wanted, *readable) if not _is_there(folder / name, self.sizes[name])]
        with _faults(self.address), ThreadPoolExecutor(_TOGETHER) as pool:
            reader = _Reader(self.address)
            jobs = [pool.submit(reader.save, self._url(name), folder / name, self._size(name)) for name in missing]
            try:
                for done, job in enumerate(as_completed(jobs), 1):
                    job.result()
                    on_progress("reading headers", done, len(jobs))
            except BaseException:
                reader.stop()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return folder / self.address.path

    def download(self, on_progress: Progress = ignore, cancelled: IsCancelled = never) -> Path:
        """Download the model into the Hugging Face cache, and return the path of its folder or file there. on_progress: called with
        numbers of bytes. Raises UserError, and Cancelled if `cancelled` returns True.
        """
        with _faults(self.address):
            from huggingface_hub import constants, snapshot_download

            self._refuse_full_disk(Path(constants.HF_HUB_CACHE))
            names = self._to_download()
            beside = [] if self.address.path in names else MODEL_FILES
            at = f"{self.address.path}/" if beside and self.address.path else ""
            folder = snapshot_download(
                self.address.repo,
                revision=self.commit,
                allow_patterns=[*map(glob.escape, names), *(at + pattern for pattern in beside)],
                tqdm_class=_progress_bar(self, on_progress, cancelled),
            )
        return Path(folder) / self.address.path

    def _refuse_full_disk(self, cache: Path) -> None:
        place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
        free = shutil.disk_usage(place).free
        if free < self.download_bytes:
            size = human_bytes(self.download_bytes)
            raise UserError(
                f"{self.address} has {size} of weights and the disk of {cache} has {human_bytes(free)} left; HF_HUB_CACHE names "
                "another folder"
            )

    @property
    def download_bytes(self) -> int:
        """The number of bytes of the weights that `download` fetches. Raises UserError if the hub does not say their sizes."""
        return sum(map(self._size, self._to_download()))

    @property
    def headers_alone(self) -> str:
        """A sentence which says that only the headers are on this machine, and how the model is downloaded."""
        size = human_bytes(self.download_bytes)
        return f"only the headers of {self.address} are here, not its {size} of weights: {hint('download')}"

    def _to_download(self) -> list[str]:
        weights = self._weight_files()
        return [name for name in weights if not name.endswith(PICKLES)] or weights

    def _weight_files(self) -> list[str]:
        found = self._files(lambda name: name.endswith((".safetensors", *PICKLES)))
        if self.address.path in self.sizes:
            return [part for part in _gguf_parts(self.address.path) if part in self.sizes] or [self.address.path]
        gguf = self._files(lambda name: name.endswith(".gguf"))
        if found or not gguf:
            return found
        if len(gguf) > 1 and sorted(gguf) != _gguf_parts(gguf[0]):
            raise UserError(
                f"{self.address} has {len(gguf)} GGUF files; name one of them, such as "
                f"{dataclasses.replace(self.address, path=min(gguf))}"
            )
        return gguf

    def _side_files(self) -> list[str]:
        return self._files(
            lambda name: name in _SIDE_FILES or _INDEX_FILE.fullmatch(name) is not None,
            beside=self.address.path in self.sizes,
        )

    def _files(self, matches: Callable[[str], bool], beside: bool = False) -> list[str]:
        """Return the files whose names satisfy `matches`, as paths in the repository. They are in the folder that the address names
        and, if this is the folder of a pipeline, in its subfolders. beside: whether the address names a file, so that files in the
        same folder are meant.
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
    """Return a checkpoint in which `CheckpointTensor.absent` is set for each tensor whose values are still on the hub.

    checkpoint: the checkpoint that was read from sparse files with only the headers of `model`.
    """
    tensors = {name: each if _describes(each) else _absent(each) for name, each in checkpoint.tensors.items()}
    return dataclasses.replace(checkpoint, tensors=tensors, headers_alone=model.headers_alone)


def _gguf_parts(path: str) -> list[str]:
    folder, slash, name = path.rpartition("/")
    return [folder + slash + part for part in gguf_parts(name)]


def _absent(tensor: CheckpointTensor) -> CheckpointTensor:
    # `dataclasses.replace` would take three times as long, and there may be 100,000 tensors.
    return CheckpointTensor(
        tensor.name,
        tensor.shape,
        tensor.dtype,
        tensor.file,
        tensor.start,
        tensor.nbytes,
        tensor.packed,
        tensor.refusal,
        True,
    )


def _describes(tensor: CheckpointTensor) -> bool:
    return tensor.nbytes <= _LARGEST_DESCRIPTION and (tensor.name.endswith(_DESCRIBING) or _QUANT_STATE in tensor.name)


def _is_name(word: str) -> bool:
    return (
        word not in ("", ".", "..") and is_printable(word) and not set(word) & set("\\:") and len(word.encode()) < 200
    )


def _is_there(path: Path, size: int | None) -> bool:
    try:
        return os.path.getsize(path) == size
    except OSError:
        return False


class _Reader:
    """Reads ranges of files from a hub. Several threads may use it at once."""

    def __init__(self, address: HubAddress) -> None:
        from huggingface_hub.utils import build_hf_headers

        self._address = address
        self._headers = {**build_hf_headers(), "accept-encoding": "identity"}
        self._lock = threading.Lock()
        self._left = _MOST_BYTES
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def save(self, url: str, path: Path, size: int) -> None:
        """Save the beginning of a weights file, with its header, as a sparse file of `size` bytes. Save any other file as a
        whole.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            if path.suffix == ".safetensors":
                self._save_safetensors(url, partial, size)
            elif path.suffix == ".gguf":
                self._save_gguf(url, partial, size)
            else:
                if size > LARGEST_JSON:
                    raise UserError(
                        f"{self._address}: {path.name} has {size:,} bytes, which are too many for such a file"
                    )
                partial.write_bytes(self.read(url, 0, size, size))
            os.replace(partial, path)
        finally:
            with suppress(OSError):
                partial.unlink()

    def _save_safetensors(self, url: str, partial: Path, size: int) -> None:
        start = self.read(url, 0, min(_FIRST_RANGE, size), size)
        length = 8 + int.from_bytes(start[:8], "little")
        if len(start) < length <= min(size, 8 + LONGEST_HEADER):  # the reader of the header refuses any other length
            start += self.read(url, len(start), length - len(start), size)
        _write_sparse(partial, start[:length], size)
        if any(part in start for part in _DESCRIBED):
            self._add_descriptions(url, partial, read_header(partial)[0].values())

    def _save_gguf(self, url: str, partial: Path, size: int) -> None:
        """Save the header of a GGUF file as a sparse file, `partial`, of `size` bytes. A GGUF file does not store the header's
        length, so ever longer ranges are read until the header is complete.
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
        spans: list[tuple[int, int]] = []
        for start, end in sorted(
            (each.start or 0, (each.start or 0) + each.nbytes) for each in tensors if _describes(each)
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

    def read(self, url: str, start: int, count: int, size: int | None = None) -> bytes:
        """Return `count` bytes of the file at `url`, from the offset `start` on. size: the size of the file; if None, fewer than
        `count` bytes may be returned. Raises UserError, and the errors of huggingface_hub.
        """
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        for attempt in range(1, _TRIES + 1):
            try:
                return self._read(url, start, count, size) if count else b""
            except HTTPError as error:
                refused = isinstance(error, HfHubHTTPError) and error.response.status_code not in _TRANSIENT
                if refused or attempt == _TRIES or self._stopped:
                    raise
                time.sleep(attempt * _PAUSE_S)
        raise AssertionError

    def _read(self, url: str, start: int, count: int, size: int | None) -> bytes:
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session, hf_raise_for_status

        headers = dict(self._headers)
        if size is not None:
            headers["range"] = f"bytes={start}-{start + count - 1}"
        content = bytearray()
        with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            if not response.is_success:  # the body is not needed and can have any size, so it is not read
                said_why = {name: text for name, text in response.headers.items() if name.startswith("x-error-")}
                hf_raise_for_status(type(response)(response.status_code, headers=said_why, request=response.request))
            if (encoding := response.headers.get("content-encoding", "identity")) not in _ENCODINGS:
                raise self._lie(f"its answer is compressed as {printable(encoding, 40)}", url)
            whole = response.status_code != 206
            if size is not None:
                said = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("content-range", ""))
                total = response.headers.get("content-length") if whole else said[2] if said else None
                if "content-encoding" in response.headers:
                    total = None  # the length is that of the compressed answer
                if (total is not None and total != str(size)) or (said and not whole and int(said[1]) != start):
                    raise self._lie(
                        f"its list of files says {size:,} bytes, its answer {printable(str(total), 40)}", url
                    )
            # A server that knows no ranges sends the file from its first byte on.
            wanted = count + (start if whole else 0)
            latest = time.monotonic() + constants.HF_HUB_DOWNLOAD_TIMEOUT + wanted / _SLOWEST
            for piece in response.iter_bytes():
                if time.monotonic() > latest:
                    raise UserError(f"{self._address}: the hub sends less than {_SLOWEST:,} bytes per second")
                self._count(len(piece))
                content += piece
                if len(content) > wanted and size is None:
                    raise self._lie(f"its answer has over {count:,} bytes", url)
                if len(content) > wanted:
                    break  # an answer that is read to its end, in contrast, leaves the connection open for the next request
        if size is not None and len(content) < wanted:
            raise self._lie(f"its answer ends after {len(content):,} of {wanted:,} bytes", url)
        return bytes(content[wanted - count : wanted] if size is not None else content)

    def _count(self, count: int) -> None:
        if self._stopped:
            raise Cancelled
        with self._lock:
            self._left -= count
        if self._left < 0:
            raise UserError(f"{self._address}: its headers have over {human_bytes(_MOST_BYTES)}, which are too many")

    def _lie(self, what: str, url: str) -> UserError:
        name = printable(unquote(url.rpartition("/")[2].partition("?")[0]), 100)
        return UserError(f"{self._address}: what the hub says of {name} can't be trusted: {what}")


def _write_sparse(path: Path, start: bytes, size: int) -> None:
    try:
        with open(path, "wb") as file:
            file.write(start)
            file.truncate(size)
    except (OSError, OverflowError) as error:
        raise UserError(f"can't write headers to {path.parent}: {one_line(error)}") from None


@contextmanager
def _faults(address: HubAddress) -> Iterator[None]:
    """A context manager that turns the errors of huggingface_hub into a UserError, which says what to do.

    In its `with` block, huggingface_hub logs nothing, because its log messages quote the server. Its telemetry is off, because it
    would first download a list of agents, and wait for this list whatever its size.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    level, silent = logging.get_verbosity(), constants.HF_HUB_DISABLE_TELEMETRY
    logging.set_verbosity(logging.CRITICAL)
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{address} is gated: accept its conditions on the hub with your account, and set HF_TOKEN or run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{address}: the model has no revision {printable(address.revision or 'main')}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{address}: the hub has no such model, or it is private and the token (HF_TOKEN, `hf auth login`) does not show it"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise UserError(
            f"{address}: HF_HUB_OFFLINE forbids asking the hub; without {SCHEME}, a downloaded model opens"
        ) from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        why = _MEANINGS.get(code, "")
        raise UserError(f"{address}: the hub answered with status {code}{f': {why}' if why else ''}") from None
    except errors.HTTPError as error:
        slow = "Timeout" in type(error).__name__
        why = "it did not answer in time; HF_HUB_DOWNLOAD_TIMEOUT sets the seconds" if slow else one_line(error)
        raise UserError(f"{address}: the hub can't be reached: {why}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{address} could not be read: {one_line(error, 300)}") from None
    finally:
        logging.set_verbosity(level)
        constants.HF_HUB_DISABLE_TELEMETRY = silent


def _progress_bar(model: HubModel, on_progress: Progress, cancelled: IsCancelled) -> type[Any]:
    """Return a class for huggingface_hub's progress bars, which draws nothing and calls `on_progress` instead. If far more bytes
    arrive than the weights of `model` have, the class raises UserError. If `cancelled` returns True, it raises Cancelled.
    """
    total = model.download_bytes
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{**named, "disable": True})
            self._counts_bytes, self._done = named.get("unit") == "B", 0

        def update(self, n: float | None = 1) -> None:
            if cancelled():
                raise Cancelled
            self._done += int(n or 0)
            if self._counts_bytes:
                if self._done > 2 * total + LARGEST_JSON:  # retries send bytes again; `total` lacks small files
                    raise UserError(
                        f"{model.address}: the hub sends more than the {human_bytes(total)} that its list of files says"
                    )
                on_progress("downloading", min(self._done, total), total)

    return Bar
