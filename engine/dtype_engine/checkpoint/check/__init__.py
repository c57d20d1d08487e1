"""Checks a checkpoint for missing, misshapen and damaged tensors. By default it reads only the headers and the scales."""

from dtype_engine.checkpoint.check.check import Progress, architecture_findings, check

__all__ = ["Progress", "architecture_findings", "check"]
