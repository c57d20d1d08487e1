"""Reports to keep: one file, HTML or Markdown, with all that is known of a recipe on a model."""

from dtype_engine.reports.document import gather
from dtype_engine.reports.render import FORMATS, check_name, render
from dtype_engine.reports.versions import versions

__all__ = ["FORMATS", "check_name", "gather", "render", "versions"]
