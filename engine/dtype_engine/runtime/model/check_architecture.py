"""Adds findings to the report on a checkpoint: tensors that only its architecture has, and tensors that only the files have."""

from __future__ import annotations

import dataclasses

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.check import architecture_findings
from dtype_engine.checkpoint.source import Source
from dtype_engine.core.options import Options
from dtype_engine.results.check import CheckReport
from dtype_engine.runtime.model.describe import describe


def with_architecture(report: CheckReport, source: Source, options: Options, checkpoint: Checkpoint) -> CheckReport:
    """Compare the tensor names in a checkpoint with those of its architecture. Returns `report` with one more finding for each
    tensor that only the checkpoint or only the architecture has.

    Raises UserError if transformers does not have the architecture that `options` name.
    """
    known = describe(source, options, checkpoint)
    if known.coverage is None:
        unchecked = (*report.unchecked, "the architecture: config.json names none that is known here")
        return dataclasses.replace(report, unchecked=unchecked)
    reported = {finding.tensor for finding in report.findings}
    more = architecture_findings(known.coverage, known.class_name)
    findings = (*report.findings, *(finding for finding in more if finding.tensor not in reported))
    return dataclasses.replace(report, findings=findings, coverage=known.coverage)
