"""Every form with every way: see the table in `tests/README.md`, printed by `python -m tests.matrix`.

The commands are run on every form. The app shows what its engine tells, which comes from the same functions: the test run has one
form of each kind in the app, and the sessions of some of them taken up. `make matrix` has every form there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.matrix import forms, run
from tests.matrix.caches import CACHES
from tests.matrix.expected import OF_SCHEMES, REFUSED, WAYS
from tests.matrix.limits import LIMITS
from tests.matrix.screens import AT_FIRST, SCREENS

_TAKEN_UP = (
    "safetensors file", "folder, experts", ".pth.tar", "whole module", "GGUF Q4_K", "diffusers", "live module",
    "file.py --weights", "package.module:Name",
)  # fmt: skip
_ONCE = ("folder, .bin shards", "adapter", "GPTQ", "file.py, no inputs")
_SCHEMES = (
    "gptq 3 bits, version 2", "gptq 8 bits, ordered columns", "awq gemv", "bnb nf4 nested", "bnb int8", "hqq", "mlx affine",
    "mlx experts", "torchao int8", "torchao nvfp4", "quanto int8", "ct int4 with zero points", "ct int4 stacked", "ct nvfp4",
    "modelopt nvfp4 with factors", "modelopt mixed", "deepseek", "gpt-oss", "comfy scaled_fp8", "comfy nvfp4", "quark int4",
    "gptq 5 bits in planes", "ct nvfp4 with e5m3 scales", "modelopt nvfp4 with low rank", "auto-round mxfp4", "gemma int4",
    "sdnq uint4 with low rank", "sinq", "modelslim int8, static", "comfy int4 by a codebook", "GGUF, with its model",
)  # fmt: skip
"""The schemes of the test run: at least one of each program's, and of each way to find its tensors. `make matrix` has all."""
_ALL_WAYS = (
    "gptq 8 bits, ordered columns", "bnb nf4 nested", "hqq", "mlx experts", "torchao nvfp4", "ct int4 stacked", "modelopt mixed",
    "deepseek", "gpt-oss", "quark int4", "GGUF, with its model",
)  # fmt: skip
"""The schemes that the test run goes every way with. The others go without what uses decoded weights alike."""
_ALIKE = {"flow", "scan", "drift --against", "drift *.kv_cache", "drift --over-memory"}
_SELDOM = ("sweep --metric", "search --metric", "tokens", *CACHES, *LIMITS)
_OFTEN = ("folder", "folder, draft head", "GPTQ", "file.py:Class", "adapter")
"""The forms with which the test run goes these ways. They measure as `drift` does, and take longer."""
_ON_TWO = ("folder", "adapter")
"""Those of them that it runs on two accelerators: each time is a process of its own."""
IN_THE_APP: dict[str, tuple[str, ...]] = dict.fromkeys(_TAKEN_UP, (*AT_FIRST, "app: --resume")) | dict.fromkeys(
    _ONCE, AT_FIRST
)
"""The ways in the app that the test run goes with a form. Forms that the app opens in the same way have one of them here."""


def test_every_checkpoint_form_has_a_row_in_the_matrix() -> None:
    assert list(REFUSED) == list(forms.names())
    for form, refused in REFUSED.items():
        assert refused.keys() <= set(WAYS), form
        assert all(refused.values()), f"{form}: a refusal has to say what its reason is"
    assert IN_THE_APP.keys() <= REFUSED.keys()


@pytest.mark.parametrize("form", forms.names())
def test_every_use_of_a_checkpoint_form_works_or_is_refused(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form in forms.NEEDS:
        pytest.importorskip(forms.NEEDS[form])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    in_the_app = IN_THE_APP.get(form, ())
    left_out = _SELDOM if form not in _OFTEN else () if form in _ON_TWO else ("drift --device-map",)
    cells = run.fill(form, tmp_path, in_the_app, left_out)
    assert set(cells) == (set(WAYS) - set(SCREENS) - set(left_out)) | set(in_the_app)
    assert not (found := run.wrong(form, cells)), "\n".join(found)


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_every_use_of_a_quantization_scheme_works_or_is_refused(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ways = OF_SCHEMES if scheme in _ALL_WAYS else [way for way in OF_SCHEMES if way not in _ALIKE]
    cells = run.fill_scheme(scheme, tmp_path, ways)
    assert list(cells) == list(ways)
    assert not (found := run.wrong(scheme, cells)), "\n".join(found)
