"""Opens a session for a model that the user named, or for an `nn.Module` in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint import refuse_changed
from dtype_engine.checkpoint.source import Source, locate_by
from dtype_engine.core.errors import UserError
from dtype_engine.core.input_args import parse_inputs_line
from dtype_engine.core.opening_progress import READING_INPUTS
from dtype_engine.core.options import STORED, ModelOptions, Options
from dtype_engine.runtime.building.load import OnStep, load
from dtype_engine.runtime.building.reference_checkpoint import use_reference
from dtype_engine.runtime.inputs import from_values
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.session.session import Session


def threads_each(threads: int | None, processes: int) -> int:
    """Return how many threads each of several processes gets if they share `threads` or, if that is None, torch's threads."""
    return max(1, (threads or torch.get_num_threads()) // processes)


def use_threads(threads: int | None) -> None:
    """Set the number of threads that torch uses for computations, unless it is None."""
    if threads:
        torch.set_num_threads(threads)


def open_session(
    model: str | Source | nn.Module | None = None,
    options: Options | None = None,
    inputs: Any = None,
    on_step: OnStep = lambda step: None,
    refused: Callable[[str], None] | None = None,
) -> Session:
    """Open a model as `dtype_engine.open` does.

    inputs: the user's values, as for `from_values`; if None, `options` name the inputs. on_step: called with a description of each
    step, such as "importing transformers". refused: called with the reason if the inputs in `options` do not fit; the session then
    opens with default inputs. If `refused` is None, the error is raised.
    """
    options = options or Options()
    use_threads(options.threads)
    given = from_values(inputs, "inputs") if inputs is not None else None
    if isinstance(model, nn.Module):
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        live = LiveModel.wrap(model, type(model).__name__, device)
        _set_reference(live, options, on_step)
        return Session(live, options, given)
    source = model if isinstance(model, Source) else locate_by(model, options)
    live = load(source, options, on_step)
    _set_reference(live, options, on_step)
    refuse_changed(live.identities)
    on_step(READING_INPUTS)
    try:
        return Session(live, options, given)
    except UserError as error:
        if refused is None:
            raise
        refused(str(error))
        return Session(live, parse_inputs_line(options, ""), given)


def _set_reference(live: LiveModel, options: ModelOptions, on_step: OnStep) -> None:
    """Set the reference model that `options.reference` names. Raises UserError if it can't be compared with the model."""
    if options.reference == STORED:
        live.reference = STORED
        for weight in live.by_id.values():
            weight.as_stored = True
    elif options.reference_model is not None:
        if options.config is not None:
            raise UserError(
                "two single files can't be compared: --against takes checkpoints in a layout of their own; leave out "
                "--config or --against"
            )
        use_reference(live, locate_by(options.reference_model, options), options, on_step)
