"""Builds a model's inputs from what the user provided, or creates inputs that suit its folder and configuration."""

from __future__ import annotations

import dataclasses

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as, with_type
from dtype_engine.core.hints import hint
from dtype_engine.core.options import InputOptions, Options
from dtype_engine.runtime.building.diffusers_pipeline import PipelineModule
from dtype_engine.runtime.inputs.audio import sound_argument, sound_inputs
from dtype_engine.runtime.inputs.batch import Batch, Inputs, from_values
from dtype_engine.runtime.inputs.diffusers_inputs import diffusers_inputs, is_diffusers_module
from dtype_engine.runtime.inputs.images import picture_inputs
from dtype_engine.runtime.inputs.limited import PartFails
from dtype_engine.runtime.inputs.multimodal import (
    SOUNDS,
    is_contrastive,
    picture_and_text_inputs,
    processor_template,
    text_rows,
)
from dtype_engine.runtime.inputs.pipeline_inputs import pipeline_inputs
from dtype_engine.runtime.inputs.preprocessing import parameters
from dtype_engine.runtime.inputs.processor_limits import check_processor_files
from dtype_engine.runtime.inputs.tensor_files import tensor_inputs
from dtype_engine.runtime.inputs.text import prompt_texts, text_inputs, without_cache
from dtype_engine.runtime.inputs.validate import with_labels
from dtype_engine.runtime.model.live import LiveModel


def make_inputs(model: LiveModel, options: Options) -> Inputs:
    """Return the user's inputs, or create some. Raises NoForward if none can be created, UserError if the user's do not fit."""
    settings = options.pipeline.given()
    if settings and (options.tensors is not None or not isinstance(model.module, PipelineModule)):
        names = ", ".join(settings).replace("_", "-")
        raise UserError(
            f"{names}: such settings are for the calls that a whole pipeline of diffusers makes: leave them out"
        )
    if options.tensors is not None:
        return tensor_inputs(model, options.tensors, options.limits, labelled=bool(options.metrics))
    given = options.prompts or options.texts or options.images or options.audio
    if model.example_inputs is not None and not given:
        with failures_as(NoForward, f"example_inputs() of {model.title} failed", with_type):
            values = model.example_inputs()
        inputs = without_cache(model, from_values(values, "example_inputs()"))
        return with_labels(model, inputs) if options.metrics else inputs
    if isinstance(model.module, PipelineModule):
        return pipeline_inputs(model, options)
    if is_diffusers_module(model.module):
        return diffusers_inputs(model, options)
    if getattr(model.module, "config", None) is None:
        if given:
            raise UserError(
                f"{model.title} is plain code, so nothing says how a prompt, a picture or audio becomes its tensors; "
                f"{hint('tensors')}"
            )
        raise NoForward(
            f"{model.title}: no forward pass: nothing says what to run it on; {hint('tensors')}, or write a "
            "function example_inputs() next to the model that returns a dict or a tuple of tensors"
        )
    try:
        with failures_as(PartFails, f"{model.title}: its inputs can't be made", with_type):
            return _made(model, options)
    except PartFails as error:
        if given:
            raise
        raise NoForward(f"{error.sentence}; {hint('tensors')}") from error


def _made(model: LiveModel, options: InputOptions) -> Inputs:
    names = parameters(model.module)
    main = getattr(model.module, "main_input_name", "input_ids")
    text, picture, sound = "input_ids" in names, "pixel_values" in names, sound_argument(model)
    if options.images and not picture:
        raise UserError(
            f"{model.title} accepts no pictures: its forward pass has no pixel_values; {hint('no-picture')}"
        )
    if options.audio and sound is None:
        raise UserError(
            f"{model.title} accepts no audio: its forward pass has no input_features or input_values; {hint('no-sound')}"
        )
    if picture or sound is not None:
        check_processor_files(model, options.limits)
    if picture and text and not options.audio:
        return _picture_and_text(model, options)
    if picture and not options.audio:
        if options.prompts or options.texts:
            raise UserError(f"{model.title} accepts pictures and no text; leave the prompts and texts out")
        return _saying_what_is_not_used(picture_inputs(model, options), options)
    if sound is not None and (not text or main == sound or options.audio or is_contrastive(model)):
        return _sound_and_text(model, options) if text else sound_inputs(model, options)
    if text:
        text_only = text_inputs(model, options)
        without = ("no audio: the model runs on text alone",) if sound is not None else ()
        return dataclasses.replace(text_only, made_of=(*text_only.made_of, *without))
    raise NoForward(f"{model.title}: no inputs can be made for {main!r}; {hint('tensors')}")


def _picture_and_text(model: LiveModel, options: InputOptions) -> Inputs:
    """Return inputs with a picture and a text in each batch, or only text if no picture is given or can be created."""
    try:
        used = options.chat and processor_template(model) is not None
        inputs = picture_and_text_inputs(model, options)
        return _saying_what_is_not_used(inputs, dataclasses.replace(options, chat=options.chat and not used))
    except NoForward as error:
        if options.images or getattr(model.module, "main_input_name", "") != "input_ids" or is_contrastive(model):
            raise
        text_only = text_inputs(model, options)
        return dataclasses.replace(text_only, made_of=(*text_only.made_of, f"no picture: {error}"))


def _sound_and_text(model: LiveModel, options: InputOptions) -> Inputs:
    """Return inputs with one batch per audio file, each with all texts, because the model compares audio with texts."""
    sounds = sound_inputs(model, dataclasses.replace(options, prompts=(), texts=()))
    texts, given = prompt_texts(options, SOUNDS)
    rows, shown, how = text_rows(model, texts, given, options.limits)
    batches = tuple(Batch(kwargs=batch.kwargs | rows, text=shown, about=batch.about) for batch in sounds.batches)
    return dataclasses.replace(sounds, batches=batches, made_of=(*sounds.made_of, how))


def _saying_what_is_not_used(inputs: Inputs, options: InputOptions) -> Inputs:
    """Return `inputs` with a note on the user's options that have no effect on a model of pictures or audio. Such options are no
    error, because they may come from a configuration file for all models.
    """
    text_options = (
        ("--chat", options.chat),
        ("--sequence-length", options.sequence_length),
        ("--sequences", options.sequences),
    )
    unused = [name for name, given in text_options if given]
    if not unused:
        return inputs
    words = f"{' and '.join(unused)} not used: {'they are' if len(unused) > 1 else 'it is'} for models of text alone"
    return dataclasses.replace(inputs, made_of=(*inputs.made_of, words))
