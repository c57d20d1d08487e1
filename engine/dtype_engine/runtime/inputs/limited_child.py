"""Runs code that comes with a model's tokenizer in a child process, with limits on time and memory.

The code is a chat template, which is a program, or a tokenizer's normalizers and regular expressions, which can expand a text or
backtrack without end. `limited.py` writes a JSON object (the job) to the standard input of this file, and reads a JSON list from
its standard output. This file imports neither torch nor this package.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

OUT_OF_MEMORY = 3
"""The exit status of the child process if it needs more memory than it may use."""


def render(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Apply a chat template to conversations. Returns a list of {"text": the resulting text}, which ends early with {"error":
    message} if the template fails, or with {"bytes": length} if its text is too long.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    answers: list[dict[str, Any]] = []
    limit_memory(job["memory"])
    for messages, opens in job["conversations"]:
        limit_seconds(job["seconds"])
        try:
            (text,), _ = render_jinja_template(
                conversations=[messages], chat_template=job["template"], add_generation_prompt=opens, **job["variables"]
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            return [*answers, {"error": str(error) or type(error).__name__}]
        if len(text.encode("utf-8", "surrogatepass")) > job["bytes"]:
            return [*answers, {"bytes": len(text.encode("utf-8", "surrogatepass"))}]
        answers.append({"text": text})
    return answers


def split(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Normalize each text and split it into words, as the tokenizer does before it looks up tokens. Returns an empty list."""
    from tokenizers import AddedToken, Tokenizer

    model = {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}
    parts = {name: job[name] for name in ("normalizer", "pre_tokenizer")}
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts}))
    for content, settings in job["added"]:
        tokenizer.add_tokens([AddedToken(content, **settings)])
    limit_memory(job["memory"])
    limit_seconds(job["seconds"] * (1 + sum(map(len, job["texts"])) // 1_000_000))
    for text in job["texts"]:
        tokenizer.encode(text, add_special_tokens=False)
    return []


def limit_memory(more: int) -> None:
    """On Linux, limit the address space of this process to its current size plus `more` bytes."""
    if sys.platform.startswith("linux"):
        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def limit_seconds(seconds: int) -> None:
    """Let the operating system end this process after `seconds` more seconds of CPU time, even inside a function in C or Rust."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    request = json.load(sys.stdin)
    try:
        result = {"render": render, "split": split}[request["job"]](request)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    json.dump(result, sys.stdout)
