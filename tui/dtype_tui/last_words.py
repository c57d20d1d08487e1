"""An app that ends by an error that nobody thought of: the terminal is restored, and one sentence says what it was."""

from __future__ import annotations

import os
import sys

from rich.text import Text
from textual.app import App

from dtype_engine.cli.common import TRACEBACK, unexpected

from .crash import recorded


class LastWords(App[None]):
    """Textual would show a traceback of hundreds of lines. With DTYPE_TUI_TRACEBACK set it still does."""

    def _fatal_error(self) -> None:
        error = sys.exc_info()[1] or self._exception
        if os.environ.get(TRACEBACK) or error is None:
            super()._fatal_error()
            return
        words = f"{self.title.partition(' ')[0] or 'dtype-tui'}: {unexpected(error)}{recorded(error)}"
        self._exit_renderables.append(Text(words, overflow="fold"))
        self._close_messages_no_wait()
