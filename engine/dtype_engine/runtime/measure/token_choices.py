"""Lets the reference write texts, and asks at each token of them whether the candidate would choose the same token.

Two texts that are decoded freely can't be compared after their first difference. So the candidate does not decode: one pass over
the prompt and the reference's text gives its logits after each of the reference's tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.execution import Execution
from dtype_engine.core.options import InputOptions, RunSettings
from dtype_engine.core.units import plural
from dtype_engine.recipe import Plan
from dtype_engine.results.attribution import NoiseFloor
from dtype_engine.results.runs import Generation, Written
from dtype_engine.results.token_choices import Kind, TextChoices, TokenReport, severity_text
from dtype_engine.runtime.execution.executor import Executor
from dtype_engine.runtime.inputs import Batch, Inputs, tokenizer_of
from dtype_engine.runtime.inputs.text import TOKENS_PER_SEQUENCE, keeps_cache, position_count
from dtype_engine.runtime.measure.generation import (
    Decoding,
    OnText,
    decoding,
    pieces,
    prompt_batch,
    prompt_text,
    why_no_text,
    write,
)
from dtype_engine.runtime.measure.noise_floor import measure_noise_floor
from dtype_engine.runtime.measure.own_answers import default_prompts
from dtype_engine.runtime.measure.progress import part_of
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.compare.chosen_tokens import NO_TOKEN, ChosenTokens, chosen_tokens, severities
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.model_behavior import ModelBehavior, Run
from dtype_engine.runtime.passes.one_pass import PassOptions
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

TOKENS = 64
"""The default for the maximum number of tokens in a text."""
_TOKENS_ALONE = {"input_ids", "attention_mask", "use_cache"}
_CONTEXT = 8
"""How many earlier tokens are decoded with a token, to find the text that it adds."""
OnStep = Callable[[str, int, int], None]
"""A callback `on_step(what, done, total)`: called with the name of a step, and how much of it is done."""


@dataclass(frozen=True, slots=True)
class ReferenceText:
    """A prompt, the text with which the reference continues it, and the inputs of a pass over both."""

    prompt: str
    written: Written
    decoding: Decoding
    batch: Batch
    """Arguments of the forward pass. Its last positions, one for each token of the text, predict the text."""


def text_prompts(model: LiveModel, inputs: Inputs, options: InputOptions, tokens: int) -> Inputs:
    """Return the prompts that the reference continues by up to `tokens` tokens: the user's or, if the user gave none to a model of
    text with a tokenizer, the default prompts, as messages in the chat template if there is one. Padding is removed, and each batch
    is one prompt. Raises UserError for prompts without room for the text.
    """
    alone = all(not batch.args and _TOKENS_ALONE.issuperset(batch.kwargs) for batch in inputs.batches)
    if alone and inputs.made and not (options.prompts or options.texts) and tokenizer_of(model) is not None:
        room = position_count(model) - tokens
        if room < 1:
            raise UserError(
                f"texts of {tokens} tokens leave no room for a prompt: {model.title} has {room + tokens} positions"
            )
        chat, prompts = default_prompts(model, min(TOKENS_PER_SEQUENCE, room), options.limits)
        through = ", through the chat template" if chat else ""
        return dataclasses.replace(prompts, description=f"{prompts.description}{through}")
    batches = tuple(
        row for batch in inputs.batches for row in _prompts(prompt_batch(_by_name(batch, model.module), inputs))
    )
    return dataclasses.replace(inputs, batches=batches)


def _by_name(batch: Batch, module: torch.nn.Module) -> Batch:
    return dataclasses.replace(batch, args=(), kwargs=dataclasses.replace(batch, labels={}).named(module))


def _prompts(batch: Batch) -> list[Batch]:
    """Return the prompts of a batch, without padding."""
    ids, mask = batch.kwargs.get("input_ids"), batch.kwargs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return [batch]
    of_tokens = {name for name, value in batch.kwargs.items() if _is_like(value, ids)}
    if len(ids) > 1 and any(isinstance(batch.kwargs[name], torch.Tensor) for name in batch.kwargs.keys() - of_tokens):
        return [batch]  # refused when it is to be continued
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        mask = torch.ones_like(ids)
    found = []
    for row in range(len(ids)):
        kept = mask[row].bool()
        cut = {name: batch.kwargs[name][row : row + 1, kept] for name in of_tokens}
        found.append(Batch(kwargs=batch.kwargs | cut))
    return found


def _is_like(value: Any, ids: torch.Tensor) -> bool:
    """Return whether a value has an integer for each token."""
    return isinstance(value, torch.Tensor) and value.shape == ids.shape and not value.is_floating_point()


def written_texts(
    runner: ForwardRunner, prompts: Inputs, tokens: int, on_step: OnStep, on_text: OnText = ignore
) -> list[ReferenceText]:
    """Let the reference continue each prompt by up to `tokens` tokens, with greedy decoding. on_text: called after every token with
    a function that returns the text so far; the candidate's part of it is empty. Raises NoForward if the model can't be run or
    generates no text, UserError for a prompt without room for the text, KernelError and Cancelled.
    """
    model = runner.model
    if (why := why_no_text(model.module)) is not None:
        raise NoForward(why)
    tokenizer = prompts.tokenizer or tokenizer_of(model)
    texts = []
    for number, batch in enumerate(prompts.batches):
        on_tokens = part_of(on_step, "writing the reference's texts", number * tokens, len(prompts.batches) * tokens)
        prompt = runner.reference_batch(batch)
        begun, shown = decoding(runner, prompt, tokens), prompt_text(batch, tokenizer)
        _refuse(model, batch, begun, tokens)

        def grows(read: Callable[[], Written], shown: str = shown) -> None:
            on_text(lambda: Generation(shown, read(), Written((), (), 0.0), finished=False))

        written = write(runner, "reference", prompt, tokenizer, tokens, on_tokens, grows)
        texts.append(ReferenceText(shown, written, begun, _whole(batch, begun.start + written.ids, model)))
    return texts


def _refuse(model: LiveModel, prompt: Batch, begun: Decoding, tokens: int) -> None:
    if "position_ids" in prompt.kwargs:
        raise UserError("leave position_ids out of the inputs: they have none for the text that is written")
    if hasattr(model.module, "config") and len(begun.start) + tokens > (known := position_count(model)):
        raise UserError(
            f"a prompt of {plural(len(begun.start), 'token')} and {tokens} more are too long for {model.title}: "
            f"it has {known} positions"
        )


def _whole(prompt: Batch, ids: tuple[int, ...], model: LiveModel) -> Batch:
    """Return the arguments of a pass over a prompt and the text after it, without the text's last token. ids: all tokens of the
    decoder.
    """
    row, kwargs = torch.tensor([ids[:-1]]), dict(prompt.kwargs)
    if keeps_cache(model):
        kwargs["use_cache"] = False
    if getattr(getattr(model.module, "config", None), "is_encoder_decoder", False):
        return Batch(kwargs=kwargs | {"decoder_input_ids": row})
    before = kwargs.get("input_ids")
    for name, value in kwargs.items():
        if isinstance(before, torch.Tensor) and _is_like(value, before):
            kwargs[name] = value.new_zeros(row.shape)
            kwargs[name][:, : value.shape[1]] = value[:, : row.shape[1]]
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = torch.ones_like(row)
    return Batch(kwargs=kwargs | {"input_ids": row})


class Passes(NamedTuple):
    """What passes over the texts have shown, for each text."""

    chosen: list[ChosenTokens]
    """The candidate's choices."""
    own: list[torch.Tensor]
    """The severities of the text's own tokens in nats, float64 [tokens]: above 0 where the reference's pass over the whole text
    prefers another token than its decoding chose.
    """

    def differ(self, texts: Sequence[ReferenceText]) -> bool:
        """Return whether the candidate chooses another token anywhere in `texts`."""
        pairs = zip(texts, self.chosen, strict=True)
        return any(text.written.ids != tuple(chosen.ids.tolist()) for text, chosen in pairs)


def passes_over(runner: ForwardRunner, texts: Sequence[ReferenceText], on_step: OnStep) -> Passes:
    """Run the reference and the candidate once over each prompt with its text. Raises NoForward, also if the output has no logits
    for each token, KernelError and Cancelled.
    """
    settings, found = runner.settings, Passes([], [])
    ways: dict[Run, Execution] = {"reference": settings.reference_execution, "candidate": settings.execution}
    executor, options = Executor(runner, [text.batch for text in texts]), PassOptions(watched=frozenset())
    try:
        for number, text in enumerate(texts):
            logits: dict[Run, torch.Tensor] = {}
            for run, execution in ways.items():
                on_step("running over the texts", 2 * number + len(logits), 2 * len(texts))
                output = executor.run(run, execution, number, options, ModuleObserver()).output
                logits[run] = _logits_of(text, output, runner.model)
            if bool(logits["reference"].isnan().any()):
                raise NoForward("the reference's logits have NaN, so it has no most likely token to compare with")
            found.chosen.append(chosen_tokens(logits["reference"], logits["candidate"]))
            found.own.append(severities(logits["reference"], torch.tensor(text.written.ids)))
    finally:
        executor.close()
    on_step("running over the texts", 2 * len(texts), 2 * len(texts))
    return found


def _logits_of(text: ReferenceText, output: Any, model: LiveModel) -> torch.Tensor:
    """Return the logits that a pass has for the tokens of a text, as the model's generation settings change them: float32 [tokens,
    classes], as transformers has them.
    """
    name, found = main_output(output)
    start, ids = text.decoding.start, text.decoding.start + text.written.ids
    if found.ndim != 3 or found.shape[:2] != (1, len(ids) - 1):
        raise NoForward(
            f"the output of {model.title} ({name}, {tuple(found.shape)}) has no logits for each of {len(ids) - 1} tokens, so its "
            "choices can't be compared"
        )
    logits = found[0, len(start) - 1 :].detach().float()
    if not len(text.decoding.processors):
        return logits
    row = torch.tensor([ids], device=logits.device)
    with torch.no_grad():
        changed = [
            text.decoding.processors(row[:, : len(start) + index], logits[index : index + 1].clone())
            for index in range(len(logits))
        ]
    return torch.cat(changed)


def text_floors(
    model: LiveModel, texts: Sequence[ReferenceText], settings: Mapping[Run, RunSettings], behavior: ModelBehavior,
    on_step: OnStep, cancelled: IsCancelled,
) -> dict[Run, NoiseFloor]:  # fmt: skip
    """Measure the noise floors over the texts with their prompts. settings: those of the runs whose floors are measured. Raises
    NoForward, KernelError and Cancelled.
    """
    inputs, found = Inputs(tuple(text.batch for text in texts), "texts of the reference"), dict[Run, NoiseFloor]()
    for run, of_run in settings.items():

        def on_runs(done: int, total: int, run: Run = run) -> None:
            on_step(f"measuring the noise floor of the {run}", done, total)

        found[run] = measure_noise_floor(model, inputs, behavior, on_runs, cancelled, of_run, run)
    return found


def token_report(
    model: LiveModel,
    plan: Plan,
    prompts: Inputs,
    texts: Sequence[ReferenceText],
    passes: Passes,
    floors: Mapping[Run, NoiseFloor],
) -> TokenReport:
    """Return the report on the candidate's choices in `texts`. passes: what `passes_over` returned for them."""
    tokenizer = prompts.tokenizer or tokenizer_of(model)
    margin = max((floor.margin for floor in floors.values() if floor.margin is not None), default=None)
    found = [_choices_in(text, chosen, margin, tokenizer) for text, chosen in zip(texts, passes.chosen, strict=True)]
    return TokenReport(
        model.title, str(model.device), tuple(map(str, plan.recipe.rules)), prompts.description, tuple(found), margin,
        floors.get("reference"), floors.get("candidate"), tuple(_notices(texts, passes)),
    )  # fmt: skip


def _choices_in(text: ReferenceText, chosen: ChosenTokens, margin: float | None, tokenizer: Any) -> TextChoices:
    own, ids, severities = text.written, chosen.ids.tolist(), chosen.severities.tolist()
    kinds: list[Kind] = []
    others = []
    for index, (token, other, severity) in enumerate(zip(own.ids, ids, severities, strict=True)):
        is_tie = margin is not None and severity <= margin
        kinds.append("identical" if token == other else "tie" if is_tie else "different")
        others.append(own.pieces[index] if token == other else _piece(tokenizer, own.ids[:index], other))
    of_others = (0.0 if kind == "identical" else severity for kind, severity in zip(kinds, severities, strict=True))
    return TextChoices(text.prompt, own, tuple(ids), tuple(others), tuple(of_others), tuple(kinds))


def _piece(tokenizer: Any, before: tuple[int, ...], token: int) -> str:
    """Return the text that a token adds after others."""
    return "NaN" if token == NO_TOKEN else pieces(tokenizer, [*before[-_CONTEXT:], token])[-1]


def _notices(texts: Sequence[ReferenceText], passes: Passes) -> Iterator[str]:
    if names := dict.fromkeys(type(each).__name__ for text in texts for each in text.decoding.processors):
        yield (
            f"both choose by logits that the model's generation settings change ({', '.join(names)}), and severities are "
            "differences of these"
        )
    own = torch.cat([*passes.own])
    if moved := int((own > 0).sum()):
        yield (
            f"in a pass over the whole text, the reference itself prefers another token to {moved:,} of the {len(own):,} that it "
            f"wrote, by up to {severity_text(float(own.max()))}"
        )
    if lost := sum(int((each.ids == NO_TOKEN).sum()) for each in passes.chosen):
        yield f"at {plural(lost, 'token')} the candidate's logits have NaN, so it has no most likely token"
