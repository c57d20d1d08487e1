"""Creates inputs that combine text with a picture or audio: for captioning, contrastive, and vision language models."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as, with_type
from dtype_engine.core.hints import hint
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.options import InputOptions
from dtype_engine.core.text import printable
from dtype_engine.runtime.inputs.batch import Batch, Inputs
from dtype_engine.runtime.inputs.images import Picture, described, make_pictures
from dtype_engine.runtime.inputs.limited import PartFails, run_template, try_tokenizer
from dtype_engine.runtime.inputs.preprocessing import (
    accepted,
    needed_tokenizer,
    no_tokenizer,
    parameters,
    processor_of,
    random_ids,
    running,
    tokenizer_of,
)
from dtype_engine.runtime.inputs.text import TextSample, prompt_texts, refuse_long, sequence_length
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import ReferenceMode

CAPTION = "a picture of"
QUESTION = "What is in the picture?"
LABELS = ("a photo of a cat", "a photo of a house", "a drawing of waves", "a page of text")
SOUNDS = ("the sound of a bell", "somebody speaks", "music", "rain on a roof")
_RANDOM_TOKENS = 8


def is_contrastive(model: LiveModel) -> bool:
    """Return whether the model compares texts with pictures or audio, as CLIP does."""
    return hasattr(model.module, "get_text_features") and "input_ids" in parameters(model.module)


def image_token(model: LiveModel) -> int | None:
    """Return the id of the token that a language model replaces by a feature vector of a picture, or None if there is none."""
    ids = (getattr(model.module.config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((token for token in ids if isinstance(token, int)), None)


def picture_and_text_inputs(model: LiveModel, options: InputOptions) -> Inputs:
    """Return inputs with pictures and texts. Raises UserError if any can't be used, and NoForward if no picture can be made."""
    pictures, made_of = make_pictures(model, options)
    if is_contrastive(model):
        return _contrastive_inputs(model, options, pictures, made_of)
    if (token := image_token(model)) is not None:
        return _vision_language_inputs(model, options, pictures, made_of, token)
    texts, given = prompt_texts(options, [CAPTION])
    batches = []
    how = ""
    for picture, text in _paired(pictures, texts):
        rows, shown, how = text_rows(model, [text], given, options.limits)
        if "decoder_input_ids" in parameters(model.module):
            rows["decoder_input_ids"] = rows["input_ids"]
        batches.append(Batch(kwargs=picture.kwargs | rows, text=shown, about=picture.about))
    whole = given or bool(options.images and tokenizer_of(model) is not None)
    return Inputs(tuple(batches), _with_texts(pictures, options, texts, given), made_of=(*made_of, how), prompts=whole)


def text_rows(
    model: LiveModel, texts: list[str], given: bool, limits: InputLimits
) -> tuple[dict[str, Any], str | None, str]:
    """Return (the texts as arguments with one padded row per text, the text for display, a phrase that says how the texts were
    created).

    given: whether the user provided the texts. Raises UserError for the user's texts if the model has no tokenizer or the texts
    are over the limits. Raises NoForward for a tokenizer that can't be run within the limits.
    """
    names = parameters(model.module)
    tokenizer = needed_tokenizer(model) if given else tokenizer_of(model)
    if tokenizer is None:
        ids = random_ids(model, len(texts), _RANDOM_TOKENS)
        rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        shown, how = None, f"text: {len(texts)} x {_RANDOM_TOKENS} random token ids: the folder {no_tokenizer(model)}"
    else:
        refuse_long([TextSample(where=f"text {number}") for number, _ in enumerate(texts, 1)], texts, limits)
        try_tokenizer(model.title, tokenizer, texts, limits)
        longest = sequence_length(model, InputOptions())
        with running(f"{model.title}: its tokenizer can't encode the texts"):
            encoded = [tokenizer(text, truncation=True, max_length=longest)["input_ids"] for text in texts]
        length = max(map(len, encoded))
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        rows = {
            "input_ids": torch.tensor([ids + [padding] * (length - len(ids)) for ids in encoded]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in encoded]),
        }
        shown = " | ".join(texts)
        how = f"text: {'yours' if given else 'built in'}, {printable(shown, 80)!r}"
    return {key: value for key, value in rows.items() if key in names}, shown, how


def _with_texts(pictures: list[Picture], options: InputOptions, texts: list[str], given: bool) -> str:
    yours = "your text" if len(texts) == 1 else f"{len(texts)} of your texts"
    return f"{described(pictures, options)}, and {yours if given else 'a prompt'}"


def _paired(pictures: list[Picture], texts: list[str]) -> list[tuple[Picture, str]]:
    count = max(len(pictures), len(texts))
    return [(pictures[index % len(pictures)], texts[index % len(texts)]) for index in range(count)]


def _contrastive_inputs(
    model: LiveModel, options: InputOptions, pictures: list[Picture], made_of: tuple[str, ...]
) -> Inputs:
    """Return inputs for a contrastive model: a single batch with all pictures and all texts."""
    texts, given = prompt_texts(options, LABELS)
    rows, shown, how = text_rows(model, texts, given, options.limits)
    shapes = {tuple(picture.kwargs["pixel_values"].shape) for picture in pictures}
    if len(shapes) > 1:
        raise UserError(f"{model.title} compares pictures of one size: these have {len(shapes)}; give fewer")
    kwargs = {key: torch.cat([picture.kwargs[key] for picture in pictures]) for key in pictures[0].kwargs}
    batch = Batch(kwargs=kwargs | rows, text=shown, about="; ".join(picture.about for picture in pictures))
    description = f"{described(pictures, options)}, compared with {len(texts)} texts"
    return Inputs((batch,), description, made_of=(*made_of, how))


def _vision_language_inputs(
    model: LiveModel, options: InputOptions, pictures: list[Picture], made_of: tuple[str, ...], token: int
) -> Inputs:
    """Return one batch for each pair of a picture and a prompt, with one image token for each feature vector of the picture."""
    texts, given = prompt_texts(options, [QUESTION])
    processor, tokenizer = processor_of(model), tokenizer_of(model)
    batches, how = [], set()
    for picture, text in _paired(pictures, texts):
        kwargs = _by_processor(model, processor, picture, text, options) if processor is not None else None
        if kwargs is not None:
            source = "yours" if given else "built in"
            how.add(
                f"text: {source}, {printable(text, 60)!r}, put together by the folder's own {type(processor).__name__}"
            )
        else:
            kwargs, made_by = _by_hand(model, picture, text, given, token, options.limits)
            how.add(made_by)
        if "use_cache" in parameters(model.module):
            kwargs["use_cache"] = False
        shown = text if tokenizer is not None else None
        batches.append(Batch(kwargs=kwargs, text=shown, about=picture.about))
    description = _with_texts(pictures, options, texts, given)
    return Inputs(tuple(batches), description, made_of=(*made_of, *sorted(how)), prompts=True)


def processor_template(model: LiveModel) -> str | None:
    """Return the chat template of the processor of a vision language model, or None if it has none."""
    template = getattr(processor_of(model), "chat_template", None) if image_token(model) is not None else None
    return template.get("default") if isinstance(template, dict) else template


def _by_processor(
    model: LiveModel, processor: Any, picture: Picture, text: str, options: InputOptions
) -> dict[str, Any] | None:
    """Return the arguments that the model's processor makes, or None if it fails. Raises UserError if the chat template fails."""
    if picture.image is None:
        return None
    template = processor_template(model) if options.chat else None
    if template is not None:
        content = [{"type": "image"}, {"type": "text", "text": text}]
        conversation = ("the prompt", [{"role": "user", "content": content}], True)
        (whole,) = run_template(model.title, template, processor.tokenizer, [conversation], options.limits)
    else:
        whole = _image_mark(model, processor) + text
    try_tokenizer(model.title, processor.tokenizer, [whole], options.limits)
    try:
        with running(f"{model.title}: its processor"):
            return accepted(model, processor(images=[picture.image], text=[whole], return_tensors="pt"))
    except PartFails:  # the caller then adds the image tokens itself
        return None


def _image_mark(model: LiveModel, processor: Any) -> str:
    """Return the placeholder of a picture in a prompt, such as `<|vision_start|><|image_pad|><|vision_end|>`."""
    mark = getattr(processor, "boi_token", None) or getattr(processor, "image_token", "")
    ids = [getattr(model.module.config, f"vision_{side}_token_id", None) for side in ("start", "end")]
    before, after = (processor.tokenizer.convert_ids_to_tokens(id) if isinstance(id, int) else "" for id in ids)
    return f"{before}{mark}{after}"


def _by_hand(
    model: LiveModel, picture: Picture, text: str, given: bool, token: int, limits: InputLimits
) -> tuple[dict[str, Any], str]:
    """Build the arguments for a picture and a prompt (`text`) without the model's processor. Returns (the arguments, a phrase that
    says how the prompt was created). given: whether the user provided the prompt. The token ids have one image token (`token`) for
    each feature vector of the picture.
    """
    config = model.module.config
    names = parameters(model.module)
    rows, _, how = text_rows(model, [text], given, limits)
    prompt = rows["input_ids"][0]
    marks = [getattr(config, name, None) for name in ("video_token_id", "vision_start_token_id", "vision_end_token_id")]
    prompt = torch.where(torch.isin(prompt, torch.tensor([token, *filter(None, marks)])), 0, prompt)
    around = [[mark] if isinstance(mark, int) else [] for mark in marks[1:]]
    row = [*around[0], *[token] * _features(model, picture), *around[1], *prompt.tolist()]
    ids = torch.tensor([row])
    more = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == token).long(),  # processors mark the tokens of a picture with 1
    }
    return picture.kwargs | {key: value for key, value in more.items() if key in names}, how


def _features(model: LiveModel, picture: Picture) -> int:
    """Return how many token positions a picture takes up, computed by the model's vision part. Raises NoForward if that fails."""
    ask = getattr(model.module, "get_image_features", None)
    if ask is None:
        raise NoForward(f"{model.title}: how many tokens a picture takes is not known; {hint('tensors')}")
    names = inspect.signature(ask).parameters
    given = {key: value.to(model.device) for key, value in picture.kwargs.items() if key in names}
    with (
        failures_as(NoForward, f"{model.title}: its picture features can't be made", with_type),
        torch.no_grad(),
        ReferenceMode(model.by_id, model.device),
    ):
        output = ask(**given)
    features = getattr(output, "pooler_output", output)
    tensors = features if isinstance(features, (list, tuple)) else [features]
    return sum(tensor.shape[:-1].numel() for tensor in tensors)
