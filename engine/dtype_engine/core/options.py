"""What a user may ask for when opening a model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How the candidate is run; the reference knows none of it.

    Attributes:
        compute: The dtype that storage-only weights come back to where no activation says which.
        autocast: Run under `torch.autocast` in this dtype, None for not.
        float_inputs: Floating inputs as given, or in the dtype of the model's first weight, as `inputs.to(model.dtype)` does.
        quantize_activations: Whether the input of a matrix product whose weight is quantised is rounded as well, in that weight's
            format, as runtimes do that serve W8A8 and W4A4: "weights", or "none".

    Example:
        >>> print(de.RunSettings(autocast="bfloat16"))
        autocast bfloat16
    """

    compute: str = "float32"
    autocast: Literal["bfloat16", "float16"] | None = None
    float_inputs: Literal["given", "model"] = "given"
    quantize_activations: Literal["none", "weights"] = "none"

    def of_weights(self) -> RunSettings:
        """What of it belongs to single weights, for scans and causes: neither autocast nor the dtype of inputs."""
        return dataclasses.replace(self, autocast=None, float_inputs="given")

    def __str__(self) -> str:
        parts = [f"autocast {self.autocast}"] if self.autocast else []
        parts += ["floating inputs follow the model"] if self.float_inputs == "model" else []
        parts += [f"storage-only weights compute in {self.compute}"] if self.compute != "float32" else []
        parts += ["activations quantised as their weights"] if self.quantize_activations == "weights" else []
        return ", ".join(parts) or "defaults"


@dataclass(frozen=True, slots=True)
class Options:
    """How to open and run a model.

    Attributes:
        device: "cpu", "cuda" or "auto" (cuda where there is one that works).
        prompts, texts: Calibration text; each prompt and each text file is one sequence or, when it is long, several. A `.jsonl`
            file has an object with `text`, `prompt` or `messages` on every line.
        chat: Prompts are what a user says: they go through the tokenizer's chat template.
        sequence_length, sequences: How many tokens a sequence has at most, and how many sequences there are at most.
        images, audio: Files for the model's own processor.
        tensors: A file of the forward pass's own arguments by name, instead of all the other inputs.
        weights: A checkpoint to load into the module of a Python file.
        architecture: The class whose module a checkpoint's tensors go into; None for the one that its config.json names.
        trust_pickle, trust_remote_code: Run code that comes with the model, as the user says it is safe.
        random_weights: Run a model some of whose weights are in none of its files, and are made at random. Otherwise it opens
            without a forward pass.
        download: Fetch a model that is not in the local cache.
        reference_bytes: How many bytes of outputs are kept for the next measurement; None for a quarter of the memory that is free,
            2 GiB at most.
        precision: The relative standard error of the drift at which a measurement ends; None to run all inputs.
        floor: Whether to measure the noise floor: "auto" where a reading is near it, and while nothing else is to be done.
        modules: In which sequences modules' outputs are compared: "some" for the first and as many more as are a quarter of the
            inputs, "exact" for all.
        settings: How the candidate is run.
        threads: How many threads torch computes with; None for its own choice.
        workers: Who scans, looks for causes and measures several recipes for the app: so many processes, or the cluster at an
            address such as `tcp://HOST:8786`; None for the app's one engine. A `Session` itself works in its own process.

    Example:
        >>> de.Options(device="cpu", sequence_length=128).sequence_length
        128
    """

    device: str = "auto"
    prompts: tuple[str, ...] = ()
    texts: tuple[Path, ...] = ()
    chat: bool = False
    sequence_length: int | None = None
    sequences: int | None = None
    images: tuple[Path, ...] = ()
    audio: tuple[Path, ...] = ()
    tensors: Path | None = None
    weights: Path | None = None
    architecture: str | None = None
    trust_pickle: bool = False
    random_weights: bool = False
    download: bool = False
    trust_remote_code: bool = False
    reference_bytes: int | None = None
    precision: float | None = None
    floor: Literal["auto", "always", "never"] = "auto"
    modules: Literal["some", "exact"] = "some"
    settings: RunSettings = field(default_factory=RunSettings)
    threads: int | None = None
    workers: int | str | None = None
