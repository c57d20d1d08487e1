"""`dtype-engine recipe`: presets, and recipes in the words of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtype_engine.cli.options import located, model_options, with_options
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options
from dtype_engine.core.text import printable
from dtype_engine.recipe import Recipe, make_plan, require_matches
from dtype_engine.results.drift import as_json

if TYPE_CHECKING:
    from dtype_engine.recipe.lint import Lint, RuleReading
    from dtype_engine.recipe.targets import Context, Conversion

# Spelled out because both programs read this file when they start, and the targets themselves are not needed then.
TARGETS = ("torchao", "llama.cpp", "diffusers", "llm-compressor", "transformers", "modelopt", "comfyui")

DIFFERS = 1
_SHOWN = 4

json_option = click.option("--json", "as_object", is_flag=True, help="Print one JSON object.")
file_argument = click.argument("file", type=click.Path(path_type=Path))
model_option = click.option("--model", help="The model to write it for; the one that the recipe names by default.")
target_names = click.Choice(TARGETS)


@click.group()
def recipe() -> None:
    """Presets, and recipes in the words of other tools."""


@recipe.command()
@file_argument
@click.option("--to", "target", required=True, type=target_names, help="The tool to write for.")
@model_option
@with_options(model_options)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it to this file, not to standard output.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@json_option
def convert(
    file: Path,
    target: str,
    model: str | None,
    output: Path | None,
    force: bool,
    as_object: bool,
    **model_settings: Any,
) -> None:
    """Write a recipe for another tool: exact for this model, whatever that tool's patterns prefer.

    What the tool can't express goes to standard error, or into 'left_out' with --json.
    """
    from dtype_engine.core.atomic_write import check_target, write_text_atomic
    from dtype_engine.recipe.targets import left_out_as_json, target_named

    if output is not None:
        check_target(output, force)
    context = _from_file(file, model, _options(model_settings))
    written = target_named(target).convert(context)
    if output is not None:
        write_text_atomic(output, written.text, replace=force)
    if as_object:
        from dtype_engine.cli.program import print_json

        print_json(
            {
                "target": target,
                "model": context.title,
                "rules": [str(rule) for rule in context.plan.recipe.rules],
                "text": written.text,
                "patterns": [{"pattern": pattern, "dtype": dtype} for pattern, dtype in written.patterns],
                "base": written.base,
                "left_out": left_out_as_json(written.left_out),
                "notes": list(written.notes),
            }
        )
        return
    if output is None:
        click.echo(written.text, nl=False)
    for line in _left_out_lines(written):
        click.echo(f"dtype-engine: {line}", err=True)


def _left_out_lines(written: Conversion) -> list[str]:
    lines = [f"note: {note}" for note in written.notes]
    for entry in written.left_out:
        what = "left out" if entry.part == "dtype" else "other scales"
        lines.append(
            f"{what}: {_some(entry.tensors)}: {entry.why}; planned {dtypes.badge(entry.planned)}, "
            f"gets {dtypes.badge(entry.instead)}"
        )
    return lines


@recipe.command()
@file_argument
@click.option("--for", "target", required=True, type=target_names, help="The tool whose matcher to try.")
@model_option
@with_options(model_options)
@json_option
@click.pass_context
def lint(
    ctx: click.Context, /, file: Path, target: str, model: str | None, as_object: bool, **model_settings: Any
) -> None:
    """What a recipe's patterns, as they stand, would take in another tool. Exit status 1 when that differs."""
    from dtype_engine.recipe.lint import lint as read_as
    from dtype_engine.recipe.targets import target_named

    context = _from_file(file, model, _options(model_settings))
    found = read_as(context, target_named(target))
    if as_object:
        from dtype_engine.cli.program import print_json

        print_json({"model": context.title, "differs": found.differs} | _lint_object(found))
    else:
        for line in _lint_lines(found):
            click.echo(line)
    ctx.exit(DIFFERS if found.differs else 0)


def _lint_object(found: Lint) -> dict[str, Any]:
    rules = [as_json(rule) | {"differs": rule.differs} for rule in found.rules]
    overruled = [{"tensor": name, "here": here, "there": there} for name, here, there in found.overruled]
    return {"target": found.target, "matcher": found.matcher, "rules": rules, "overruled": overruled}


def _lint_lines(found: Lint) -> list[str]:
    lines = [f"{found.target}: {found.matcher}"]
    for rule in found.rules:
        lines += _rule_lines(rule)
    if found.overruled:
        name, here, there = found.overruled[0]
        lines.append(
            f"{len(found.overruled)} tensors would go by another rule, first {name}: {here} decides here, {there} there"
        )
    lines.append("the patterns differ; 'recipe convert' writes exact ones" if found.differs else "no difference")
    return lines


def _rule_lines(rule: RuleReading) -> list[str]:
    lines = [f"{'!' if rule.differs else ' '} {rule.pattern}={rule.dtype}: {rule.here} here, {rule.there} there"]
    if rule.problem:
        lines.append(f"    {rule.problem}")
    if rule.only_here:
        lines.append(f"    only here:  {_some(rule.only_here)}")
    if rule.only_there:
        lines.append(f"    only there: {_some(rule.only_there)}")
    if rule.beyond:
        lines.append(f"    {rule.beyond} more that no pattern reaches there")
    return lines


@recipe.command()
@click.argument("model", required=False)
@with_options(model_options)
@json_option
def presets(model: str | None, as_object: bool, **model_settings: Any) -> None:
    """What presets there are, and the bytes that each would leave of this model."""
    from dtype_engine.recipe.presets import PRESETS

    context = _context(Recipe(), model, _options(model_settings))
    entries: list[dict[str, Any]] = []
    for preset in PRESETS.values():
        entry: dict[str, Any] = {"name": preset.name, "sentence": preset.sentence, "rules": [], "planned_bytes": None}
        try:
            made = preset.recipe(context.tree)
        except UserError as error:
            entry["unavailable"] = str(error)
        else:
            entry["rules"] = [str(rule) for rule in made.rules]
            entry["planned_bytes"] = make_plan(context.tree, made).planned_bytes
        entries.append(entry)
    if as_object:
        from dtype_engine.cli.program import print_json

        print_json({"model": context.title, "stored_bytes": context.tree.stored_bytes, "presets": entries})
        return
    from dtype_engine.core.units import human_bytes

    click.echo(f"{context.title}: {human_bytes(context.tree.stored_bytes)} as stored")
    for entry in entries:
        planned = entry["planned_bytes"]
        click.echo(
            f"{entry['name']:16} {human_bytes(planned) if planned is not None else '-':>11}  {entry['sentence']}"
        )
        click.echo(f"{'':28}  {entry.get('unavailable') or ', '.join(entry['rules'])}")


def _options(model_settings: dict[str, Any]) -> Options:
    return Options(device="cpu", **model_settings)


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more


def _from_file(file: Path, model: str | None, options: Options) -> Context:
    """The plan of a recipe file for the model asked for, else the one that the file names."""
    from dtype_engine.recipe.file import read_recipe_file

    given = read_recipe_file(file)
    if model is None and given.model is None:
        raise UserError(f"{file} does not say what model it is for: add --model")
    if model is not None:
        return _context(given.recipe, model, options)
    return _context(given.recipe, given.model, options, python_only_by="--model")


def _context(recipe: Recipe, model: str | None, options: Options, python_only_by: str | None = None) -> Context:
    """The plan of a recipe for a model. Raises UserError for a rule that takes nothing."""
    from dtype_engine.recipe.targets import Context
    from dtype_engine.runtime.model.describe import describe

    source = located(model, options, python_only_by)
    found = describe(source, options)
    require_matches(found.tree, recipe)
    return Context(found.tree, make_plan(found.tree, recipe), source.title, found.model_type, found.kinds)
