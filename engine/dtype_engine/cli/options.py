"""The options of both programs, and the command class that turns them into one `RunRequest`."""

from __future__ import annotations

import faulthandler
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from dtype_engine.cli.request import RunRequest
from dtype_engine.cli.streams import answers_alone
from dtype_engine.core.errors import UserError
from dtype_engine.core.exits import exits_as_errors
from dtype_engine.core.options import ClassesDim

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_FILE = click.Path(path_type=Path)

json_option = click.option("--json", "as_object", is_flag=True, help="Print one JSON object.")
force_option = click.option("--force", is_flag=True, help="Replace a file that is there.")


def _paths(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """What a shell offers for MODEL: its own completion of paths."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(begun, type="file")]


class _ClassesDim(click.ParamType["ClassesDim"]):
    """A dimension such as `1` or `-1`, or a word."""

    name = "dimension"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ClassesDim:
        if isinstance(value, int) or value in ("auto", "none"):
            return cast("ClassesDim", value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r}: give a dimension such as 1 or -1, none or auto", param, ctx)


_MODEL = click.Argument(["model"], required=False, shell_complete=_paths)
_RULES = (
    click.Option(
        ["--cast", "casts"], multiple=True, metavar="PATTERN=DTYPE", help="A rule; the last that matches wins."
    ),
    click.Option(["--recipe", "recipe_file"], type=_FILE, help="A recipe file; --cast rules come after its own."),
    click.Option(["--preset"], metavar="NAME", help="Start from a preset; see `recipe presets`."),
)
_OPENING = (
    click.Option(
        ["--trust-pickle"], is_flag=True, help="Load pickles that hold more than tensors; they can run any code."
    ),
    click.Option(
        ["--download"], is_flag=True, help="Fetch MODEL from the Hugging Face hub when it is not in the cache."
    ),
    click.Option(
        ["--weights"],
        type=_FILE,
        metavar="FILE",
        help="A checkpoint (.pth, .safetensors, ...) for the model of a Python file.",
    ),
    click.Option(["--trust-remote-code"], is_flag=True, help="Run Python code that comes with the checkpoint."),
    click.Option(
        ["--architecture"],
        metavar="NAME",
        help="The class that the checkpoint's tensors belong to, where no config.json names it.",
    ),
)
_RUNNING = (
    click.Option(["--device"], default="auto", show_default=True, help="cpu, cuda or auto."),
    click.Option(["--prompt", "prompts"], multiple=True, help="Calibration text; may be repeated."),
    click.Option(
        ["--text", "texts"],
        multiple=True,
        type=_FILE,
        metavar="FILE",
        help="A text file, or a .jsonl file with text, prompt or messages on every line, cut into sequences.",
    ),
    click.Option(["--chat"], is_flag=True, help="Put every prompt through the tokenizer's chat template."),
    click.Option(["--sequence-length"], type=click.IntRange(min=2), metavar="N", help="Tokens a sequence, at most."),
    click.Option(["--sequences"], type=click.IntRange(min=1), metavar="N", help="How many sequences, at most."),
    click.Option(["--image", "images"], multiple=True, type=_FILE, metavar="FILE", help="A picture; may be repeated."),
    click.Option(["--audio"], multiple=True, type=_FILE, metavar="FILE", help="A sound; may be repeated."),
    click.Option(
        ["--inputs", "tensors"],
        type=_FILE,
        metavar="FILE",
        help="The forward pass's own arguments by name: .safetensors, .npz or .pt.",
    ),
    click.Option(
        ["--compute"],
        default="float32",
        show_default=True,
        help="What storage-only weights compute in without an activation.",
    ),
    click.Option(["--autocast"], metavar="DTYPE", help="Run the candidate under torch.autocast in bf16 or fp16."),
    click.Option(
        ["--float-inputs"],
        type=click.Choice(["given", "model"]),
        default="given",
        show_default=True,
        help="Floating inputs as they are, or cast to the dtype of the model's first weight.",
    ),
    click.Option(
        ["--quantize-activations"],
        type=click.Choice(["none", "weights"]),
        default="none",
        show_default=True,
        help="weights: round the input of a matrix product in the format of its weight, as runtimes do in W8A8 and W4A4.",
    ),
    click.Option(
        ["--classes-dim"],
        type=_ClassesDim(),
        default="auto",
        show_default=True,
        metavar="N|none|auto",
        help="The dimension of the output that holds the classes of a distribution, or none; auto: as the model's class says.",
    ),
)


class _Bytes(click.ParamType[int]):
    """A size such as `2GiB`."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from dtype_engine.search.constraints import parse_bytes

        try:
            return value if isinstance(value, int) else parse_bytes(value.replace("%", "?"), 0)
        except UserError:
            self.fail(f"{value!r}: give a size, such as 2GiB", param, ctx)


class _Precision(click.ParamType[float]):
    """A share such as `5%` or `0.05`."""

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
        help="End when the drift is known to this relative standard error, such as 5%; by default when all inputs were run.",
    ),
    click.Option(
        ["--floor"],
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="The drift of the reference against itself. auto: where a reading is near it; in the app, while nothing else runs.",
    ),
    click.Option(
        ["--modules"],
        type=click.Choice(["some", "exact"]),
        default="some",
        show_default=True,
        help="Compare modules' outputs in about a quarter of the inputs, or in all of them. The main output is always compared in "
        "all that are run.",
    ),
    click.Option(
        ["--keep", "reference_bytes"],
        type=_Bytes(),
        metavar="BYTES",
        help="Outputs to keep for the next measurement, such as 2GiB; by default a quarter of what is free, up to 2 GiB.",
    ),
)


class ModelCommand(click.Command):
    """A command about one model. Its function gets a `RunRequest` as `request`, beside the parameters of its own.

    rules: it takes --cast, --recipe and --preset. runs: it takes the options of a forward pass: device, inputs and settings.
    measures: it takes those of measuring drift.
    checks_inputs: files of inputs are on this machine, and are looked at before anything else is. MODEL is an argument, unless a
    parameter of its own is named `model`.
    """

    def __init__(
        self,
        name: str | None,
        params: Sequence[click.Parameter] = (),
        rules: bool = True,
        runs: bool = True,
        measures: bool = False,
        checks_inputs: bool = True,
        **named: Any,
    ) -> None:
        argument = () if any(parameter.name == "model" for parameter in params) else (_MODEL,)
        rule_options, model_options = _RULES if rules else (), (*_OPENING, *(_RUNNING if runs else ()))
        model_options += _MEASURING if measures else ()
        super().__init__(name, params=[*argument, *rule_options, *params, *model_options], **named)
        self._runs = runs
        self._checks_inputs = checks_inputs
        self._shared = {"model", *(parameter.name for parameter in (*rule_options, *model_options))}

    def invoke(self, ctx: click.Context) -> Any:
        """Call the function. Raises UserError for options that make no request."""
        if ctx.parent is None:  # the app's own command: it prints nothing, and draws on the terminal
            return self._invoke(ctx)
        # A crash, such as of a mapped file that is cut short, says on standard error where it was.
        if not faulthandler.is_enabled():
            faulthandler.enable(2)
        with answers_alone(), exits_as_errors():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        default = click.core.ParameterSource.DEFAULT
        explicit = frozenset(name for name in ctx.params if ctx.get_parameter_source(name) is not default)
        values = {name: ctx.params.pop(name) for name in tuple(ctx.params) if name in self._shared}
        ctx.params["request"] = RunRequest.of(values, explicit, self._runs, self._checks_inputs)
        return super().invoke(ctx)
