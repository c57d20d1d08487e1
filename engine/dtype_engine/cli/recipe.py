"""`dtype-engine recipe`: presets, recipes in the formats of other tools, and how other tools read the patterns of recipes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dtype_engine.checkpoint.memory_fit import fit
from dtype_engine.cli.conversions import left_out_lines, some_names
from dtype_engine.cli.options import ModelCommand, bandwidth_option, force_option, json_option, sarif_option
from dtype_engine.cli.program import NO, answer, answer_file, print_json, print_stderr
from dtype_engine.cli.request import RunRequest
from dtype_engine.core.bandwidth import milliseconds
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.core.roundings import ROUNDINGS
from dtype_engine.core.system_memory import total_memory
from dtype_engine.core.units import human_bytes, plural, token_time
from dtype_engine.recipe import Recipe, require_matches
from dtype_engine.recipe.serving import RUNTIMES, lint_serving, serving_lines
from dtype_engine.recipe.targets import TARGET_SUFFIXES, Context, target_named
from dtype_engine.results.as_json import as_json

if TYPE_CHECKING:
    from dtype_engine.recipe.lint import Lint, RuleComparison

_file_argument = click.argument("file", type=click.Path(path_type=Path))
_model_option = click.option(
    "--model",
    help="The model whose tensors the recipe's patterns match. By default, the model that the recipe file names.",
)


@click.group()
def recipe() -> None:
    """List presets, write recipes in the formats of other tools, and check which tensors a recipe selects in another tool."""


@recipe.command(cls=ModelCommand, rules=False)
@_file_argument
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Choice(tuple(TARGET_SUFFIXES)),
    help="The tool in whose format the recipe is written, such as llm-compressor or torchao.",
)
@_model_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The file to write the converted recipe to. By default, it is printed to standard output.",
)
@click.option(
    "--imatrix",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --to llama.cpp: also run the model on its inputs, and write the file that llama-quantize reads with --imatrix.",
)
@force_option
@json_option
def convert(
    request: RunRequest,
    file: Path,
    target: str,
    output: Path | None,
    imatrix: Path | None,
    force: bool,
    as_object: bool,
) -> None:
    """Write a recipe in the format of another tool, so that the tool gives every tensor the dtype that dtype-engine gives it.

    Tensors with dtypes that the tool does not have are listed on standard error, or under 'left_out' with --json.
    """
    from dtype_engine.core.atomic_write import check_target, write_text_atomic

    for path in (output, imatrix):
        if path is not None:
            check_target(path, force)
    if imatrix is not None and target != "llama.cpp":
        raise UserError(f"--imatrix goes with --to llama.cpp: {target} reads no such file")
    context = _from_file(file, request)
    written = target_named(target).convert(context)
    if imatrix is not None:
        _write_imatrix(imatrix, file, request, force)
    if output is not None:
        write_text_atomic(output, written.text, replace=force)
    if as_object:
        rules = [str(rule) for rule in context.plan.recipe.rules]
        patterns = [{"pattern": pattern, "dtype": dtype} for pattern, dtype in written.patterns]
        known = {"target": target, "model": context.title, "rules": rules}
        print_json(known | as_json(written) | {"patterns": patterns})
        return
    if output is None:
        answer_file(written.text)
    for line in left_out_lines(written):
        print_stderr(f"dtype-engine: {line}")


def _write_imatrix(path: Path, file: Path, request: RunRequest, force: bool) -> None:
    from dtype_engine.core.atomic_write import write_atomic
    from dtype_engine.recipe.file import read_recipe_file

    model = request.model or read_recipe_file(file).model
    session = msgspec.structs.replace(request, recipe=Recipe(), model=model).open_session()
    write_atomic(path, session.imatrix(), replace=force)


@recipe.command(cls=ModelCommand, rules=False, runs=False)
@_file_argument
@click.option(
    "--for",
    "target",
    required=True,
    type=click.Choice(tuple(dict.fromkeys((*TARGET_SUFFIXES, *RUNTIMES)))),
    help="The tool whose matches are compared with those of dtype-engine, or a runtime (vllm or sglang) that would load an "
    "export.",
)
@_model_option
@sarif_option
@json_option
def lint(request: RunRequest, file: Path, target: str, as_sarif: bool, as_object: bool) -> int:
    """Compare which tensors the patterns of a recipe match in dtype-engine and in another tool that gets the same patterns, and
    list the differences.

    With --for vllm or sglang, show instead how this inference runtime would load an export of the recipe. The exit status is 1 if
    the matches differ, or if the runtime would refuse a weight, change it, or run it slowly.
    """
    from dtype_engine.recipe.lint import lint as read_as

    if as_sarif and as_object:
        raise UserError("--sarif and --json are two forms of one answer: give one of them")
    context = _from_file(file, request)
    if target in RUNTIMES:
        return _lint_serving(file if as_sarif else None, context, target, as_object)
    reading = read_as(context, target_named(target))
    if as_sarif:
        from dtype_engine.reports.sarif import lint_sarif

        print_json(lint_sarif(file, reading))
    elif as_object:
        rules = [as_json(rule) | {"differs": rule.differs} for rule in reading.rules]
        overruled = [{"tensor": name, "here": here, "there": there} for name, here, there in reading.overruled]
        known = {"model": context.title, "differs": reading.differs}
        print_json(known | as_json(reading) | {"rules": rules, "overruled": overruled})
    else:
        for line in _lint_lines(reading):
            answer(line)
    return NO if reading.differs else 0


def _lint_serving(sarif_of: Path | None, context: Context, target: str, as_object: bool) -> int:
    """Print how the runtime `target` would load an export. If `sarif_of` (a recipe file) is not None, print SARIF about it."""
    runtime = next(name for name in RUNTIMES if name == target)
    reading = lint_serving(context, runtime)
    if sarif_of is not None:
        from dtype_engine.reports.sarif import serving_sarif

        print_json(serving_sarif(sarif_of, reading))
    elif as_object:
        print_json({"model": context.title, "loads": reading.loads} | as_json(reading))
    else:
        for line in serving_lines(reading, lambda names: some_names(tuple(names))):
            answer(line)
    return NO if reading.findings else 0


def _lint_lines(reading: Lint) -> list[str]:
    lines = [
        f"{reading.target}: {reading.matcher}",
        *(line for rule in reading.rules for line in _rule_lines(rule, reading.target)),
    ]
    if reading.overruled:
        name, here, there = reading.overruled[0]
        lines.append(
            f"another rule decides {plural(len(reading.overruled), 'tensor')} in {reading.target}, first {name}: {there} there, "
            f"{here} in dtype-engine"
        )
    for problem in reading.caches.problems:
        lines += [f"! {problem.effect}: {problem.why}", f"    {some_names(problem.tensors)}"]
    if reading.patterns_differ:
        lines.append("the patterns differ; 'recipe convert' writes exact ones")
    elif not reading.differs:
        lines.append("no difference")
    if reading.caches.flags:
        lines.append(f"for the KV cache: {' '.join(reading.caches.flags)}")
    return lines


def _rule_lines(rule: RuleComparison, target: str) -> list[str]:
    matches = f"matches {plural(rule.here, 'tensor')} in dtype-engine, {rule.there:,} in {target}"
    lines = [f"{'!' if rule.differs else ' '} {rule.pattern}={rule.dtype}: {matches}"]
    if rule.problem:
        lines.append(f"    {rule.problem}")
    if rule.only_here:
        lines.append(f"    not in {target}: {some_names(rule.only_here)}")
    if rule.only_there:
        lines.append(f"    only in {target}: {some_names(rule.only_there)}")
    if rule.beyond:
        lines.append(f"    {target} can't cast {rule.beyond:,} of them, whatever the pattern")
    return lines


@recipe.command(cls=ModelCommand, rules=False, runs=False)
@bandwidth_option
@json_option
def presets(request: RunRequest, bandwidth: float | None, as_object: bool) -> None:
    """List the presets, which are ready-made recipes, with their rules for MODEL, the size that MODEL has under each, and the bytes
    of weights that a token reads.
    """
    from dtype_engine.recipe.presets import preset_effects, rounding_words

    context = _context(request)
    entries: list[dict[str, Any]] = []
    for effect in preset_effects(context.tree):
        entry: dict[str, Any] = {"name": effect.preset.name, "sentence": effect.preset.sentence}
        entry["roundings"] = [rounding for rounding in ROUNDINGS if effect.preset.rounded(rounding)]
        if effect.recipe is None:
            entry |= {"rules": [], "planned_bytes": None, "unavailable": effect.reason}
        else:
            entry |= {
                "rules": [str(rule) for rule in effect.recipe.rules],
                "planned_bytes": effect.planned_bytes,
                "fits_memory": effect.planned_bytes <= total_memory(),
                "active_bytes": effect.active_bytes,
                "milliseconds": _least_time(effect.active_bytes, bandwidth),
            }
        entries.append(entry)
    if as_object:
        print_json({"model": context.title, "stored_bytes": context.tree.stored_bytes, "presets": entries})
        return
    answer(f"{context.title}: {human_bytes(context.tree.stored_bytes)} as stored")
    for entry in entries:
        planned = entry["planned_bytes"]
        answer(f"{entry['name']:16} {human_bytes(planned) if planned is not None else '-':>11}  {entry['sentence']}")
        answer(f"{'':28}  {entry.get('unavailable') or ', '.join(entry['rules'])}")
        if (active := entry.get("active_bytes")) is not None:
            least = entry["milliseconds"]
            time = f", in at least {token_time(least)}" if least is not None else ""
            answer(f"{'':28}  a token reads {human_bytes(active)} of the weights{time}")
        if planned is not None and not entry["fits_memory"]:
            answer(f"{'':28}  {fit(planned)}")
    answer(rounding_words())


def _least_time(active: int | None, bandwidth: float | None) -> float | None:
    return None if active is None or bandwidth is None else milliseconds(active, bandwidth)


def _from_file(file: Path, request: RunRequest) -> Context:
    from dtype_engine.recipe.file import read_recipe_file

    given = read_recipe_file(file)
    if request.model is None and given.model is None:
        raise UserError(f"{file} does not say what model it is for: add --model")
    by = "--model" if request.model is None else None
    found = _context(msgspec.structs.replace(request, recipe=given.recipe, model=request.model or given.model), by)
    settings = given.settings or RunSettings()
    return dataclasses.replace(found, activations=settings.quantize_activations)


def _context(request: RunRequest, python_only_by: str | None = None) -> Context:
    """Return the plan of the request's recipe, and the facts about the model that converting a recipe needs. python_only_by: as in
    `RunRequest.locate`.
    """
    from dtype_engine.runtime.building.describe import describe

    source = request.locate(python_only_by)
    model = describe(source, request.options)
    plan = require_matches(model.tree, request.recipe)
    return Context(model.tree, plan, source.title, model.model_type, model.kinds)
