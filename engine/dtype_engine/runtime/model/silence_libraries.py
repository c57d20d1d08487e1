"""Keeping libraries from writing to the terminal, in which the app may be running."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings, log messages and progress bars of libraries off the terminal while the block runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")  # tqdm reads this when transformers imports it
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            yield
        finally:
            if "transformers" in sys.modules:
                silence_transformers()


def silence_transformers() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
