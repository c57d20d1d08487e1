"""Makes inputs of what a model itself answers: the reference continues the default prompts, and each prompt with its answer is one
sequence. It is text of the kind that the model writes when it is used, and that no calibration file has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.options import InputOptions
from dtype_engine.core.units import plural
from dtype_engine.runtime.inputs import Inputs, tokenizer_of
from dtype_engine.runtime.inputs.preprocessing import no_tokenizer, parameters
from dtype_engine.runtime.inputs.text import TOKENS_PER_SEQUENCE, position_count, text_inputs, token_batch
from dtype_engine.runtime.measure.generation import continued, why_no_text
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.runner import ForwardRunner

ANSWER_TOKENS = 64
"""The default for the maximum number of tokens in an answer."""


def own_answers(
    runner: ForwardRunner, tokens: int, limits: InputLimits, on_progress: Callable[[int, int], object]
) -> Inputs:
    """Let the reference answer each default prompt by up to `tokens` tokens, with greedy decoding. Returns the prompts with their
    answers. A prompt is a user's message in the model's chat template or, without one, plain text.

    on_progress: called after each token with the number of tokens until now and the largest number that it can reach; the missing
    tokens of an answer that ends early count. Raises NoForward if the model can't answer a text or can't be run, UserError if it
    has no tokenizer or no room for a prompt and `tokens`. Raises KernelError and Cancelled.
    """
    model = runner.model
    _refuse(model)
    room = min(TOKENS_PER_SEQUENCE, position_count(model)) - tokens
    if room < 1:
        raise UserError(f"answers of {tokens} tokens are too long: a prompt and its answer have {room + tokens} tokens")
    chat, prompts = default_prompts(model, room, limits)
    batches, answered, count = [], 0, len(prompts.batches)
    for number, prompt in enumerate(prompts.batches):

        def on_token(done: int, before: int = number * tokens) -> None:
            on_progress(before + done, count * tokens)

        answer = continued(runner, prompt, prompts, tokens, on_token)
        ids = torch.cat([prompt.kwargs["input_ids"][0], torch.tensor(answer.ids, dtype=torch.int64)])
        batches.append(token_batch(model, ids, f"{prompt.text}{answer.text}"))
        answered += len(answer.ids)
    through = " through its chat template" if chat else ""
    about = f"the model's own answers to {plural(count, 'default prompt')}{through}"
    positions = sum(batch.kwargs["input_ids"].numel() for batch in batches)
    described = f"{about}, {plural(answered, 'token')}, {positions:,} with the prompts"
    return Inputs(tuple(batches), described, prompts.tokenizer, made_of=(about,))


def default_prompts(model: LiveModel, longest: int, limits: InputLimits) -> tuple[bool, Inputs]:
    """Return the default prompts in sequences of up to `longest` tokens. They are messages in the model's chat template or, without
    one, plain text. The first result says whether there is a template.
    """
    chat = bool(getattr(tokenizer_of(model), "chat_template", None))
    prompts = text_inputs(model, InputOptions(chat=chat, sequence_length=longest, limits=limits))
    return chat, dataclasses.replace(prompts, prompts=True)


def _refuse(model: LiveModel) -> None:
    """Raise an error with the reason if a model can't answer a text."""
    if (why := why_no_text(model.module)) is not None:
        raise NoForward(why)
    names, config = parameters(model.module), getattr(model.module, "config", None)
    if "input_ids" not in names or config is None or getattr(config, "is_encoder_decoder", False):
        raise NoForward(
            f"a {type(model.module).__name__} does not continue a text, so it has no answers to measure: name a file of "
            "other inputs with --held-out"
        )
    if tokenizer_of(model) is None:
        raise UserError(
            f"{model.title} {no_tokenizer(model)}, so it can't answer prompts: name a file of tensors with --held-out"
        )
