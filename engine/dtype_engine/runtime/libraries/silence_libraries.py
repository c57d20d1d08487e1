"""Keeps libraries from writing to the terminal, in which the app may be running."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_STDERR = threading.RLock()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings, log messages and progress bars of libraries off the terminal during the `with` block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")  # tqdm reads this when transformers imports it
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("LOGURU_AUTOINIT", "False")  # compressed-tensors logs text from config.json with loguru
        logging.getLogger("transformers").setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            if "transformers" in sys.modules:
                silence_transformers()


@contextmanager
def no_stderr() -> Iterator[None]:
    """Discard what Python code writes to `sys.stderr` in the `with` block: compressed-tensors logs names without escaping them."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


@contextmanager
def without_panic_message(drop: bool = False) -> Iterator[None]:
    """Hold back what is written to standard error during the `with` block, also directly to its file descriptor: libraries in Rust
    write a message when they panic, and libtiff and mpg123 write warnings about damaged files.

    What was written is discarded if the block raises, or if `drop` is True. Otherwise it is written when the block ends. Only one
    thread at a time can be in such a block.
    """
    with _STDERR, contextlib.ExitStack() as stack:
        try:
            written = stack.enter_context(tempfile.TemporaryFile())
            stderr = os.dup(2)
        except OSError:  # there is no place for such a file, or standard error is closed
            yield
            return
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException:
            written.truncate(0)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            if drop:
                written.truncate(0)
            with contextlib.suppress(OSError):
                os.write(2, written.read())


def silence_transformers() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
