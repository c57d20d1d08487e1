"""Small checkpoints in the layouts of other programs' quantizers, with the values that they hold."""

from tests.helpers.quantized import block_scaled, comfy, low_rank, quantizers

CASES = quantizers.CASES | block_scaled.CASES | comfy.CASES | low_rank.CASES
"""A small checkpoint of each way to store a weight."""
