"""Reads files and ranges of files from a hub. Everything that the hub answers is untrusted: lengths, speed and errors are checked.

Every byte that comes from a hub goes through `HubReader`, so that these limits hold for all of them.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import IO, Any
from urllib.parse import SplitResult, unquote, urlsplit

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled, UserError, one_line
from dtype_engine.core.replaced import replaced
from dtype_engine.core.text import is_printable, printable
from dtype_engine.core.units import human_bytes

_TRIES = 3
_PAUSE_S = 0.5
_PROGRESS_BYTES = 1 << 20
"""If this many bytes of a file have arrived since the last failure, tries are counted from 1 again."""
_MEANINGS = {
    401: "it asks for a token (HF_TOKEN, `hf auth login`)",
    403: "the token may not read it",
    404: "there is no such file",
    429: "it allows no more requests for now, and more with a token (HF_TOKEN, `hf auth login`)",
}
_TRANSIENT = (429, 500, 502, 503, 504)
_SLOWEST = 1000
"""The minimum rate of an answer in bytes per second, measured over HF_HUB_DOWNLOAD_TIMEOUT seconds at a time."""
_PHASES = 3
"""The connection, the request and the beginning of the answer may take HF_HUB_DOWNLOAD_TIMEOUT seconds each."""
_LOOK_S, _MOST_CPU_S = 0.2, 2.0
"""How often to look at the thread that waits for headers, and how many seconds of CPU time it may take."""
_TOO_LATE = "did not answer in time; HF_HUB_DOWNLOAD_TIMEOUT sets the seconds"
_ENCODINGS = {"identity": False, "gzip": True, "deflate": True}
"""Accepted `Content-Encoding`s, and whether they compress. With others, a few bytes could decompress to any size."""
_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS
_OVERHEAD = 1 << 16
"""How many bytes longer a compressed answer may be than the decompressed one, and how many of a redirect are read."""
_MOST_REDIRECTS = 10
_OWN_HUB = "https://huggingface.co"
"""The hub without HF_ENDPOINT."""
_HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.]{2,45}\])(:[0-9]{1,5})?")


class _TooLate(UserError):
    """Raised if the headers of an answer take too long, or too much comes before them. The thread that waits still runs."""


def hub_server() -> tuple[str, str | None]:
    """Return (the address of the hub without a user name and password, the header `Authorization` made of these or None). Raises
    UserError, whose sentence does not quote them.
    """
    from huggingface_hub import constants  # HfApi, which says the same, takes long to import

    parts = _parts_of_server(constants.ENDPOINT)
    user, at, host = parts.netloc.rpartition("@")
    return (
        f"{parts.scheme}://{host}{parts.path}",
        f"Basic {base64.b64encode(unquote(user).encode()).decode()}" if at else None,
    )


def _parts_of_server(address: str) -> SplitResult:
    try:
        parts = urlsplit(address)
        host = parts.netloc.rpartition("@")[2]
        valid = parts.scheme in ("http", "https") and _HOST.fullmatch(host) and (parts.port or 0) >= 0
    except ValueError:
        valid = None
    if not valid or parts.query or parts.fragment or "@" in parts.path or not is_printable(address):
        raise UserError(f"HF_ENDPOINT is no address of a server: {printable(address.rpartition('@')[2], 100)}")
    return parts


class HubReader:
    """Reads ranges of files from a hub. Several threads may use it at once."""

    def __init__(
        self,
        title: str,
        most_bytes: float = math.inf,
        most_seconds: float = math.inf,
        cancelled: IsCancelled = never,
    ) -> None:
        """title: the model's name in errors. most_bytes, most_seconds: limits for all answers together. cancelled: called for each
        piece; if it returns True, Cancelled is raised.
        """
        from huggingface_hub.utils import build_hf_headers

        self.title = title
        self._headers = {**build_hf_headers(), "accept-encoding": "identity"}
        if (password := hub_server()[1]) is not None:
            self._headers["authorization"] = password
        self._lock = threading.Lock()
        self._most = self._left = most_bytes
        self._seconds, self._latest = most_seconds, time.monotonic() + most_seconds
        self._cancelled = cancelled
        self._stopped = False

    def stop(self) -> None:
        """Make all calls that still run, in any thread, raise Cancelled at their next piece."""
        self._stopped = True

    def read(self, url: str, start: int, count: int, size: int | None = None) -> bytes:
        """Return `count` bytes of a file from `start` on. size: of the file; if None, fewer bytes may be returned. Raises
        UserError.
        """
        for attempt in range(1, _TRIES + 1):
            with self._tried_again(attempt):
                return b"".join(self._pieces(url, start, count, size)) if count else b""
        raise AssertionError

    def save(
        self, url: str, size: int, digest: str | None, file: IO[bytes], on_bytes: Callable[[int], object] = ignore
    ) -> None:
        """Write the whole file at `url`, of `size` bytes, to `file`. digest: of the content, or None if unknown. on_bytes: called
        with the number of bytes of each piece. Raises UserError, also if the content has another digest, and Cancelled.

        After a failure, only the missing bytes are requested again. Without a digest, all are, since the rest might be of another
        content.
        """
        done, attempt, hasher = 0, 1, content_hash(digest, size)
        while done < size:
            before = done
            with self._tried_again(attempt):
                for piece in self._pieces(url, done, size - done, size):
                    file.write(piece)
                    if hasher is not None:
                        hasher.update(piece)
                    done += len(piece)
                    on_bytes(len(piece))
            if hasher is None and done < size:
                file.seek(0)
                file.truncate()
                on_bytes(-done)
                done = 0
            attempt = 1 if done - before >= _PROGRESS_BYTES else attempt + 1
        if hasher is not None and hasher.hexdigest() != digest:
            raise self._lie("its content has another digest than its list of files says", url)

    @contextmanager
    def _tried_again(self, attempt: int) -> Iterator[None]:
        """A context manager that suppresses an error and waits if the request may be tried again. attempt: number of this try, from
        1.
        """
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        try:
            yield
        except HTTPError as error:
            refused = isinstance(error, HfHubHTTPError) and error.response.status_code not in _TRANSIENT
            if refused or attempt >= _TRIES or self._stopped:
                raise
            time.sleep(attempt * _PAUSE_S)

    def _pieces(self, url: str, start: int, count: int, size: int | None) -> Iterator[bytes]:
        from huggingface_hub.utils import hf_raise_for_status

        headers = dict(self._headers)
        if size is not None:
            headers["range"] = f"bytes={start}-{start + count - 1}"
        response = self._send(url, headers)
        try:
            if not response.is_success:  # the body is not needed and can have any size, so it is not read
                said_why = {
                    name: text
                    for name, text in response.headers.items()
                    if name.startswith("x-error-") and text.isascii()  # no others can be put into a response
                }
                hf_raise_for_status(type(response)(response.status_code, headers=said_why, request=response.request))
            whole = response.status_code != 206
            if size is not None:
                self._refuse_other_range(response, whole, start, size, url)
            # A server that knows no ranges sends the file from its first byte on.
            skip = start if whole else 0
            wanted = count + skip
            most = size if size is not None and whole else count
            arrived = 0
            for piece in self._decoded(response, most, url):
                useful = piece[max(0, skip - arrived) : max(0, wanted - arrived)]
                arrived += len(piece)
                if arrived > most:
                    raise self._lie(f"its answer has over {most:,} bytes", url)
                if useful:
                    yield useful
                if arrived > wanted:
                    break  # an answer that is read to its end, in contrast, leaves the connection open for the next request
        finally:
            response.close()
        if size is not None and arrived < wanted:
            raise self._lie(f"its answer ends after {arrived:,} of {wanted:,} bytes", url)

    def _send(self, url: str, headers: dict[str, str]) -> Any:
        """Return the response of a GET request after redirects, once its headers are here. A thread waits for them and is abandoned
        if they take too long, since the HTTP client limits only the time between two bytes. Raises UserError.
        """
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session

        client, seconds = get_session(), constants.HF_HUB_DOWNLOAD_TIMEOUT
        request = client.build_request("GET", url, headers=headers, timeout=seconds)
        answers: SimpleQueue[Any] = SimpleQueue()
        too_late, clocks = threading.Event(), list[int]()

        def ask() -> None:
            try:
                if hasattr(time, "pthread_getcpuclockid"):  # macOS lacks it
                    clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
                response = self._redirected(client, request)
            except BaseException as error:
                answers.put(error)
                return
            answers.put(response)
            if too_late.is_set():
                response.close()

        threading.Thread(target=ask, daemon=True).start()
        try:
            answer = self._waited(answers, clocks, time.monotonic() + _PHASES * seconds)
        except _TooLate:
            too_late.set()
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _waited(self, answers: SimpleQueue[Any], clocks: list[int], latest: float) -> Any:
        """Return the entry that a thread adds to `answers`. clocks: its CPU clock, if known. Raises _TooLate, also if the thread
        takes much CPU time: the HTTP client passes over any number of answers with status 100 to 199.
        """
        while (left := latest - time.monotonic()) > 0:
            with suppress(Empty):
                return answers.get(timeout=min(left, _LOOK_S))
            with suppress(OSError):  # the thread has just ended
                if any(time.clock_gettime(clock) > _MOST_CPU_S for clock in clocks):
                    raise _TooLate(f"{self.title}: the hub sends too much before the headers of its answer")
        raise _TooLate(f"{self.title}: the hub {_TOO_LATE}")

    def _redirected(self, client: Any, request: Any) -> Any:
        """Return the first response that is no redirect. The HTTP client would read and decompress the bodies of redirects, of any
        size; here a body is read only if it is short, which leaves the connection open for the next request.
        """
        for _ in range(_MOST_REDIRECTS + 1):
            response = client.send(request, stream=True, follow_redirects=False)
            if not response.has_redirect_location:
                return response
            url, last, request = str(request.url), request.url.scheme, response.next_request
            arrived = 0
            for piece in response.iter_raw():
                arrived += len(piece)
                if arrived > _OVERHEAD:
                    break
            response.close()
            if request is None or request.url.scheme not in ("https", last):
                raise self._lie("it redirects to what is no address of a server, or from https to http", url)
        raise self._lie(f"it redirects over {_MOST_REDIRECTS} times", url)

    def _refuse_other_range(self, response: Any, whole: bool, start: int, size: int, url: str) -> None:
        said = re.fullmatch(r"bytes (\d{1,20})-\d{1,20}/(\d{1,20})", response.headers.get("content-range", ""))
        total = response.headers.get("content-length") if whole else said[2] if said else None
        if "content-encoding" in response.headers:
            total = None  # the length is that of the compressed answer
        if total is not None and total != str(size):
            raise self._lie(f"its list of files says {size:,} bytes, its answer {printable(total, 40)}", url)
        if said and not whole and int(said[1]) != start:
            raise self._lie(f"its answer begins at byte {int(said[1]):,}, although byte {start:,} was asked for", url)

    def _decoded(self, response: Any, most: int, url: str) -> Iterator[bytes]:
        """Yield the decompressed body: one piece for each piece that arrives, even if it is empty. In contrast, the client's
        `iter_bytes` omits empty pieces. most: the maximum bytes of the body. Raises UserError, also if the answer is too long.
        """
        encoding = response.headers.get("content-encoding", "identity")
        if encoding not in _ENCODINGS:
            raise self._lie(f"its answer is compressed as {printable(encoding, 40)}", url)
        if not _ENCODINGS[encoding]:
            yield from self._arriving(response)
            return
        decoder, arrived = zlib.decompressobj(_ZLIB_OR_GZIP), 0
        try:
            for piece in self._arriving(response):
                arrived += len(piece)
                if arrived > most + _OVERHEAD:
                    raise self._lie(f"its answer has over {most:,} bytes", url)
                yield decoder.decompress(piece, most + 1)
        except zlib.error as error:
            raise self._lie(f"its answer can't be decompressed ({one_line(error, 60)})", url) from None

    def _arriving(self, response: Any) -> Iterator[bytes]:
        """Yield the body of a response as it arrives. Raises UserError if it arrives too slowly, and Cancelled."""
        from huggingface_hub import constants

        period = constants.HF_HUB_DOWNLOAD_TIMEOUT
        waited, arrived, since = 0.0, 0, time.monotonic()
        for piece in response.iter_raw():
            waited += time.monotonic() - since  # without the time that the caller takes for each piece
            arrived += len(piece)
            if waited > period:
                if arrived < _SLOWEST * waited:
                    raise UserError(f"{self.title}: the hub sends less than {_SLOWEST:,} bytes per second")
                waited, arrived = 0.0, 0
            self._count(len(piece))
            yield piece
            since = time.monotonic()

    def _count(self, count: int) -> None:
        if self._stopped or self._cancelled():
            raise Cancelled
        if time.monotonic() > self._latest:
            raise UserError(
                f"{self.title}: the hub needs over {self._seconds:,.0f} seconds for the headers, which is too long"
            )
        with self._lock:
            self._left -= count
        if self._left < 0:
            raise UserError(f"{self.title}: its headers have over {human_bytes(int(self._most))}, which are too many")

    def _lie(self, what: str, url: str) -> UserError:
        name = printable(unquote(url.rpartition("/")[2].partition("?")[0]), 100)
        return UserError(f"{self.title}: what the hub says of {name} can't be trusted: {what}")


def content_hash(digest: str | None, size: int) -> Any:
    """Return the hash, of no bytes yet, whose result has to be `digest` for a content of `size` bytes: SHA-256, or git's SHA-1 of a
    blob, which begins with the size. None if there is no digest.
    """
    if digest is None:
        return None
    if len(digest) == 64:
        return hashlib.sha256(usedforsecurity=False)
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


@contextmanager
def hub_faults(title: str, revision: str) -> Iterator[None]:
    """A context manager that turns the errors of huggingface_hub into a UserError, which says what to do. title: the model's
    address. revision: the branch, tag or commit that is asked for.

    In its `with` block, huggingface_hub logs nothing, because its messages quote the server. It also sends no telemetry, because it
    would first download a list of agents, whose size is not limited.
    """
    _parts_of_server(os.environ.get("HF_ENDPOINT") or _OWN_HUB)  # the imports fail if it is no address
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import close_session, logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with replaced(constants, "HF_HUB_DISABLE_TELEMETRY", True):
            yield
    except _TooLate:
        close_session()  # ends the threads that still wait for headers
        raise
    except errors.GatedRepoError:
        raise UserError(
            f"{title} is gated: accept its conditions on the hub with your account, and set HF_TOKEN or run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{title}: the model has no revision {printable(revision)}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{title}: the hub has no such model, or it is private and the token (HF_TOKEN, `hf auth login`) does not show it"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise UserError(
            f"{title}: HF_HUB_OFFLINE forbids asking the hub; without hf://, a downloaded model opens"
        ) from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        why = _MEANINGS.get(code, "")
        raise UserError(f"{title}: the hub answered with status {code}{f': {why}' if why else ''}") from None
    except errors.HTTPError as error:
        slow = "Timeout" in type(error).__name__
        why = f"it {_TOO_LATE}" if slow else one_line(error)
        raise UserError(f"{title}: the hub can't be reached: {why}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of a file; those of connections are HTTPErrors
            raise UserError(
                f"{title} can't be saved: {os.strerror(error.errno)}; HF_HUB_CACHE names another folder for downloads, "
                "XDG_CACHE_HOME for headers"
            ) from None
        raise UserError(f"{title} could not be read: {one_line(error, 300)}") from None
    finally:
        logging.set_verbosity(level)
