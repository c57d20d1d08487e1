"""A checkpoint's file that is cut short, or whose disk fails, while its weights are mapped.

To read a page that a mapping has and its file has no more is the signal SIGBUS, in whatever thread reads it, and ends the process
without a word: in the app with the session's last key, and a terminal that is left raw. So the signal has a handler here that puts
empty memory in the place of the missing pages, of checkpoints' files alone, and notes the file. What was read then is not true, and
`unchanged` makes an error of it. Linux on x86-64 and ARM64; elsewhere the signal does what it did.

The handler is Python, called by ctypes in the thread that reads: not in the midst of anything of the interpreter's, since what
reads weights is a copy or a kernel.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.file_identity import FileIdentity, refuse_changed
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.text import printable

_SUPPORTED = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_SA_SIGINFO = 4
_BUS_ADRERR = 2
_MAP_FIXED = 0x10
_ADDRESS_AT = 16
"""Where siginfo_t has the address, on 64-bit Linux (sigaction(2))."""


class _SigAction(ctypes.Structure):
    """struct sigaction, as glibc and musl have it on x86-64 and ARM64."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_watched: frozenset[tuple[int, str]] = frozenset()
"""Inode and path of the files whose mappings are mended. Replaced, never changed: the handler may read it at any moment."""
_cut: frozenset[str] = frozenset()
"""Paths of those that were found to lack pages."""
_before = _SigAction()
_installed: Any = None
_page = mmap.PAGESIZE
_MOST_REPEATS = 1000
_repeats = 0
"""How often in a row a page was found mended already: another thread was faster, or the signal is not of a file."""


def identified(files: Iterable[Path]) -> tuple[FileIdentity, ...]:
    """Files as they are before anything is read of them, and from now on watched. Raises UserError for one that is not there."""
    identities = tuple(map(FileIdentity.of, files))
    watch(identities)
    return identities


def watch(files: Iterable[FileIdentity]) -> None:
    """From now on a page of these that is missing when it is read is no end of the process."""
    global _watched
    _watched = _watched.union((file.inode, os.path.realpath(file.path)) for file in files)
    if _SUPPORTED and _installed is None and _watched:
        _install()


def was_cut(files: Iterable[FileIdentity]) -> FileIdentity | None:
    """The first of the files that lacked pages when they were read, if any did."""
    if not _cut:
        return None
    return next((file for file in files if os.path.realpath(file.path) in _cut), None)


@contextmanager
def unchanged(files: tuple[FileIdentity, ...]) -> Iterator[None]:
    """Refuse a block that reads these files, and all that it read of them, if one is not what was opened.

    Raises UserError that names the file and says how it changed.
    """
    watch(files)
    refuse_unreadable(files)
    try:
        yield
    except Cancelled:
        raise
    except (
        Exception
    ):  # whatever failed may have failed because of it: write(2) says "Bad address" of a page that is missing
        refuse_unreadable(files)
        raise
    refuse_unreadable(files)


def refuse_unreadable(files: tuple[FileIdentity, ...]) -> None:
    """Raise UserError for the first of the files that is not what was opened, or lacked pages when it was read."""
    refuse_changed(files)
    if (file := was_cut(files)) is not None:
        raise UserError(
            f"{printable(str(file.path), 500)} was cut short while it was read, so what is read of it now can't be trusted; "
            "open the model again"
        )


def _install() -> None:
    global _installed
    _libc.sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    _libc.mmap.restype = ctypes.c_void_p
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_missing_page)
    action = _SigAction(handler=ctypes.cast(handler, ctypes.c_void_p), flags=_SA_SIGINFO)
    if _libc.sigaction(signal.SIGBUS, ctypes.addressof(action), ctypes.addressof(_before)) == 0:
        _installed = handler  # it has to live as long as the process


def _missing_page(number: int, info: int, context: int) -> None:
    """The signal's handler: put empty memory where the page is missing, or give the signal to who had it before."""
    collects = gc.isenabled()
    gc.disable()
    code = _BUS_ADRERR
    try:
        code = ctypes.c_int.from_address(info + 8).value
        address = ctypes.c_void_p.from_address(info + _ADDRESS_AT).value or 0
        mended = code == _BUS_ADRERR and _mend(address)
    except Exception:
        mended = False
    if collects:
        gc.enable()
    if not mended:  # the instruction runs again, and the signal comes again
        _libc.sigaction(signal.SIGBUS, ctypes.addressof(_before), None)
        if code <= 0:  # a process sent it, and no instruction runs again
            os.kill(os.getpid(), number)


def _mend(address: int) -> bool:
    """Put empty memory from the page of an address to the end of its mapping, where that is one of a watched file.

    Its file ends before that page, and so has nothing of what follows. True too where another thread has just done it.
    """
    global _cut, _repeats
    for line in _mappings().splitlines():
        area, _, _, _, inode, *path = line.split(None, 5)
        first, _, end = area.partition(b"-")
        if not int(first, 16) <= address < int(end, 16):
            continue
        if not path:
            _repeats += 1
            return inode == b"0" and bool(_cut) and _repeats < _MOST_REPEATS
        name = os.fsdecode(path[0]).removesuffix(" (deleted)")
        known = next((watched for watched in _watched if watched[0] == int(inode) or watched[1] == name), None)
        if known is None:
            return False
        start = address - address % _page
        _cut, _repeats = _cut | {known[1]}, 0
        got = _libc.mmap(
            start,
            int(end, 16) - start,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED,
            -1,
            0,
        )
        return bool(got == start)
    return False


def _mappings() -> bytes:
    """What this process has mapped (proc(5)). Not through a file object: nothing here may wait for a lock."""
    file = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = bytearray()
        while piece := os.read(file, 1 << 16):
            content += piece
        return bytes(content)
    finally:
        os.close(file)


_libc: Any = ctypes.PyDLL(None) if _SUPPORTED else None
"""PyDLL keeps the interpreter's lock during a call: no other thread maps or unmaps anything through Python meanwhile."""
