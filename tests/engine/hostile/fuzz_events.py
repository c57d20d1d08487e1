"""The kind of `fuzz.py` that is what an engine elsewhere sends: a stream with its mark, its greeting and some events, damaged. The
app reads it from a process, as it reads an engine's, and has to live on with whatever it understood.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
from tests.helpers import draw_times
from tests.helpers.mutations import changed
from tests.helpers.random_events import KINDS as EVENTS
from tests.helpers.random_events import RandomEvents

KINDS = ("event",)
_STREAMS = 40
_EVENTS = 4
_KEYS = (*"jl3msiv?e:", "enter", "tab", "end", "escape")
_WAIT_S = 10.0


def make_good(kind: str, folder: Path) -> list[bytes]:
    """Streams that between them have every kind of event, with texts of all sorts."""
    import dtype_engine.service.messages  # noqa: F401  # it imports what the events' annotations name
    from dtype_engine.recipe import Recipe, Rule
    from dtype_engine.service.control import PROTOCOL, Hello
    from dtype_engine.service.frames import MARK

    streams = []
    recipes = (Recipe(), Recipe((Rule("*", "bfloat16"),)), Recipe((Rule("*.mlp", "float8_e4m3fn"),)))
    for number in range(_STREAMS):
        telling = RandomEvents(random.Random(number), _tree(), recipes, hostile=number % 4 == 0)
        messages = [msgspec.msgpack.encode(Hello(PROTOCOL, "0"))]
        for event in range(_EVENTS):
            messages += telling.next(EVENTS[(number * _EVENTS + event) % len(EVENTS)])
        streams.append(MARK + b"".join(map(_framed, messages)))
    return streams


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


def _tree() -> Any:
    from dtype_engine.core.tree import TensorInfo, from_tensors

    names = (f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in ("mlp", "norm"))
    return from_tensors([TensorInfo(name, (4, 8), "float32") for name in names])


def mutated(kind: str, content: bytes, chooser: random.Random) -> bytes | None:
    """A stream with one of its messages changed that stays MessagePack, or None for whatever `fuzz.py` does to bytes."""
    if chooser.random() < 0.3:
        return None
    from dtype_engine.service.frames import MARK, FrameReader

    rest = content.removeprefix(MARK)
    places = [0]

    def read(count: int) -> bytes:
        begin = places[0]
        places[0] += count
        return rest[begin : begin + count]

    reader = FrameReader(read)
    messages = list(iter(reader.next, None))
    place = chooser.randrange(len(messages))
    value = msgspec.msgpack.decode(messages[place])
    for _ in range(chooser.randrange(1, 3)):
        value = changed(value, chooser)
    try:
        messages[place] = msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError):  # no message has such a number or text
        return None
    return MARK + b"".join(map(_framed, messages))


def run_case(content: bytes, folder: Path, seed: int) -> int:
    """The app's exit status: 0 where it lived until its engine ended, and then until it was left."""
    (folder / "stream").write_bytes(content)
    return asyncio.run(_shown(folder / "stream", random.Random(seed)))


async def _shown(stream: Path, chooser: random.Random) -> int:
    from tests.tui.test_hostile_events import check_screen, without_last_check

    from dtype_engine.core.options import Options
    from dtype_engine.service.connection import EngineCommand
    from dtype_engine.service.control import Open
    from dtype_engine.service.process import EngineProcess
    from dtype_tui.app import DtypeApp
    from dtype_tui.state.launch import Launch

    command = EngineCommand((shutil.which("cat") or "cat", str(stream)), name="host")
    app = DtypeApp(
        Launch("model", _tree()),
        lambda emit, wait: EngineProcess(command, Open(None, Options(), read_headers=True), emit, wait=wait),
    )
    draw_times.at_once_unless_told(app.main)
    without_last_check(app)
    async with app.run_test(size=(80, 24)) as pilot:
        async with asyncio.timeout(_WAIT_S):
            while app.controller.life.error is None:
                await asyncio.sleep(0.005)
        await pilot.pause()
        check_screen(app)
        await pilot.press(*chooser.choices(_KEYS, k=2))
        await pilot.pause()
        check_screen(app)
        if not app.is_running:
            return 1
    return app.return_code or 0
