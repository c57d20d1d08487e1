"""Keys as they stand on a keyboard."""

from __future__ import annotations

import pytest

from dtype_tui.config.key_names import on_keyboard


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("slash", "/"),
        ("right_curly_bracket", "}"),
        ("escape", "Esc"),
        ("enter", "Enter"),
        ("space", "Space"),
        ("backspace", "Backspace"),
        ("pagedown", "PgDn"),
        ("shift+tab", "Shift+Tab"),
        ("ctrl+r", "Ctrl+r"),
        (" f5", "f5"),
        ("left", "←"),
        ("H", "H"),
        ("1", "1"),
    ],
)
def test_keys_are_shown_as_on_the_keyboard(key: str, shown: str) -> None:
    assert on_keyboard(key) == shown
