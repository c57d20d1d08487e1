"""Compares a checkpoint with its architecture, for the report on the checkpoint."""

from __future__ import annotations

import dataclasses

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.check import architecture_findings
from dtype_engine.checkpoint.plausible import ImpossibleConfig
from dtype_engine.checkpoint.source import Source
from dtype_engine.core.errors import NoForward
from dtype_engine.core.options import ModelOptions
from dtype_engine.results.check import CheckReport, Finding
from dtype_engine.runtime.building.describe import describe


def with_architecture(
    report: CheckReport, source: Source, options: ModelOptions, checkpoint: Checkpoint
) -> CheckReport:
    """Return `report` with one more finding for each tensor that only the checkpoint or only its architecture has, or that has
    another shape in the architecture; and with one if no model can be made of config.json. If the architecture is unknown, the
    report says why among what is unchecked.

    Raises UserError if transformers does not have the architecture that `options` name.
    """
    known = describe(source, options, checkpoint)
    if known.coverage is None:
        if known.unknown is not None and _contradicts(known.unknown, options):
            finding = Finding("configuration", "config.json", f"makes no model: {known.unknown}", "config.json")
            return dataclasses.replace(report, findings=(*report.findings, finding))
        why = known.unknown or "the files hold a whole module, which was loaded as it is"
        return dataclasses.replace(report, unchecked=(*report.unchecked, f"the architecture: {why}"))
    reported = {finding.tensor for finding in report.findings}
    more = architecture_findings(known.coverage, known.class_name, checkpoint)
    findings = (*report.findings, *(finding for finding in more if finding.tensor not in reported))
    return dataclasses.replace(report, findings=findings, coverage=known.coverage)


def _contradicts(error: NoForward, options: ModelOptions) -> bool:
    """Return whether an error is the fault of config.json, and not of a missing package, the machine or a model's own code."""
    outside = (ImportError, OSError, MemoryError)
    of_machine = isinstance(error.__cause__, outside) or isinstance(error.__context__, outside)
    return isinstance(error, ImpossibleConfig) and not of_machine and not options.trust_remote_code
