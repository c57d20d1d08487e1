"""The commands that look at a model as it is, and run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dtype_engine.cli.drift_more import fail_where_missed, look_closer
from dtype_engine.cli.options import (
    json_option,
    located,
    model_argument,
    model_options,
    opened,
    options_from,
    read_rules,
    rule_options,
    run_options,
    with_options,
    with_preset,
)
from dtype_engine.cli.planning import planned
from dtype_engine.cli.program import print_json, say, say_progress
from dtype_engine.cli.saving import may_save, save_measured, save_recipe_options
from dtype_engine.cli.thresholds import threshold_options, thresholds_from
from dtype_engine.core.options import Options
from dtype_engine.recipe import make_plan, require_matches
from dtype_engine.results.drift import Generation, as_json
from dtype_engine.results.thresholds import verdicts


@click.command()
@model_argument
@with_options(rule_options)
@with_options(model_options)
@json_option
def inspect(
    model: str | None,
    casts: tuple[str, ...],
    recipe_file: Path | None,
    as_object: bool,
    **model_settings: Any,
) -> None:
    """Modules, dtypes, parameters and bytes; from the headers alone where there are headers."""
    options = Options(device="cpu", **model_settings)
    source = located(model, options)
    known = planned(source, read_rules(casts, recipe_file), options)
    tree, plan = known.tree, known.plan
    totals = tree.totals(plan.dtypes)
    tensors = [
        {
            "name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype, "planned": plan.dtypes[tensor.name],
            "kind": tensor.kind, "bytes": tensor.nbytes, "tied": list(tensor.aliases), "fixed": tensor.fixed,
        }
        for tensor in tree.tensors.values()
    ]  # fmt: skip
    whole = totals[""]
    result = {
        "model": source.title,
        "parameters": whole.parameters if not whole.unknown else None,
        "buffers": whole.buffers,
        "stored_bytes": plan.stored_bytes,
        "planned_bytes": plan.planned_bytes,
        "dtypes": {name: {"elements": whole.elements[name], "bytes": whole.nbytes[name]} for name in whole.elements},
        "rules": [str(rule) for rule in plan.recipe.rules],
        "modules": [
            {
                "name": name, "class": module.class_name,
                "parameters": totals[name].parameters if not totals[name].unknown else None,
                "buffers": totals[name].buffers, "bytes": totals[name].total_bytes, "dtypes": dict(totals[name].nbytes),
            }
            for name, module in tree.modules.items()
        ],
        "tensors": tensors,
    }  # fmt: skip
    if as_object:
        print_json(result)
        return
    from dtype_engine.reports.text import inspect_text

    click.echo(inspect_text(tree, plan, source.title))


@click.command()
@model_argument
@with_options(rule_options)
@with_options(run_options)
@click.option(
    "--generate",
    "tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also let both write N tokens, greedily, and show where they part.",
)
@with_options(save_recipe_options)
@click.option(
    "--causes", "with_causes", is_flag=True, help="Also run every module as cast by itself: where drift arises."
)
@click.option(
    "--suggest", is_flag=True, help="Try rules that keep the values that the casts lose, and say the drift then."
)
@with_options(threshold_options)
@json_option
def drift(
    model: str | None,
    casts: tuple[str, ...],
    recipe_file: Path | None,
    tokens: int | None,
    save_recipe: Path | None,
    force: bool,
    with_causes: bool,
    suggest: bool,
    as_object: bool,
    **run_settings: Any,
) -> int:
    """Run the float32 reference and the candidate, and report how far the outputs and the memory moved.

    Weights of which values became infinite or zero in their dtype are told as lost, whatever the output is.

    Exit status 1 when a limit (--max-kl, --min-sqnr, --min-top1) is not kept.
    """
    may_save(save_recipe, force)
    limits = thresholds_from(run_settings)
    session = opened(model, read_rules(casts, recipe_file), options_from(**run_settings))
    report = session.drift(on_progress=say_progress)
    save_measured(session, report, save_recipe, force)
    texts = session.generate(tokens, lambda which, done, most: say(f"{which}: {done} tokens")) if tokens else ()
    found = verdicts(limits, report.output)
    more = look_closer(session, report, with_causes, suggest)
    say("")
    if as_object:
        calibration = {"calibration": as_json(session.inputs_reading)}
        generated = {"generated": [_generation(text) for text in texts]} if tokens else {}
        print_json(as_json(report) | calibration | generated | more.as_json() | {"thresholds": as_json(found)})
        return fail_where_missed(found)
    from dtype_engine.reports.text import drift_text, generation_text

    click.echo(drift_text(report))
    click.echo(more.text(report, found))
    for text in texts:
        click.echo(generation_text(text))
    for notice in report.notices:
        click.echo(f"dtype-engine: note: {notice}", err=True)
    return fail_where_missed(found)


@click.command()
@model_argument
@with_options(rule_options)
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
    session = opened(model, read_rules(casts, recipe_file), options_from(**run_settings))
    found = session.flow()
    if as_object:
        rules = [str(rule) for rule in session.recipe.rules]
        print_json({"model": session.model.title, "rules": rules, "casts": as_json(found)})
        return
    from dtype_engine.reports.text import flow_text

    click.echo(flow_text(found))


@click.command()
@model_argument
@with_options(rule_options)
@with_options(run_options)
@click.option(
    "--repeats", type=click.IntRange(min=3), default=5, show_default=True, help="ForwardRunner timed after a warm-up."
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
    session = opened(model, read_rules(casts, recipe_file), options_from(**run_settings))
    report = session.speed(lambda what, done, total: say(f"timing {what}: {done} of {total}"), repeats=repeats)
    say("")
    if as_object:
        print_json(as_json(report))
        return
    from dtype_engine.reports.text import speed_text

    click.echo(speed_text(report))
    for notice in report.notices:
        click.echo(f"dtype-engine: note: {notice}", err=True)


@click.command()
@model_argument
@with_options(rule_options)
@with_options(model_options)
@json_option
def weights(
    model: str | None,
    casts: tuple[str, ...],
    recipe_file: Path | None,
    as_object: bool,
    **model_settings: Any,
) -> None:
    """What a cast does to the values of every tensor, without a forward pass: errors, overflow, underflow."""
    options = Options(device="cpu", **model_settings)
    source = located(model, options)
    recipe = read_rules(casts, recipe_file)
    from dtype_engine.checkpoint import unchanged
    from dtype_engine.runtime.measure.weight_errors import round_trips, round_trips_of_live, skipped

    def progress(done: int, total: int) -> None:
        say(f"weights: {done} of {total}")

    if source.kind == "python":
        from dtype_engine.runtime.model.load import load

        live = load(source, options)
        recipe = with_preset(recipe, live.tree)
        require_matches(live.tree, recipe)
        tree, plan = live.tree, make_plan(live.tree, recipe)
        with unchanged(live.identities):
            found = list(round_trips_of_live(live, plan.dtypes, progress))
    else:
        known = planned(source, recipe, options)
        assert known.checkpoint is not None
        tree, plan = known.tree, known.plan
        with unchanged(known.checkpoint.identities):
            found = list(round_trips(known.checkpoint, known.tree, plan.dtypes, progress))
    say("")
    left_out = skipped(tree)
    if as_object:
        rules = [str(rule) for rule in plan.recipe.rules]
        print_json({"model": source.title, "rules": rules, "weights": as_json(found), "skipped": as_json(left_out)})
        return
    from dtype_engine.reports.text import skipped_text, weights_text

    click.echo(weights_text(found))
    if left_out:
        click.echo(skipped_text(left_out))


def _generation(text: Generation) -> dict[str, Any]:
    """One generation as JSON: what was written, and the first token that differs (null when none does)."""
    return {
        "prompt": text.prompt,
        "reference": as_json(text.reference) | {"text": text.reference.text},
        "candidate": as_json(text.candidate) | {"text": text.candidate.text},
        "first_difference": text.same_tokens if text.differs else None,
    }
