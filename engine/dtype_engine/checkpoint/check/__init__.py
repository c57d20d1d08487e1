"""Checks a checkpoint for missing, misshapen and damaged tensors. Only the headers and the scales are read, unless all values are
asked for.
"""

from dtype_engine.checkpoint.check.check import Progress, architecture_findings, check

__all__ = ["Progress", "architecture_findings", "check"]
