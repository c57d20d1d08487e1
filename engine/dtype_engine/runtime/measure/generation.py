"""Generates text or captions greedily with the reference and the candidate, to show after how many tokens they start to differ."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.errors import Cancelled, NoForward, UserError
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.results.runs import Generation, Written
from dtype_engine.runtime.inputs import Batch, Inputs, running, tokenizer_of
from dtype_engine.runtime.inputs.text import position_count
from dtype_engine.runtime.libraries.silence_libraries import quiet
from dtype_engine.runtime.measure.progress import part_of
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.compare.pictures import picture_range
from dtype_engine.runtime.passes.runner import ForwardRunner

PROMPT_TOKENS = 32
OnTokens = Callable[[str, int, int], None]
"""A callback `on_tokens("reference" or "candidate", done, most)`, called after every token with the name of the run, the number of
tokens generated so far by both runs, for all prompts, and the largest number that `done` can reach. If a text ends early, its
missing tokens count as generated.
"""
OnText = Callable[[Callable[[], Generation]], None]
"""A callback, called after every token with a function that decodes all tokens, and returns the texts generated so far."""


def generate(
    runner: ForwardRunner,
    inputs: Inputs,
    tokens: int,
    on_tokens: OnTokens,
    on_text: OnText = lambda read: None,
) -> tuple[Generation, ...]:
    """Let the reference and the candidate each continue every prompt of the user by up to `tokens` tokens, with greedy decoding.

    If the user gave no prompts, only the first input is continued: a calibration text, cut to `PROMPT_TOKENS` tokens, or an image,
    for which a caption is generated. Raises NoForward if the model can't generate or can't be run, KernelError and Cancelled.
    """
    if (why := why_no_text(runner.model.module)) is not None:
        raise NoForward(why)
    tokenizer = inputs.tokenizer or tokenizer_of(runner.model)
    batches = inputs.batches if inputs.prompts else inputs.batches[:1]
    most = 2 * len(batches) * tokens
    generations = []
    for number, batch in enumerate(batches):
        prompt, before = prompt_batch(batch, inputs), 2 * number * tokens
        of_reference = part_of(on_tokens, "reference", before, most)
        of_candidate = part_of(on_tokens, "candidate", before + tokens, most)
        text = prompt_text(prompt, tokenizer)

        def reference_grows(read: Callable[[], Written], text: str = text) -> None:
            on_text(lambda: Generation(text, read(), Written((), (), 0.0), finished=False))

        first = runner.reference_batch(prompt)
        reference = write(runner, "reference", first, tokenizer, tokens, of_reference, reference_grows)

        def candidate_grows(read: Callable[[], Written], text: str = text, reference: Written = reference) -> None:
            on_text(lambda: Generation(text, reference, read(), finished=False))

        second = runner.candidate_batch(prompt)
        candidate = write(runner, "candidate", second, tokenizer, tokens, of_candidate, candidate_grows)
        generations.append(Generation(text, reference, candidate))
    return tuple(generations)


def continued(
    runner: ForwardRunner, batch: Batch, inputs: Inputs, tokens: int, on_tokens: Callable[[int], None]
) -> Written:
    """Let the reference continue one batch of `inputs` by up to `tokens` tokens, with greedy decoding. on_tokens: called after each
    token with the number of tokens. Raises NoForward if the model can't be run, KernelError and Cancelled.
    """
    prompt = runner.reference_batch(prompt_batch(batch, inputs))
    return write(runner, "reference", prompt, inputs.tokenizer, tokens, on_tokens, ignore)


def why_no_text(module: Any) -> str | None:
    """Return a sentence that says why a model can't generate text, or None if it can."""
    can = getattr(module, "can_generate", None)
    if hasattr(module, "generate") and (can is None or can() or _own_generate(module)):
        return None
    if picture_range(module) is not None:
        return f"a {type(module).__name__} makes pictures and no text; they can be seen when they are measured"
    return f"a {type(module).__name__} does not generate text; open a model with a language model head or a captioner"


def refuse_tokens(model: LiveModel, tokens: int, limits: InputLimits) -> None:
    """Raise UserError if more tokens shall be generated than the model has positions or the limits allow, which has no end."""
    if hasattr(model.module, "config") and tokens > (known := position_count(model)):
        raise UserError(f"texts of {tokens} tokens are too long for {model.title}: it has {known} positions")
    limits.refuse_file("tokens", "a text to generate", tokens)


def _own_generate(module: Any) -> bool:
    from transformers import GenerationMixin

    return type(module).generate is not GenerationMixin.generate


def prompt_batch(batch: Batch, inputs: Inputs) -> Batch:
    """Return the arguments in a batch that the model's `generate` accepts. (It refuses some of a forward pass, such as labels.)"""
    # Tensors are copied, because BLIP's own `generate` writes its start token into the given ids.
    kwargs = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in batch.kwargs.items()
        if name not in ("use_cache", "decoder_input_ids", "labels")
    }
    if "pixel_values" in kwargs and inputs.made and not inputs.prompts:
        # The ids of a synthetic picture have no meaning, so the caption starts from the picture alone.
        kwargs = {"pixel_values": kwargs["pixel_values"]}
    elif not inputs.prompts and inputs.made and "decoder_input_ids" not in batch.kwargs:
        kwargs = {
            name: value[:, :PROMPT_TOKENS] if isinstance(value, torch.Tensor) and value.ndim == 2 else value
            for name, value in kwargs.items()
        }
    return Batch(batch.args, kwargs)


def write(
    runner: ForwardRunner,
    run: Literal["reference", "candidate"],
    prompt: Batch,
    tokenizer: Any,
    tokens: int,
    on_tokens: Callable[[int], None],
    on_text: Callable[[Callable[[], Written]], None],
) -> Written:
    """Generate a continuation of `prompt` in a reference or candidate run. After each token, `on_tokens` is called with the number
    of tokens, and `on_text` with a function that returns the text so far.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    began: list[int] = []
    started = time.perf_counter()

    class Progress(StoppingCriteria):  # type: ignore[misc]
        """A stopping criterion that never stops the generation, but reports its progress and raises Cancelled."""

        def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
            if runner.cancelled():
                raise Cancelled
            if not began:
                began.append(input_ids.shape[1] - 1)
            on_tokens(input_ids.shape[1] - began[0])
            on_text(partial(_written, tokenizer, input_ids[0, began[0] :], time.perf_counter() - started))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    module: Any = runner.model.module

    def call() -> torch.Tensor:
        began.clear()
        with quiet():  # transformers warns of lengths in the model's own settings
            written: torch.Tensor = module.generate(
                *prompt.args,
                **prompt.kwargs,
                **_greedy(runner.model, tokens),
                stopping_criteria=StoppingCriteriaList([Progress()]),
            )
        return written

    ran = runner.reference(call) if run == "reference" else runner.candidate(call)
    return _written(tokenizer, ran.output[0, began[0] if began else 0 :], ran.seconds)


class _Prepared(Exception):
    """Leaves transformers' `generate` when it has prepared everything and would begin to decode."""


class Decoding(NamedTuple):
    """How transformers' greedy decoding of a prompt begins, and how it changes logits before it chooses a token."""

    start: tuple[int, ...]
    """The tokens of the decoder before the first generated one: the prompt or, in an encoder-decoder model, its start tokens."""
    processors: Any
    """What the model's generation settings do to logits, such as a penalty for repetition: a `LogitsProcessorList`, which takes
    token ids, int64 [batch, positions], and the logits of the next token, float32 [batch, classes].
    """


def decoding(runner: ForwardRunner, prompt: Batch, tokens: int) -> Decoding:
    """Return how greedy decoding of up to `tokens` tokens after a prompt begins. Raises NoForward if the model can't be run or has
    another way to generate text, UserError for several prompts in one batch, KernelError and Cancelled.
    """
    found: list[Decoding] = []
    module: Any = runner.model.module

    def take(_: Any, input_ids: torch.Tensor, logits_processor: Any, **rest: Any) -> None:
        if len(input_ids) != 1:
            raise UserError(f"a batch has {len(input_ids)} prompts: give one prompt in each batch")
        found.append(Decoding(tuple(input_ids[0].tolist()), logits_processor))
        raise _Prepared

    if (getattr(getattr(module, "generation_config", None), "guidance_scale", None) or 1) != 1:
        raise NoForward("guidance_scale in the model's generation settings runs it twice for each token: set it to 1")

    def call() -> None:
        # An encoder runs here, so this is a pass of its own.
        with quiet(), contextlib.suppress(_Prepared):
            prompt.run(partial(module.generate, **_greedy(runner.model, tokens), custom_generate=take))

    runner.reference(call)
    if not found:
        raise NoForward(
            f"a {type(module).__name__} generates text in a way of its own, so its choices can't be compared"
        )
    return found[0]


def _written(tokenizer: Any, tokens: torch.Tensor, seconds: float) -> Written:
    ids = tokens.tolist()
    return Written(tuple(ids), pieces(tokenizer, ids), seconds)


def _greedy(model: LiveModel, tokens: int) -> dict[str, Any]:
    """Return arguments for `generate` with the model's own settings, except that decoding is greedy (no sampling, no beams).
    tokens: how many to generate at most.
    """
    own = getattr(model.module, "generation_config", None)
    if own is None or _own_generate(model.module):
        return {"max_new_tokens": tokens, "do_sample": False, "num_beams": 1}
    config = copy.deepcopy(own)
    for name, value in {
        "do_sample": False, "num_beams": 1, "max_new_tokens": tokens, "max_length": None, "min_length": 0, "temperature": None,
        "top_k": None, "top_p": None, "min_p": None, "typical_p": None, "num_return_sequences": 1,
        "return_dict_in_generate": False,
    }.items():  # fmt: skip
        setattr(config, name, value)
    if config.pad_token_id is None:
        ends = config.eos_token_id
        config.pad_token_id = ends[0] if isinstance(ends, list) else ends if ends is not None else 0
    if config.decoder_start_token_id is None and config.bos_token_id is None:
        config.decoder_start_token_id = config.pad_token_id
    return {"generation_config": config}


def pieces(tokenizer: Any, ids: list[int]) -> tuple[str, ...]:
    """Return the text that each token adds or, without a tokenizer, the token's id. A token that ends inside a multi-byte character
    adds nothing; the token that completes the character adds all of it.
    """
    if tokenizer is None:
        return tuple(f" {token}" for token in ids)
    texts: list[str] = []
    shown = ""
    with running("the tokenizer can't decode the tokens"):
        for count in range(1, len(ids) + 1):
            text = tokenizer.decode(ids[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            whole = text.rstrip("\ufffd") if count < len(ids) else text
            grown = whole.startswith(shown)
            texts.append(whole[len(shown) :] if grown else "")
            shown = whole if grown else shown
    return tuple(texts)


def prompt_text(prompt: Batch, tokenizer: Any) -> str:
    ids = prompt.kwargs.get("input_ids", prompt.args[0] if prompt.args else None)
    picture = "a picture" if "pixel_values" in prompt.kwargs else ""
    if "input_features" in prompt.kwargs or "input_values" in prompt.kwargs:
        picture = "a sound"
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return picture or "the given input"
    text = "".join(pieces(tokenizer, ids[0].tolist()))
    return f"{picture}; {text}" if picture else text
