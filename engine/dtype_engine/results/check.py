"""The problems that a check of a checkpoint finds, as plain data, and why each kind of problem matters."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.text import Name
from dtype_engine.results.coverage import Coverage
from dtype_engine.results.model_card import CardCheck


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problem that a check of a checkpoint can find."""

    title: str
    why: str
    """Why such problems matter."""
    seen: tuple[str, ...] = ()
    """Public issues about published checkpoints or loaders, as owner/repository#number."""


KINDS: dict[str, Kind] = {
    "missing-part": Kind(
        "codes without a part that they need",
        "A loader takes the codes for values or stops: without its scale an fp8 weight is off by a factor of hundreds.",
        ("unslothai/unsloth#6200", "unslothai/unsloth#6978", "vllm-project/vllm#54444"),
    ),
    "orphan-part": Kind(
        "scales or other parts without codes",
        "A loader that goes by the name multiplies a plain weight by the scale, or drops the scale without a word.",
        ("unslothai/unsloth#6200", "unslothai/unsloth#6978"),
    ),
    "part-shape": Kind(
        "parts whose shape does not fit their codes",
        "Scales meet the wrong blocks, or the loader stops.",
        ("NVIDIA/Model-Optimizer#2038",),
    ),
    "group-index": Kind(
        "columns in a group that has no scale",
        "A loader reads a scale behind the last one, or stops.",
    ),
    "scale-values": Kind(
        "scales that are not finite, zero or negative",
        "Every value of such a block is NaN, infinite, zero or of the wrong sign.",
        (
            "vllm-project/compressed-tensors#832",
            "NVIDIA/Model-Optimizer#1633",
            "vllm-project/vllm#45212",
            "sgl-project/sglang#33541",
        ),
    ),
    "mixed-siblings": Kind(
        "fused siblings in several formats",
        "vLLM and SGLang multiply q, k and v (and gate and up) as one matrix, and refuse several formats in it.",
    ),
    "sibling-scales": Kind(
        "fused siblings with several scales of the tensor",
        "A runtime that fuses them takes one of the scales for all, and computes something else.",
        ("NVIDIA/TensorRT-LLM#14199", "vllm-project/vllm#55073"),
    ),
    "declared-dtype": Kind(
        "no weight is in the dtype that config.json declares",
        "Loaders that go by config.json convert every weight as they load it.",
        ("huggingface/transformers#46459",),
    ),
    "declared-scheme": Kind(
        "quantization of which config.json and the files say different things",
        "Loaders go by config.json: they look for codes under other names, pass over them, or compute other values from them.",
    ),
    "declared-size": Kind(
        "numbers of layers or tokens that config.json declares and the files contradict",
        "Loaders make what the files lack at random, and pass over what they have besides.",
    ),
    "draft-head": Kind(
        "draft heads (MTP) of which config.json or the source has more than the files",
        "A runtime that drafts tokens with the head stops at a missing weight, or drafts tokens that the model does not accept.",
        (
            "vllm-project/llm-compressor#2735",
            "vllm-project/vllm#37667",
            "huggingface/transformers#46127",
            "intel/auto-round#1526",
        ),
    ),
    "float32-island": Kind(
        "tensors that the architecture keeps in float32, stored in 16 bits",
        "The digits that the architecture asks for were lost when the file was written; loading widens only what is left.",
    ),
    "second-set": Kind(
        "several sets of weights in one folder",
        "Programs differ in which set they read, so two of them may run different models.",
        ("Blaizzy/mlx-vlm#1329", "NVIDIA/TensorRT-LLM#7013"),
    ),
    "configuration": Kind(
        "a configuration that can't be read, or of which no model can be made",
        "Loaders stop, or take something else in its place.",
    ),
    "tensor-shape": Kind(
        "tensors with another shape than config.json gives them",
        "Loaders stop at such a tensor, or make it at random.",
        ("RUC-GSAI/YuLan-Chat#8", "OpenHelix-Team/ReconVLA#7"),
    ),
    "tensor-dtype": Kind(
        "integers where the architecture has floats",
        "Loaders take codes for values, since no scale is there and no quantization is declared.",
    ),
    "missing-tensor": Kind(
        "tensors that are in no file",
        "Loaders make such a weight at random, often without an error.",
        ("sgl-project/sglang#23625", "vllm-project/vllm#53537"),
    ),
    "unused-tensor": Kind(
        "tensors that the architecture has no place for",
        "Loaders pass over them: the weight that they should be is missing, or the file is of another architecture.",
    ),
    "foreign-prefix": Kind(
        "a prefix or another part of names that the architecture does not have",
        "Loaders find none of the weights under these names.",
        ("unslothai/unsloth#6200",),
    ),
    "left-out-file": Kind(
        "files that the index leaves out",
        "Loaders go by the index, so the tensors of this file are not loaded.",
        ("huggingface/huggingface_hub#4728",),
    ),
    "index-entry": Kind(
        "entries of the index that disagree with the files",
        "Loaders that open only the file that the index names don't find the tensor, and plan memory by the index's total_size.",
        ("huggingface/huggingface_hub#4728",),
    ),
    "tie-differs": Kind(
        "tied weights that differ",
        "config.json ties the two, so one of them is dropped as the model is loaded.",
    ),
    "tokenizer": Kind(
        "a tokenizer with more ids than the embedding has rows",
        "A text with such a token has no embedding: the forward pass stops, or reads beyond the end of the matrix.",
    ),
    "adapter": Kind(
        "tensors of an adapter that fit neither its configuration nor a layer of its base model",
        "PEFT stops, or passes over the tensors, so that the layer is not adapted.",
    ),
    "not-finite": Kind(
        "values that are not finite",
        "One NaN reaches every output.",
    ),
    "constant": Kind(
        "matrices with one value only",
        "A trained matrix has many values: this one was never written, or its data were lost.",
    ),
    "against-missing": Kind(
        "tensors of the source that this checkpoint lacks",
        "The weight was dropped on the way.",
        ("sgl-project/sglang#23625", "vllm-project/vllm#53537"),
    ),
    "against-shape": Kind(
        "tensors with another shape than in the source",
        "The two are not the same model, or the weight was cut.",
    ),
    "against-new": Kind(
        "tensors that the source does not have",
        "They are no parts of quantized weights, so nothing of the source became them.",
    ),
    "card-figure": Kind(
        "figures of the model card that a repeated measurement does not confirm",
        "Whoever chooses the model by its card gets another one, or the card is of other weights, rules or settings.",
    ),
    "card-weights": Kind(
        "weights that are not those of the model card",
        "The files were changed or replaced after they were measured, so the card says nothing about them.",
    ),
    "card-metadata": Kind(
        "figures in the README's metadata that the model card contradicts",
        "A hub shows those of the metadata.",
    ),
}
"""All kinds of problems, by their names in JSON and SARIF."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem that a check found in a checkpoint."""

    kind: str
    """A key of `KINDS`."""
    tensor: Name
    """The name of what has the problem: a tensor, a file or a field of config.json."""
    what: str
    """The problem, in words that follow this name in a sentence, such as "has no scales"."""
    file: str = ""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check of a checkpoint found, and what it examined."""

    model: str
    tensors: int
    files: int
    scales: int
    """How many scale tensors of quantized weights were read."""
    values: int | None
    """The number of tensors whose values were read, or None if the user did not ask for it."""
    seconds: float
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...] = ()
    """Sentences that say what was not checked."""
    against: str | None = None
    """The source with which the checkpoint was compared."""
    coverage: Coverage | None = None
    """Which tensors of the architecture, or else of the index, are in the files. None if both are unknown."""
    card: CardCheck | None = None
    """The model card beside a repeated measurement, or None if the user named no card."""
