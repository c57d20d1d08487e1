"""`dtype-engine mcp`: serves commands as tools to agents that speak the Model Context Protocol, on standard input and output.

Each call of a tool runs its command in a process of its own, which is ended at the time limit. A call can name only models and text
files in the allowed folders. It can't give options that run code, download or write files.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.text import printable, without_controls
from dtype_engine.core.version import __version__

if TYPE_CHECKING:
    import anyio
    from mcp.server.mcpserver import MCPServer

ENGINE = (sys.executable, "-P", "-c", "from dtype_engine.cli import main; main()")
"""The words of the command line that starts `dtype-engine`, without its arguments."""
_MOST_CHARACTERS = 200_000
"""Maximum length of an answer, in characters. The JSON of a large model would fill an agent's context many times over."""
_MOST_OF_AN_ERROR = 2000
"""Maximum length of an error message, in characters. A message may quote an argument, which can have any length."""
_INSTRUCTIONS = """Measures what happens to a PyTorch model when some of its layers are in another dtype.
A rule is PATTERN=DTYPE, such as *.mlp=fp8 or model.layers.{0..7}=bf16; the last rule that matches a tensor decides. inspect lists
the modules with their bytes, also planned under rules. drift measures how much the output changes under rules. scan estimates how
much each weight matters in each dtype, and search finds the best rules for a size. check looks for errors in a checkpoint's files.
against compares the outputs of two checkpoints. The model demo is built in."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A command of `dtype-engine` that agents can call."""

    name: str
    command: str
    required: tuple[str, ...] = ()
    """The parameters that an agent must give, although they are optional on the command line."""
    against: str = ""
    """The name of the parameter for the option --against, or "" to leave this option out."""
    left_out: tuple[str, ...] = ()
    """Parameters that this tool leaves out, besides those in `LEFT_OUT`."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Defaults of parameters by name, in place of the command's. An answer in JSON ignores them."""
    help: str = ""
    """The description of the tool, or "" to take the help of the command."""


TOOLS = (
    Tool("inspect", "inspect", left_out=("top", "by", "all"), defaults={"depth": 3}),
    Tool("drift", "drift", required=("casts",), left_out=("keep",)),
    Tool(
        "against",
        "drift",
        required=("other",),
        against="other",
        left_out=("keep", "preset", "reference"),
        help="Measure how much the outputs of another checkpoint of the same architecture, to which the casts apply, differ from "
        "those of a model in float32.",
    ),
    Tool("scan", "scan", left_out=("reference",)),
    Tool("search", "search", required=("budget",), left_out=("max_predicted", "reference")),
    Tool("check", "check", against="source", left_out=("modules",)),
)
_RUN_CODE = {"trust_pickle", "trust_remote_code", "weights", "metrics", "evals", "data", "inputs", "chat"}
_WRITE_OR_DOWNLOAD = {"save", "save_recipe", "save_pictures", "report", "output", "force", "download", "revision"}
_READ_OTHER_FILES = {"recipe", "images", "audio", "held_out", "device_map"}
_OF_THE_MACHINE = {
    "device", "over_memory", "max_memory", "workers", "shard", "random_weights", "limits", "sarif", "least", "most",
}  # fmt: skip
LEFT_OUT = _RUN_CODE | _WRITE_OR_DOWNLOAD | _READ_OTHER_FILES | _OF_THE_MACHINE
"""The parameters that no tool has."""


@dataclass(frozen=True, slots=True)
class Access:
    """The models and files that an agent may read by calling the server's tools."""

    folders: tuple[Path, ...]
    """The folders from which models and text files may be read."""
    hub: bool = False
    """Whether models on a hub (`hf://org/name`) and in the Hugging Face cache may be read."""

    def model(self, text: str) -> str:
        """Return what to pass as MODEL for the model that an agent named. Raises UserError unless the agent may read the model."""
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
    """Return a server that offers `TOOLS`. seconds: the time limit of a call. engine: the command that starts `dtype-engine`.
    Raises UserError if `mcp` is not installed.
    """
    try:
        import anyio
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise UserError("the package mcp is not installed: pip install 'dtype-tui[mcp]'") from None
    server = MCPServer("dtype-engine", instructions=_INSTRUCTIONS, version=__version__, log_level="ERROR")
    one_at_a_time = anyio.CapacityLimiter(1)  # each call may take the memory of a whole model
    for tool in TOOLS:
        server.add_tool(_Call(tool, access, seconds, engine, one_at_a_time))
    return server


def command_of(tool: Tool) -> tuple[click.Command, dict[str, click.Option]]:
    """Return (the command of a tool, the options of the command that agents can give, by the tool's parameter names)."""
    from dtype_engine.cli import cli

    command = cli.get_command(click.Context(cli), tool.command)
    assert command is not None
    named = {_name(option): option for option in command.params if isinstance(option, click.Option)}
    named |= {tool.against: named["against"]} if tool.against else {}
    left_out = LEFT_OUT | {"against", *tool.left_out}
    return command, {name: option for name, option in named.items() if name not in left_out}


@dataclass(eq=False)
class _Call:
    """A function with the parameters of a tool, which runs the tool's command. The server makes the tool's schema from the
    function's signature.
    """

    tool: Tool
    access: Access
    seconds: float
    engine: Sequence[str]
    one_at_a_time: anyio.CapacityLimiter

    def __post_init__(self) -> None:
        command, self._options = command_of(self.tool)
        model = inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, annotation=str)
        parameters = [_parameter(self.tool, name, option) for name, option in self._options.items()]
        self.__name__ = self.tool.name
        self.__doc__ = self.tool.help or inspect.cleandoc(command.help or "")
        self.__signature__ = inspect.Signature((model, *parameters), return_annotation=str)

    async def __call__(self, model: str, **values: Any) -> str:
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            return await self._answer([*self._words(values), "--", self.access.model(model)], bool(values.get("json")))
        except UserError as error:
            raise ToolError(str(error)) from None
        except (OSError, ValueError) as error:  # such as a path or arguments that are too long for the system
            raise ToolError(one_line(error, 200)) from None

    def _words(self, values: Mapping[str, Any]) -> list[str]:
        words: list[str] = []
        for name, option in self._options.items():
            value = values[name]
            if value in (None, _default(option)) or (values["json"] and value == self.tool.defaults.get(name)):
                continue
            if isinstance(value, bool):
                words.append((option.opts if value else option.secondary_opts)[-1])
                continue
            check = self.access.model if name == self.tool.against else str
            check = self.access.file if isinstance(option.type, click.Path) else check
            words += [f"{option.opts[-1]}={check(each)}" for each in (value if isinstance(value, list) else [value])]
        return words

    async def _answer(self, arguments: Sequence[str], json: bool) -> str:
        """Return the output of the command for these arguments. Raises UserError if the command fails or takes too long."""
        import anyio

        name, environment = self.tool.command, os.environ | {"PYTHONIOENCODING": "utf-8"}  # decoded as UTF-8 below
        async with self.one_at_a_time:
            try:
                with anyio.fail_after(self.seconds):
                    words = [*self.engine, name, *arguments]
                    ended = await anyio.run_process(words, stdin=subprocess.DEVNULL, check=False, env=environment)
            except TimeoutError:
                raise UserError(f"{name} took over {self.seconds} seconds and was ended") from None
        said, notes = (without_controls(text.decode(errors="replace")).strip() for text in (ended.stdout, ended.stderr))
        if ended.returncode not in (0, 1):
            raise UserError(_shortened(notes) or f"{name} ended with status {ended.returncode}")
        if len(said) > _MOST_CHARACTERS:
            said = f"{said[:_MOST_CHARACTERS]}\n... and {len(said) - _MOST_CHARACTERS:,} more characters"
        return said if json or not notes else f"{said}\n{notes}"


def _name(option: click.Option) -> str:
    """Return a tool's parameter name for an option: the plural, such as `casts`, if the option may be repeated, else its own
    name.
    """
    return str(option.name) if option.multiple else option.opts[-1].removeprefix("--").replace("-", "_")


def _default(option: click.Option) -> str | int | float | bool | None:
    return option.default if isinstance(option.default, (str, int, float)) else False if option.is_flag else None


def _parameter(tool: Tool, name: str, option: click.Option) -> inspect.Parameter:
    """Return the parameter of a tool for an option. A text such as `0.1` may also be given as a number."""
    from pydantic import Field

    numbers: dict[type, type] = {click.IntRange: int, type(click.FLOAT): float}
    kind: Any = bool if option.is_flag else list[str] if option.multiple else numbers.get(type(option.type), str)
    more: Any = {"enum": list(option.type.choices)} if isinstance(option.type, click.Choice) else None
    default = ... if name in tool.required else tool.defaults.get(name, _default(option))
    said = Field(
        default, description=option.help, json_schema_extra=more, coerce_numbers_to_str=True if kind is str else None
    )
    optional = kind | None if default is None else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=said, annotation=optional)


def _shortened(text: str) -> str:
    """Return the beginning and the end of a message that is too long. The error comes last, after the warnings of libraries."""
    half = _MOST_OF_AN_ERROR // 2
    return text if len(text) <= _MOST_OF_AN_ERROR else f"{text[:half]} … {text[-half:]}"
