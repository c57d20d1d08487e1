"""Starts an engine on another machine: through the system's ssh for `ssh://HOST/PATH`, or by a command that the user supplies."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.service.connection import SESSION, Connection, EngineCommand, NoAnswer, new_session
from dtype_tui.state.addresses import is_address
from dtype_tui.state.launch import Launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtype_engine.core.options import Options
    from dtype_engine.recipe import Recipe
    from dtype_engine.service.engine import Engine
    from dtype_engine.service.events import Event
    from dtype_tui.app import StartEngine

_ADDRESS = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9_][\w.+-]*)@)?(?P<host>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<path>/.*)?",
    re.ASCII | re.DOTALL,
)
_FAR_COMMAND = f"dtype-engine stdio --compressed --linger 10m --session {SESSION}"
_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")
"""Options of ssh that end a dead connection within a minute instead of hours."""
_UNATTENDED = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""Options for reconnecting while the screen is open, when ssh can't ask for a password."""
_NOT_FOUND = 127
_SSH_FAILED = 255


@dataclass(frozen=True)
class Address:
    """The parts of an `ssh://` address."""

    destination: str
    """[USER@]HOST, as ssh expects it."""
    port: str | None
    model: str | None
    """The path on the other machine, or None for the demo."""


def address_of(model: str) -> Address:
    """Parse `ssh://[USER@]HOST[:PORT]/PATH`, `ssh://HOST/~/PATH`, or `ssh://HOST` for the demo on HOST. Raises UserError."""
    found = _ADDRESS.fullmatch(model)
    if found is None:
        raise UserError(
            f"{printable(model, 200)} is no address: write ssh://[USER@]HOST[:PORT]/PATH, or ssh://HOST/~/PATH below the home there"
        )
    user, host, port, path = found.group("user", "host", "port", "path")
    host = host.strip("[]")
    path = (path or "").removeprefix("/") if (path or "").startswith("/~") else path
    return Address(f"{user}@{host}" if user else host, port, None if path in (None, "/") else path)


def reference_there(model: str | None, options: Options) -> str:
    """Return `Options.reference` for an engine on another machine: "/base" for "ssh://HOST/base". A dtype is not changed.

    Raises UserError if the reference is a checkpoint that is not given by an address on the same machine as `model`.
    """
    if options.reference_model is None:
        return options.reference
    sides = options.reference_model, model
    there, candidate = (address_of(text) if text is not None and is_address(text) else None for text in sides)
    if there is None or candidate is None or (there.destination, there.port) != (candidate.destination, candidate.port):
        raise UserError(
            "--against: MODEL and OTHER must be on one machine: write both as ssh://HOST/PATH of the same HOST"
        )
    return there.model or "demo"


def command_of(address: Address) -> EngineCommand:
    """Return the ssh command that starts the engine. The engine receives the model's path as data, so no shell interprets it."""
    port = ("-p", address.port) if address.port else ()
    end = (*port, "--", address.destination, _FAR_COMMAND)
    return EngineCommand(
        ("ssh", "-T", *_ALIVE, *end),
        name=address.destination,
        compressed=True,
        unattended=("ssh", "-T", *_ALIVE, *_UNATTENDED, *end),
    )


def command_from(line: str) -> EngineCommand:
    """Parse the value of --engine-command. Raises UserError if it is empty or can't be split into words."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UserError(f"--engine-command: {error}") from None
    if not words:
        raise UserError("--engine-command: name a command, as in 'docker exec -i BOX dtype-engine stdio'")
    return EngineCommand(tuple(words), name=PurePath(words[0]).name, compressed="--compressed" in line)


def connect(
    model: str | None, engine_command: str | None, options: Options, recipe: Recipe
) -> tuple[Launch, StartEngine]:
    """Start an engine by ssh or by `engine_command`, and let it open the model. This happens before the screen opens, so that ssh
    can ask for a password. Returns the model as a `Launch`, and the function that gives the app this engine.

    Raises UserError if the engine can't be reached, the model can't be found, or a rule matches nothing.
    """
    if engine_command is None:
        assert model is not None
        address = address_of(model)
        command, model = command_of(address), address.model
    elif is_address(model):
        raise UserError(
            "--engine-command already starts the engine elsewhere: name MODEL as it is there, without ssh://"
        )
    else:
        command = command_from(engine_command)
    from dtype_engine.service.control import Open
    from dtype_engine.service.process import EngineProcess

    session = new_session()
    connection = Connection(command, command.start(session, attended=True))
    try:
        connection.handshake()
        title = connection.open_model(Open(model, options, True, recipe))
    except NoAnswer as error:
        raise UserError(_why_not(error, command, engine_command is None)) from None
    except BaseException:
        connection.kill()
        raise

    def start_engine(emit: Callable[[Event], None], wait: Callable[[], None]) -> Engine:
        message = Open(model, options, read_headers=True)
        return EngineProcess(command, message, emit, connection=connection, session=session, wait=wait)

    return Launch(title), start_engine


def _why_not(error: NoAnswer, command: EngineCommand, by_ssh: bool) -> str:
    """Return why dtype-engine did not answer, and what may help. by_ssh: whether the app's own ssh command started it."""
    name, words = command.name, error.words.partition(": ")[2] or error.words
    if by_ssh and error.status == _SSH_FAILED:
        return f"{name} can't be reached: {words}"
    if "No such command" in words or "No such option" in words:
        return f"{name} has an older dtype-tui, which can't be used from elsewhere: install this version there"
    if error.status == _NOT_FOUND:
        other = f"--engine-command 'ssh {name} FOLDER/dtype-engine stdio'" if by_ssh else "give its whole path"
        return f"{name}: there is no dtype-engine ({words}): pip install dtype-tui there, or, where it is elsewhere, {other}"
    return str(error)
