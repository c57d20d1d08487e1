"""`dtype-engine --version`. With `--verbose`, it also prints the libraries and the hardware, which may affect measured metrics."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import click

from dtype_engine.cli.program import answer
from dtype_engine.core.version import __version__

_LIBRARIES = ("torch", "transformers", "safetensors", "textual", "gguf", "numpy")


def print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    """Print the version and exit if `wanted`, the option's value, is True."""
    if not wanted or context.resilient_parsing:
        return
    if not context.params.get("verbose"):
        answer(f"dtype-engine, version {__version__}")
        context.exit()
    from dtype_engine.reports.versions import installed
    from dtype_engine.runtime.device import hardware

    named = {"dtype-tui": __version__, "python": platform.python_version()}
    named |= {name: installed(name) or "not installed" for name in _LIBRARIES}
    named |= {"platform": platform.platform(), "processor": f"{_processor()}, {os.cpu_count()} cores"} | hardware()
    for name, value in named.items():
        answer(f"{name:<13} {value}")
    context.exit()


def _processor() -> str:
    """Return the processor's model name, on Linux from /proc/cpuinfo, because `platform` knows only the architecture there."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
