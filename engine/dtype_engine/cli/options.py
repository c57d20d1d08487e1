"""What the commands share: options, how a model is opened with its rules, progress, and errors as one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from dtype_engine.cli.program import say
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.input_args import check_files
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Recipe, Rule, make_plan, require_matches

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.runtime.session import Session

_PRESET = f"{__name__}.preset"
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
model_options = [
    click.option(
        "--trust-pickle", is_flag=True, help="Load pickles that hold more than tensors; they can run any code."
    ),
    click.option("--download", is_flag=True, help="Fetch MODEL from the Hugging Face hub when it is not in the cache."),
    click.option(
        "--weights",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A checkpoint (.pth, .safetensors, ...) for the model of a Python file.",
    ),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the checkpoint."),
    click.option(
        "--architecture",
        metavar="NAME",
        help="The class that the checkpoint's tensors belong to, where no config.json names it.",
    ),
]
"""How any MODEL is opened: every command that takes one has all of these; they are fields of `Options`."""
preset_option = click.option(
    "--preset",
    metavar="NAME",
    expose_value=False,
    callback=lambda ctx, parameter, name: ctx.meta.update({_PRESET: name}) if name else None,
    help="Start from a preset; see `recipe presets`.",
)
"""Gives no argument to the command: its rules can't be known before the tree is. `with_preset` puts them in."""
rule_options = [*cast_options, preset_option]
"""Every command that takes rules has all of these."""
input_options = [
    click.option("--prompt", "prompts", multiple=True, help="Calibration text; may be repeated."),
    click.option(
        "--text",
        "texts",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A text file, or a .jsonl file with text, prompt or messages on every line, cut into sequences.",
    ),
    click.option("--chat", is_flag=True, help="Put every prompt through the tokenizer's chat template."),
    click.option("--sequence-length", type=click.IntRange(min=2), metavar="N", help="Tokens a sequence, at most."),
    click.option("--sequences", type=click.IntRange(min=1), metavar="N", help="How many sequences, at most."),
    click.option(
        "--image",
        "images",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A picture; may be repeated.",
    ),
    click.option(
        "--audio", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="A sound; may be repeated."
    ),
    click.option(
        "--inputs",
        "tensors",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The forward pass's own arguments by name: .safetensors, .npz or .pt.",
    ),
]
run_options = [
    *model_options,
    click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto."),
    *input_options,
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
]


Command = TypeVar("Command", bound=Callable[..., Any])


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """A decorator that adds several click options in the order given."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def located(model: str | None, options: Options, python_only_by: str | None = None) -> Source:
    """What MODEL on the command line means (one that a file names, with `python_only_by`; see `locate`).

    Raises UserError, also for an option that does not go with such a model.
    """
    from dtype_engine.checkpoint.source import locate

    source = locate(model, options.trust_pickle, options.download, python_only_by)
    if source.kind == "checkpoint" and options.weights is not None:
        raise UserError("--weights goes with the code of a model, as in file.py:Name --weights model.pth")
    if source.kind == "python" and options.architecture is not None:
        raise UserError(f"--architecture goes with a checkpoint; {source.title} makes its own module")
    return source


def opened(model: str | None, recipe: Recipe, options: Options) -> Session:
    """A session with a recipe in force whose rules all take something."""
    source = located(model, options)
    checkpoint = source.open()
    if checkpoint is not None:
        refuse_unmatched(source, checkpoint.tree(), recipe, options)
    from dtype_engine.runtime.session import open_session

    session = open_session(source, settled(options), say=say)
    _say_made_for(session.model.title)
    recipe = with_preset(recipe, session.tree)
    require_matches(session.tree, recipe)
    session.apply(recipe)
    return session


def read_rules(casts: Sequence[str], recipe_file: Path | None) -> Recipe:
    """The rules of a recipe file, then those of the command line. Raises UserError."""
    preset_asked()
    recipe = Recipe()
    if recipe_file is not None:
        from dtype_engine.recipe.file import read_recipe

        recipe = read_recipe(recipe_file)
    for cast in casts:
        recipe = recipe.then(Rule.parse(cast))
    return recipe


def preset_asked() -> str | None:
    """The name given with --preset. It stays with the command: its rules can't be known before the model's tree is."""
    context = click.get_current_context(silent=True)
    name: str | None = context.meta.get(_PRESET) if context is not None else None
    if name is not None:
        from dtype_engine.recipe.presets import preset

        preset(name)  # a name that is none is refused at once
    return name


def with_preset(recipe: Recipe, tree: Tree) -> Recipe:
    """A recipe after the rules of the preset that was asked for, if one was. Raises UserError."""
    name = preset_asked()
    if name is None:
        return recipe
    from dtype_engine.recipe.presets import preset

    return Recipe((*preset(name).recipe(tree).rules, *recipe.rules))


def settled(options: Options) -> Options:
    """With the run settings of the recipe file, where it has some and the command line says nothing else."""
    context = click.get_current_context(silent=True)
    file = context.params.get("recipe_file") if context is not None else None
    if context is None or file is None:
        return options
    from dtype_engine.recipe.file import read_recipe_file

    written = read_recipe_file(file).settings
    if written is None:
        return options
    said = {
        name: getattr(options.settings, name)
        for name in ("compute", "autocast", "float_inputs")
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    return dataclasses.replace(options, settings=dataclasses.replace(written, **said))


def _say_made_for(title: str) -> None:
    """A note where the recipe file of this command names another model than `title`."""
    context = click.get_current_context(silent=True)
    file = context.params.get("recipe_file") if context is not None else None
    if file is not None:
        from dtype_engine.recipe.file import read_recipe_file

        named = read_recipe_file(file).model
        if named is not None and named != title:
            click.echo(f"dtype-engine: note: {file} was made for {printable(named)}, and this is {title}", err=True)


def refuse_unmatched(source: Source, tree: Tree, recipe: Recipe, options: Options) -> None:
    """Raise UserError for a rule that takes nothing, before any weight is loaded.

    The headers' names mostly tell at once. Where they do not, or a rule goes by module classes, the architecture is asked,
    which imports torch: it also has tied names and packed experts that the files do not have.
    """
    if not recipe.rules:
        return
    plan = make_plan(tree, recipe)
    plan.refuse_too_slow()
    if plan.unmatched or plan.waiting:
        from dtype_engine.runtime.model.describe import describe

        require_matches(describe(source, options).tree, recipe)


def options_from(
    device: str,
    prompts: tuple[str, ...],
    texts: tuple[Path, ...],
    chat: bool,
    sequence_length: int | None,
    sequences: int | None,
    images: tuple[Path, ...],
    audio: tuple[Path, ...],
    tensors: Path | None,
    compute: str,
    autocast: str | None,
    float_inputs: Literal["given", "model"],
    weights: Path | None,
    trust_remote_code: bool,
    architecture: str | None,
    trust_pickle: bool,
    download: bool,
) -> Options:
    """What `run_options` gathered from the command line. Raises UserError."""
    chosen = dtypes.parse_target(compute)
    if chosen not in dtypes.COMPUTE_DTYPES:
        raise UserError(f"--compute {compute}: choose one of {', '.join(dtypes.COMPUTE_DTYPES)}")
    cast = _AUTOCAST.get(dtypes.parse_target(autocast)) if autocast is not None else None
    if autocast is not None and cast is None:
        raise UserError(f"--autocast {autocast}: torch.autocast knows bfloat16 and float16")
    options = Options(
        device=device,
        prompts=prompts,
        texts=texts,
        chat=chat,
        sequence_length=sequence_length,
        sequences=sequences,
        images=images,
        audio=audio,
        tensors=tensors,
        settings=RunSettings(chosen, cast, float_inputs),
        weights=weights,
        trust_remote_code=trust_remote_code,
        architecture=architecture,
        trust_pickle=trust_pickle,
        download=download,
    )
    check_files(options)
    return options
