"""The candidate's output for the first input of a session."""

from __future__ import annotations

import torch

import dtype_engine as de
from dtype_engine.core.cancellation import never
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner


def candidate_output(session: de.Session) -> torch.Tensor:
    """Return the main output as a measurement computes it, with the settings of the session."""
    batch = session.need_inputs().batches[0]
    with ForwardRunner(session.model, session.settings, never) as runner:
        output = runner.candidate(lambda: session.model.module(*batch.args, **batch.kwargs)).output
    return main_output(output)[1]
