"""Computes how similar two pictures or videos are: the peak signal-to-noise ratio and the structural similarity.

With pixels r of the reference and c of the candidate, scaled to 0 to 1 and clipped to this range as for saving:

    PSNR = 10 log10(1 / mean((c - r)²)), in dB
    SSIM = mean of (2 μr μc + C1) (2 σrc + C2) / ((μr² + μc² + C1) (σr² + σc² + C2))

The means μ, variances σ² and covariances are those in a window of 11 x 11 pixels with Gaussian weights (σ = 1.5); C1 = 0.01² and C2
= 0.03². That is the SSIM of Wang, Bovik, Sheikh and Simoncelli (2004), computed for each channel separately, over the windows that
lie completely in the picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, conv2d

from dtype_engine.results.pictures import MOST_PIXELS, Picture

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2
_CHUNK = 16
"""Number of planes (channels of pictures) that are compared at once."""


@dataclass(slots=True)
class PictureSums:
    """Sums over the pixels of pictures, from which `psnr_db` and `ssim` are computed."""

    pixels: int = 0
    squares: float = 0.0
    """The sum of (c - r)², for pixels r of the reference and c of the candidate."""
    windows: int = 0
    similarity: float = 0.0
    """The sum of the structural similarity (SSIM) of all windows."""

    def add(self, other: PictureSums) -> None:
        """Add the sums over further pictures."""
        self.pixels += other.pixels
        self.squares += other.squares
        self.windows += other.windows
        self.similarity += other.similarity

    @property
    def psnr_db(self) -> float:
        """The peak signal-to-noise ratio in dB: infinity for equal pictures, NaN if the candidate has NaN."""
        if not self.squares:
            return math.inf
        return 10 * math.log10(self.pixels / self.squares) if math.isfinite(self.squares) else math.nan

    @property
    def ssim(self) -> float | None:
        """The mean structural similarity, at most 1. None if the pictures are smaller than a window of 11 x 11 pixels."""
        return self.similarity / self.windows if self.windows else None


def picture_range(module: nn.Module) -> tuple[float, float] | None:
    """Return the values of black and of full brightness in a module's output, if its attribute `picture_range` has them."""
    match getattr(module, "picture_range", None):
        case (int() | float() as low, int() | float() as high) if low < high:
            return float(low), float(high)
    return None


def first_picture(output: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return the first picture of a batch, or the first frame of its first video: [3, height, width], with values from 0 to 1.

    output: [batch, channels, height, width], with another dimension before or after the channels for the frames of a video. low,
    high: the values of black and of full brightness. NaN becomes black.
    """
    first = output[0]
    if first.ndim == 4:
        first = first[0] if first.shape[1] in (1, 3) else first[:, 0]
    first = (first[:3] if first.shape[0] >= 3 else first[:1]).detach().float().cpu()
    return ((first.nan_to_num(low, high, low) - low) / (high - low)).clamp(0, 1).expand(3, -1, -1)


def small_picture(output: torch.Tensor, low: float, high: float) -> Picture:
    """Return `first_picture` of the same arguments. A picture larger than `MOST_PIXELS` is made smaller by averaging its pixels."""
    picture = first_picture(output, low, high)
    if max(picture.shape) > MOST_PIXELS:
        share = MOST_PIXELS / max(picture.shape)
        height, width = (max(1, round(share * size)) for size in picture.shape[1:])
        picture = adaptive_avg_pool2d(picture, (height, width))
    values = (255 * picture).round().to(torch.uint8).movedim(0, -1).contiguous()
    return Picture(values.shape[1], values.shape[0], values.numpy().tobytes())


def picture_sums(reference: torch.Tensor, candidate: torch.Tensor, low: float, high: float) -> PictureSums:
    """Compare two tensors of pictures, [..., height, width]. low, high: the pixel values of black and of full brightness."""
    sums = PictureSums()
    planes = [each.detach().cpu().flatten(0, -3) for each in (reference, candidate)]
    for one, other in zip(*(torch.split(each, _CHUNK) for each in planes), strict=True):
        r, c = (((each.double() - low) / (high - low)).clamp(0, 1) for each in (one, other))
        sums.pixels += r.numel()
        sums.squares += float((c - r).square().sum())
        if min(r.shape[-2:]) >= _WINDOW:
            similar = _similarity(r, c)
            sums.windows += similar.numel()
            sums.similarity += float(similar.sum())
    return sums


def _similarity(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    along = torch.exp(-((torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2) ** 2) / (2 * _SIGMA**2))
    along /= along.sum()

    def mean(plane: torch.Tensor) -> torch.Tensor:
        return conv2d(conv2d(plane[:, None], along.view(1, 1, -1, 1)), along.view(1, 1, 1, -1))[:, 0]

    of_r, of_c = mean(r), mean(c)
    variance_r, variance_c, covariance = mean(r * r) - of_r**2, mean(c * c) - of_c**2, mean(r * c) - of_r * of_c
    luminance = (2 * of_r * of_c + _C1) / (of_r**2 + of_c**2 + _C1)
    return luminance * (2 * covariance + _C2) / (variance_r + variance_c + _C2)
