"""Checks a checkpoint for missing, misshapen and damaged tensors. Values other than scales are read only on demand."""

from dtype_engine.checkpoint.check.check import architecture_findings, check

__all__ = ["architecture_findings", "check"]
