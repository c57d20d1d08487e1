"""The README.md of an export: what the export contains, and which values each way of loading it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtype_engine.checkpoint.packed_weights import quantized_parts
from dtype_engine.checkpoint.weight_sets import NAMED_WEIGHTS, NO_WEIGHTS
from dtype_engine.core import dtypes
from dtype_engine.core.file_layouts import FileLayout
from dtype_engine.core.units import human_bytes
from dtype_engine.core.version import __version__
from dtype_engine.recipe.loader_facts import Kind, Outcome, outcomes
from dtype_engine.recipe.schemes import layout
from dtype_engine.reports.markdown import code_span, escaped
from dtype_engine.reports.text_losses import loss_sentences
from dtype_engine.results.export import ExportedDtype
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.export.config import export_dtype, has_undeclared_codes
from dtype_engine.runtime.export.contents import Contents, ExportTensor, own_layout
from dtype_engine.runtime.export.experts import experts, misread
from dtype_engine.runtime.export.gptq_settings import why_not_transformers
from dtype_engine.runtime.export.loading_notes import python_lines, quoted, section, short


def by_dtype(contents: Contents) -> dict[str, ExportedDtype]:
    """Return the number of tensors and of bytes in each dtype of the export. The dtype with most bytes comes first."""
    sums: dict[str, list[int]] = {}
    for item in contents.items:
        sum_of_dtype = sums.setdefault(item.dtype, [0, 0])
        sum_of_dtype[0] += 1
        sum_of_dtype[1] += item.nbytes
    return {name: ExportedDtype(*sums[name]) for name in sorted(sums, key=lambda name: -sums[name][1])}


def readme(contents: Contents, name: str, sums: Mapping[str, ExportedDtype], lost: Sequence[ValueLoss] = ()) -> str:
    """Return the README's text. name: the export folder's name. sums: the result of `by_dtype`. lost: weights with lost values."""
    losses = [f"- {code_span(line)}" for line in loss_sentences(lost, most=40)]
    rows = [f"| {dtype} | {row.tensors} | {human_bytes(row.nbytes)} |" for dtype, row in sums.items()]
    lines = [
        f"# {escaped(name)}",
        "",
        f"{code_span(contents.title)}, cast by the rules in `recipe.yaml` and written by dtype-engine {__version__}.",
        "",
        "| dtype | tensors | bytes |",
        "|---|---|---|",
        *rows,
        "",
        *(["## Values lost in the casts", "", *losses, ""] if losses else []),
        "## Loading it",
        "",
        *(_plain_section(contents, name) if contents.layout.kind == "model" else section(contents, name)),
        "",
        "## Checking it",
        "",
        "    dtype-engine verify FOLDER --against SOURCE",
        "",
        "casts the source by the recipe once more and compares every tensor bit for bit.",
    ]
    return "\n".join(lines) + "\n"


def _plain_section(contents: Contents, name: str) -> list[str]:
    module = "" if contents.config is not None else ", module=YourModel()"
    ours = "gives the model with every weight in the dtype of the table, mapped from the files."
    if quantized := sorted({item.dtype for item in contents.items if item.has_scales}):
        ours = (
            f"gives the model with every weight in the dtype of the table, except those with scales ({', '.join(quantized)}): a "
            f"plain module has no place for scales, so these become values in {export_dtype(contents)}."
        )
        if contents.file_layout is None:
            ours += " `de.open` keeps codes and scales and runs them as they are stored."
    if len({export_dtype(contents) if item.has_scales else item.dtype for item in contents.items}) > 1:
        ours += (
            " torch refuses operations on several dtypes: `with de.mixed_dtypes():` the model runs as it was measured."
        )
    return [
        *python_lines("import dtype_engine as de", "", f"model = de.load_pretrained({quoted(name)}{module})"),
        "",
        ours,
        "",
        *_lines_on_others(contents),
    ]


def loading_text(contents: Contents) -> str:
    """Return sentences on the dtypes and values that `load_pretrained` and transformers' `from_pretrained` load from an export."""
    if contents.layout.kind != "model":
        return short(contents)
    if contents.config is None:
        return (
            "dtype_engine.load_pretrained(folder, module=...) keeps these dtypes; without a config.json from_pretrained can't load "
            "it."
        )
    wide = export_dtype(contents)
    scaled = [item for item in contents.items if item.has_scales]
    ours = f"dtype_engine.load_pretrained keeps these dtypes{f', but weights with scales become {wide}' if scaled else ''}."
    if contents.file_layout is not None:
        return f"{ours} {_of_gptq_layout(contents.items, contents.file_layout)}"
    if own_layout(contents.items):
        return (
            f"{ours} Plain from_pretrained raises an error: some scales are in a layout that only dtype-engine reads."
        )
    if has_undeclared_codes(contents):
        return f"{ours} Plain from_pretrained raises an error: config.json does not say that the weights are quantized."
    if misread(contents.items) is not None:
        return f"{ours} Plain from_pretrained of transformers raises an error: its experts are in vLLM's layout."
    if scaled:
        package = "accelerate" if _in_fp8_layout(contents) else "compressed-tensors"
        given = outcomes(_kinds(contents), wide)
        failing = sorted({dtype for (dtype, _), (plain, _) in given.items() if plain in _ERRORS})
        mended = not any(dequantized is Outcome.TAKEN_FOR_ONE_FORMAT for _, dequantized in given.values())
        without = " without dequantize=True" if mended else ""
        errors = f" Weights in {', '.join(failing)} give an error there{without}." if failing else ""
        return f"{ours} Plain from_pretrained needs the {package} package, and casts weights without scales to {wide}.{errors}"
    if how := _quantised_before(contents):
        return f"Its weights are {how} already: from_pretrained needs the package for that, and load_pretrained decodes them."
    if {item.dtype for item in contents.items if item.dtype in dtypes.COMPUTE_DTYPES} - {wide}:
        return f"{ours} Plain from_pretrained silently casts all of it to {wide}; the values stay the same."
    return f"{ours} So does plain from_pretrained: all of it is {wide}."


_RAISES = (
    f"So `{NAMED_WEIGHTS}` in `config.json` names a file that does not exist, `{NO_WEIGHTS}`, and `from_pretrained` raises an "
    "error with that name."
)


def _of_gptq_layout(items: Sequence[ExportTensor], layout: FileLayout) -> str:
    """Return sentences on which programs load an export in GPTQ's layout."""
    why = why_not_transformers(items)
    theirs = "needs the packages optimum and gptqmodel" if not why else f"raises an error: {why}"
    return (
        f"GPTQModel and vLLM load its weights with scales, which are in the layout {layout.name}. Plain from_pretrained of "
        f"transformers {theirs}."
    )


_ERRORS = (Outcome.FAILS_TO_LOAD, Outcome.FAILS_TO_RUN)


def _kinds(contents: Contents) -> list[Kind]:
    return sorted({(item.dtype, bool(item.packed_into)) for item in contents.items if item.portable})


def _in_fp8_layout(contents: Contents) -> bool:
    return any(item.portable and layout(item.dtype) == "fp8" for item in contents.items)


def _quantised_before(contents: Contents) -> str | None:
    """Return a few words on how another program has quantized the source's weights, or None if they are not quantized."""
    plain = {entry.name: entry for item in contents.items if not item.has_scales for entry in item.entries}
    parts = quantized_parts(plain, contents.config)
    return next(iter(parts.values())).removeprefix("part of a weight that is ") if parts else None


def _lines_on_others(contents: Contents) -> list[str]:
    """Return lines on how other programs load the export."""
    if has_undeclared_codes(contents):
        return [
            "Plain `from_pretrained` of transformers would take the codes of its weights for values, because `config.json` does "
            f"not say that they are quantized. {_RAISES} `load_pretrained` above decodes them to {export_dtype(contents)}."
        ]
    if contents.file_layout is None:
        return _from_pretrained_lines(contents)
    more = f" {_RAISES}" if why_not_transformers(contents.items) else ""
    return [_of_gptq_layout(contents.items, contents.file_layout) + more]


def _from_pretrained_lines(contents: Contents) -> list[str]:
    if not any(item.has_scales for item in contents.items) and (how := _quantised_before(contents)):
        return [
            f"Its weights are {escaped(how)} already, as they were in the source. `from_pretrained` of transformers loads them",
            f"with the package for that, if it is installed. `load_pretrained` above decodes them to {export_dtype(contents)}.",
        ]
    if contents.config is None:
        return ["There is no `config.json`, so `from_pretrained` of transformers can't load it."]
    if own := own_layout(contents.items):
        are = (
            f"{code_span(own[0].name)} is"
            if len(own) == 1
            else f"{len(own)} weights, first {code_span(own[0].name)}, are"
        )
        return [
            f"Plain `from_pretrained` of transformers can't load it: {are} stored with scales under a name that ends in "
            f"`_quantized`, a layout that only dtype-engine reads. transformers would make such weights at random. {_RAISES}",
        ]
    config_dtype = export_dtype(contents)
    computed = {item.dtype for item in contents.items if item.dtype in dtypes.COMPUTE_DTYPES}
    lines = []
    if _in_fp8_layout(contents):
        lines.append(
            "Plain `from_pretrained` of transformers reads it where the accelerate package is installed: on a CPU as values in "
            f"{config_dtype}, on a GPU with fp8 as it is stored."
        )
    elif (problem := misread(contents.items)) is not None:
        lines.append(
            f"Plain `from_pretrained` of transformers 5 does not read it: {problem}. {_RAISES} The experts are in the layout "
            "that vLLM reads: each has its own tensors under its name in the checkpoint, and `config.json` says which format they "
            "are in."
        )
    elif any(item.portable for item in contents.items):
        lines += _scaled_weights(contents)
        if experts(contents.items):
            lines.append(
                "transformers packs the experts of a layer into one weight and does not quantize their activations."
            )
        if any(item.quantised_inputs for item in contents.items):
            lines.append(
                "Activations are quantized as its `config.json` says: by runtimes that serve it, and by `from_pretrained` without "
                "`dequantize=True`. Here that is `--quantize-activations weights`, which `recipe.yaml` says as well."
            )
    if computed - {config_dtype}:
        lines.append(
            "Plain `from_pretrained` of transformers 5 silently brings a checkpoint of several dtypes into one: "
            f"{config_dtype}, the dtype named in `config.json`, which holds every stored value exactly. The values are the same, "
            f"but the memory is that of {config_dtype}, and the model no longer computes in the dtypes of the table."
        )
    if contents.cache_scheme is not None:
        lines.append(
            "`config.json` gives the KV caches a format, and the file holds their scales. Inference runtimes round keys and values "
            "so, and so does `from_pretrained` if compressed-tensors finds the caches of the installed transformers. If not, it "
            "reports the scales as unexpected, and caches are not rounded."
        )
    if not lines:
        but = ", but for what follows" if contents.otherwise else ""
        lines.append(f"Plain `from_pretrained` of transformers gives the same: all weights are in {config_dtype}{but}.")
    lines += [f"{escaped(sentence[:1].upper() + sentence[1:])}." for sentence in contents.otherwise]
    return "\n\n".join(lines).split("\n")


def _scaled_weights(contents: Contents) -> list[str]:
    wide = export_dtype(contents)
    table = [
        "| weights | `from_pretrained(folder)` | with `quantization_config=CompressedTensorsConfig(dequantize=True)` |",
        "|---|---|---|",
    ]
    for (dtype, expert), given in outcomes(_kinds(contents), wide).items():
        plain, dequantized = (outcome.format(wide=wide) for outcome in given)
        table.append(f"| {'experts' if expert else 'linear layers'} in {dtype} | {plain} | {dequantized} |")
    return [
        "Plain `from_pretrained` of transformers 5 needs the compressed-tensors package to load it. Compared with the values that "
        "`load_pretrained` gives for the weights with scales, it gives",
        "\n".join(table),
    ]
