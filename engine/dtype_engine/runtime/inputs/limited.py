"""Runs a model's chat template, and tries its tokenizer on texts, in a child process with limits on time and memory."""

from __future__ import annotations

import hashlib
import json
import math
import re
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
"""(its origin, for error messages; its messages; whether the chat template adds the words with which the model's answer begins)"""
_CHILD = Path(__file__).with_name("limited_child.py")
_MEMORY = 1 << 30
_MEMORY_PER_CHARACTER = 256
"""How many bytes the child process may use for each character of the longest text: about twice what the tokenizers library needs.
"""
_START_SECONDS = 60
_BUSY = 4
"""How many times as long a child process may run as its limit on CPU time, because other processes may be using the processors."""
_EXPANDING = frozenset({"Replace", "Split", "Precompiled"})
"""The types of tokenizer steps that can make a text many times as long, or whose time can grow much faster than the text."""
_LONGEST_SETTINGS = 10_000
"""A tokenizer whose steps have settings of more characters is also tried, because `Prepend` can have a text of any length."""
_DECODER_GROWTH = 1000
_TEMPLATE_COPIES = 16
_tried: set[bytes] = set()
"""SHA-256 digests of (tokenizer, texts) that this process has tried and that stayed within the limits."""


class PartFails(UserError):
    """Raised if a tokenizer, a processor or a chat template in a model's folder fails on an input."""


class _Ended(Exception):
    """Raised if a limit ended a child process. The message continues a sentence that begins with what the child ran."""


class _Failed(_Ended):
    """Raised if a child process failed by itself, before it reached a limit."""


def _as_templates_get(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as transformers passes it to a template: from 5.23 on, without the keys whose value is None."""
    import transformers

    keeps_none = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
    return {key: value for key, value in message.items() if keeps_none or value is not None}


def run_template(
    title: str, template: str, tokenizer: Any, conversations: Sequence[Conversation], limits: InputLimits
) -> list[str]:
    """Return the texts that `apply_chat_template(messages, tokenize=False)` would return for the conversations.

    tokenizer: has the special tokens that the template can insert. Raises UserError if the template fails or exceeds the limits.
    """
    said = f"the chat template of {title}"
    job = {
        "job": "render",
        "template": template,
        "variables": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "conversations": [
            ([_as_templates_get(message) for message in messages], opens) for _, messages, opens in conversations
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
    """Try the normalizers and regular expressions of a tokenizer on the texts, in a child process. Raises PartFails if they fail.
    Raises NoForward if they exceed the limits on time or memory, if the decoder or the post-processor expands a text too much, or
    if the post-processor would add more tokens to the texts than the limit.
    Tokenizers whose few steps can't expand a text much, and tokenizers written in Python, are not tried.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    copies, added = _copies(_state(getattr(backend, "post_processor", None)))
    limits.refuse_model("tokens", title, "the post-processor in its tokenizer.json", added * len(texts))
    if copies > _TEMPLATE_COPIES:
        raise NoForward(
            f"{title}: no forward pass: the post-processor in its tokenizer.json repeats a text {copies:,} times; {hint('tensors')}"
        )
    growth = _growth(_state(getattr(backend, "decoder", None)))
    if growth > _DECODER_GROWTH:
        raise NoForward(
            f"{title}: no forward pass: the decoder in its tokenizer.json may make {growth:,} characters of one; {hint('tensors')}"
        )
    parts = _parts(tokenizer)
    if not _may_expand(parts):
        return
    job = {"job": "split", "texts": list(texts), **parts}
    digest = hashlib.sha256(json.dumps(job).encode()).digest()
    if digest in _tried:
        return
    longest = max(map(len, texts), default=0)
    try:
        _run(job, limits, _MEMORY + _MEMORY_PER_CHARACTER * longest, 1 + sum(map(len, texts)) // 1_000_000)
    except _Failed as failed:
        raise PartFails(f"{title}: its tokenizer.json {failed}") from None
    except _Ended as ended:
        raise NoForward(f"{title}: no forward pass: its tokenizer.json {ended}; {hint('tensors')}") from None
    _tried.add(digest)


def _parts(tokenizer: Any) -> dict[str, Any]:
    """Return the settings of the steps that a tokenizer runs before it looks up tokens, in the form of tokenizer.json."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts: dict[str, Any] = {name: _state(getattr(backend, name, None)) for name in ("normalizer", "pre_tokenizer")}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    parts["added"] = [(token.content, {flag: getattr(token, flag) for flag in flags}) for token in tokens]
    return parts


def _may_expand(parts: dict[str, Any]) -> bool:
    """Return whether a tokenizer's steps may make a text much longer or need much time. This is also assumed of several steps of
    one type, because each `ByteLevel`, for example, can double a text.
    """
    settings = json.dumps([parts["normalizer"], parts["pre_tokenizer"]])
    types = [name for name in re.findall(r'"type": "(\w+)"', settings) if name != "Sequence"]
    return len(settings) > _LONGEST_SETTINGS or len(types) > len(set(types)) or not _EXPANDING.isdisjoint(types)


def _state(step: Any) -> Any:
    """Return the settings of a tokenizer's step in the form of tokenizer.json, or None for a step that is written in Python."""
    try:
        return None if step is None else json.loads(step.__getstate__())
    except Exception:  # what the tokenizers library raises for a step that is written in Python
        return None


def _growth(decoder: Any) -> int:
    """Return the maximum number of characters that the replacements of a tokenizer's decoder can make of one character."""
    if not isinstance(decoder, dict):
        return 1
    if "" in (decoder.get("suffix"), decoder.get("word_delimiter_token")):
        return 2  # the decoder puts a space beside each character
    if decoder.get("type") == "Replace":
        taken = len(decoder["pattern"].get("String", ""))
        return max(1, math.ceil(len(decoder["content"]) / taken) if taken else len(decoder["content"]) + 1)
    return math.prod(map(_growth, decoder.get("decoders", ())))


def _copies(processor: Any) -> tuple[int, int]:
    """Return the maximum number of (copies of a text, special tokens) that a tokenizer's post-processor can insert."""
    if not isinstance(processor, dict):
        return 1, 0
    sizes = {name: len(token["ids"]) for name, token in processor.get("special_tokens", {}).items()}
    templates = (processor.get("single", ()), processor.get("pair", ()))
    copies = max(1, *(sum("Sequence" in piece for piece in pieces) for pieces in templates))
    special = [[piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece] for pieces in templates]
    added = max(sum(sizes.get(name, 0) for name in names) for names in special)
    for step in map(_copies, processor.get("processors", ())):  # each works on what the last one made
        copies, added = copies * step[0], added * step[0] + step[1]
    return copies, added


def _run(job: dict[str, Any], limits: InputLimits, memory: int, allowances: int) -> list[dict[str, Any]]:
    """Run `limited_child.py` in a child process, and return the list that it writes.

    job: what the child runs, and the texts to run it on. memory: how many bytes the child may use in addition to the imported
    libraries. allowances: the seconds in `limits` are multiplied by this. Raises _Ended if the child exceeds a limit, and _Failed
    if it fails by itself.
    """
    seconds = limits.template_seconds
    too_long = f"needs over {seconds:,} s; --input-limit template-seconds={2 * seconds} allows twice as much"
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_CHILD)],
            input=json.dumps({**job, "seconds": seconds, "memory": memory}).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_START_SECONDS + _BUSY * seconds * max(1, allowances),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _Ended(too_long) from None
    except OSError as error:
        raise UserError(f"can't start a process for the tokenizer: {error.strerror}") from None
    if done.returncode == 0:
        answers: list[dict[str, Any]] = json.loads(done.stdout)
        return answers
    if done.returncode == -signal.SIGPROF:
        raise _Ended(too_long)
    if done.returncode == OUT_OF_MEMORY or done.returncode < 0:  # Rust ends the process if it gets no memory
        raise _Ended(f"needs more memory than the {memory >> 20:,} MiB that it may have")
    raise _Failed("makes the process that runs it fail")
