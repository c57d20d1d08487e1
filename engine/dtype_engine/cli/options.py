"""The options that `dtype-engine` and `dtype-tui` share, and the command class that turns them into one `RunRequest`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import click

from dtype_engine.checkpoint import crash_watch
from dtype_engine.cli.request import RunRequest
from dtype_engine.cli.streams import answers_alone
from dtype_engine.core.errors import UserError
from dtype_engine.core.foreign_code import foreign_code
from dtype_engine.core.input_limits import KINDS
from dtype_engine.core.number_ranges import MOST_TOKENS, Scale, Seed, SequenceLength, Sequences, Steps, Strength
from dtype_engine.core.options import FLOAT32, STORED, ClassesDim
from dtype_engine.core.pipeline_settings import SETTINGS, parse_size
from dtype_engine.recipe.serving_memory import DEFAULT_CONTEXT
from dtype_engine.results.thresholds import settings_of_limits

_FILE = click.Path(path_type=Path)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def with_options(*options: Decorator) -> Decorator:
    """Return a decorator that adds these options, in this order, to a command's function."""

    def add_all(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return add_all


json_option = click.option("--json", "as_object", is_flag=True, help="Print the answer as one JSON object.")
sarif_option = click.option(
    "--sarif",
    "as_sarif",
    is_flag=True,
    help="Print the findings as a JSON object in SARIF 2.1.0, a format for the results of static analysis.",
)
force_option = click.option(
    "--force", is_flag=True, help="Replace the output file if it exists. Without --force, an existing file is an error."
)


# What follows converts the texts of options. click makes one line of a ValueError.


def _classes_dim(text: str) -> ClassesDim:
    if text in ("auto", "none"):
        return cast("ClassesDim", text)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r}: give a dimension such as 1 or -1, none or auto") from None


def _input_limit(text: str) -> tuple[str, int]:
    kind, _, number = text.partition("=")
    if kind not in KINDS or not re.fullmatch("[0-9]{1,15}", number):
        raise ValueError(f"{text!r}: give KIND=NUMBER, where KIND is {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    return kind.replace("-", "_"), int(number)


def _max_memory(text: str | dict[str, int]) -> dict[str, int]:
    if isinstance(text, dict):  # the default
        return text
    pairs = (part.partition("=") for part in text.split(","))
    try:
        limits = {device.strip(): byte_count(size) for device, _, size in pairs}
    except ValueError:
        limits = {"": 0}
    if "" in limits:
        raise ValueError(f"{text!r}: give DEVICE=SIZE, such as cpu=40GiB")
    return limits


def byte_count(text: str) -> int:
    """Return the number of bytes of a size such as `2GiB`. Raises ValueError."""
    from dtype_engine.search.constraints import parse_bytes  # imported late, for a faster first paint of the app

    try:
        return parse_bytes(text.replace("%", "?"), 0)
    except UserError:
        raise ValueError(f"{text!r}: give a size, such as 2GiB") from None


def bytes_per_second(text: str) -> float:
    """Return a bandwidth such as `3.35TB/s`, or that of a device such as `h100-sxm`. Raises ValueError."""
    from dtype_engine.search.constraints import parse_bandwidth  # imported late, for a faster first paint of the app

    try:
        return parse_bandwidth(text)
    except UserError as error:
        raise ValueError(str(error)) from None


def _precision(text: str) -> float:
    share = text.strip()
    try:
        precision = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        precision = 0.0
    if not 0 < precision < 1:
        raise ValueError(f"{text!r}: give a share of the drift, such as 5%")
    return precision


def _range_of(kind: Any) -> click.IntRange | click.FloatRange:
    """Return the range of a type of `number_ranges`."""
    number, limits = get_args(kind)[:2]
    if number is int:
        return click.IntRange(limits.ge, limits.le)
    return click.FloatRange(limits.ge if limits.gt is None else limits.gt, limits.le, min_open=limits.gt is not None)


def _files(names: list[str], words: str) -> click.Option:
    return click.Option(names, multiple=True, type=_FILE, metavar="FILE", help=words)


_MODEL = click.Argument(["model"], required=False, type=click.Path(readable=False))
_RULES = (
    click.Option(
        ["--cast", "casts"],
        multiple=True,
        metavar="PATTERN=DTYPE",
        help="A rule: '*.mlp=bf16' casts all tensors in modules named mlp to bfloat16. May be repeated; the last rule that "
        "matches a tensor decides its dtype.",
    ),
    click.Option(
        ["--recipe", "recipe_file"],
        type=_FILE,
        help="A recipe file: YAML with rules and settings for runs. The rules of --cast are applied after the file's rules.",
    ),
    click.Option(
        ["--preset"],
        metavar="NAME",
        help="The name of a preset, a ready-made set of rules that is fitted to the model. Its rules come before those of "
        "--recipe and --cast. `dtype-engine recipe presets` lists the names.",
    ),
)
_OPENING = (
    click.Option(
        ["--revision"],
        metavar="NAME",
        help="If MODEL is on a hub (hf://org/name): the branch, tag or commit to read.  [default: main]",
    ),
    click.Option(
        ["--base"],
        metavar="MODEL",
        help="If MODEL is a PEFT adapter: the base model to merge it into, or none to open the adapter alone. By default, the "
        "adapter's configuration names the base.",
    ),
    click.Option(
        ["--trust-pickle"],
        is_flag=True,
        help="Allow loading pickle files (.pt, .pth, .bin) that contain more than tensors. Loading such a file can run any code "
        "that is in it.",
    ),
    click.Option(
        ["--download"],
        is_flag=True,
        help="Download MODEL from the Hugging Face hub if it is not in the local cache. Without --download, nothing is "
        "downloaded.",
    ),
    click.Option(
        ["--weights"],
        type=_FILE,
        metavar="FILE",
        help="If MODEL is Python code (file.py:Name): the checkpoint file whose weights are loaded into it, such as net.pth or "
        "net.safetensors.",
    ),
    click.Option(
        ["--trust-remote-code"],
        is_flag=True,
        help="Allow running the Python code that comes with the checkpoint. Models that transformers does not know need this.",
    ),
    click.Option(
        ["--component"],
        metavar="NAME",
        help="If MODEL is a diffusers pipeline: open only this component of it, such as unet or vae.",
    ),
    click.Option(
        ["--config"],
        type=_FILE,
        metavar="FOLDER",
        help="If MODEL is a single file of a diffusion model, such as sd15.safetensors: a folder in the layout of diffusers with "
        "its configuration, that of a pipeline or of one model. Weights of a pipeline that the file lacks are read from there.",
    ),
    click.Option(
        ["--architecture"],
        metavar="NAME",
        help="The model class of transformers to load the checkpoint into, such as LlamaForCausalLM. By default, config.json "
        "names it.",
    ),
)
_OF_CONFIGURATION = click.core.ParameterSource.DEFAULT_MAP
REFERENCE = (
    click.Option(
        ["--against"],
        metavar="OTHER",
        help="Compare OTHER, another checkpoint of the same architecture, with MODEL. The reference has MODEL's weights in "
        "float32. The candidate has OTHER's weights, to which the casts apply.",
    ),
    click.Option(
        ["--reference"],
        type=click.Choice([FLOAT32, STORED]),
        default=FLOAT32,
        show_default=True,
        help="The model from which the drift is measured. float32: MODEL with all weights and arithmetic in float32. stored: "
        "MODEL in its stored dtypes, as plain torch runs it.",
    ),
)
_PIPELINE = (
    click.Option(
        ["--steps"],
        type=_range_of(Steps),
        metavar="N",
        help="If MODEL is a diffusers pipeline: the number of denoising steps of each picture.  [default: 4]",
    ),
    click.Option(
        ["--size"],
        type=parse_size,
        metavar="WIDTHxHEIGHT",
        help="The size of each picture of a pipeline, in pixels. By default at most 256x256, or 64x64 for a video.",
    ),
    click.Option(
        ["--guidance"],
        type=_range_of(Scale),
        metavar="SCALE",
        help="The pipeline's guidance_scale, by which the prompt guides it. By default, the pipeline's own.",
    ),
    click.Option(
        ["--true-cfg"],
        type=_range_of(Scale),
        metavar="SCALE",
        help="The pipeline's true_cfg_scale: the guidance by which pipelines such as Flux use a negative prompt.",
    ),
    click.Option(["--negative-prompt"], metavar="TEXT", help="What the pictures of a pipeline should not show."),
    click.Option(
        ["--strength"],
        type=_range_of(Strength),
        metavar="SHARE",
        help="How much of the picture of --image the pipeline replaces by noise first. By default, the pipeline's own.",
    ),
    click.Option(
        ["--seed"],
        type=_range_of(Seed),
        default=0,
        show_default=True,
        metavar="N",
        help="The seed of a pipeline's first picture. Each further one has the next number.",
    ),
)
"""The fields of `PipelineSettings`."""
_RUNNING = (
    click.Option(
        ["--device"],
        default="auto",
        show_default=True,
        help="The device that runs the model: cpu, cuda, or another accelerator that torch supports, such as cuda:1 or mps. "
        "auto: the accelerator if it can compute in float64, otherwise the CPU.",
    ),
    click.Option(
        ["--over-memory"],
        is_flag=True,
        help="Run a model whose weights do not fit in memory, by reading them from the disk in every pass. Without this option, "
        "such a model can be inspected and exported, but not run.",
    ),
    click.Option(
        ["--max-memory"],
        type=_max_memory,
        default={},
        metavar="DEVICE=SIZE",
        help="Maximum memory that weights may take on a device, such as cpu=40GiB or cuda:0=8GiB. By default, all memory of the "
        "machine.",
    ),
    click.Option(
        ["--device-map"],
        default="",
        metavar="auto|FILE",
        help="Distribute the model over several devices. auto: fill one accelerator after the other, each up to --max-memory, then "
        'the CPU. FILE: a JSON file that maps modules to devices, such as {"model.layers.0": "cuda:1"}.',
    ),
    click.Option(
        ["--random-weights"],
        is_flag=True,
        help="Run the model even if its files lack some weights, which then get random values. Without this option, such a model "
        "is not run.",
    ),
    click.Option(
        ["--prompt", "prompts"],
        multiple=True,
        help="A text to run the model on (a calibration text); may be repeated. If no inputs are given, the program makes "
        "suitable ones.",
    ),
    _files(
        ["--text", "texts"],
        "A file of texts to run the model on: a plain text, or a .jsonl file in which each line is an object with a 'text', "
        "'prompt' or 'messages' key. Long texts are split into sequences. May be repeated.",
    ),
    click.Option(
        ["--chat"],
        is_flag=True,
        help="Format each text of --prompt and --text as a user's message, by the model's chat template.",
    ),
    click.Option(
        ["--sequence-length"],
        type=_range_of(SequenceLength),
        metavar="N",
        help="Maximum number of tokens in a sequence; longer texts are split. By default 512, or as many as the model supports "
        "if they are fewer.",
    ),
    click.Option(
        ["--sequences"],
        type=_range_of(Sequences),
        metavar="N",
        help="Maximum number of sequences to run the model on. By default, all that the texts contain.",
    ),
    _files(
        ["--image", "images"],
        "An image file to run the model on (a calibration input), or from which a diffusers pipeline starts; may be repeated.",
    ),
    _files(["--audio"], "An audio file to run the model on (a calibration input); may be repeated."),
    click.Option(
        ["--inputs", "tensors"],
        type=_FILE,
        metavar="FILE",
        help="A .safetensors, .npz or .pt file with the arguments of the forward pass, each a tensor with the argument's name, "
        "such as input_ids. They replace all other inputs.",
    ),
    *_PIPELINE,
    _files(
        ["--calibration"],
        "A file of texts, an image, audio or tensors to which roundings such as GPTQ are fitted; may be repeated. Without it, they "
        "are fitted to the inputs on which drift is measured, which makes the drift look smaller than it is on other text.",
    ),
    click.Option(
        ["--input-limit", "limits"],
        type=_input_limit,
        multiple=True,
        metavar="KIND=NUMBER",
        help="Change a limit that protects against huge inputs, as in tokens=2000000; may be repeated. The limits are pixels (in "
        "one image), seconds (of one audio file), values (in the tensor made from one image or audio file), tokens (in all "
        "texts together), template-seconds (of running the chat template on one conversation) and template-bytes (in the text "
        "that it returns).",
    ),
    click.Option(
        ["--compute"],
        default="float32",
        show_default=True,
        help="The dtype to which quantized weights (fp8, int8 and block formats) are dequantized for an operation that has no "
        "activation, such as an embedding lookup. All other operations, such as matrix products, use the activation's dtype "
        "instead.",
    ),
    click.Option(
        ["--autocast"],
        metavar="DTYPE",
        help="Run the candidate (the cast model) under torch.autocast in this dtype, bf16 or fp16. By default, autocast is off.",
    ),
    click.Option(
        ["--float-inputs"],
        type=click.Choice(["given", "model"]),
        default="given",
        show_default=True,
        help="The dtype in which the candidate gets floating-point inputs, such as pixel values. given: unchanged. model: the "
        "dtype of the model's first weight.",
    ),
    click.Option(
        ["--quantize-activations"],
        type=click.Choice(["none", "weights"]),
        default="none",
        show_default=True,
        help="Whether the inputs of matrix products with quantized weights are quantized, too. none: they are not. weights: they "
        "are rounded to the weight's format, as runtimes do that serve W8A8 or W4A4 models, or to 8 bits for llama.cpp's "
        "types.",
    ),
    click.Option(
        ["--candidate", "execution"],
        multiple=True,
        metavar="KEY=VALUE",
        help="How the candidate is executed; may be repeated. attention=eager, sdpa, flex, math or flash (the last two: torch's "
        "kernels of sdpa). batch=N: N sequences at once, the shorter ones padded. padding=right or left. decode=yes: token by "
        "token, with a KV cache. threads=N. mkldnn=no. matmul=highest, high or medium: the precision of products of float32.",
    ),
    click.Option(
        ["--reference-run", "reference_execution"],
        multiple=True,
        metavar="KEY=VALUE",
        help="How the reference is executed, as --candidate says it of the candidate; may be repeated.",
    ),
    click.Option(
        ["--classes-dim"],
        type=_classes_dim,
        default="auto",
        show_default=True,
        metavar="N|none|auto",
        help="The dimension of the model's output along which the scores of the classes or tokens lie, such as -1; a softmax "
        "over it gives their probabilities. none: the output has no such scores. auto: the model's class and config decide.",
    ),
)

_INPUTS = (
    "device", "prompts", "texts", "chat", "sequence_length", "sequences", "images", "audio", "tensors", "calibration", *SETTINGS,
)  # fmt: skip
INPUTS = tuple(option for option in _RUNNING if option.name in _INPUTS)
"""The options for the inputs of a command that runs the model only if it is asked to."""
_OF_CARD = (*_INPUTS, "over_memory", "max_memory", "device_map", "limits")
_ON_CARD = ("chat", "sequence_length", "sequences")
OF_CARD = tuple(option for option in _RUNNING if option.name in _OF_CARD and option.name not in _ON_CARD)
"""The options with which a command repeats the measurement of a model card. The other ones are on the card."""
METRICS = (
    click.Option(
        ["--acceptance"],
        is_flag=True,
        help="Also measure the acceptance, the sum of min(p, q) over all tokens: how often speculative sampling from the reference "
        "keeps a token that the candidate drafts. Also measures that of the checkpoint's own draft head, where transformers runs "
        "it. --min acceptance=95% does so as well.",
    ),
    click.Option(
        ["--metric", "metrics"],
        multiple=True,
        metavar="FILE.py:NAME",
        help="Also measure your own metric, such as an accuracy, on the reference and the candidate: FILE.py:NAME. NAME is a "
        "function NAME(output, inputs) that returns a number for each example, a function NAME(model), or a torchmetrics "
        "object. This runs FILE.py. May be repeated.",
    ),
    click.Option(
        ["--eval", "evals"],
        multiple=True,
        metavar="lm-eval:TASK|queries:FILE.jsonl",
        help="Also evaluate the reference and the candidate on a task of lm-eval, the LM evaluation harness: lm-eval:arc_easy, "
        "or lm-eval:FILE.yaml for a task of your own; or on queries and their documents, which an embedding model or a reranker "
        "has to find: queries:FILE.jsonl. May be repeated.",
    ),
    _files(
        ["--data"],
        "A file of examples on which --metric is measured: texts, an image, audio or tensors; may be repeated. It may also "
        "contain labels, which are passed to the metric, not to the model. By default, the metric is measured on the inputs of "
        "the drift.",
    ),
)


bandwidth_option = click.option(
    "--bandwidth",
    type=bytes_per_second,
    metavar="BYTES/s",
    help="The bandwidth of the memory that holds the weights, such as 3.35TB/s, or a device such as h100-sxm. It gives the least "
    "time for a token.",
)
context_option = click.option(
    "--context",
    type=click.IntRange(1, MOST_TOKENS),
    metavar="N",
    help=f"Number of tokens of each sequence in the KV cache. By default {DEFAULT_CONTEXT:,}, or as many as the model was made for "
    "if they are fewer.",
)
batch_option = click.option(
    "--batch",
    type=click.IntRange(1, 1 << 20),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of sequences that are in the KV cache at the same time.",
)


FLOOR = click.Option(
    ["--floor"],
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="When to measure the noise floor, the drift that the reference shows from itself if its float32 sums are computed "
    "in another order: always, never, or auto. auto: only if the measured drift is small enough to be noise (in dtype-tui, "
    "also whenever the engine is idle, unless the model runs from the disk).",
)
_MEASURING = (
    click.Option(
        ["--precision"],
        type=_precision,
        metavar="SHARE",
        help="Stop measuring once the standard error of the drift is at most this fraction of the drift, such as 5%. By default, "
        "all inputs are run.",
    ),
    FLOOR,
    click.Option(
        ["--modules"],
        type=click.Choice(["some", "exact"]),
        default="some",
        show_default=True,
        help="On how many inputs the outputs of modules are compared. some: on about a sixth of them. exact: on all. The model's "
        "main output is always compared on all inputs that are run.",
    ),
    click.Option(
        ["--keep", "reference_bytes"],
        type=byte_count,
        metavar="BYTES",
        help="Maximum memory for the reference's outputs, such as 2GiB. They are kept so that later measurements in the same "
        "process are faster. By default, a quarter of the free memory, at most 2 GiB.",
    ),
)
MEASURING = (*REFERENCE, *_MEASURING, *METRICS)
"""The options of a command that measures drift."""
HELD_OUT = _files(
    ["--held-out"],
    "A file of other texts (or an image, audio, tensors), on which the drift is measured once more, with the roundings of the "
    "recipe, such as GPTQ, and without them; may be repeated. A rounding that was fitted to one kind of text may lose on another.",
)

LOGITS = (
    click.Option(
        ["--against-logits"],
        type=_FILE,
        metavar="FILE",
        help="Take the candidate's outputs from this file, which another runtime has written; MODEL runs as the reference, on the "
        "file's tokens. FILE is one of --save-logits, one of llama-perplexity --kl-divergence-base, or JSON Lines with the "
        "prompt_logprobs of vLLM, of which KL is a lower bound.",
    ),
    click.Option(
        ["--reference-logits"],
        type=_FILE,
        metavar="FILE",
        help="Take the reference's outputs from such a file; MODEL, cast by the rules, runs as the candidate.",
    ),
)


def _need_working_folder() -> None:
    """Raise UserError if the working folder was removed: Intel's MKL, which torch loads, then ends the process without a reason."""
    try:
        os.getcwd()
    except OSError:
        raise UserError(
            "the working folder has been removed: change to one that exists, and run the command again"
        ) from None


class ModelCommand(click.Command):
    """A command about one model. Its function receives a `RunRequest` as `request`, and the command's other parameters.

    rules: whether the command has --cast, --recipe and --preset. runs: whether it has the options of a forward pass (device, inputs
    and settings). also: further options of the request, such as `REFERENCE`. checks_inputs: whether the input files are on this
    machine, and are checked first. The argument MODEL is added unless there is a parameter named `model`.
    """

    def __init__(
        self,
        name: str | None,
        params: Sequence[click.Parameter] = (),
        rules: bool = True,
        runs: bool = True,
        also: Sequence[click.Option] = (),
        checks_inputs: bool = True,
        **named: Any,
    ) -> None:
        argument = () if any(parameter.name == "model" for parameter in params) else (_MODEL,)
        rule_options, model_options = _RULES if rules else (), (*_OPENING, *(_RUNNING if runs else ()), *also)
        super().__init__(name, params=[*argument, *rule_options, *params, *model_options], **named)
        self._runs = runs
        self._checks_inputs = checks_inputs
        self._shared = {"model", *(parameter.name for parameter in (*rule_options, *model_options))}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. If the user typed a rule without --cast, the error says that --cast is missing."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "casts" in self._shared and "extra argument" in error.message and "=" in error.message:
                raise click.UsageError(f"{error.message}; rules are given as --cast PATTERN=DTYPE", ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command's function with a `RunRequest`. Raises UserError for invalid options."""
        _need_working_folder()
        if ctx.parent is None:  # this is the app's command, which prints nothing and draws on the terminal
            return self._invoke(ctx)
        crash_watch.start()
        with answers_alone(), foreign_code():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        default = click.core.ParameterSource.DEFAULT
        explicit = frozenset(name for name in ctx.params if ctx.get_parameter_source(name) is not default)
        values = {name: ctx.params.pop(name) for name in tuple(ctx.params) if name in self._shared}
        wanted = settings_of_limits((*ctx.params.get("least", ()), *ctx.params.get("most", ())))
        values, explicit = values | dict.fromkeys(wanted, True), explicit | wanted
        if values.get("against") is not None and ctx.get_parameter_source("reference") is _OF_CONFIGURATION:
            values["reference"] = FLOAT32  # only a default from the user's configuration, which --against overrides
        ctx.params["request"] = RunRequest.of(values, explicit, self._runs, self._checks_inputs)
        return super().invoke(ctx)
