"""`dtype-engine export` writes a checkpoint in the dtypes of a recipe, and `dtype-engine verify` checks such a checkpoint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import click

from dtype_engine.cli.options import ModelCommand, json_option
from dtype_engine.cli.parallel import workers_option
from dtype_engine.cli.program import NO, answer, note, print_json, say, say_share
from dtype_engine.cli.request import RunRequest
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.file_layouts import COMPRESSED_TENSORS, FILE_LAYOUTS
from dtype_engine.core.text import printable
from dtype_engine.core.throttle import Throttle
from dtype_engine.core.units import human_bytes, plural, seconds_text
from dtype_engine.recipe import make_plan
from dtype_engine.reports.text import found_text
from dtype_engine.reports.text_losses import loss_lines
from dtype_engine.results.as_json import as_json
from dtype_engine.results.export import CastReport, ComparedTensor, ExportReport, VerifyReport

_SHOWN = 20
"""The maximum number of tensors of one kind that the texts list."""
_TENSOR_BYTES = 1 << 30
"""Estimated bytes of memory that a worker of `verify` needs for one tensor and its casts."""


@click.command(cls=ModelCommand)
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The folder to write. If the name ends in .safetensors, .pth, .pt, .bin or .ckpt, one file is written instead. An "
    "existing file, or a folder that is not empty, is replaced only with --force.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace the output folder or file if it exists, once the export is complete. MODEL itself is never replaced.",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    help="Maximum size of each weights file, such as 500MB. A larger export is split into several files.",
)
@click.option(
    "--incomplete",
    is_flag=True,
    help="Export the tensors that exist even if the checkpoint lacks some of the model's tensors, or has some in other shapes "
    "than config.json gives them. Without this option, that is an error.",
)
@click.option(
    "--layout",
    type=click.Choice((COMPRESSED_TENSORS, *FILE_LAYOUTS)),
    default=COMPRESSED_TENSORS,
    show_default=True,
    help="The layout of weights with scales, for the programs that read it. "
    + "; ".join(f"{each.name} is {each.words}" for each in FILE_LAYOUTS.values())
    + ". Models of diffusers always have torchao's.",
)
@json_option
def export(
    request: RunRequest, folder: Path, force: bool, max_shard_size: str, incomplete: bool, layout: str, as_object: bool
) -> None:
    """Write MODEL as a new checkpoint in the dtypes of a recipe. MODEL itself stays unchanged. Its weights are read, cast and
    written one after another, so they need not fit in memory. A folder also gets the recipe, and the files that loaders need, such
    as config.json. One file gets only the weights: .safetensors is a safetensors file, and the other endings, such as .pth, give a
    state dict that torch.load reads.

    With --quantize-activations=weights, the checkpoint tells inference runtimes to also round the inputs of matrix products, in the
    formats that support this (W8A8, W4A4).
    The scales of activations in NVFP4 and of KV caches in fp8 can't be computed from the weights, and roundings such as GPTQ are
    fitted to inputs: for them, the model is loaded, and runs on the calibration inputs.
    """
    from dtype_engine.checkpoint.export_folder import check_export
    from dtype_engine.runtime.export import export as write
    from dtype_engine.runtime.export import of_checkpoint
    from dtype_engine.runtime.export.file_layout import in_layout
    from dtype_engine.runtime.export.input_scales import needs_calibration
    from dtype_engine.runtime.export.rounded import needs_fitting

    source, recipe = request.locate(), request.recipe
    check_export(folder, force, [source.path] if source.path is not None else [])
    checkpoint, contents = source.open(), None
    if checkpoint is not None:
        if request.preset is not None:
            from dtype_engine.runtime.building.describe import describe

            recipe = request.with_preset(describe(source, request.options).tree)
        contents = in_layout(of_checkpoint(checkpoint, source.title, recipe, request.options), layout)
    with_caches = checkpoint is not None and bool(make_plan(checkpoint.tree(), recipe).caches)
    if contents is not None and not (with_caches or needs_calibration(contents) or needs_fitting(contents)):
        report = write(contents, folder, max_shard_size, _rate("exporting"), force=force, incomplete=incomplete)
    else:
        session = request.open_session(source)
        report = session.export(
            folder, max_shard_size, _rate("exporting"), force=force, incomplete=incomplete, layout=layout
        )
    say("")
    if as_object:
        print_json(as_json(report))
        return
    answer(export_text(report))
    note(report.notices)


@click.command(cls=ModelCommand, rules=False)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--against", "model", required=True, metavar="MODEL", help="The model from which FOLDER was made.")
@click.option(
    "--drift",
    is_flag=True,
    help="Also check that two drifts are equal: that of MODEL with the export's recipe, and that of the export itself, "
    "loaded from FOLDER.",
)
@workers_option
@json_option
def verify(request: RunRequest, folder: Path, drift: bool, workers: str | int | None, as_object: bool) -> int:
    """Check bit for bit that FOLDER, an export, is what its recipe says: each tensor must have the dtype and the values that the
    recipe in FOLDER gives when it is applied to MODEL, the model of --against.

    FOLDER may also be a checkpoint (folder or file) that another program made from MODEL. Then each tensor must be MODEL's tensor,
    cast to the dtype that it has in FOLDER.

    The exit status is 1 if a tensor differs, is missing or new, or can't be compared.
    """
    from dtype_engine.checkpoint.export_folder import is_export

    if not folder.exists():
        raise UserError(f"there is no folder {folder}")
    options = request.options
    if options.device == "auto":  # the CPU gives the same sums on any machine
        options = dataclasses.replace(options, device="cpu")
    source = request.locate()
    if not is_export(folder):
        if drift or workers is not None:
            option = "--drift" if drift else "--workers"
            raise UserError(f"{folder} is no export of this program: {option} is only for these")
        from dtype_engine.runtime.verify.foreign import compare_foreign

        compared = compare_foreign(folder, source, options, _rate("comparing"))
        return _print_comparison(compared, cast_text(compared), as_object)
    from dtype_engine.runtime.session.verify import verify as check

    if workers is None:
        report = check(folder, source, drift, options, _rate("comparing"))
    else:
        from dtype_engine.evaluation.work import comparing
        from dtype_engine.evaluation.workers import Workers

        with Workers(workers, lambda sentence: note([sentence])) as started:
            threads = started.threads(options.threads, _TENSOR_BYTES)
            compare = comparing(started.pool(_TENSOR_BYTES), threads, folder, source, options)
            report = check(folder, source, drift, options, _rate("comparing"), elsewhere=compare)
    return _print_comparison(report, verify_text(report), as_object)


def _print_comparison(report: VerifyReport | CastReport, text: str, as_object: bool) -> int:
    say("")
    if as_object:
        print_json(as_json(report) | {"same": report.same})
    else:
        answer(text)
    return 0 if report.same else NO


def _rate(what: str) -> Callable[[int, int], None]:
    """Return a progress callback that shows `what`, the bytes done and the bytes per second, at most ten times a second."""
    started, throttle = time.perf_counter(), Throttle(first=False)

    def on_bytes(done: int, total: int) -> None:
        if throttle.due(last=done == total):
            seconds = time.perf_counter() - started
            speed = human_bytes(done / seconds) if seconds > 0 else "0 B"
            say_share(what, done, total, f"{what}: {human_bytes(done)} of {human_bytes(total)}, {speed}/s")

    return on_bytes


def export_text(report: ExportReport) -> str:
    """Return an export's rules, bytes in each dtype, folder and speed as text."""
    rate = f", {human_bytes(report.nbytes / report.seconds)}/s" if report.seconds else ""
    in_folders = any("/" in name for name in report.files)
    files = report.files[0] if len(report.files) == 1 else f"{len(report.files)} {'files' if in_folders else 'shards'}"
    files = "one file" if Path(report.folder).name == files else files
    mix = ", ".join(
        f"{dtypes.short_name(name)} {human_bytes(found.nbytes)} in {found.tensors}"
        for name, found in report.dtypes.items()
    )
    return "\n".join(
        [
            f"model      {report.model}{found_text(report.coverage)}",
            f"rules      {', '.join(report.rules) or 'none: as stored'}",
            f"tensors    {mix}",
            f"written    {printable(report.folder, 1000)}: {human_bytes(report.nbytes)}, {files}, in "
            f"{seconds_text(report.seconds)}{rate}",
            *loss_lines(report.lost),
        ]
    )


def cast_text(report: CastReport) -> str:
    """Return the comparison of another program's checkpoint with its source as text."""
    lines = [
        f"checkpoint {printable(report.folder, 1000)}",
        f"against    {report.model}",
        f"compared   {plural(len(report.tensors), 'tensor')}, {human_bytes(report.nbytes)}, in {seconds_text(report.seconds)}",
    ]
    groups: dict[tuple[str, str], list[ComparedTensor]] = {}
    for tensor in report.tensors:
        word = "exact" if tensor.exact else "decoded" if tensor.differing is None else "differs"
        groups.setdefault((word, _change(tensor)), []).append(tensor)
    for (word, change), tensors in groups.items():
        worst = max(tensors, key=lambda tensor: tensor.max_abs)
        of = f", max |Δ| {worst.max_abs:.3e} in {printable(worst.name)}" if worst.max_abs else ""
        lines.append(f"{word:<10} {plural(len(tensors), 'tensor')} {change}{of}")
    rows = [
        ("differs", tensor.name, f"{tensor.differing:,} of {tensor.elements:,} values, max |Δ| {tensor.max_abs:.3e}")
        for tensor in report.tensors
        if tensor.differing
    ]
    rows += [("differs", found.name, found.what) for found in report.differences]
    unread = [("uncompared", found.name, found.what) for found in report.uncompared]
    for kind in (rows, unread):
        lines += [f"{word:<10} {printable(name)} {what}" for word, name, what in kind[:_SHOWN]]
        if len(kind) > _SHOWN:
            lines.append(f"           and {len(kind) - _SHOWN:,} more")
    lines += [f"unchecked  {printable(sentence, 1000)}" for sentence in report.unchecked]
    decoded = sum(tensor.differing is None for tensor in report.tensors)
    counts = {"differ": len(rows), "were decoded": decoded, "were not compared": len(unread)}
    said = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    lines.append("every tensor is an exact cast of the source's" if report.same else f"not all are exact casts: {said}")
    return "\n".join(lines)


def _change(tensor: ComparedTensor) -> str:
    before, after = dtypes.short_name(tensor.source_dtype), dtypes.short_name(tensor.dtype)
    return after if before == after else f"{before}→{after}"


def verify_text(report: VerifyReport) -> str:
    """Return the verification of an export as text."""
    lines = [
        f"export     {printable(report.folder, 1000)}",
        f"against    {report.model}",
        f"rules      {', '.join(report.rules) or 'none: as stored'}",
        f"compared   {report.tensors} tensors, {human_bytes(report.nbytes)}, in {seconds_text(report.seconds)}",
    ]
    lines += [f"differs    {printable(found.name)} {found.what}" for found in report.differences[:_SHOWN]]
    if len(report.differences) > _SHOWN:
        lines.append(f"           and {len(report.differences) - _SHOWN} more")
    lines += loss_lines(report.lost)
    if report.drift_before is not None and report.drift_after is not None:
        before, after = report.drift_before, report.drift_after
        lines.append(f"drift      max |Δ| {before.max_abs:.6e} cast, {after.max_abs:.6e} loaded back")
        lines.append(f"           mean |Δ| {before.mean_abs:.6e} cast, {after.mean_abs:.6e} loaded back")
    lines += [f"unchecked  {printable(sentence, 1000)}" for sentence in report.unchecked]
    same = "the same, bit for bit"
    if report.rounded:
        same += f"; {plural(report.rounded, 'tensor')} with values that the rounding may choose"
    lines.append(same if report.same else "not the same")
    return "\n".join(lines)
