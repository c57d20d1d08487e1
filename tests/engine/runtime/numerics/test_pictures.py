"""PSNR and SSIM, against the same by scipy's Gaussian filter."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import nn

import dtype_engine as de
from dtype_engine.reports.document import Measured, build_report
from dtype_engine.reports.render import render
from dtype_engine.results.as_json import as_json
from dtype_engine.results.pictures import MOST_PICTURES, Picture, PicturePair
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics
from dtype_engine.runtime.numerics.compare.pictures import picture_range, picture_sums, small_picture
from dtype_engine.service import events
from dtype_engine.service.messages import AnswerDecoder, check_event, encode_answer


def by_scipy(r: np.ndarray, c: np.ndarray) -> float:
    """The SSIM of one plane, where its window of 11 x 11 pixels lies in it."""

    def mean(plane: np.ndarray) -> np.ndarray:
        return gaussian_filter(plane, 1.5, truncate=3.5)[5:-5, 5:-5]

    mr, mc = mean(r), mean(c)
    vr, vc, vrc = mean(r * r) - mr**2, mean(c * c) - mc**2, mean(r * c) - mr * mc
    return float((((2 * mr * mc + 1e-4) * (2 * vrc + 9e-4)) / ((mr**2 + mc**2 + 1e-4) * (vr + vc + 9e-4))).mean())


def test_psnr_and_ssim_equal_those_of_numpy_and_scipy() -> None:
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


def test_psnr_over_pictures_is_that_of_all_pixels_together() -> None:
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


def test_small_picture_has_the_values_or_their_means() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (1, 3, 5, 7), dtype=np.uint8)
    shown = small_picture(torch.from_numpy(pixels / 127.5 - 1), -1.0, 1.0)
    assert (shown.width, shown.height) == (7, 5)
    assert (np.frombuffer(shown.pixels, np.uint8).reshape(5, 7, 3) == pixels[0].transpose(1, 2, 0)).all()
    large = rng.random((1, 1, 512, 1024))
    shown = small_picture(torch.from_numpy(large), 0.0, 1.0)
    means = 255 * large[0, 0].reshape(128, 4, 256, 4).mean((1, 3))
    held = np.frombuffer(shown.pixels, np.uint8).reshape(128, 256, 3)
    assert np.abs(held - means[..., None]).max() <= 0.51
    video = torch.arange(2 * 3 * 4 * 4).reshape(1, 2, 3, 4, 4) / 96
    frames_last = small_picture(video.movedim(1, 2), 0.0, 1.0)
    assert small_picture(video, 0.0, 1.0) == frames_last == small_picture(video[:, 0], 0.0, 1.0)
    unknown = torch.tensor([math.nan, math.inf, -math.inf, 0.5]).reshape(1, 1, 2, 2)
    assert small_picture(unknown, 0.0, 1.0).pixels == bytes([0] * 3 + [255] * 3 + [0] * 3 + [128] * 3)


@pytest.mark.parametrize(
    ("held", "wanted"), [((0, 1), (0.0, 1.0)), ((-1.0, 1.0), (-1.0, 1.0)), ((1, 0), None), (7, None), ("ab", None)]
)
def test_picture_range_is_read_from_the_module_class(held: object, wanted: object) -> None:
    assert picture_range(type("Painter", (torch.nn.Module,), {"picture_range": held})()) == wanted
    assert picture_range(torch.nn.Linear(1, 1)) is None


class Painter(nn.Module):
    """A model of our own that says that its outputs are pictures."""

    picture_range = (0.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x).sigmoid()


def test_pictures_of_both_sides_are_in_report_and_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    module = Painter()
    inputs = [torch.rand(1, 1, 12, 16) for _ in range(6)]
    with torch.no_grad():
        plain = [module(x)[0] for x in inputs]
        rough = nn.functional.conv2d(
            inputs[1].bfloat16(), *(each.bfloat16() for each in module.mix.parameters()), padding=1
        )
    session = de.open(module, inputs=inputs)
    session.cast("*", "bfloat16")
    report = session.drift()
    assert len(report.pictures) == MOST_PICTURES

    def held(picture: Picture) -> torch.Tensor:
        return torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8).reshape(12, 16, 3).movedim(-1, 0).float()

    for pair, wanted in zip(report.pictures, plain, strict=False):
        assert (held(pair.reference) - 255 * wanted).abs().max() <= 0.51
    assert (held(report.pictures[1].candidate) - 255 * rough[0].float().sigmoid()).abs().max() <= 1.51
    assert as_json(report)["pictures"][0]["reference"] == {"width": 16, "height": 12}
    made = build_report(session.tree, session.plan, "Painter", session.settings, Measured(report), {})
    page = render(made, tmp_path / "report.html")
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    wanted_pixels = [each.pixels for pair in report.pictures for each in (pair.reference, pair.candidate)]
    assert [Image.open(io.BytesIO(base64.b64decode(each))).tobytes() for each in embedded] == wanted_pixels
    assert "a report in HTML has the pictures" in render(made, tmp_path / "report.md")
    event = events.Measured(session.recipe, report)
    check_event(event)
    decoder = AnswerDecoder()
    assert [decoder.decode(part) for part in encode_answer(event)] == [event]
    narrow = dataclasses.replace(report.pictures[0].reference, width=15)
    for pairs in (
        report.pictures * 2,
        (PicturePair(narrow, report.pictures[0].candidate),),
        (PicturePair(Picture(257, 1, bytes(3 * 257)), Picture(1, 1, bytes(3))),),
        (PicturePair(Picture(0, 0, b""), Picture(1, 1, bytes(3))),),
    ):
        with pytest.raises(ValueError, match=r"pictures of at most|bytes for a picture"):
            check_event(events.Measured(session.recipe, dataclasses.replace(report, pictures=pairs)))
