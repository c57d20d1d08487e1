"""Makes the input of `dtype-engine mcp` one that the package `mcp` can read and answer to."""

from __future__ import annotations

import json
import os
import re
import threading
from contextlib import suppress

HALF_A_PAIR = "\uffff"
"""Stands for half of a pair of surrogates in the messages that the server reads. Unicode says that no text has this character."""

_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
"""Matches an escape in JSON, or those of a pair of surrogates; as a group, that of half of a pair."""


def repair_input() -> None:
    """Put a pipe in place of standard input, into which a thread copies every line with `HALF_A_PAIR` for each half of a pair, and
    with an object for parameters that are none.

    The package `mcp` leaves other lines unanswered, and the agent waits in vain.
    """
    wire, (end, start) = os.dup(0), os.pipe()
    os.dup2(end, 0)
    os.close(end)

    def copy() -> None:
        with suppress(OSError), open(start, "wb", buffering=0) as pipe, open(wire, "rb") as lines:
            for line in lines:
                left = memoryview(with_object_as_parameters(without_half_pairs(line)))
                while left:
                    left = left[pipe.write(left) :]

    threading.Thread(target=copy, name="read the calls", daemon=True).start()


def without_half_pairs(line: bytes) -> bytes:
    r"""Return a line of JSON in which `\uffff` stands for each escape of half of a pair of surrogates."""
    return _ESCAPE.sub(lambda found: b"\\uffff" if found[1] else found[0], line)


def with_object_as_parameters(line: bytes) -> bytes:
    """Return a line of JSON in which an object that every method refuses stands for parameters that are no object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(message, dict) or isinstance(message.get("params"), dict | None):
        return line
    return json.dumps(message | {"params": {"_meta": message["params"]}}).encode() + b"\n"
