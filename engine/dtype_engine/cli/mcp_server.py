"""`dtype-engine mcp`: serves commands as tools to agents that speak the Model Context Protocol, on standard input and output.

Each call of a tool runs the command of the same name in a process of its own, which is ended at the time limit. A call can name
only models and text files in the allowed folders. It can't give options that run code, download or write files.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.text import printable, without_controls
from dtype_engine.core.version import __version__

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

ENGINE = (sys.executable, "-P", "-c", "from dtype_engine.cli import main; main()")
"""The words of the command line that starts `dtype-engine`, without its arguments."""
_MOST_CHARACTERS = 200_000
"""Maximum length of an answer to an agent, in characters. The JSON of a large model would fill an agent's context many times over.
"""
_MOST_OF_AN_ERROR = 2000
"""Maximum length of an error message to an agent, in characters. A message may quote an argument, which can have any length."""
_INSTRUCTIONS = """Measures what happens to a PyTorch model when some of its layers are in another dtype.
A rule is PATTERN=DTYPE, such as *.mlp=fp8 or model.layers.{0..7}=bf16; the last rule that matches a tensor decides. inspect lists
the modules with their bytes, also planned under rules. drift measures how much the output changes under rules. scan estimates how
much each weight matters in each dtype, and search finds the best rules for a size. check looks for errors in a checkpoint's files.
against compares the outputs of two checkpoints. The model demo is built in."""


@dataclass(frozen=True, slots=True)
class Access:
    """Which models and files an agent may read by calling the server's tools."""

    folders: tuple[Path, ...]
    """The folders from which models and text files may be read."""
    hub: bool = False
    """Whether models on a hub (`hf://org/name`) and in the Hugging Face cache may be read."""

    def model(self, text: str) -> str:
        """Return the model that an agent named with `text`, as the argument MODEL of a command line. Raises UserError unless the
        model may be read.
        """
        from dtype_engine.checkpoint.source import is_python

        if Path(text).expanduser().exists():
            return self.file(text)
        if text == "demo":
            return text
        if is_python(text) or text.endswith(".py"):
            raise UserError(f"{printable(text, 200)} is Python code, which no tool runs: name a checkpoint")
        if not self.hub:
            raise UserError(
                f"{printable(text, 200)}: no such folder or file; models on a hub are served with dtype-engine mcp --hub"
            )
        return text

    def file(self, text: str) -> str:
        """Return the absolute path of a file or folder. Raises UserError unless it is in an allowed folder."""
        path = Path(text).expanduser().resolve()
        if not any(path.is_relative_to(folder.resolve()) for folder in self.folders):
            allowed = ", ".join(str(folder.resolve()) for folder in self.folders)
            raise UserError(f"{printable(text, 200)} is outside the folders that may be read: {allowed}")
        return str(path)


@click.command("mcp")
@click.option(
    "--allow",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder from which agents may read models and text files; may be repeated.  [default: the working directory]",
)
@click.option(
    "--hub",
    is_flag=True,
    help="Also let agents read models on a hub (hf://org/name) and in the local Hugging Face cache.",
)
@click.option(
    "--seconds",
    type=click.IntRange(min=1),
    default=600,
    show_default=True,
    help="The time limit for each call of a tool, in seconds. A call that takes longer is stopped with an error.",
)
def mcp(folders: tuple[Path, ...], hub: bool, seconds: int) -> None:
    """Serve the commands inspect, drift (also against another checkpoint), scan, search and check as tools for AI agents, by the
    Model Context Protocol (MCP) on standard input and output.

    Agents start this command themselves; users name it in the agent's configuration. It needs `pip install 'dtype-tui[mcp]'`.
    """
    if sys.stdin.isatty():
        raise UserError("this is for programs: an agent's configuration names the command `dtype-engine mcp`")
    make_server(Access(folders or (Path(),), hub), seconds).run()


def make_server(access: Access, seconds: float, engine: Sequence[str] = ENGINE) -> MCPServer:
    """Return a server for the Model Context Protocol, which offers commands of `dtype-engine` as tools. access: what the tools may
    read. seconds: the time limit of a call. engine: the command that starts `dtype-engine`.

    Raises UserError if the package `mcp` is not installed.
    """
    try:
        import anyio
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise UserError("the package mcp is not installed: pip install 'dtype-tui[mcp]'") from None
    server = MCPServer("dtype-engine", instructions=_INSTRUCTIONS, version=__version__, log_level="ERROR")
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}  # what the engine prints is decoded as UTF-8
    one_at_a_time = anyio.CapacityLimiter(1)  # each call may take the memory of a whole model

    async def run(command: str, model: str, *options: str, json: bool = False) -> str:
        words = [*engine, command, *options, *(["--json"] if json else []), "--", access.model(model)]
        async with one_at_a_time:
            try:
                with anyio.fail_after(seconds):
                    ended = await anyio.run_process(words, stdin=subprocess.DEVNULL, check=False, env=environment)
            except TimeoutError:
                raise UserError(f"{command} took over {seconds} seconds and was ended") from None
        said, notes = (without_controls(text.decode(errors="replace")).strip() for text in (ended.stdout, ended.stderr))
        if ended.returncode not in (0, 1):
            raise UserError(_shortened(notes) or f"{command} ended with status {ended.returncode}")
        if len(said) > _MOST_CHARACTERS:
            said = f"{said[:_MOST_CHARACTERS]}\n... and {len(said) - _MOST_CHARACTERS:,} more characters"
        return said if json or not notes else f"{said}\n{notes}"

    def inputs(prompts: Sequence[str] | None, texts: Sequence[str] | None, sequences: int | None) -> list[str]:
        files = [access.file(text) for text in texts or ()]
        return [*_options("prompt", prompts), *_options("text", files), *_option("sequences", sequences)]

    def tool(function: Callable[..., Awaitable[str]]) -> None:
        @functools.wraps(function)
        async def call(*arguments: Any, **named: Any) -> str:
            try:
                return await function(*arguments, **named)
            except UserError as error:
                raise ToolError(str(error)) from None
            except (OSError, ValueError) as error:  # such as a path or arguments that are too long for the system
                raise ToolError(one_line(error, 200)) from None

        server.tool()(call)

    @tool
    async def inspect(
        model: str, casts: list[str] | None = None, preset: str | None = None, depth: int = 3, json: bool = False
    ) -> str:
        """List the modules of a model with dtypes, parameters and bytes, before and after the casts of rules. Only headers are
        read.

        casts: rules such as '*.mlp=bf16'. depth: how many levels of modules to list. json: answer with the whole tree as JSON,
        which is long.
        """
        options = [*_options("cast", casts), *_option("preset", preset), *([] if json else _option("depth", depth))]
        return await run("inspect", model, *options, json=json)

    @tool
    async def drift(
        model: str,
        casts: list[str],
        preset: str | None = None,
        prompts: list[str] | None = None,
        texts: list[str] | None = None,
        sequences: int | None = None,
        max_kl: float | None = None,
        json: bool = False,
    ) -> str:
        """Measure how much the output of a model changes if rules cast its weights, compared with the same model in float32.

        casts: rules such as '*.mlp=bf16'. prompts, texts: calibration texts, and paths of text files; by default, the model's
        default inputs. max_kl: a limit on the mean KL in nats; the answer says if it is not met.
        """
        options = [*_options("cast", casts), *_option("preset", preset), *_option("max-kl", max_kl)]
        return await run("drift", model, *options, *inputs(prompts, texts, sequences), json=json)

    @tool
    async def against(
        model: str,
        other: str,
        casts: list[str] | None = None,
        prompts: list[str] | None = None,
        texts: list[str] | None = None,
        sequences: int | None = None,
        json: bool = False,
    ) -> str:
        """Measure how much the outputs of another checkpoint of the same architecture differ from those of a model in float32.

        other: the other checkpoint. casts: rules such as '*.mlp=bf16', which are applied to it. prompts, texts: calibration texts,
        and paths of text files.
        """
        options = [
            *_option("against", access.model(other)),
            *_options("cast", casts),
            *inputs(prompts, texts, sequences),
        ]
        return await run("drift", model, *options, json=json)

    @tool
    async def scan(
        model: str,
        dtypes: str | None = None,
        prompts: list[str] | None = None,
        texts: list[str] | None = None,
        sequences: int | None = None,
        json: bool = False,
    ) -> str:
        """Estimate how far a model's output drifts if one weight is cast to one dtype, for each weight and each dtype. dtypes:
        names separated by commas, such as bf16,fp8,int8.
        """
        return await run("scan", model, *_option("dtypes", dtypes), *inputs(prompts, texts, sequences), json=json)

    @tool
    async def search(
        model: str,
        budget: str,
        dtypes: str | None = None,
        prompts: list[str] | None = None,
        texts: list[str] | None = None,
        sequences: int | None = None,
        json: bool = False,
    ) -> str:
        """Find the rules with the least drift with which the weights have at most a given size. budget: the size: 12GiB, 500MB, or
        45% of the stored size. dtypes: the dtypes to choose from, such as bf16,fp8,int8.
        """
        options = [*_option("budget", budget), *_option("dtypes", dtypes), *inputs(prompts, texts, sequences)]
        return await run("search", model, *options, json=json)

    @tool
    async def check(model: str, source: str | None = None, values: bool = False, json: bool = False) -> str:
        """Look for errors in the files of a checkpoint: missing tensors, quantized weights with codes and scales that do not fit
        together, and invalid scales.

        source: the checkpoint from which the model was made, to compare names and shapes with. values: also read the values of all
        tensors, to find NaN and infinities.
        """
        options = _option("against", access.model(source) if source is not None else None)
        return await run("check", model, *options, *(["--values"] if values else []), json=json)

    return server


def _option(name: str, value: object) -> list[str]:
    return [f"--{name}={value}"] if value is not None else []


def _options(name: str, values: Sequence[str] | None) -> list[str]:
    return [f"--{name}={value}" for value in values or ()]


def _shortened(text: str) -> str:
    """Return the beginning and the end of a text if it is too long for an error message. The error itself comes last, after the
    warnings of libraries.
    """
    half = _MOST_OF_AN_ERROR // 2
    return text if len(text) <= _MOST_OF_AN_ERROR else f"{text[:half]} … {text[-half:]}"
