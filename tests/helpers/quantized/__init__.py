"""Small checkpoints in the layouts of other programs' quantizers, with the values that they hold."""

from tests.helpers.quantized import block_scaled, quantizers

CASES = quantizers.CASES | block_scaled.CASES
"""A small checkpoint of each way to store a weight."""
