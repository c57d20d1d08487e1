"""Errors that say that a resource of the system ran out, in whatever type a library wraps them."""

from __future__ import annotations

import errno
import os

import pytest

from dtype_engine.cli.program import unexpected
from dtype_engine.core.errors import exhausted, lacks_memory

MEMORY = "there is not enough memory for this"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), MEMORY),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), MEMORY),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            MEMORY,
        ),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), MEMORY),
        (
            OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
            "Too many open files: raise the limit, as by `ulimit -n 1024`",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']"),
            "no folder for temporary files can be written: set TMPDIR to one that can",
        ),
        (RuntimeError("can't start new thread"), "no more threads can be started: raise the limit, `ulimit -u`"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.json"),
            "can't read or write x.json: No space left on device: free some space there, or write elsewhere",
        ),
    ],
)
def test_exhausted_resource_is_named_with_what_to_do(error: Exception, says: str) -> None:
    assert unexpected(error) == says
    assert exhausted(error)
    assert lacks_memory(error) == (says == MEMORY)


def test_other_errors_exhaust_nothing() -> None:
    assert exhausted(ValueError("no such weight")) == ""
    assert "this is a fault of the program or of the file" in unexpected(ValueError("no such weight"))
