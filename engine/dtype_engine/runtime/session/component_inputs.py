"""Creates a session's inputs. Those of a component of a diffusers pipeline, if its own fail, come from one run of the pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint.components import index_around
from dtype_engine.checkpoint.source import locate
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.options import InputOptions, ModelOptions, Options, RunSettings
from dtype_engine.core.pipeline_settings import PipelineSettings
from dtype_engine.core.units import plural
from dtype_engine.runtime.building.diffusers_models import run_decoder
from dtype_engine.runtime.building.load import build_on_meta, load
from dtype_engine.runtime.inputs import Batch, Inputs, make_inputs, one_of_each_shape
from dtype_engine.runtime.inputs.pipeline_inputs import pipeline_inputs
from dtype_engine.runtime.libraries.silence_libraries import quiet
from dtype_engine.runtime.model.containers import copied, with_tensors
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.runner import ForwardRunner

_STEPS = 2
_NOT_RECORDED = ("return_dict", "generator")
"""Arguments that say nothing about the component's values: the form of its output, and a generator, which a run would advance."""


def inputs_of(model: LiveModel, options: Options) -> Inputs:
    """Return the inputs that `make_inputs` creates. If the model is a component of a pipeline, and there are no such inputs or it
    refuses them, return the arguments that one run of the pipeline passes to it. Raises NoForward if there are no inputs, and
    UserError if the user's inputs do not fit the model.
    """
    given = options.prompts or options.texts or options.images or options.audio or options.tensors is not None
    given = given or bool(options.pipeline.given())
    if given or model.folder is None or not index_around(model.folder):
        return make_inputs(model, options)
    try:
        made = make_inputs(model, options)
        if not _may_be_refused(model, made):
            return made
        with ForwardRunner(model, RunSettings(), never, watch=False) as runner:
            runner.reference(runner.reference_call(made.batches[0]))
        return made
    except NoForward as unknown:
        try:
            with failures_as(NoForward, "it can't be run"):
                return _from_pipeline(model, model.folder.parent.name, options)
        except UserError as error:
            raise NoForward(f"{unknown.sentence}; nor can the pipeline around it: {error.sentence}") from None


def _may_be_refused(model: LiveModel, inputs: Inputs) -> bool:
    """Return whether the model's code seems to refuse the first of some inputs: whether a pass on the meta device, which computes
    nothing and needs no weights, fails. Returns False if such a pass fails only because the code reads values.
    """
    if model.checkpoint is None:
        return False
    module = build_on_meta(model.checkpoint, ModelOptions())[0].to("meta")
    run_decoder(module, of_sound=False)
    try:
        with quiet(), torch.no_grad():
            inputs.batches[0].on(torch.device("meta")).run(module.eval())
    except Exception as error:
        return "meta" not in str(error)
    return False


def _from_pipeline(model: LiveModel, title: str, options: Options) -> Inputs:
    assert model.folder is not None
    name = model.folder.name
    opened = ModelOptions(device=options.device, trust_pickle=options.trust_pickle, max_memory=options.max_memory)
    pipeline = load(locate(str(model.folder.parent)), opened)
    settings = PipelineSettings(steps=options.sequences or _STEPS)
    given = pipeline_inputs(pipeline, InputOptions(sequences=1, pipeline=settings))
    with ForwardRunner(pipeline, RunSettings(), never, watch=False) as runner:
        run = runner.reference_call(given.batches[0])

        def recording() -> list[dict[str, Any]]:
            with _recorded(getattr(pipeline.module, name)) as calls:
                run()
            return calls

        calls = runner.reference(recording).output
    if not calls:
        raise NoForward(f"{title} does not use {name} for {given.description}")
    what = f"{plural(len(calls), 'call')} that {title} makes for {given.description}"
    return Inputs(tuple(Batch(kwargs=call) for call in calls), what, made_of=(f"{what}; seed 0",))


@contextmanager
def _recorded(component: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """In the `with` block, record the arguments of each call of a component, or of the decoder of an autoencoder, by name."""
    name = "decode" if hasattr(component, "decode") and hasattr(component, "encode") else "forward"
    original: Callable[..., Any] = getattr(component, name)
    signature = inspect.signature(original)
    required = {name for name, each in signature.parameters.items() if each.default is each.empty}
    calls: list[dict[str, Any]] = []

    def recording(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind(*args, **kwargs).arguments
        named |= named.pop("kwargs", {})
        if name == "decode":  # the decoder's forward pass calls its argument z
            named = {"z": named.pop(next(iter(named))), **named}
        absent = {key for key, value in named.items() if value is None and key not in required}
        kept = {key: value for key, value in named.items() if key not in _NOT_RECORDED and key not in absent}
        calls.append(with_tensors(kept, _copied))
        return original(*args, **kwargs)

    setattr(component, name, recording)
    try:
        yield calls
    finally:
        delattr(component, name)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU. Floating-point values become float32, or stay float64."""
    wide = tensor.is_floating_point() and tensor.dtype != torch.float64
    return copied(tensor.detach()).to("cpu", torch.float32 if wide else None)


def tried_inputs(
    model: LiveModel, options: Options, settings: RunSettings, behavior: ModelBehavior, cancelled: IsCancelled
) -> Inputs:
    """Return the inputs that `options` name, after a reference run over one batch of each shape. Raises UserError if they can't be
    made or do not fit the model, and what a run raises.
    """
    inputs = inputs_of(model, options)
    with ForwardRunner(model, settings, cancelled, watch=False, behavior=behavior) as runner:
        for tried in one_of_each_shape(inputs):
            runner.reference(runner.reference_call(tried))
    return inputs
