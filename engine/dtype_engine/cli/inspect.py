"""`dtype-engine inspect`: shows the modules, dtypes and bytes of a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.check.parts import unpaired_sentences
from dtype_engine.checkpoint.completeness import what_is_missing
from dtype_engine.checkpoint.memory_fit import fit
from dtype_engine.checkpoint.modeling_source import foreign_prefix
from dtype_engine.checkpoint.source import Source
from dtype_engine.cli.options import ModelCommand, json_option
from dtype_engine.cli.program import answer, note, print_json
from dtype_engine.cli.request import Planned, RunRequest
from dtype_engine.cli.streams import answers
from dtype_engine.core.errors import UserError
from dtype_engine.core.hints import ON_THE_COMMAND_LINE, fill_hints
from dtype_engine.core.system_memory import total_memory
from dtype_engine.core.tree import Totals, draft_notice
from dtype_engine.reports.layer_kinds import totals_by_kind
from dtype_engine.results.as_json import as_json
from dtype_engine.results.coverage import Coverage


@click.command(cls=ModelCommand, runs=False)
@json_option
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    metavar="N",
    help="Show only this number of levels of modules below the model. By default, all levels.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    help="Instead of the tree, list this number of modules, those with the most bytes in their own tensors (without the "
    "tensors of submodules).",
)
@click.option(
    "--by",
    type=click.Choice(["kind"]),
    help="kind: instead of the tree, list the bytes of each kind of module: attention, MLP, experts, embeddings, norms, "
    "others.",
)
@click.option(
    "--sort",
    type=click.Choice(["model", "bytes"]),
    default="model",
    show_default=True,
    help="The order of the modules that have the same parent. model: the model's own order. bytes: the largest first.",
)
@click.option(
    "--all",
    "whole",
    is_flag=True,
    help="Show every layer. Without --all, a terminal shows layers that are like the one before them as a single line.",
)
def inspect(
    request: RunRequest, as_object: bool, depth: int | None, top: int | None, by: str | None, sort: str, whole: bool
) -> None:
    """List MODEL's modules with their dtypes, number of parameters and bytes: as they are stored or, with rules such as --cast, as
    they would be after the casts. Only the headers of the files are read, if they have headers, as safetensors files do.
    """
    if (top is not None) + (by is not None) + (depth is not None or sort != "model" or whole) > 1:
        raise UserError("--top, --by, and the options of the tree (--depth, --sort, --all) exclude each other")
    if as_object and (top is not None or by is not None or depth is not None or sort != "model"):
        raise UserError("--json always prints everything: leave out --top, --by, --depth and --sort")
    source = request.locate()
    planned = request.plan(source)
    tree, plan, checkpoint = planned.tree, planned.plan, planned.checkpoint
    coverage, incomplete = _coverage(request, source, checkpoint)
    if as_object:
        print_json(_as_object(source, planned, coverage, incomplete))
        return
    from dtype_engine.reports.text_inspect import TreeView, kinds_text, largest_text, tree_text

    if coverage is not None or incomplete:
        answer("; ".join((*([str(coverage)] if coverage is not None else []), *incomplete)))
    if checkpoint is not None:
        for line in (*checkpoint.of_sets, *checkpoint.provenance.lines()):
            answer(line)
    if source.hub is not None:
        answer(f"{fill_hints(source.hub.headers_alone, ON_THE_COMMAND_LINE)}. {fit(plan.planned_bytes)}")
    if by is not None:
        answer(kinds_text(tree, plan))
    elif top is not None:
        answer(largest_text(tree, plan, top))
    else:
        view = TreeView(depth, fold=answers().isatty() and not whole, by_bytes=sort == "bytes")
        answer(tree_text(tree, plan, source.title, view))
    note((*(checkpoint.remarks if checkpoint is not None else ()), *draft_notice(tree)))


def _as_object(
    source: Source, planned: Planned, coverage: Coverage | None, incomplete: tuple[str, ...]
) -> dict[str, Any]:
    """Return the object that --json prints. incomplete: sentences about tensors that are missing."""
    tree, plan, checkpoint = planned.tree, planned.plan, planned.checkpoint
    totals = tree.totals(plan.dtypes)
    whole = totals[""]
    tensors = [
        {
            "name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype, "planned": plan.dtypes[tensor.name],
            "kind": tensor.kind, "bytes": tensor.nbytes, "tied": list(tensor.aliases), "fixed": tensor.uncastable_reason,
        }
        for tensor in tree.tensors.values()
    ]  # fmt: skip
    provenance = checkpoint.provenance if checkpoint is not None else None
    return {
        "model": source.title,
        "found": coverage.found if coverage is not None else None,
        "expected": coverage.expected if coverage is not None else None,
        "incomplete": list(incomplete),
        "passed_over": list(checkpoint.passed_over) if checkpoint is not None else [],
        "notices": [*(checkpoint.remarks if checkpoint is not None else ()), *draft_notice(tree)],
        "provenance": as_json(provenance or None),
        **_counts(whole),
        "stored_bytes": plan.stored_bytes,
        "planned_bytes": plan.planned_bytes,
        "dtypes": {name: {"elements": count, "bytes": whole.nbytes[name]} for name, count in whole.elements.items()},
        "kinds": [{"kind": kind} | _sums(of_kind) for kind, of_kind in totals_by_kind(tree, plan.dtypes).items()],
        "rules": [str(rule) for rule in plan.recipe.rules],
        "draft_head": list(tree.draft.modules),
        "modules": [
            {"name": name, "class": module.class_name} | _sums(totals[name]) for name, module in tree.modules.items()
        ],
        "tensors": tensors,
        "on_hub": {"download_bytes": source.hub.download_bytes, "fits_memory": plan.planned_bytes <= total_memory()}
        if source.hub is not None
        else None,
    }  # fmt: skip


def _counts(totals: Totals) -> dict[str, Any]:
    return {"parameters": None if totals.unknown else totals.parameters, "buffers": totals.buffers}


def _sums(totals: Totals) -> dict[str, Any]:
    return _counts(totals) | {"bytes": totals.total_bytes, "dtypes": dict(totals.nbytes)}


def _coverage(
    request: RunRequest, source: Source, checkpoint: Checkpoint | None
) -> tuple[Coverage | None, tuple[str, ...]]:
    """Return (which of the model's tensors are in its files, sentences about the missing tensors). The first is None if unknown.

    The architecture, whose import takes seconds, is only built if rules or options need it anyway, or if the index or the tensor
    names suggest that tensors are missing.
    """
    if checkpoint is None:
        return None, ()
    index, unpaired = checkpoint.index, unpaired_sentences(checkpoint.foreign)
    asked = bool(request.recipe.rules or request.preset or request.options.architecture)
    prefix = foreign_prefix(checkpoint.weights, checkpoint.config)
    if not asked and not what_is_missing(index, None, "") and not prefix:
        return (index.coverage, (*index.sentences, *unpaired)) if index is not None else (None, unpaired)
    from dtype_engine.runtime.building.describe import describe

    known = describe(source, request.options, checkpoint)
    coverage = known.coverage or (index.coverage if index is not None else None)
    return coverage, (*what_is_missing(index, known.coverage, known.class_name, prefix), *unpaired)
