"""PSNR and SSIM, against the same by scipy's Gaussian filter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics
from dtype_engine.runtime.numerics.compare.pictures import picture_sums


def by_scipy(r: np.ndarray, c: np.ndarray) -> float:
    """The SSIM of one plane, where its window of 11 x 11 pixels lies in it."""

    def mean(plane: np.ndarray) -> np.ndarray:
        return gaussian_filter(plane, 1.5, truncate=3.5)[5:-5, 5:-5]

    mr, mc = mean(r), mean(c)
    vr, vc, vrc = mean(r * r) - mr**2, mean(c * c) - mc**2, mean(r * c) - mr * mc
    return float((((2 * mr * mc + 1e-4) * (2 * vrc + 9e-4)) / ((mr**2 + mc**2 + 1e-4) * (vr + vc + 9e-4))).mean())


def test_pictures_are_compared_as_others_do() -> None:
    rng = np.random.default_rng(0)
    smooth = gaussian_filter(rng.random((2, 3, 40, 32)), (0, 0, 2, 2))
    reference = (smooth - smooth.min()) / (smooth.max() - smooth.min()) * 2.4 - 1.2  # some pixels are out of range
    candidate = reference + 0.05 * rng.standard_normal(reference.shape)
    sums = picture_sums(torch.from_numpy(reference), torch.from_numpy(candidate), -1.0, 1.0)
    r, c = (np.clip((each + 1) / 2, 0, 1) for each in (reference, candidate))
    assert sums.psnr_db == pytest.approx(-10 * math.log10(((r - c) ** 2).mean()), rel=1e-12)
    planes = [by_scipy(one, other) for one, other in zip(r.reshape(-1, 40, 32), c.reshape(-1, 40, 32), strict=True)]
    assert sums.ssim == pytest.approx(np.mean(planes), rel=1e-9)
    assert 0.5 < np.mean(planes) < 0.999


def test_a_mean_over_pictures_and_what_has_none() -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.rand(1, 3, 16, 16, generator=generator) for _ in range(3)]
    metrics = OutputMetrics(None, (0.0, 1.0))
    for picture in pictures:
        metrics.add(picture, (picture + 0.01).clamp(0, 1))
    together = picture_sums(torch.cat(pictures), torch.cat([(each + 0.01).clamp(0, 1) for each in pictures]), 0.0, 1.0)
    assert metrics.result().psnr_db == pytest.approx(together.psnr_db, rel=1e-12)
    assert metrics.result().ssim == pytest.approx(together.ssim, rel=1e-12)
    same = picture_sums(pictures[0], pictures[0], 0.0, 1.0)
    assert (same.psnr_db, same.ssim) == (math.inf, pytest.approx(1.0))
    black = picture_sums(pictures[0], torch.full_like(pictures[0], math.nan), 0.0, 1.0)
    assert math.isnan(black.psnr_db)
    assert picture_sums(torch.rand(3, 8, 8), torch.rand(3, 8, 8), 0.0, 1.0).ssim is None
    assert OutputMetrics(None).sequences == {}
    plain = OutputMetrics(None)
    plain.add(pictures[0], pictures[1])
    assert (plain.result().psnr_db, plain.result().ssim) == (None, None)
