"""`dtype-engine`: every question the app can ask, for scripts and jobs.

Results go to standard output (with `--json`, one object and nothing else), everything else to standard error.
Exit status: 0 done, 1 the answer is no, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from . import dtypes
from .errors import UserError
from .options import Options, RunSettings
from .readings import Generation, as_json
from .recipe import Recipe, Rule, make_plan, require_matches
from .tree import Tree

if TYPE_CHECKING:
    from .model.source import Source
    from .session import Session

BAD_INPUT, INTERRUPTED = 2, 130
_AUTOCAST: dict[str, Literal["bfloat16", "float16"]] = {"bfloat16": "bfloat16", "float16": "float16"}

model_argument = click.argument("model", required=False)
json_option = click.option("--json", "as_object", is_flag=True, help="Print one JSON object.")
cast_options = [
    click.option("--cast", "casts", multiple=True, metavar="PATTERN=DTYPE", help="A rule; the last that matches wins."),
    click.option(
        "--recipe",
        "recipe_file",
        type=click.Path(path_type=Path),
        help="A recipe file; --cast rules come after its own.",
    ),
]
run_options = [
    click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto."),
    click.option("--prompt", "prompts", multiple=True, help="Calibration text; may be repeated."),
    click.option(
        "--text", "texts", multiple=True, type=click.Path(path_type=Path), help="A text file, cut into sequences."
    ),
    click.option(
        "--compute",
        default="float32",
        show_default=True,
        help="What storage-only weights compute in without an activation.",
    ),
    click.option("--autocast", metavar="DTYPE", help="Run the candidate under torch.autocast in bf16 or fp16."),
    click.option(
        "--float-inputs",
        type=click.Choice(["given", "model"]),
        default="given",
        show_default=True,
        help="Floating inputs as they are, or cast to the dtype of the model's first weight.",
    ),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the checkpoint."),
]


Command = TypeVar("Command", bound=Callable[..., Any])


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """A decorator that adds several click options in the order given."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dtype-tui")
def cli() -> None:
    """What happens if these layers are in another dtype?

    MODEL is a checkpoint folder or file, a Hugging Face id in the local cache, file.py:Name, package.module:Name, or
    nothing for the built-in demo.
    """


@cli.command()
@model_argument
@with_options(cast_options)
@json_option
def inspect(model: str | None, casts: tuple[str, ...], recipe_file: Path | None, as_object: bool) -> None:
    """Modules, dtypes, parameters and bytes; from the headers alone where there are headers."""
    from .model.source import locate

    source = locate(model)
    checkpoint = source.open()
    if checkpoint is not None:
        tree = checkpoint.tree()
    else:
        from .model.load import load

        tree = load(source, Options(device="cpu")).tree
    recipe = read_rules(casts, recipe_file)
    refuse_unmatched(source, tree, recipe, Options(device="cpu"))
    plan = make_plan(tree, recipe)
    totals = tree.totals(plan.dtypes)
    tensors = [
        {
            "name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype, "planned": plan.dtypes[tensor.name],
            "kind": tensor.kind, "bytes": tensor.nbytes, "tied": list(tensor.aliases),
        }
        for tensor in tree.tensors.values()
    ]  # fmt: skip
    whole = totals[""]
    result = {
        "model": source.title,
        "parameters": whole.total_elements,
        "stored_bytes": plan.stored_bytes,
        "planned_bytes": plan.planned_bytes,
        "dtypes": {name: {"elements": whole.elements[name], "bytes": whole.nbytes[name]} for name in whole.elements},
        "rules": [str(rule) for rule in recipe.rules],
        "modules": [
            {
                "name": name, "class": module.class_name, "parameters": totals[name].total_elements,
                "bytes": totals[name].total_bytes, "dtypes": dict(totals[name].nbytes),
            }
            for name, module in tree.modules.items()
        ],
        "tensors": tensors,
    }  # fmt: skip
    if as_object:
        print_json(result)
        return
    from .report_text import inspect_text

    click.echo(inspect_text(tree, plan, source.title))


@cli.command()
@model_argument
@with_options(cast_options)
@with_options(run_options)
@click.option(
    "--generate",
    "tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also let both write N tokens, greedily, and show where they part.",
)
@json_option
def drift(
    model: str | None,
    casts: tuple[str, ...],
    recipe_file: Path | None,
    tokens: int | None,
    as_object: bool,
    **run_settings: Any,
) -> None:
    """Run the float32 reference and the candidate, and report how far the outputs and the memory moved."""
    session = _opened(model, read_rules(casts, recipe_file), options_from(**run_settings))
    report = session.drift(on_progress=_say_progress)
    texts = session.generate(tokens, lambda which, done, most: _say(f"{which}: {done} tokens")) if tokens else ()
    _say("")
    if as_object:
        print_json(as_json(report) | ({"generated": [_generation(text) for text in texts]} if tokens else {}))
        return
    from .report_text import drift_text, generation_text

    click.echo(drift_text(report))
    for text in texts:
        click.echo(generation_text(text))
    for notice in report.notices:
        click.echo(f"dtype-engine: note: {notice}", err=True)


@cli.command()
@model_argument
@with_options(cast_options)
@with_options(run_options)
@json_option
def flow(
    model: str | None,
    casts: tuple[str, ...],
    recipe_file: Path | None,
    as_object: bool,
    **run_settings: Any,
) -> None:
    """Every implicit cast of one forward pass: module, operation, from, to, elements."""
    session = _opened(model, read_rules(casts, recipe_file), options_from(**run_settings))
    found = session.flow()
    if as_object:
        rules = [str(rule) for rule in session.recipe.rules]
        print_json({"model": session.model.title, "rules": rules, "casts": as_json(found)})
        return
    from .report_text import flow_text

    click.echo(flow_text(found))


@cli.command()
@model_argument
@with_options(cast_options)
@with_options(run_options)
@click.option(
    "--repeats", type=click.IntRange(min=3), default=5, show_default=True, help="Passes timed after a warm-up."
)
@json_option
def speed(
    model: str | None,
    casts: tuple[str, ...],
    recipe_file: Path | None,
    repeats: int,
    as_object: bool,
    **run_settings: Any,
) -> None:
    """Time forward passes in float32, as stored, and as cast: the median of repeats after a warm-up."""
    session = _opened(model, read_rules(casts, recipe_file), options_from(**run_settings))
    report = session.speed(lambda what, done, total: _say(f"timing {what}: {done} of {total}"), repeats=repeats)
    _say("")
    if as_object:
        print_json(as_json(report))
        return
    from .report_text import speed_text

    click.echo(speed_text(report))
    for notice in report.notices:
        click.echo(f"dtype-engine: note: {notice}", err=True)


def _generation(text: Generation) -> dict[str, Any]:
    """One generation as JSON: what was written, and the first token that differs (null when none does)."""
    return {
        "prompt": text.prompt,
        "reference": as_json(text.reference) | {"text": text.reference.text},
        "candidate": as_json(text.candidate) | {"text": text.candidate.text},
        "first_difference": text.same_tokens if text.differs else None,
    }


def _opened(model: str | None, recipe: Recipe, options: Options) -> Session:
    """A session with a recipe in force whose rules all take something."""
    from .model.source import locate

    source = locate(model)
    checkpoint = source.open()
    if checkpoint is not None:
        refuse_unmatched(source, checkpoint.tree(), recipe, options)
    from .session import open_session

    session = open_session(source, options, say=_say)
    require_matches(session.tree, recipe)
    session.apply(recipe)
    return session


def read_rules(casts: Sequence[str], recipe_file: Path | None) -> Recipe:
    """The rules of a recipe file, then those of the command line. Raises UserError."""
    recipe = Recipe()
    if recipe_file is not None:
        from .recipe.file import read_recipe

        recipe = read_recipe(recipe_file)
    for cast in casts:
        recipe = recipe.then(Rule.parse(cast))
    return recipe


def refuse_unmatched(source: Source, tree: Tree, recipe: Recipe, options: Options) -> None:
    """Raise UserError for a rule that takes nothing, before any weight is loaded.

    The headers' names mostly tell at once. Where they do not match, the architecture itself is asked, which imports torch:
    it also has tied names and packed experts that the files do not have.
    """
    try:
        require_matches(tree, recipe)
    except UserError:
        from .model.load import expected_tree

        expected = expected_tree(source, options)
        if expected is None:
            raise
        require_matches(expected, recipe)


def options_from(
    device: str,
    prompts: tuple[str, ...],
    texts: tuple[Path, ...],
    compute: str,
    autocast: str | None,
    float_inputs: Literal["given", "model"],
    trust_remote_code: bool,
) -> Options:
    """What `run_options` gathered from the command line. Raises UserError."""
    chosen = dtypes.parse_target(compute)
    if chosen not in dtypes.COMPUTED:
        raise UserError(f"--compute {compute}: choose one of {', '.join(dtypes.COMPUTED)}")
    cast = _AUTOCAST.get(dtypes.parse_target(autocast)) if autocast is not None else None
    if autocast is not None and cast is None:
        raise UserError(f"--autocast {autocast}: torch.autocast knows bfloat16 and float16")
    return Options(
        device=device,
        prompts=prompts,
        texts=texts,
        settings=RunSettings(chosen, cast, float_inputs),
        trust_remote_code=trust_remote_code,
    )


def print_json(value: Any) -> None:
    """One object on standard output."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def _say(step: str) -> None:
    """Progress for a person; nothing when standard error is not a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{step}")
        sys.stderr.flush()


def _say_progress(run: str, done: int, total: int | None) -> None:
    share = f" {100 * done // total} %" if total else ""
    _say(f"{run}: {done} module calls{share}")


def run(command: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run a click command by the project's rules for errors and exit statuses: one line, 2 for bad input."""
    try:
        result = command.main(args=arguments, prog_name=program, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (UserError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"{program}: {' '.join(text.split())}", file=sys.stderr)
        return BAD_INPUT
    except (KeyboardInterrupt, click.Abort):
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


from . import cli_scan as _cli_scan  # noqa: E402, F401  (adds its commands)


def main() -> None:
    """The `dtype-engine` program."""
    sys.exit(run(cli, "dtype-engine"))
