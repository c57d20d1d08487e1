"""The tools that agents call, through the client of the package itself."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import preloaded

from dtype_engine.cli import cli
from dtype_engine.cli.mcp_server import Access, make_server
from dtype_engine.cli.program import run

pytest.importorskip("mcp")
ENGINE = preloaded.command("import sys; sys.argv[0] = 'dtype-engine'; from dtype_engine.cli import main; main()")
DEMO_RULE = "*.mlp=fp8"


@asynccontextmanager
async def client_of(access: Access, seconds: float = 300, engine: tuple[str, ...] = ENGINE) -> AsyncIterator[Any]:
    from mcp import Client

    async with Client(make_server(access, seconds, engine)) as client:
        yield client


async def called(name: str, engine: tuple[str, ...] = ENGINE, seconds: float = 300, **arguments: object) -> Any:
    """Return the result of one call of a tool on the demo."""
    async with client_of(Access((Path(),)), seconds, engine) as client:
        return await client.call_tool(name, {"model": "demo", **arguments})


def text_of(result: Any) -> str:
    return "".join(part.text for part in result.content)


RUNNING = "prompts texts sequence_length sequences compute autocast float_inputs quantize_activations classes_dim"
OF_DRIFT = (
    "model casts generate causes suggest max_kl min_sqnr min_top1 json component architecture precision floor modules "
    + RUNNING
)
OFFERED = {
    "inspect": "model casts preset json depth sort component architecture",
    "drift": f"{OF_DRIFT} preset reference",
    "against": f"{OF_DRIFT} other",
    "scan": f"model formats dtypes draws exact json component architecture {RUNNING}",
    "search": "model budget keep groups only context batch measure verify formats dtypes draws exact json component architecture "
    + RUNNING,
    "check": "model source values json component architecture",
}
"""The parameters of each tool. No parameter may run code, write a file, download, or read a file outside the allowed folders."""


async def test_mcp_tools_have_schemas() -> None:
    async with client_of(Access((Path(),))) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert {name: set(tool.input_schema["properties"]) for name, tool in tools.items()} == {
        name: set(names.split()) for name, names in OFFERED.items()
    }
    required = {name: set(tool.input_schema["required"]) - {"model"} for name, tool in tools.items()}
    assert {name: more for name, more in required.items() if more} == {
        "drift": {"casts"}, "against": {"other"}, "search": {"budget"},
    }  # fmt: skip
    for tool in tools.values():
        assert "model" in tool.input_schema["required"], tool.name
        assert tool.description
    assert tools["inspect"].input_schema["properties"]["depth"]["default"] == 3
    drift = tools["drift"].input_schema["properties"]
    assert drift["casts"]["items"] == {"type": "string"}
    assert drift["floor"]["enum"] == ["auto", "always", "never"]
    assert drift["floor"]["default"] == "auto"
    assert drift["sequences"]["description"].startswith("Maximum number of sequences")


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "inspect": ({"casts": [DEMO_RULE], "depth": 1}, "demo"),
    "check": ({"values": True}, "nothing found"),
    "drift": ({"casts": [DEMO_RULE], "prompts": ["import os"], "max_kl": 0.0}, "SQNR"),
    "scan": ({"dtypes": "fp8", "prompts": ["import os"]}, "self_attn.o_proj.weight"),
    "search": ({"budget": "60%", "dtypes": "bf16", "prompts": ["import os"], "measure": False}, "predicted"),
    "against": ({"other": "demo", "casts": [DEMO_RULE], "prompts": ["import os"]}, "SQNR"),
}


@pytest.mark.slow
async def test_each_mcp_tool_answers_like_its_command(capfd: pytest.CaptureFixture[str]) -> None:
    async with client_of(Access((Path(),))) as client:
        assert set(CALLS) == {tool.name for tool in (await client.list_tools()).tools}
        for name, (arguments, words) in CALLS.items():
            result = await client.call_tool(name, {"model": "demo", **arguments})
            assert not result.is_error, text_of(result)
            assert words in text_of(result), name
        result = await client.call_tool(
            "drift", {"model": "demo", "casts": [DEMO_RULE], "prompts": ["import os"], "json": True}
        )
    assert run(cli, "dtype-engine", ["drift", "--cast", DEMO_RULE, "--prompt", "import os", "--json"]) == 0
    assert json.loads(text_of(result))["output"] == json.loads(capfd.readouterr().out)["output"]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("inspect", {"model": "/etc"}, "/etc is outside the folders that may be read: "),
        ("inspect", {"model": "inside/../../secret"}, "is outside the folders"),
        ("inspect", {"model": "link"}, "link is outside the folders"),
        ("inspect", {"model": "net.py:Net"}, "net.py:Net is Python code, which no tool runs"),
        ("inspect", {"model": "os:system"}, "os:system is Python code"),
        ("inspect", {"model": "hf://org/name"}, "models on a hub are served with dtype-engine mcp --hub"),
        ("inspect", {"model": "--help"}, "--help: no such folder or file"),
        ("check", {"model": "demo", "source": "/etc/passwd"}, "/etc/passwd is outside the folders"),
        ("against", {"model": "demo", "other": "/etc/passwd"}, "/etc/passwd is outside the folders"),
        ("drift", {"model": "demo", "casts": [], "texts": ["/etc/passwd"]}, "/etc/passwd is outside the folders"),
        ("inspect", {"model": "/proc/self/root/etc"}, "/proc/self/root/etc is outside the folders"),
        ("inspect", {"model": "x" * 5000}, "File name too long: 'xxx"),
        ("inspect", {"model": "demo", "casts": ["x" * 5_000_000]}, "Argument list too long"),
        ("inspect", {"model": "demo", "casts": ["*=bf16\0"]}, "embedded null byte"),
    ],
)
async def test_mcp_refuses_paths_outside_its_folders_and_python_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any], words: str
) -> None:
    (tmp_path / "secret").mkdir()
    here = tmp_path / "here"
    (here / "inside").mkdir(parents=True)
    (here / "link").symlink_to(tmp_path / "secret")
    (here / "net.py").write_text("raise SystemExit")
    monkeypatch.chdir(here)
    async with client_of(Access((here,)), engine=("false",)) as client:
        result = await client.call_tool(name, arguments)
    assert result.is_error
    assert words in text_of(result)


@pytest.mark.slow
async def test_mcp_reports_errors_and_exceeded_limits_in_sentences() -> None:
    result = await called("inspect", casts=["nothing=fp8"])
    assert result.is_error
    assert "pattern 'nothing' matches nothing in this model" in text_of(result)
    result = await called("check", (sys.executable, "-c", "import time; time.sleep(600)"), 0.2)
    assert result.is_error
    assert "check took over 0.2 seconds and was ended" in text_of(result)
    result = await called("check", (sys.executable, "-c", "print('x' * 300_000)"))
    assert text_of(result).endswith("... and 100,000 more characters")
    result = await called("check", (sys.executable, "-c", "import sys; sys.stderr.write('x' * 300_000); sys.exit(2)"))
    assert result.is_error
    assert len(text_of(result)) < 2100


@pytest.mark.slow
async def test_mcp_serves_over_standard_streams(tmp_path: Path) -> None:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    command, *arguments = ENGINE
    server = StdioServerParameters(
        command=command, args=[*arguments, "mcp", "--allow", str(tmp_path)], cwd=str(tmp_path)
    )
    async with Client(stdio_client(server)) as client:
        assert len((await client.list_tools()).tools) == 6
        result = await client.call_tool("inspect", {"model": "demo", "depth": 0})
    assert "707.8 k" in text_of(result)
