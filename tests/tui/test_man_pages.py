"""The manual pages, made of the help."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import click
import pytest
from tests.helpers.paths import ROOT

from dtype_engine.cli import cli
from dtype_tui.cli.command import command


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, str(ROOT / "tui" / "write_man_pages.py"), str(folder)], check=True)
    return {page.stem: page.read_text() for page in folder.glob("*.1")}


def test_man_pages_have_every_command_and_option(pages: dict[str, str]) -> None:
    assert set(pages) == {"dtype-tui", "dtype-engine"}
    shown = {name: page.replace("\\-", "-") for name, page in pages.items()}
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.opts[0] in shown["dtype-tui"]
    context = click.Context(cli)
    for name in cli.list_commands(context):
        one = cli.get_command(context, name)
        assert one is not None
        assert (f"dtype-engine {name}" in shown["dtype-engine"]) is not one.hidden
        for option in one.params if not one.hidden else ():
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0] in shown["dtype-engine"]


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff here")
@pytest.mark.parametrize("program", ["dtype-tui", "dtype-engine"])
def test_man_pages_are_valid_for_groff(program: str, pages: dict[str, str]) -> None:
    groff = ["groff", "-man", "-ww", "-Kutf8", "-Tutf8", "-P-c"]
    done = subprocess.run(groff, input=pages[program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    words = " ".join(re.sub(".\b|\x1b\\[[0-9;]*m", "", done.stdout).split())
    assert f"{program} - " in words
    assert "--trust-pickle Allow loading pickle files (.pt, .pth, .bin) that contain more than tensors." in words
    assert "BOX dtype-engine stdio" in words or program == "dtype-engine"
