"""The options that `dtype-engine` and `dtype-tui` share, and the command class that turns them into one `RunRequest`."""

from __future__ import annotations

import faulthandler
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from dtype_engine.cli.request import RunRequest
from dtype_engine.cli.streams import answers_alone
from dtype_engine.core.errors import UserError
from dtype_engine.core.foreign_code import foreign_code
from dtype_engine.core.input_limits import KINDS
from dtype_engine.core.options import FLOAT32, STORED, ClassesDim
from dtype_engine.recipe.serving_memory import DEFAULT_CONTEXT, MOST_TOKENS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_FILE = click.Path(path_type=Path)

json_option = click.option("--json", "as_object", is_flag=True, help="Print one JSON object.")
force_option = click.option("--force", is_flag=True, help="Replace an existing output file.")


def _paths(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Tell the shell to complete the argument MODEL as a file path. begun: the part of the path that is already typed."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(begun, type="file")]


class _ClassesDim(click.ParamType["ClassesDim"]):
    """A click parameter type for the dimension of the output that counts classes or tokens: a number such as `1` or `-1`, `auto`
    (by the class of the model), or `none` (the output is no distribution).
    """

    name = "dimension"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ClassesDim:
        if isinstance(value, int) or value in ("auto", "none"):
            return cast("ClassesDim", value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r}: give a dimension such as 1 or -1, none or auto", param, ctx)


class _InputLimit(click.ParamType[tuple[str, int]]):
    """A click parameter type for a limit such as `pixels=200000000`: the name of a field of InputLimits, and its value."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        kind, _, number = str(value).partition("=")
        if kind not in KINDS or not re.fullmatch("[0-9]{1,15}", number):
            self.fail(f"{value!r}: give KIND=NUMBER, where KIND is {', '.join(KINDS[:-1])} or {KINDS[-1]}", param, ctx)
        return kind.replace("-", "_"), int(number)


class _MaxMemory(click.ParamType[dict[str, int]]):
    """A click parameter type for the memory of devices, such as `cpu=40GiB`."""

    name = "memory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        from dtype_engine.search.constraints import parse_bytes

        if isinstance(value, dict):
            return value
        try:
            pairs = (part.partition("=") for part in str(value).split(","))
            limits = {device.strip(): parse_bytes(size.replace("%", "?"), 0) for device, _, size in pairs}
        except UserError:
            limits = {"": 0}
        if "" in limits:
            self.fail(f"{value!r}: give DEVICE=SIZE, such as cpu=40GiB", param, ctx)
        return limits


_MODEL = click.Argument(["model"], required=False, shell_complete=_paths)
_RULES = (
    click.Option(
        ["--cast", "casts"],
        multiple=True,
        metavar="PATTERN=DTYPE",
        help="Cast the tensors that PATTERN matches. The last rule that matches a tensor decides its dtype.",
    ),
    click.Option(
        ["--recipe", "recipe_file"], type=_FILE, help="A recipe file. The rules of --cast follow the file's rules."
    ),
    click.Option(
        ["--preset"], metavar="NAME", help="Put this preset's rules before all others. `recipe presets` lists presets."
    ),
)
_OPENING = (
    click.Option(
        ["--revision"], metavar="NAME", help="For MODEL hf://org/name: the branch, tag or commit.  [default: main]"
    ),
    click.Option(
        ["--trust-pickle"],
        is_flag=True,
        help="Load pickles that hold more than tensors. Such pickles can run any code.",
    ),
    click.Option(
        ["--download"], is_flag=True, help="Download MODEL from the Hugging Face hub if it is not in the local cache."
    ),
    click.Option(
        ["--weights"],
        type=_FILE,
        metavar="FILE",
        help="The checkpoint (.pth, .safetensors, ...) to load into a model built in Python.",
    ),
    click.Option(["--trust-remote-code"], is_flag=True, help="Run the Python code that comes with the checkpoint."),
    click.Option(
        ["--component"],
        metavar="NAME",
        help="Open this component of a diffusers pipeline by itself, such as unet or vae.",
    ),
    click.Option(["--architecture"], metavar="NAME", help="The checkpoint's model class, if no config.json names it."),
)
_OF_CONFIGURATION = click.core.ParameterSource.DEFAULT_MAP
_REFERENCE = (
    click.Option(
        ["--against"],
        metavar="OTHER",
        help="Compare OTHER, a checkpoint of the same architecture, with MODEL: OTHER is cast and run, and the reference has the "
        "weights of MODEL in float32.",
    ),
    click.Option(
        ["--reference"],
        type=click.Choice([FLOAT32, STORED]),
        default=FLOAT32,
        show_default=True,
        help="What drift is measured from. float32: MODEL's weights in float32 arithmetic. stored: MODEL in its stored dtypes, as "
        "plain torch runs it.",
    ),
)
_RUNNING = (
    click.Option(
        ["--device"],
        default="auto",
        show_default=True,
        help="Where to run the model: cpu, cuda, another accelerator such as mps, or auto (an accelerator if it computes in "
        "float64, else cpu).",
    ),
    click.Option(
        ["--over-memory"],
        is_flag=True,
        help="Run a model that is larger than the memory. Its weights are read from the disk whenever it runs.",
    ),
    click.Option(
        ["--max-memory"],
        type=_MaxMemory(),
        default={},
        metavar="DEVICE=SIZE",
        help="The most memory to use for weights, such as cpu=40GiB. By default, all memory of the machine.",
    ),
    click.Option(
        ["--random-weights"], is_flag=True, help="Run a model even if its files lack weights, which are then random."
    ),
    click.Option(["--prompt", "prompts"], multiple=True, help="A calibration text; may be repeated."),
    click.Option(
        ["--text", "texts"],
        multiple=True,
        type=_FILE,
        metavar="FILE",
        help="A calibration text file, or a .jsonl file in which each line is an object with a 'text', 'prompt' or 'messages' key. "
        "The text is cut into sequences.",
    ),
    click.Option(["--chat"], is_flag=True, help="Apply the model's chat template to every prompt."),
    click.Option(["--sequence-length"], type=click.IntRange(min=2), metavar="N", help="Maximum tokens per sequence."),
    click.Option(["--sequences"], type=click.IntRange(min=1), metavar="N", help="Maximum number of sequences to run."),
    click.Option(
        ["--image", "images"], multiple=True, type=_FILE, metavar="FILE", help="A calibration image; may be repeated."
    ),
    click.Option(
        ["--audio"], multiple=True, type=_FILE, metavar="FILE", help="A calibration audio file; may be repeated."
    ),
    click.Option(
        ["--inputs", "tensors"],
        type=_FILE,
        metavar="FILE",
        help="A .safetensors, .npz or .pt file whose tensors have the names of the forward pass's arguments.",
    ),
    click.Option(
        ["--input-limit", "limits"],
        type=_InputLimit(),
        multiple=True,
        metavar="KIND=NUMBER",
        help="Change a limit that protects against huge inputs, such as tokens=2000000; may be repeated. KIND is pixels (in an "
        "image), seconds (of audio), values (in the tensor made from an image or audio), tokens (in all texts together), "
        "template-seconds (that the chat template may run for a conversation) or template-bytes (in the text that it makes).",
    ),
    click.Option(
        ["--compute"],
        default="float32",
        show_default=True,
        help="The dtype to which weights in fp8, int8 and block formats are dequantized for operations without an activation, "
        "such as an embedding lookup. Other operations, such as matrix products, use the activation's dtype.",
    ),
    click.Option(["--autocast"], metavar="DTYPE", help="Run the candidate under torch.autocast in bf16 or fp16."),
    click.Option(
        ["--float-inputs"],
        type=click.Choice(["given", "model"]),
        default="given",
        show_default=True,
        help="given: floating-point inputs keep their dtype. model: they are cast to the dtype of the model's first weight.",
    ),
    click.Option(
        ["--quantize-activations"],
        type=click.Choice(["none", "weights"]),
        default="none",
        show_default=True,
        help="With `weights`, also round the input of each matrix product to its weight's format, as W8A8 and W4A4 runtimes do.",
    ),
    click.Option(
        ["--classes-dim"],
        type=_ClassesDim(),
        default="auto",
        show_default=True,
        metavar="N|none|auto",
        help="The output dimension over which class probabilities are taken; none: the output is no distribution; auto: infer it "
        "from the model's Python class and config.",
    ),
)


_METRICS = (
    click.Option(
        ["--metric", "metrics"],
        multiple=True,
        metavar="FILE.py:NAME",
        help="Also measure your own metric, such as an accuracy: a function NAME(output, inputs) that returns a number for each "
        "example, NAME(model), or a torchmetrics object. Runs FILE.py. May be repeated.",
    ),
    click.Option(
        ["--eval", "evals"],
        multiple=True,
        metavar="lm-eval:TASK",
        help="Also evaluate the reference and the candidate on TASK of lm-eval, or on the task in a YAML file; may be repeated.",
    ),
    click.Option(
        ["--data"],
        multiple=True,
        type=_FILE,
        metavar="FILE",
        help="The examples for --metric: a file of texts, an image, audio or tensors, which may have labels beside the arguments "
        "of the forward pass; may be repeated. By default, the metric is measured on the inputs.",
    ),
)


context_option = click.option(
    "--context",
    type=click.IntRange(1, MOST_TOKENS),
    metavar="N",
    help=f"Tokens of each sequence in the KV cache. By default {DEFAULT_CONTEXT:,}, or as many as the model was made for if they "
    "are fewer.",
)
batch_option = click.option(
    "--batch",
    type=click.IntRange(1, 1 << 20),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of sequences in the KV cache.",
)


class Bytes(click.ParamType[int]):
    """A click parameter type for a size such as `2GiB`."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from dtype_engine.search.constraints import parse_bytes

        try:
            return value if isinstance(value, int) else parse_bytes(value.replace("%", "?"), 0)
        except UserError:
            self.fail(f"{value!r}: give a size, such as 2GiB", param, ctx)


class _Precision(click.ParamType[float]):
    """A click parameter type for a fraction, written as `5%` or `0.05`."""

    name = "precision"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share < 1:
            self.fail(f"{value!r}: give a share of the drift, such as 5%", param, ctx)
        return share


_MEASURING = (
    click.Option(
        ["--precision"],
        type=_Precision(),
        metavar="SHARE",
        help="Stop once the relative standard error of the drift is at most SHARE, such as 5%. By default, all inputs are run.",
    ),
    click.Option(
        ["--floor"],
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="When to measure the noise floor: how much the reference differs from itself if its float32 sums are computed in "
        "another order. auto: if the drift is so small that it may be mere noise (in dtype-tui, also whenever the engine is idle).",
    ),
    click.Option(
        ["--modules"],
        type=click.Choice(["some", "exact"]),
        default="some",
        show_default=True,
        help="Compare modules' outputs over about a sixth of the inputs (some) or over all inputs (exact). The main output is "
        "always compared over all inputs that are run.",
    ),
    click.Option(
        ["--keep", "reference_bytes"],
        type=Bytes(),
        metavar="BYTES",
        help="Maximum size of the reference outputs to keep for later measurements, such as 2GiB. By default, a quarter of the "
        "free memory, at most 2 GiB.",
    ),
)


class ModelCommand(click.Command):
    """A command about one model. Its function receives a `RunRequest` as `request`, and the command's other parameters.

    rules: whether the command has --cast, --recipe and --preset. runs: whether it has the options of a forward pass (device, inputs
    and settings). compares: whether it has the options that choose the reference, --against and --reference. has_metrics: whether
    it has the options that name the user's own metrics. measures: whether it has the options of a drift measurement; it then also
    has those that choose the reference and metrics. checks_inputs: whether the input files are on this machine, so that they can be
    checked first. The argument MODEL is added unless the command has a parameter named `model`.
    """

    def __init__(
        self,
        name: str | None,
        params: Sequence[click.Parameter] = (),
        rules: bool = True,
        runs: bool = True,
        compares: bool = False,
        has_metrics: bool = False,
        measures: bool = False,
        checks_inputs: bool = True,
        **named: Any,
    ) -> None:
        argument = () if any(parameter.name == "model" for parameter in params) else (_MODEL,)
        rule_options, model_options = _RULES if rules else (), (*_OPENING, *(_RUNNING if runs else ()))
        model_options += (*(_REFERENCE if compares or measures else ()), *(_MEASURING if measures else ()))
        model_options += _METRICS if has_metrics or measures else ()
        super().__init__(name, params=[*argument, *rule_options, *params, *model_options], **named)
        self._runs = runs
        self._checks_inputs = checks_inputs
        self._shared = {"model", *(parameter.name for parameter in (*rule_options, *model_options))}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments as click does, and return those left over. If a rule was typed without --cast, the error says so."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "casts" in self._shared and "extra argument" in error.message and "=" in error.message:
                raise click.UsageError(f"{error.message}; rules are given as --cast PATTERN=DTYPE", ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Build the `RunRequest`, call the command's function with it, and return the function's result. Raises UserError for
        invalid options.
        """
        if ctx.parent is None:  # this is the app's command, which prints nothing and draws on the terminal
            return self._invoke(ctx)
        # After a crash, such as by a mapped file that was cut short, standard error shows where it happened.
        if not faulthandler.is_enabled():
            faulthandler.enable(2)
        with answers_alone(), foreign_code():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        default = click.core.ParameterSource.DEFAULT
        explicit = frozenset(name for name in ctx.params if ctx.get_parameter_source(name) is not default)
        values = {name: ctx.params.pop(name) for name in tuple(ctx.params) if name in self._shared}
        if values.get("against") is not None and ctx.get_parameter_source("reference") is _OF_CONFIGURATION:
            values["reference"] = FLOAT32  # only a default from the user's configuration, which --against overrides
        ctx.params["request"] = RunRequest.of(values, explicit, self._runs, self._checks_inputs)
        return super().invoke(ctx)
