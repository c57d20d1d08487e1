"""Writes a model card into the README of a model, and reads it again. The README comes from other people, so nothing in it is
trusted: its size and its YAML are limited, every entry has a type, and no name in it is opened.

The card is a block of Markdown between two comments. Its table has the figures, and its YAML the rest (`recipe/model_card.py`). The
README's metadata repeats the figures as `model-index`, in the form of
https://github.com/huggingface/hub-docs/blob/main/modelcard.md, because a hub shows them from there. `.eval_results/*.yaml` can't
have them: it is for benchmarks that a hub has registered, of which none compares a model with its reference.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dtype_engine.checkpoint.weight_files import resolve_inside
from dtype_engine.core.errors import UserError
from dtype_engine.core.input_args import AUDIO, IMAGES, TENSORS
from dtype_engine.core.options import FLOAT32, STORED
from dtype_engine.core.plain_yaml import load_yaml
from dtype_engine.core.regular_files import read_regular, reading
from dtype_engine.core.text import printable
from dtype_engine.core.user_folders import expanded
from dtype_engine.recipe.file import MEASURED, read_recipe, write_recipe
from dtype_engine.recipe.model_card import UNITS, ModelCard
from dtype_engine.reports.markdown import escaped
from dtype_engine.results.figures import FIGURES
from dtype_engine.results.model_card import COUNTS, CardFigure

README = "README.md"
_OPTIONS = {"--image": IMAGES, "--audio": AUDIO, "--inputs": TENSORS}
"""The options for files with inputs that are no texts, with the endings of their names."""
_LARGEST = 4_000_000
"""The most bytes of a README."""
_LARGEST_YAML = 256 << 10
"""The most characters of the card's YAML and of the README's metadata, which take up to 20 s per MB to read."""
_BEGIN, _END = "<!-- model card of dtype-tui: begin -->", "<!-- model card of dtype-tui: end -->"
_MOST_TOKENS = 100_000_000
"""The most tokens for which a card may ask. Without a tokenizer, that many random ones are made."""
_ROW = re.compile(r"^\| *`([a-z0-9_]{1,80})` *\|([^|\n]{1,80})\|([^|\n]{0,80})\|", re.MULTILINE)
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,3})?|inf")
_FRONT = re.compile(r"\A---\n((?:(?!---\n).*\n)*)---\n")
_INDEX = re.compile(r"^model-index:.*\n(?:(?:(?:#.*)?\n)*[ \t-].*\n)*", re.MULTILINE)
_MARK = "inputs_sha256"
"""The argument of a data set in `model-index` that only results of this program have."""


def card_block(card: ModelCard) -> str:
    """Return the card as Markdown, from its first comment to its second."""
    rows = [f"| `{each.name}` | {' | '.join(each.texts)} | {_what(each.name)} |" for each in card.figures]
    recipe = card.recipe
    written = write_recipe(
        recipe.recipe, recipe.model, recipe.settings, recipe.measured, units=UNITS, fitted_to=recipe.fitted_to
    ).replace(f"\n{MEASURED}\n", "\nmeasured:  # what was compared, and by which versions\n", 1)
    lines = [
        _BEGIN,
        "## Drift from the reference",
        "",
        "By how much the outputs of this model differ from those of its reference on the same inputs, measured by dtype-tui. The",
        "standard errors are those over the positions. What was compared follows the table.",
        "",
        "| figure | value | standard error | what it is |",
        "|---|---:|---:|---|",
        *rows,
        "",
        f"```yaml\n{written}```",
        "",
        "This command measures it again and compares each figure (FOLDER: this model):",
        "",
        f"    {_command(card)}",
        _END,
    ]
    return "\n".join(lines) + "\n"


def _what(name: str) -> str:
    figure = FIGURES.get(name)
    return COUNTS[name] if figure is None else f"{figure.label}, {figure.comment}"


def _command(card: ModelCard) -> str:
    words = ["dtype-engine", "check", "FOLDER", "--card", f"FOLDER/{README}", "--against", card.base]
    words += [word for file in card.files for word in (_option(file), file)]
    return " ".join(shlex.quote(printable(word, 300)) for word in words)


def _option(file: str) -> str:
    """Return the option that takes an input file, by the ending of its name."""
    ending = Path(file).suffix.lower()
    return next((option for option, endings in _OPTIONS.items() if ending in endings), "--text")


def read_readme(path: Path) -> tuple[Path, str]:
    """Return (absolute path, text) of a README. path: the file, or a folder that has it under its usual name. Raises UserError."""
    path = expanded(path).absolute()
    with reading(printable(str(path), 500)):
        if path.is_dir():
            if not (path / README).exists():
                raise UserError(f"{printable(str(path), 500)} has no {README}")
            path = resolve_inside(path, README, README)
        try:
            return path, read_regular(path, _LARGEST).decode().replace("\r\n", "\n")
        except UnicodeDecodeError:
            raise UserError(f"{printable(str(path), 500)} is not text (UTF-8)") from None


def read_card(readme: str, where: str) -> ModelCard:
    """Return the card in the text of a README. where: its file, which begins the messages of errors. Raises UserError if there is
    no card or several, or for an entry that is missing, unknown or of the wrong type.
    """
    begin, end = _place(readme, where)
    if begin < 0:
        raise UserError(f"{where} has no model card of dtype-tui: dtype-engine report --model-card writes one")
    table, _, rest = readme[begin:end].partition("\n```yaml\n")
    text, fence, _ = rest.partition("\n```")
    if not fence:
        raise UserError(f"{where}: the model card has no block of YAML")
    card = ModelCard(_figures(_limited(table, where), where), read_recipe(_limited(text, where), where))
    try:
        conditions = card.conditions
    except UserError as error:
        raise UserError(f"{where}: measured: {error}") from None
    if conditions.of_one_checkpoint and conditions.reference not in (FLOAT32, STORED):
        raise UserError(
            f"{where}: the model card has another reference than {FLOAT32} or {STORED}, and no candidate_sha256"
        )
    if missing := sorted(COUNTS.keys() - {figure.name for figure in card.figures}):
        raise UserError(f"{where}: the table of the model card lacks {', '.join(missing)}")
    if (conditions.sequence_length or 1) * (conditions.sequences or 1) > _MOST_TOKENS:
        raise UserError(f"{where}: the model card asks for over {_MOST_TOKENS:,} tokens")
    return card


def _place(readme: str, where: str) -> tuple[int, int]:
    """Return where the card begins and ends in a README, or (-1, -1) if there is none. Raises UserError if there are several."""
    begin, end = readme.find(_BEGIN), readme.find(_END)
    if begin < 0 and end < 0:
        return -1, -1
    if readme.count(_BEGIN) > 1 or readme.count(_END) > 1:
        raise UserError(f"{where} has several model cards of dtype-tui: leave one")
    if end < begin or begin < 0:
        raise UserError(
            f"{where}: the comment at the {'beginning' if begin < 0 else 'end'} of the model card is missing"
        )
    return begin, end + len(_END)


def _limited(text: str, where: str) -> str:
    if len(text) > _LARGEST_YAML:
        raise UserError(
            f"{where}: its card or metadata has {len(text):,} characters, and {_LARGEST_YAML:,} are read at most"
        )
    return text


def _figures(table: str, where: str) -> tuple[CardFigure, ...]:
    figures: dict[str, CardFigure] = {}
    for name, *texts in _ROW.findall(table):
        value, error = (text.strip() for text in texts)
        if name in figures or (name not in FIGURES and name not in COUNTS):
            problem = "occurs twice" if name in figures else "is unknown to this version"
            raise UserError(f"{where}: the figure {name} of the model card {problem}")
        for text in filter(None, (value, error)) if value else ("",):
            whole = name not in COUNTS or text.isdigit()
            if _NUMBER.fullmatch(text) is None or not whole or (text != "inf" and not math.isfinite(float(text))):
                raise UserError(f"{where}: {name} on the model card is {printable(repr(text), 60)}, which is no number")
        number = int(value) if name in COUNTS else float(value)
        figures[name] = CardFigure(name, number, float(error) if error else None)
    return tuple(figures.values())


def refuse_unreadable(readme: str, where: str) -> None:
    """Raise UserError if a README can't get a card: its metadata can't be read, or it has several cards."""
    front = _FRONT.match(readme)
    _metadata(_limited(front[1], where) if front else "", where)
    _place(readme, where)


def with_card(readme: str, where: str, card: ModelCard, task: str) -> str:
    """Return the text of a README with a card in place of its earlier one, or at its end, and with the metadata of the figures.
    Everything else stays. readme: "" for a new one. where: the file, for messages. task: the model's task, in a hub's words.
    """
    front = _FRONT.match(readme)
    head, body = (_limited(front[1], where), readme[front.end() :]) if front else ("", readme)
    begin, end = _place(body, where)
    block = card_block(card)
    if begin >= 0:
        body = body[:begin] + block.rstrip("\n") + body[end:]
    else:
        body = f"{body.rstrip(chr(10)) or '# ' + escaped(printable(card.model, 200))}\n\n{block}"
    known = _metadata(head, where)
    first, *others = _others(known.get("model-index")) or [{"results": []}]
    mine = {"name": printable(card.model, 200)} | first | {"results": [*first["results"], _result(card, task)]}
    more: dict[str, Any] = {"model-index": [mine, *others]}
    if card.base_model is not None and "base_model" not in known:
        more = {"base_model": card.base_model} | more
    head = _INDEX.sub("", head)
    if _metadata(head, where) != {name: value for name, value in known.items() if name != "model-index"}:
        raise UserError(
            f"{where}: its metadata has a model-index that can't be replaced: write it as a list of indented lines"
        )
    dumped = yaml.safe_dump(more, sort_keys=False, allow_unicode=True, width=1 << 20)
    return f"---\n{head}{dumped}---\n{body if front else chr(10) + body}"


def _metadata(head: str, where: str) -> Mapping[str, Any]:
    try:
        known = load_yaml(head) if head.strip() else {}
    except UserError as error:
        raise UserError(f"{where}: its metadata: {error}") from None
    if not isinstance(known, dict):
        raise UserError(f"{where}: its metadata is no mapping of names to values")
    return known


def _others(index: Any) -> list[dict[str, Any]]:
    """Return the entries of a `model-index` without the results of this program."""
    entries = [each for each in index if isinstance(each, dict)] if isinstance(index, list) else []
    return [entry | {"results": [each for each in _results(entry) if _args(each) is None]} for entry in entries]


def _results(entry: Mapping[str, Any]) -> list[Any]:
    results = entry.get("results")
    return results if isinstance(results, list) else []


def _args(result: Any) -> dict[str, Any] | None:
    """Return the arguments of the data set of a result of `model-index` if this program wrote it, otherwise None."""
    data_set = result.get("dataset") if isinstance(result, dict) else None
    args = data_set.get("args") if isinstance(data_set, dict) else None
    return args if isinstance(args, dict) and _MARK in args else None


def _result(card: ModelCard, task: str) -> dict[str, Any]:
    conditions = card.conditions
    metrics = [
        {"type": each.name, "name": FIGURES[each.name].label, "value": float(each.texts[0])}
        | ({"args": {"standard_error": float(each.texts[1])}} if each.error is not None else {})
        for each in card.figures
        if each.name in FIGURES and math.isfinite(each.value)
    ]
    args = {_MARK: conditions.inputs_sha256, "reference_sha256": conditions.reference_sha256}
    named = printable(card.inputs_text, 200)
    return {
        "task": {"type": task},
        "dataset": {"type": "calibration-text", "name": named, "args": args},
        "metrics": metrics,
    }


def metadata_differences(readme: str, where: str, card: ModelCard) -> Sequence[tuple[str, str]]:
    """Return (name of a figure, what is different) for each figure of this program in the README's metadata that its card has with
    another value, or not at all. Raises UserError for metadata that can't be read.
    """
    front = _FRONT.match(readme)
    index = _metadata(_limited(front[1], where), where).get("model-index") if front else None
    on_card = {figure.name: float(figure.texts[0]) for figure in card.figures}
    found = []
    for entry in index if isinstance(index, list) else []:
        for result in _results(entry) if isinstance(entry, dict) else []:
            metrics = result.get("metrics") if _args(result) is not None else None
            for metric in metrics if isinstance(metrics, list) else []:
                name, value = (
                    (metric.get(key) for key in ("type", "value")) if isinstance(metric, dict) else (None, None)
                )
                if not isinstance(value, (int, float)) or on_card.get(str(name)) != value:
                    has = f"{on_card[str(name)]:g}" if str(name) in on_card else "no such figure"
                    found.append((str(name), f"is {printable(str(value), 40)} in the metadata, and the card has {has}"))
    return found
