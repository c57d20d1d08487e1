"""The check of a checkpoint: what is wrong with its tensors, by headers and scales alone."""

from dtype_engine.checkpoint.check.check import Progress, architecture_findings, check

__all__ = ["Progress", "architecture_findings", "check"]
