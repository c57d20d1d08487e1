"""Runs a model's chat template, and tries its tokenizer's expressions, in a child process with limits on time and memory."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtype_engine.core.errors import NoForward, UserError, one_line
from dtype_engine.core.hints import hint
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.runtime.inputs.limited_child import OUT_OF_MEMORY

Conversation = tuple[str, list[dict[str, Any]], bool]
"""The origin of a conversation, its messages, and whether its text ends with the words that begin the model's answer."""
_CHILD = Path(__file__).with_name("limited_child.py")
_MEMORY = 1 << 30
_MEMORY_PER_CHARACTER = 256
"""About twice the bytes that the tokenizers library needs for a character of text and its share of a word."""
_START_SECONDS = 60
_BUSY = 4
"""How many times longer than its computing a child may take, because other processes are running."""
_EXPANDING = ('"Replace"', '"Regex"', '"Precompiled"')
"""The parts of a tokenizer that can make a text much longer than it is, or take much longer than it is long."""
_DECODER_GROWTH = 1000
_TIME_IS_UP = getattr(signal, "SIGPROF", 0)
_tried: set[bytes] = set()
"""Digests of the tokenizers and texts that stayed within the limits in this process."""


class PartFails(UserError):
    """The tokenizer, a processor or the chat template of a model's folder fails for an input."""


class _Ended(Exception):
    """The child was ended by a limit. The message completes a sentence that begins with the name of what it ran."""


class _Failed(_Ended):
    """The child ended by itself, with an error."""


def run_template(
    title: str, template: str, tokenizer: Any, conversations: Sequence[Conversation], limits: InputLimits
) -> list[str]:
    """Return what `apply_chat_template(messages, tokenize=False)` of a tokenizer or processor makes of each conversation.

    template: the tokenizer's or the processor's own. tokenizer: names the special tokens that the template can insert. Raises
    UserError, which names the origin of the conversation, for a template that fails.
    """
    said = f"the chat template of {title}"
    job = {
        "job": "render",
        "template": template,
        "variables": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "conversations": [
            ([{key: value for key, value in message.items() if value is not None} for message in messages], opens)
            for _, messages, opens in conversations
        ],
        "bytes": limits.template_bytes,
    }
    try:
        answers = _run(job, limits, _MEMORY, len(conversations))
    except _Ended as ended:
        raise UserError(f"{said} {ended}; {hint('no-chat')}") from None
    for (where, _, _), answer in zip(conversations, answers, strict=False):
        if "bytes" in answer:
            limits.refuse_file("template_bytes", f"{where}: the text that {said} makes", answer["bytes"])
        if "error" in answer:
            error = one_line(ValueError(answer["error"]))
            raise UserError(f"{where}: {said} refuses this conversation: {error}")
    return [answer["text"] for answer in answers]


def try_tokenizer(title: str, tokenizer: Any, texts: Sequence[str], limits: InputLimits) -> None:
    """Try the normalizers and expressions of a tokenizer on the texts. Raises NoForward if they take too much time or memory, and
    PartFails if they fail.

    Tokenizers without replacements and expressions are not tried, because they can't take much, and neither are tokenizers written
    in Python.
    """
    growth = _growth(_state(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)))
    if growth > _DECODER_GROWTH:
        raise NoForward(
            f"{title}: no forward pass: the decoder in its tokenizer.json may make {growth:,} characters of one; {hint('tensors')}"
        )
    parts = _parts(tokenizer)
    if not any(name in json.dumps(parts) for name in _EXPANDING):
        return
    job = {"job": "split", "texts": list(texts), **parts}
    digest = hashlib.sha256(json.dumps(job).encode()).digest()
    if digest in _tried:
        return
    longest = max(map(len, texts), default=0)
    try:
        _run(job, limits, _MEMORY + _MEMORY_PER_CHARACTER * longest, len(texts) + sum(map(len, texts)) // 1_000_000)
    except _Failed as failed:
        raise PartFails(f"{title}: its tokenizer.json {failed}") from None
    except _Ended as ended:
        raise NoForward(f"{title}: no forward pass: its tokenizer.json {ended}; {hint('tensors')}") from None
    _tried.add(digest)


def stays_in_limits(title: str, tokenizer: Any, text: str) -> bool:
    """Return whether a tokenizer encodes and decodes the text within the default limits. Raises PartFails if it fails."""
    try:
        try_tokenizer(title, tokenizer, [text], InputLimits())
    except NoForward:
        return False
    return True


def _parts(tokenizer: Any) -> dict[str, Any]:
    """Return the parts of a tokenizer that run before tokens are looked up, as plain data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts: dict[str, Any] = {name: _state(getattr(backend, name, None)) for name in ("normalizer", "pre_tokenizer")}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    parts["added"] = [(token.content, {flag: getattr(token, flag) for flag in flags}) for token in tokens]
    return parts


def _state(step: Any) -> Any:
    """Return a step of a tokenizer as in its tokenizer.json, or None if there is no such step or it is written in Python."""
    try:
        return None if step is None else json.loads(step.__getstate__())
    except Exception:  # what the tokenizers library raises for a step that is written in Python
        return None


def _growth(decoder: Any) -> int:
    """Return how many characters a decoder's replacements make at most of one."""
    if not isinstance(decoder, dict):
        return 1
    if decoder.get("type") == "Replace":
        taken = len(decoder["pattern"].get("String", ""))
        return max(1, math.ceil(len(decoder["content"]) / taken) if taken else len(decoder["content"]) + 1)
    return math.prod(map(_growth, decoder.get("decoders", ())))


def _run(job: dict[str, Any], limits: InputLimits, memory: int, pieces: int) -> list[dict[str, Any]]:
    """Run a job of `limited_child.py` and return its answers. Raises _Ended."""
    seconds = limits.template_seconds
    too_long = f"needs over {seconds:,} s; --input-limit template-seconds={2 * seconds} allows twice as much"
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_CHILD)],
            input=json.dumps({**job, "seconds": seconds, "memory": memory}).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_START_SECONDS + _BUSY * seconds * max(1, pieces),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _Ended(too_long) from None
    except OSError as error:
        raise UserError(f"can't start a process for the tokenizer: {error.strerror}") from None
    if done.returncode == 0:
        answers: list[dict[str, Any]] = json.loads(done.stdout)
        return answers
    if done.returncode == -_TIME_IS_UP:
        raise _Ended(too_long)
    if done.returncode == OUT_OF_MEMORY or done.returncode < 0:  # Rust ends the process if it gets no memory
        raise _Ended(f"needs more memory than the {memory >> 20:,} MiB that it may have")
    raise _Failed("makes the process that runs it fail")
