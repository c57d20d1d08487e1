"""Every form with every way: see the table in `tests/README.md`, printed by `python -m tests.matrix`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.matrix import forms, run
from tests.matrix.expected import REFUSED, WAYS
from tests.matrix.screens import SCREENS


def test_every_form_has_a_row_and_every_row_a_form() -> None:
    assert list(REFUSED) == list(forms.names())
    for form, refused in REFUSED.items():
        assert refused.keys() <= set(WAYS), form
        assert all(refused.values()), f"{form}: a refusal has to say what its reason is"


@pytest.mark.parametrize("form", forms.names())
def test_without_a_screen(form: str, tmp_path: Path) -> None:
    cells = run.commands(form, forms.made(form, tmp_path / "made"), tmp_path / "work")
    assert set(cells) == set(WAYS) - set(SCREENS)
    assert not (found := run.wrong(form, cells)), "\n".join(found)


@pytest.mark.parametrize("form", forms.names())
def test_in_the_app(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    cells = run.screens(form, forms.made(form, tmp_path / "made"), tmp_path / "app")
    assert set(cells) == set(SCREENS)
    assert not (found := run.wrong(form, cells)), "\n".join(found)
