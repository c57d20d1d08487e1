"""The options for opening and running a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dtype_engine.core.dtypes import COMPUTE_DTYPES
from dtype_engine.core.execution import PLAIN, Execution
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.number_ranges import Count, Dimension, Processes, SequenceLength, Sequences, Share, Threads
from dtype_engine.core.pipeline_settings import PipelineSettings
from dtype_engine.core.typed_data import TypedFields

FLOAT32, STORED = "float32", "stored"
"""The values of `Options.reference` for the model itself, in float32 arithmetic or in its stored dtypes."""
NO_BASE = "none"
"""The value of `Options.base` with which an adapter is opened without its base."""
LM_EVAL, QUERIES = "lm-eval:", "queries:"
"""The prefixes of metrics in `Options.metrics` that are a task of lm-eval, or a file of queries and their documents."""


def evaluation(text: str) -> tuple[str, str] | None:
    """Return (its prefix, what it names) for an entry of `Options.metrics` that is an evaluation, or None if it is a function."""
    prefix = next((each for each in (LM_EVAL, QUERIES) if text.startswith(each)), "")
    named = text.removeprefix(prefix)
    # `queries:accuracy` is a function of the module `queries`.
    return (prefix, named) if prefix and not (prefix == QUERIES and named.isidentifier()) else None


ComputeDtype = Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(COMPUTE_DTYPES)})\Z")]
ClassesDim = Dimension | Literal["auto", "none"]
"""In which dimension of the main output the logits lie: an index, "auto" to determine it, or "none" for no distribution."""


@dataclass(frozen=True, slots=True, repr=False)
class RunSettings(TypedFields):
    """The settings with which the candidate, the cast model, is run. The reference ignores all but `reference_execution`.

    Example:
        >>> print(de.RunSettings(autocast="bfloat16"))
        autocast bfloat16
    """

    compute: ComputeDtype = "float32"
    """The dtype to which quantized weights, such as float8 or int8, are dequantized for an operation without an activation,
    such as an embedding lookup. Other operations use the activation's dtype.
    """
    autocast: Literal["bfloat16", "float16"] | None = None
    """The dtype of `torch.autocast` while the candidate runs; None to run without autocast."""
    float_inputs: Literal["given", "model"] = "given"
    """Whether floating inputs are cast to the dtype of the model's first weight ("model"), as `inputs.to(model.dtype)` does."""
    quantize_activations: Literal["none", "weights"] = "none"
    """Whether the input of each matrix product with a quantized weight is rounded to the weight's format ("weights"), as in
    runtimes that serve W8A8 and W4A4, and to 8 bits for a type of llama.cpp, as there. For a weight that another program
    quantized, the input is rounded as the checkpoint's configuration declares.
    """
    classes_dim: ClassesDim = "auto"
    """The dimension of the main output along which the logits over classes or tokens lie, from 0, or from the end if negative.
    "none": the output is no distribution. "auto": the model's class and its configuration decide.
    """
    execution: Execution = PLAIN
    """How the candidate is executed: its attention kernel, batch and so on."""
    reference_execution: Execution = PLAIN
    """How the reference is executed."""
    acceptance: bool = False
    """Whether to measure the acceptance, Σ min(p, q): how often speculative sampling from the reference keeps a token that the
    candidate drafts. Comparing two outputs over classes then takes about 15 % longer. If the checkpoint has a draft head, each
    model also runs once more with its head, for the acceptance of its own drafts.
    """

    def of_weights(self) -> RunSettings:
        """Return these settings without those that do not apply to single weights: autocast, `float_inputs`, executions and the
        acceptance.
        """
        return dataclasses.replace(
            self, autocast=None, float_inputs="given", execution=PLAIN, reference_execution=PLAIN, acceptance=False
        )

    def __str__(self) -> str:
        parts = [f"autocast {self.autocast}"] if self.autocast else []
        parts += ["floating inputs follow the model"] if self.float_inputs == "model" else []
        parts += [f"storage-only weights compute in {self.compute}"] if self.compute != "float32" else []
        parts += ["activations quantized as their weights"] if self.quantize_activations == "weights" else []
        parts += ["no distribution"] if self.classes_dim == "none" else []
        parts += [f"classes in dimension {self.classes_dim}"] if isinstance(self.classes_dim, int) else []
        parts += [str(self.execution)] if self.execution != PLAIN else []
        parts += [f"reference {self.reference_execution}"] if self.reference_execution != PLAIN else []
        parts += ["acceptance measured"] if self.acceptance else []
        return ", ".join(parts) or "defaults"


@dataclass(frozen=True, repr=False)
class ModelOptions(TypedFields):
    """The options for opening a model and its reference."""

    device: str = "auto"
    """The torch device: "cpu"; an accelerator, such as "cuda:1", "mps" or "xpu"; or "auto": the accelerator if it computes in
    float64, as CUDA does, and else the CPU.
    """
    threads: Threads | None = None
    """The number of threads that torch uses for computing. If None, torch's default number."""
    weights: Path | None = None
    """A checkpoint file whose weights are loaded into the module of a Python file. None: the module keeps its own."""
    architecture: str | None = None
    """The transformers class into which a checkpoint is loaded, such as "LlamaForCausalLM". If None, config.json names it."""
    base: str | None = None
    """The base model into which a PEFT adapter is merged as it is opened, by its path or name. If None, the adapter's configuration
    names it. "none": the adapter is opened alone.
    """
    config: Path | None = None
    """The folder with the configuration of a model that is a single file, such as sd15.safetensors, in the layout of diffusers:
    that of the pipeline, or of one of its models. Weights of a pipeline that the file lacks are read from there. If None, the
    configuration is next to the weights.
    """
    trust_pickle: bool = False
    """Whether to allow unpickling the model's files, which can run any code that they contain."""
    trust_remote_code: bool = False
    """Whether to allow running the Python code that comes with the model."""
    random_weights: bool = False
    """Whether to run a model with random values for weights that its files lack. Otherwise, it opens but can't run."""
    download: bool = False
    """Whether to download a model that is not in the local cache."""
    over_memory: bool = False
    """Whether to run a model that is larger than the memory, reading its weights from the disk whenever it runs."""
    max_memory: Mapping[str, Count] = field(default_factory=dict)
    """The most bytes that weights may take, keyed by device, "cpu" or "cuda:0". Without an entry, all memory may be used."""
    device_map: str = ""
    """How to distribute the model over devices. "auto": fill all accelerators of the chosen type, each up to its entry in
    `max_memory`, then the CPU. Any other text: the path of a JSON file that maps names of modules to devices. "": one device.
    """
    reference: str = FLOAT32
    """What drift is measured from. "float32": the stored weights in float32 arithmetic (float64 for weights stored in float64).
    "stored": the model in its stored dtypes, as plain torch runs it. Any other text: another checkpoint of the same
    architecture, for example "path/to/other", in float32 arithmetic.
    """

    @property
    def reference_model(self) -> str | None:
        """The path or name of the checkpoint that the reference is, or None if the reference has the model's own weights."""
        return None if self.reference in (FLOAT32, STORED) else self.reference


@dataclass(frozen=True, repr=False)
class InputOptions(TypedFields):
    """The options that say on which inputs a model is run."""

    prompts: tuple[str, ...] = ()
    """Calibration prompts. Each is one sequence, or several if it is long."""
    texts: tuple[Path, ...] = ()
    """Calibration text files. Each line of a `.jsonl` file is an object with `text`, `prompt` or `messages`."""
    chat: bool = False
    """Whether to format each prompt as a user's message with the chat template of the tokenizer or processor."""
    sequence_length: SequenceLength | None = None
    """The maximum tokens in a sequence; longer texts are split. If None, 512 or the model's maximum if that is less."""
    sequences: Sequences | None = None
    """The maximum number of calibration sequences to run. If None, all are run."""
    images: tuple[Path, ...] = ()
    """Image files, which the model's own processor converts to inputs. A pipeline of diffusers starts from them."""
    audio: tuple[Path, ...] = ()
    """Audio files, which the model's own processor converts to inputs."""
    tensors: Path | None = None
    """A file (.safetensors, .npz or .pt) with every argument of the forward pass by name, in place of all other inputs."""
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    """How a pipeline of diffusers is called."""
    calibration: tuple[Path, ...] = ()
    """Files of texts, images, audio or tensors to which roundings such as GPTQ are fitted. It should be other text than that on
    which drift is measured. If empty, they are fitted to the inputs on which drift is measured.
    """
    held_out: tuple[Path, ...] = ()
    """Files of texts, images, audio or tensors, on which `Session.held_out` measures the drift once more, for example of another
    kind of text than `calibration`.
    """
    limits: InputLimits = field(default_factory=InputLimits)
    """The limits on images, audio, texts and model files. A file that exceeds a limit is refused."""


@dataclass(frozen=True, repr=False)
class MeasureOptions(TypedFields):
    """The options for running the candidate and measuring its drift."""

    settings: RunSettings = field(default_factory=RunSettings)
    """The settings of candidate runs."""
    metrics: tuple[str, ...] = ()
    """The user's own metrics: `file.py:NAME` or `package.module:NAME`, which run that code, `lm-eval:TASK` or
    `queries:FILE.jsonl`.
    """
    against_logits: Path | None = None
    """A file with outputs that stand for the candidate's, for example of another runtime. The model runs as the reference, on the
    file's tokens. `Session.save_logits` writes such a file, and llama-perplexity with `--kl-divergence-base`; or it is JSON Lines
    with vLLM's `prompt_logprobs`.
    """
    reference_logits: Path | None = None
    """Such a file whose outputs stand for the reference's; the model runs as the candidate."""
    data: tuple[Path, ...] = ()
    """Files of texts, images, audio or tensors, on which `metrics` are measured. If empty, they are measured on the inputs."""
    precision: Share | None = None
    """The relative standard error of the drift at which a measurement stops. If None, it runs all inputs."""
    floor: Literal["auto", "always", "never"] = "auto"
    """When to measure the noise floor: how much the reference differs from itself if the same arithmetic runs in another order.
    "auto": if a measured drift is so small that it may be noise, and in the app also while the engine is idle, unless the model
    runs from the disk.
    """
    modules: Literal["some", "exact"] = "some"
    """The sequences on which outputs of modules are compared: "some", up to about 1/6 of them, or all ("exact")."""
    reference_bytes: Count | None = None
    """Maximum bytes that are kept of the reference's outputs. If None, 1/4 of the free memory, at most 2 GiB."""


@dataclass(frozen=True, repr=False)
class AppOptions(TypedFields):
    """The options of the app, for its engine."""

    workers: Processes | str | None = None
    """Where the app runs scans, the search for causes, and measurements of several recipes: in this many processes, on the
    cluster at this address (`tcp://HOST:8786`), or, if None, in its engine. A `Session` always works in its own process.
    """
    read_only: bool = False
    """Whether the engine refuses to write any file, and to read input files that are chosen while it runs. The app sets this
    when it is shown to other people.
    """


@dataclass(frozen=True, repr=False)
class Options(AppOptions, MeasureOptions, InputOptions, ModelOptions):
    """All options for opening and running a model: those of `ModelOptions`, `InputOptions` and `MeasureOptions`, and the app's.

    A function that needs only one of these parts takes it, so it can be called with this part alone or with all options. A value
    of the wrong type or out of range raises UserError here, not later; a path may also be a string, and a tuple a list.

    Example:
        >>> de.Options(device="cpu", sequence_length=128).sequence_length
        128
    """

    def with_inputs(self, inputs: InputOptions) -> Options:
        """Return these options with the fields of `InputOptions` taken from `inputs`."""
        names = [each.name for each in dataclasses.fields(InputOptions)]
        return dataclasses.replace(self, **{name: getattr(inputs, name) for name in names})
