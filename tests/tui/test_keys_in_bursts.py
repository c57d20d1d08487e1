"""Keys that arrive together, as over a slow line, have the same effect as keys that arrive one by one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.observations import cursor, rules, top, typed, typing
from tests.helpers.recording_engine import engine, launched, make_app, model_ready, report, running, say
from tests.helpers.screen_text import until
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input

from dtype_engine.service import events
from dtype_engine.service.save_requests import ExportRequest
from dtype_tui.app import DtypeApp
from dtype_tui.widgets.module_tree import ModuleTree

NAMES = {":": "colon", "/": "slash", "*": "asterisk", ".": "full_stop", "=": "equals_sign", "-": "minus", ",": "comma"}
NAMES |= {" ": "space", "?": "question_mark", "<": "less_than_sign", ">": "greater_than_sign"}


def keys_of(words: str) -> list[Key]:
    """Return keys from characters, with key names in braces and the space as _: `:cast{tab}_*.mlp_bf16{enter}`."""
    keys, rest = [], words.replace("_", " ")
    while rest:
        if rest[0] == "{":
            name, _, rest = rest[1:].partition("}")
            keys.append(Key(name, None))
        else:
            keys.append(Key(NAMES.get(rest[0], rest[0]), rest[0]))
            rest = rest[1:]
    return keys


async def burst(app: DtypeApp, keys: Sequence[Key]) -> None:
    """Post all keys before the first is handled. Waits until all keys, and the messages that they posted, are handled."""
    done = asyncio.Event()
    for key in keys:
        app.post_message(key)
    app.call_later(done.set)
    await done.wait()
    for _ in range(30):
        await asyncio.sleep(0)


async def one_by_one(app: DtypeApp, keys: Sequence[Key]) -> None:
    for key in keys:
        await burst(app, [key])


async def begun(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Send that the model is open and was measured."""
    recipe = app.controller.experiment.recipe
    await say(app, pilot, model_ready(app), events.Measured(recipe, report(recipe)), events.Idle())


def state(app: DtypeApp) -> dict[str, Any]:
    """Return everything that keys can change."""
    tree = app.query_one(ModuleTree)
    line = app.focused if isinstance(app.focused, Input) else None
    return {
        "windows": [type(window).__name__ for window in app.screen_stack],
        "focus": app.focused.id or type(app.focused).__name__ if app.focused is not None else None,
        "line": (line.value, line.selection) if line is not None else None,
        "rules": rules(app),
        "cursor": tree.current.name,
        "open": len(tree.rows),
        "filter": tree.filter_text,
        "order": tree.order,
        "asked": engine(app).commands[:],
        "recipes": [str(recipe) for recipe in engine(app).recipes],
        "inputs": engine(app).lines[:],
        "saves": engine(app).saves[:],
        "settings": engine(app).settings[:],
    }


BURSTS = """
    c{ctrl+u}*.mlp=bf16{enter}  c=f16{enter}  c{tab}{tab}{enter}  c{tab}{shift+tab}{escape}  c{backspace}{enter}  {escape}
    :cast_*.norm_f16{enter}  :cas{tab}_*.mlp_bf16{enter}  :{up}{enter}  :{up}{up}{down}{enter}  :{tab}{tab}x{backspace}{tab}
    :go{tab}{escape}  :sort_bytes{enter}  :{enter}  :nonsense{enter}  /mlp{enter}n  /proj{escape}  /{ctrl+u}norm{enter}nnN
    j  k  l  h  jj2  k8  u  {ctrl+r}  x  z  {tab}  m  f  ff  gg  tt  g  t  vv  E  C  {end}  w  n  N  G  {home}
    e{down}{ctrl+u}out{enter}  e{escape}  e{down}{down}{tab}{shift+tab}{ctrl+w}x{enter}  i{ctrl+u}text{enter}{escape}
    iabc{left}{left}X{enter}{escape}2  ?{escape}  ?jjq  ,{escape}  p{escape}  pj{enter}  H{escape}  Hjk{escape}
    {enter}{escape}  {enter}jjq  d{escape}  2{enter}q3  s{escape}  s{enter}  {escape}  abc  ab{left}{delete}
    {ctrl+a}x{ctrl+k}  {shift+left}{shift+left}y  {alt+b}z  *=bf16  {backspace}{backspace}
"""


@pytest.mark.slow
async def test_random_keys_received_in_bursts_act_like_single_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each burst continues from the state that the one before left, so a difference that is not visible at once may show later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dtype_tui.main_screen.STOP_WAIT_S", 1e6)  # what the app does by the clock is another test's
    chance = random.Random(1)
    bursts = ["".join(chance.choices(BURSTS.split(), k=chance.randint(1, 4))) for _ in range(20)]

    async def states(press: Any) -> list[dict[str, Any]]:
        app, seen = make_app(), []
        async with running(app) as pilot:
            await begun(app, pilot)
            for words in bursts:
                await press(app, keys_of(words))
                if len(words) % 3 == 0:
                    await say(app, pilot, events.Idle())
                seen.append(state(app))
        return seen

    together, apart = await states(burst), await states(one_by_one)
    for number, (one, other) in enumerate(zip(together, apart, strict=True)):
        assert one == other, f"after {bursts[: number + 1][-3:]}"


async def test_keys_received_together_with_a_cast_are_handled() -> None:
    async with launched() as (app, pilot):
        await begun(app, pilot)
        await burst(app, keys_of("c{ctrl+u}*.mlpx{backspace}=bf16{enter}2j"))
        assert rules(app) == ["*.mlp=bfloat16", "*=bfloat16"]
        assert not typing(app)
        assert cursor(app) != ""


async def test_keys_received_together_with_escape_are_handled() -> None:
    async with launched() as (app, pilot):
        await begun(app, pilot)
        await burst(app, keys_of("cabc{escape}2:abc{escape}j/abc{escape}e{escape}i{escape}?{escape}3"))
        assert len(engine(app).recipes) == 2
        assert rules(app) == ["*=float16"]
        assert (top(app), typed(app)) == ("MainScreen", "no line")


async def test_letter_received_together_with_escape_is_handled_after_it() -> None:
    """Older terminals send the same bytes for Escape and then q as for alt+q."""
    async with launched() as (app, pilot):
        await begun(app, pilot)
        await burst(app, [*keys_of("c"), Key("alt+z", "z")])
        assert app.query_one(ModuleTree).order != "model"
        assert not typing(app)


async def test_save_window_keeps_text_typed_before_it_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with launched() as (app, pilot):
        await begun(app, pilot)
        await burst(app, keys_of("e{down}{up}{ctrl+u}casts{enter}j"))
        assert engine(app).saves == [ExportRequest(Path("casts"), False)]
        assert (top(app), cursor(app) != "") == ("MainScreen", True)


async def test_existing_export_is_replaced_only_by_a_second_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("there/recipe.yaml").write_text("version: 1\nrules:\n")
    Path("there/README.md").write_text(
        "# there\n\n`demo`, cast by the rules in `recipe.yaml` and written by dtype-engine 0.2.0.\n"
    )
    async with launched() as (app, pilot):
        await begun(app, pilot)
        await burst(app, keys_of("e{ctrl+u}there{enter}x{backspace}{enter}"))
        assert engine(app).saves == []
        await burst(app, keys_of("{enter}"))
        assert engine(app).saves == [ExportRequest(Path("there"), True)]


@pytest.mark.parametrize(("key", "command"), [("f", "flow"), ("t", "speed")])
async def test_key_pressed_twice_sends_one_request(key: str, command: str) -> None:
    async with launched() as (app, pilot):
        await begun(app, pilot)
        await burst(app, keys_of(key * 3))
        assert engine(app).commands.count(command) == 1
        await burst(app, keys_of(f"2{key}"))
        assert engine(app).commands.count(command) == 2, "another recipe"
        await burst(app, keys_of(f"{{escape}}{key}{key}"))
        assert engine(app).commands.count(command) == 3, "it was stopped"
        await say(app, pilot, events.Idle())
        await burst(app, keys_of(key))
        assert engine(app).commands.count(command) == 4, "the engine has done all"


@pytest.mark.parametrize(
    ("line", "command"), [(":download{enter}", "download"), (":over-memory{enter}", "over-memory")]
)
async def test_model_can_be_opened_again_while_it_is_measured(line: str, command: str) -> None:
    """The model can be opened although the engine is busy."""
    async with launched() as (app, pilot):
        await begun(app, pilot)
        await burst(app, keys_of(line * 2))
        assert engine(app).commands.count(command) == 1
        await say(app, pilot, model_ready(app), events.Jobs("measure", ()))
        await burst(app, keys_of(line))
        assert engine(app).commands.count(command) == 2


async def test_keys_before_the_first_paint_are_kept() -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)):
        await burst(app, keys_of("c{ctrl+u}*.mlp=bf16{enter}/norm{enter}"))
        assert rules(app) == ["*.mlp=bfloat16"]
        assert "norm" in cursor(app)


async def test_keys_after_quitting_do_nothing() -> None:
    async with launched() as (app, pilot):
        await begun(app, pilot)
        await burst(app, keys_of("q2"))
        assert rules(app) == []


async def test_text_typed_together_with_opening_the_command_palette_is_run() -> None:
    async with launched() as (app, pilot):
        await begun(app, pilot)
        await burst(app, keys_of("{ctrl+p}history{enter}"))
        await until(pilot, lambda: top(app) == "MeasurementsScreen")
