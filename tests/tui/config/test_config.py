"""The configuration file, ASCII drawing and the program's own theme."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.helpers.recording_engine import launched, make_app
from tests.helpers.screen_text import screen
from textual.color import Color

from dtype_engine.core.errors import UserError
from dtype_engine.results.drift import ImplicitCastStats
from dtype_tui.config.ascii import line_in_ascii, wants_ascii
from dtype_tui.config.config import Config, config_path, read_config
from dtype_tui.rendering.cells import wrap_dotted
from dtype_tui.rendering.palette import HIGH_CONTRAST
from dtype_tui.screens.flow import flow_screen
from dtype_tui.screens.overlay import Answer, Overlay
from dtype_tui.widgets.module_tree import ModuleTree

KNOWN = (["cast", "undo", "measure"], ["nord", "high-contrast"], ["device", "text"])


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = config_path()
    assert path == tmp_path / "dtype-tui" / "config.yaml"
    path.parent.mkdir()
    return path


def test_missing_config_file_means_the_default_configuration(written: Path) -> None:
    assert read_config(*KNOWN) == Config()
    written.write_text("# nothing yet\n")
    assert read_config(*KNOWN) == Config()


def test_complete_config_file_is_read(written: Path) -> None:
    written.write_text("theme: nord\nascii: always\nkeys: {undo: f5}\ndefaults: {device: cpu, text: [a.txt]}\n")
    assert read_config(*KNOWN) == Config("nord", "always", {"undo": "f5"}, {"device": "cpu", "text": ["a.txt"]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("thme: nord", "unknown setting thme; did you mean theme?"),
        ("theme: mauve", "unknown theme mauve; there are nord, high-contrast"),
        ("ascii: maybe", "ascii: maybe is none of auto, always, never"),
        ("keys: {unod: f5}", "unknown key's action unod; did you mean undo?"),
        ("keys: {undo: 5}", "keys: undo: 5 is no key"),
        ("keys: {undo: f5, cast: f5}", "f5 is given to more than one action"),
        ("keys: [undo]", "keys: must hold names and values"),
        ("defaults: {devise: cpu}", "unknown default devise; did you mean device?"),
        ("- theme", "must hold names and values"),
        ("theme: [", "not valid YAML in line 1"),
        ("theme: [nord]", "unknown theme"),
        ("theme: 2024-13-45", "2024-13-45 is not a valid timestamp"),
        ('theme: !!int "zz"', "zz is not a valid int"),
        (f"theme: {'9' * 5000}", "is not a valid int"),
        (f"theme: {'[' * 3000}", "nested too deep"),
        ("theme: &a [nord]\nkeys: *a", "anchors and aliases"),
        (f"theme: {'x' * 100_001}", "too many"),
        ('keys: {undo: "\\e[2J"}', "keys: undo: \\x1b[2J is no key"),
        ('keys: {undo: "a\\nb"}', "keys: undo: a\\x0ab is no key"),
        ('keys: {undo: "f5,,f6"}', "keys: undo: f5,,f6 is no key"),
        (f"keys: {{undo: {'x' * 5000}}}", "is no key"),
    ],
)
def test_invalid_config_file_is_refused_by_path_in_one_sentence(written: Path, text: str, says: str) -> None:
    written.write_text(text)
    with pytest.raises(UserError) as caught:
        read_config(*KNOWN)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(written))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("defaults", "says"),
    [
        ("{device: {a: b}}", "device takes one value, not {'a': 'b'}"),
        ("{device: [cpu, cuda]}", "device takes one value"),
        ("{text: [[a]]}", "text takes a value or a list of them"),
        ("{text: [2024-01-01]}", "text takes a value or a list of them"),
        ("{sequences: .nan}", "config.yaml: defaults: sequences: 'nan' is not a valid integer"),
        ("{chat: maybe}", "config.yaml: defaults: chat: 'maybe' is not a valid boolean"),
    ],
)
def test_configured_default_of_the_wrong_type_is_refused(
    written: Path, defaults: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dtype_tui.cli import command as cli
    from dtype_tui.cli.main import main

    written.write_text(f"defaults: {defaults}")
    cli.configured.cache_clear()
    monkeypatch.setattr("sys.argv", ["dtype-tui", "demo"])
    with pytest.raises(SystemExit) as ended:
        main()
    cli.configured.cache_clear()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in said
    assert said.count("\n") == 1


def test_configured_defaults_are_parsed_like_options(written: Path) -> None:
    """For an option that may be repeated, a single text is one value, and not a value for each letter."""
    from dtype_tui.cli import command as cli
    from dtype_tui.cli.main import configured_defaults

    written.write_text("defaults: {text: a.txt, sequences: 8, chat: true, inputs: 5, prompt: [one, 2]}")
    cli.configured.cache_clear()
    found = configured_defaults()
    cli.configured.cache_clear()
    assert found == {"texts": ["a.txt"], "sequences": "8", "chat": True, "tensors": "5", "prompts": ["one", "2"]}
    context = cli.command.make_context("dtype-tui", ["demo"], default_map=found)
    assert context.params["texts"] == (Path("a.txt"),)
    assert context.params["sequences"] == 8
    assert context.params["chat"] is True


def test_named_pipe_as_config_file_is_refused(written: Path) -> None:
    os.mkfifo(written)
    with pytest.raises(UserError, match="is not a regular file"):
        read_config(*KNOWN)


@pytest.mark.slow
async def test_configured_keys_and_theme_take_effect() -> None:
    config = Config("high-contrast", "never", {"undo": "f5", "drop-rules": "ctrl+d"})
    app = make_app(config=config)
    async with app.run_test(size=(120, 100)) as pilot:
        assert app.theme == "high-contrast"
        await pilot.press("2")
        assert app.controller.experiment.recipe.rules
        await pilot.press("u")
        assert app.controller.experiment.recipe.rules
        await pilot.press("f5")
        assert not app.controller.experiment.recipe.rules
        await pilot.press("question_mark")
        await pilot.pause()
        text = " ".join(screen(app).split())
        assert "f5 ^r undo, redo" in text
        assert "^d drop the node's rules" in text


async def test_ascii_mode_draws_only_ascii_and_keeps_columns() -> None:
    drawn = {}
    for setting in ("always", "never"):
        app = make_app(title="démo→", config=Config(ascii=setting))
        async with app.run_test(size=(120, 36)) as pilot:
            app.query_one(ModuleTree).go_to("model.layers.3.mlp.up_proj.weight")
            await pilot.press("2")
            await pilot.pause()
            drawn[setting] = screen(app)
    assert drawn["always"].isascii()
    assert not drawn["never"].isascii()
    for plain, fancy in zip(drawn["always"].splitlines(), drawn["never"].splitlines(), strict=True):
        assert len(plain) == cell_len(fancy)
    assert "f32-> bf16" in drawn["always"]


@pytest.mark.parametrize(
    ("line", "drawn"),
    [
        ("a → b    |", "a -> b   |"),
        ("│   a→b│", "|  a->b|"),
        ("2.5 ± 0.1  ≥ 3 ", "2.5 +- 0.1 >=3 "),
        ("a → b", "a ->b"),
        ("a→b", "a>b"),
        ("←→ dtype  ↑↓ choose", "<> dtype  ^v choose"),
        ("0 … 3  4 alike  LlamaDec… 1.0", "0...3  4 alike  LlamaDec~ 1.0"),
    ],
)
def test_signs_without_a_single_ascii_character_get_several_if_there_is_room(line: str, drawn: str) -> None:
    found = "".join(line_in_ascii(line))
    assert found == drawn
    assert len(found) == len(line)


@pytest.mark.parametrize("text", ["", "abc", "▾ модель", "模型", "⣿⠀", "╭─╮│╰╯", "█▏ 45 dB", "é → ü", "\u200b"])
def test_text_in_ascii_is_as_wide_as_the_original(text: str) -> None:
    plain = "".join(line_in_ascii(text))
    assert plain.isascii()
    assert len(plain) == cell_len(text)


@pytest.mark.parametrize(
    ("setting", "locale", "wanted"),
    [("always", "C.UTF-8", True), ("never", "C", False), ("auto", "C", True), ("auto", "en_US.UTF-8", False),
     ("auto", "de_DE.ISO-8859-1", True), ("auto", "C.utf8", False)],
)  # fmt: skip
def test_ascii_setting_auto_follows_the_locale(
    setting: str, locale: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    assert wants_ascii(setting) is wanted


def test_colors_of_the_high_contrast_theme_have_a_contrast_of_7() -> None:
    background = Color.parse(HIGH_CONTRAST.background or "")

    def luminance(color: Color) -> float:
        """Relative luminance as WCAG 2.1 defines it."""
        parts = [
            channel / 12.92 if channel <= 0.03928 else ((channel + 0.055) / 1.055) ** 2.4
            for channel in color.normalized
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for name in ("foreground", "primary", "secondary", "accent", "success", "warning", "error"):
        ratio = (luminance(Color.parse(getattr(HIGH_CONTRAST, name))) + 0.05) / (luminance(background) + 0.05)
        assert ratio >= 7, name


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["dtype-dark", "dtype-light", "textual-light", "nord", "high-contrast"])
async def test_tree_uses_the_colors_of_the_theme(theme: str) -> None:
    """On a terminal of whatever colours. In a theme of the terminal's own colours it has those."""
    async with launched(config=Config("ansi-dark")) as (app, pilot):
        tree = app.query_one(ModuleTree)
        heading, below = 0, tree.size.height - 1
        for y in (heading, below):
            assert {segment.style.bgcolor for segment in tree.render_line(y) if segment.style is not None} == {None}
        app.theme = theme
        await pilot.pause()
        for y in (heading, below):
            styles = [segment.style for segment in tree.render_line(y)]
            assert len({style.bgcolor for style in styles if style}) == 1
            assert all(style and style.bgcolor and style.color for style in styles)


@pytest.mark.parametrize("name", ["model", "model.layers.0.self_attn.q_proj", "x" * 40, "a.b", "", "." * 5])
@pytest.mark.parametrize("width", [1, 12, 26, 200])
def test_name_wrapped_at_dots_keeps_all_characters(name: str, width: int) -> None:
    lines = wrap_dotted(name, width).split("\n")
    assert "".join(lines) == name
    assert all(len(line) <= width or "." not in line[1:] for line in lines)


def test_long_operation_name_leaves_room_for_module_names_in_the_list_of_casts() -> None:
    cast = ImplicitCastStats(
        "model.layers.0.self_attn", "scaled_dot_product_attention", "bfloat16", "float32", 40_900, 4, True
    )
    console = Console(width=Overlay.content_width(80))
    with console.capture() as said:
        console.print(flow_screen(Answer((cast,), None, make_app().controller.experiment, 80))._body)
    assert [line.split()[0] for line in said.get().splitlines()] == ["module", "model.layers.0", ".self_attn"]
