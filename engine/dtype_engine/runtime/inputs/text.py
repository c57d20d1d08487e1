"""Turns calibration text into token ids: prompts, text files and JSONL files, cut into sequences."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dtype_engine.core.errors import UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.input_limits import CHARACTERS_PER_TOKEN, InputLimits
from dtype_engine.core.options import InputOptions
from dtype_engine.core.regular_files import read_text
from dtype_engine.core.text import printable
from dtype_engine.runtime.inputs.batch import Batch, Inputs
from dtype_engine.runtime.inputs.default_prompts import DEFAULT_PROMPTS
from dtype_engine.runtime.inputs.limited import Conversation, run_template, try_tokenizer
from dtype_engine.runtime.inputs.preprocessing import (
    learned_positions,
    no_tokenizer,
    parameters,
    random_ids,
    running,
    text_config,
    tokenizer_of,
)
from dtype_engine.runtime.inputs.validate import id_count
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.kv_cache import CACHE_FIELDS

TOKENS_PER_SEQUENCE = 512
_RANDOM_SEQUENCES, _RANDOM_TOKENS = 4, 128
_ANY_LENGTH = 10**9
_SHOWN_TOKENS = 40
_TEXT_KEYS = ("messages", "text", "prompt")
_JSONL = (".jsonl", ".ndjson")
_NO_CACHE = {"use_cache": False}
_CACHES = frozenset({"use_cache", *CACHE_FIELDS})
"""Arguments by which the user says whether and how the model keeps a KV cache or the state of a recurrence."""
BUILT_IN = "built-in prompts: Python code, prose, technical text, a sum"


@dataclass(frozen=True, slots=True)
class TextSample:
    """A text from the user: either plain text or the messages of a conversation."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    where: str = ""
    """Where the text comes from, for error messages: `prompt 2`, or a file and a line."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """The further entries of the text's line in a JSONL file, which the user's metrics receive."""


_DEFAULT_SAMPLES = tuple(TextSample(text, where="the built-in prompts") for text in DEFAULT_PROMPTS)


def text_inputs(model: LiveModel, options: InputOptions) -> Inputs:
    """Return sequences of token ids for a language model, an encoder, or an encoder and its decoder. Without a tokenizer, the ids
    are random. Raises UserError for a text that can't be used.
    """
    config = model.module.config
    longest = sequence_length(model, options)
    tokenizer = tokenizer_of(model)
    decoder = ("the decoder is given the encoder's tokens",) if getattr(config, "is_encoder_decoder", False) else ()
    if tokenizer is None:
        if options.prompts or options.texts or options.chat:
            raise UserError(
                f"{model.title} {no_tokenizer(model)}, so prompts and texts can't be used; leave them out for random token ids"
            )
        why = no_tokenizer(model)
        length = options.sequence_length or min(_RANDOM_TOKENS, longest)
        rows = random_ids(model, options.sequences or _RANDOM_SEQUENCES, length)
        described = f"random token ids ({len(rows)} x {len(rows[0])}): the folder {why}"
        batches = tuple(token_batch(model, row, None) for row in rows)
        return Inputs(batches, described, made_of=(f"token ids at random: the folder {why}", *decoder))
    given = bool(options.prompts or options.texts)
    sequences: list[tuple[torch.Tensor, str, Mapping[str, Any]]] = []
    taken = 0
    # Every text is at least one sequence, so no more texts are needed than sequences.
    samples = list(islice(text_samples(options) if given else _DEFAULT_SAMPLES, options.sequences))
    for sample, (ids, text) in zip(samples, encoded(tokenizer, samples, model.title, options), strict=True):
        if ids.numel() and (highest := int(ids.max())) >= (count := id_count(model, "input_ids") or highest + 1):
            raise UserError(
                f"{sample.where}: the tokenizer of {model.title} gives the token id {highest}, beyond the model's vocabulary "
                f"(0 to {count - 1}): it is the tokenizer of another model"
            )
        for start in range(0, len(ids), longest):
            part = ids[start : start + longest]
            if start == 0:
                sequences.append((part, text, sample.labels))
            elif len(part) > 1:
                with running(f"{sample.where}: the tokenizer of {model.title} can't decode it"):
                    begin = tokenizer.decode(part[:_SHOWN_TOKENS], skip_special_tokens=True)
                sequences.append((part, f"…{begin}", sample.labels))
        if options.sequences is not None and len(sequences) >= options.sequences:
            sequences = sequences[: options.sequences]
            break
        taken += len(ids)
        if given:
            options.limits.refuse_file("tokens", f"the text up to {sample.where}", taken)
    positions = sum(len(ids) for ids, _, _ in sequences)
    yours = "prompts and texts" if options.prompts and options.texts else "prompts" if options.prompts else "text"
    plural = "" if len(sequences) == 1 else "s"
    kind = f"sequence{plural} of your {yours}" if given else f"default prompt{plural}"
    described = f"{len(sequences):,} {kind}, {positions:,} tokens"
    batches = tuple(
        dataclasses.replace(token_batch(model, ids, text), labels=dict(labels)) for ids, text, labels in sequences
    )
    made_of = (f"{sources(options)}, in sequences of up to {longest} tokens", *decoder)
    return Inputs(batches, described, tokenizer, prompts=bool(options.prompts) and not options.texts, made_of=made_of)


def position_count(model: LiveModel) -> int:
    """Return the number of the positions of a model with a configuration, or 10**9 if neither it nor the weights limit them."""
    named = int(getattr(text_config(model.module.config), "max_position_embeddings", 0) or _ANY_LENGTH)
    return min(named, learned_positions(model.module) or _ANY_LENGTH)


def sequence_length(model: LiveModel, options: InputOptions) -> int:
    """Return the maximum number of tokens in a sequence: the number that the user set or, without it, 512 or the number of the
    model's positions if that is smaller. Raises UserError if the user set a number above the model's positions.
    """
    known = position_count(model)
    if options.sequence_length is not None:
        if options.sequence_length > known:
            raise UserError(
                f"sequences of {options.sequence_length} tokens are too long for {model.title}: it has {known} positions"
            )
        return options.sequence_length
    return min(TOKENS_PER_SEQUENCE, known)


def sources(options: InputOptions) -> str:
    """Return a phrase for the user that says where the text comes from, such as "your 2 prompts" or the name of a file."""
    names = []
    if options.prompts:
        names.append(f"your {len(options.prompts)} prompts" if len(options.prompts) > 1 else "your prompt")
    names += [printable(path.name, 60) for path in options.texts]
    if not names:
        names.append(f"{len(DEFAULT_PROMPTS)} {BUILT_IN}")
    return ", ".join(names) + (", through the chat template" if options.chat else "")


def text_samples(options: InputOptions) -> Iterator[TextSample]:
    """Yield the user's prompts, then the texts in the user's files. Raises UserError for a file that can't be read."""
    for number, prompt in enumerate(options.prompts, 1):
        yield TextSample(prompt, where=f"prompt {number}")
    for path in options.texts:
        if path.suffix.lower() in _JSONL:
            yield from read_jsonl(path, options.limits)
        else:
            yield TextSample(read_text(path, options.limits), where=str(path))


def json_lines(path: Path, limits: InputLimits) -> Iterator[tuple[str, Any]]:
    """Yield (file and line, for messages; the value) for each line of a JSON Lines file that is not blank. Raises UserError for an
    invalid line and for a file that is over the limits.
    """
    for number, line in enumerate(read_text(path, limits).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{where}: no valid JSON; a JSONL file has one object on every line") from None
        yield where, entry


def read_jsonl(path: Path, limits: InputLimits) -> Iterator[TextSample]:
    """Yield one text for each line: a string, or an object with `text`, `prompt` or `messages`. Raises UserError for an invalid
    line and for a file that is over the limits.
    """
    for where, entry in json_lines(path, limits):
        values = {"text": entry} if isinstance(entry, str) else entry if isinstance(entry, dict) else {}
        messages, text = values.get("messages"), values.get("text", values.get("prompt"))
        labels = {key: value for key, value in values.items() if key not in _TEXT_KEYS}
        if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
            yield TextSample(messages=tuple(messages), where=where, labels=labels)
        elif isinstance(text, str):
            yield TextSample(text, where=where, labels=labels)
        else:
            raise UserError(
                f"{where}: needs a text in 'text' or 'prompt', or 'messages', each with 'role' and 'content'"
            )


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def encoded(
    tokenizer: Any, samples: Sequence[TextSample], title: str, options: InputOptions
) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield (token ids, int64 [positions], the encoded text) for each text. The chat template is applied to conversations and, if
    `options.chat` is set, to all texts.

    Raises UserError for a text without tokens or over the limits, and for a conversation if there is no chat template or the
    template fails. Raises NoForward for a tokenizer that can't be run within the limits.
    """
    texts = [sample.text for sample in samples]
    chats = [at for at, sample in enumerate(samples) if sample.messages or options.chat]
    if chats:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"{samples[chats[0]].where}: {title} has no chat template; {hint('no-chat')}")
        conversations = [_conversation(samples[at]) for at in chats]
        made = run_template(title, tokenizer.get_chat_template(), tokenizer, conversations, options.limits)
        for at, text in zip(chats, made, strict=True):
            texts[at] = text
    refuse_long(samples, texts, options.limits)
    try_tokenizer(title, tokenizer, texts, options.limits)
    for at, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        with running(f"{sample.where}: the tokenizer of {title} can't encode it"):
            ids = tokenizer(text, add_special_tokens=at not in chats)["input_ids"]
        if len(ids) == 0:
            raise UserError(f"{sample.where}: {printable(text, 40)!r} has no tokens")
        yield torch.tensor(ids, dtype=torch.int64), text


def _conversation(sample: TextSample) -> Conversation:
    """Return a user's text as a conversation. Plain text becomes a message of the "user", which the model is to answer."""
    messages = list(sample.messages) or [{"role": "user", "content": sample.text}]
    return sample.where, messages, not sample.messages


def refuse_long(samples: Sequence[TextSample], texts: Sequence[str], limits: InputLimits) -> None:
    """Raise UserError for a text that would be over the limit on tokens if each token had `CHARACTERS_PER_TOKEN` characters, and
    for a text with half of a surrogate pair, which `\\ud800` in JSON makes. texts: the texts of `samples`, with the chat template
    applied.
    """
    for sample, text in zip(samples, texts, strict=True):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(
                f"{sample.where}: {printable(text, 40)!r} has half of a pair of surrogates, which is not text"
            )
        what = f"{sample.where}, at {CHARACTERS_PER_TOKEN} characters per token,"
        limits.refuse_file("tokens", what, len(text) / CHARACTERS_PER_TOKEN)


def prompt_texts(options: InputOptions, default: Iterable[str]) -> tuple[list[str], bool]:
    """Return (the texts to combine with pictures or audio, whether the user provided them). default: the texts to use if the user
    has provided none. Raises UserError for a conversation (`messages`), which can't be combined with pictures or audio.
    """
    texts = []
    for sample in text_samples(options):
        if sample.messages:
            raise UserError(f"{sample.where}: 'messages' are for models of text alone; use 'text' or 'prompt' here")
        texts.append(sample.text)
    return (texts, True) if texts else (list(default), False)


def token_batch(model: LiveModel, ids: torch.Tensor, text: str | None) -> Batch:
    """Return a batch with a single sequence of token ids [positions]. text: the text of the same sequence, for display."""
    row = ids[None]
    kwargs: dict[str, Any] = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    names = parameters(model.module)
    config = model.module.config
    if keeps_cache(model):
        kwargs |= _NO_CACHE
    if getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = row
    kwargs = {key: value for key, value in kwargs.items() if key in names or "kwargs" in names}
    return Batch(kwargs=kwargs, next_tokens=_next_tokens(model, row), text=text)


def keeps_cache(model: LiveModel) -> bool:
    """Return whether a model of transformers returns a KV cache with its output unless it is called with `use_cache=False`."""
    config = getattr(model.module, "config", None)
    return "use_cache" in parameters(model.module) and getattr(config, "use_cache", None) is not None


def without_cache(model: LiveModel, inputs: Inputs) -> Inputs:
    """Return the user's tensors with `use_cache=False` if the model would otherwise keep a KV cache. Batches with an argument that
    concerns a cache stay unchanged. With a cache, layers would write to an argument, and their outputs could not be reused after a
    cast.
    """
    if not keeps_cache(model):
        return inputs
    batches = tuple(
        batch
        if _CACHES & batch.named(model.module).keys()
        else dataclasses.replace(batch, kwargs=batch.kwargs | _NO_CACHE)
        for batch in inputs.batches
    )
    changed = any(one is not other for one, other in zip(batches, inputs.batches, strict=True))
    made_of = (*inputs.made_of, "use_cache: False, because the cache is not compared") if changed else inputs.made_of
    return dataclasses.replace(inputs, batches=batches, made_of=made_of)


def with_next_tokens(model: LiveModel, inputs: Inputs) -> Inputs:
    """Return the user's tensors (`inputs`) with `Batch.next_tokens` set if the model is a causal language model. The tokens come
    from the batch's labels or, if it has none, from its token ids. Padding (attention mask 0) has no next token.
    """
    return dataclasses.replace(inputs, batches=tuple(_with_targets(model, batch) for batch in inputs.batches))


def _with_targets(model: LiveModel, batch: Batch) -> Batch:
    ids = batch.kwargs.get("input_ids")
    fewer_outputs = "logits_to_keep" in batch.kwargs or "num_logits_to_keep" in batch.kwargs
    if batch.next_tokens is not None or fewer_outputs or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return batch
    labels, mask = batch.kwargs.get("labels"), batch.kwargs.get("attention_mask")
    targets = labels if isinstance(labels, torch.Tensor) and labels.shape == ids.shape else ids
    next_tokens = _next_tokens(model, targets.long())
    if next_tokens is not None and isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        seen = mask.bool() & torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1).bool()
        next_tokens = next_tokens.masked_fill(~seen, -100)
    return dataclasses.replace(batch, next_tokens=next_tokens)


def _next_tokens(model: LiveModel, row: torch.Tensor) -> torch.Tensor | None:
    """Return the token that a causal language model should predict at each position (-100: no token), or None if the model is not
    causal. row: token ids [batch, positions].
    """
    name, config = type(model.module).__name__, getattr(model.module, "config", None)
    if getattr(config, "is_encoder_decoder", False) or not name.endswith(("ForCausalLM", "LMHeadModel")):
        return None
    return torch.cat([row[:, 1:], torch.full_like(row[:, :1], -100)], dim=1)
