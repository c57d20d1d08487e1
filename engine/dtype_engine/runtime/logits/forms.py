"""Opens a file of outputs by the reader of its form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dtype_engine.core.errors import UserError
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.regular_files import open_regular, reading
from dtype_engine.core.user_folders import expanded
from dtype_engine.runtime.logits.llama_form import MAGIC, read_llama
from dtype_engine.runtime.logits.outputs import LogitsFile
from dtype_engine.runtime.logits.own_form import read_own
from dtype_engine.runtime.logits.vllm_form import read_vllm


class Form(NamedTuple):
    begins: Callable[[bytes], bool]
    """Whether a file of this form may begin with these 16 bytes."""
    read: Callable[[Path, InputLimits, frozenset[int]], LogitsFile]
    """A function of the path, the limits on tokens, and the ids of the model's tokens that begin a text."""


FORMS = (
    Form(lambda head: head.startswith(MAGIC), read_llama),
    Form(lambda head: head[4:8] == bytes(4), read_own),  # the length of the header, which is under 2**32
    Form(lambda head: head.lstrip().startswith(b"{"), read_vllm),
)
"""All forms. A file is read by the first form with which it begins."""


def open_logits(path: Path, limits: InputLimits, bos: frozenset[int]) -> LogitsFile:
    """Read the header and the tokens of a file of outputs. Raises UserError if it can't be read or has none of the forms."""
    path = expanded(path)
    with reading(path), open_regular(path) as file:
        head = file.read(16)
    form = next((form for form in FORMS if form.begins(head)), None)
    if form is None:
        raise UserError(
            f"{path} is no file of outputs: give one that drift --save-logits, llama-perplexity --kl-divergence-base or vLLM "
            "(JSON Lines with prompt_logprobs) has written"
        )
    return form.read(path, limits, bos)
