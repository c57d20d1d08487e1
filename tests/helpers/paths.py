"""Where the tests' own models lie, and the demo."""

from __future__ import annotations

from pathlib import Path

import dtype_engine

ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).parent.parent / "engine" / "models"
"""Models as Python files."""
TINYNET = MODELS / "tinynet.py"
DEMO = Path(dtype_engine.__file__).parent / "demo"
