"""Adds `__repr__` and `_repr_html_` to result classes. These classes do not define the methods themselves, because they must not
import the code that writes reports.
"""

from __future__ import annotations

from dtype_engine.core.tree import Tree
from dtype_engine.reports.notebook import drift_html, drift_repr, scan_html, tree_html
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.scan import ScanReport


def show_in_notebooks() -> None:
    """Make notebooks show trees, drift reports and scan reports as tables, and make Python prompts show a drift report in five
    lines.
    """
    DriftReport.__repr__ = drift_repr  # type: ignore[assignment]
    Tree._repr_html_ = tree_html  # type: ignore[attr-defined]
    DriftReport._repr_html_ = drift_html  # type: ignore[attr-defined]
    ScanReport._repr_html_ = scan_html  # type: ignore[attr-defined]
