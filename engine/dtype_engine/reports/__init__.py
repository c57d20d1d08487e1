"""Reports to keep: one file, HTML or Markdown, with all that is known of a recipe on a model. Never imports torch."""

from .contents import gather
from .versions import versions
from .write import FORMATS, check_name, render

__all__ = ["FORMATS", "check_name", "gather", "render", "versions"]
