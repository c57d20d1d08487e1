"""Libraries that would write to the terminal, which may be showing the app."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Keep libraries from writing to the terminal, which may be showing the app."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported, which transformers does
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            yield
        finally:
            if "transformers" in sys.modules:  # whoever imported it
                silence_transformers()


def silence_transformers() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
