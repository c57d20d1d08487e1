"""Makes one vector of each input from a model's main output, as a program that searches by these vectors does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import load

from dtype_engine.checkpoint.embedding_modules import MODULES, embedding_modules
from dtype_engine.checkpoint.weight_files import read_beside, read_json
from dtype_engine.core.errors import UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.regular_files import reading
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.compare.neighbors import FEWEST, MOST, by_chance

POOLINGS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "cls_token": ("first token", lambda rows: rows[0]),
    "lasttoken": ("last token", lambda rows: rows[-1]),
    "max_tokens": ("maximum over tokens", lambda rows: rows.amax(0)),
    "mean_tokens": ("mean over tokens", lambda rows: rows.mean(0)),
    "mean_sqrt_len_tokens": ("sum over tokens / √tokens", lambda rows: rows.sum(0) / len(rows) ** 0.5),
    "weightedmean_tokens": ("mean weighted by position", lambda rows: _weighted(rows)),
}
"""The ways of pooling of sentence-transformers, by their names in its files: (what it is, a function that makes a vector [width] of
the last hidden states of an input, float32 [tokens, width] without padding).
"""
Layer = Callable[[torch.Tensor], torch.Tensor]
"""Maps vectors [inputs, width], float32 on the CPU, to vectors of another width."""
_ACTIVATIONS: dict[str, Layer] = {"Identity": lambda values: values, "Tanh": torch.tanh, "ReLU": torch.relu}
_LARGEST_LAYER = 1 << 30
_VECTORS = ("text_embeds", "image_embeds", "sentence_embedding", "embeddings")
"""The names of outputs that have one vector for each input: [inputs, width]."""
_HIDDEN = "last_hidden_state"
_WITHOUT_FILE = (("CLIPText*", "lasttoken"), ("Siglip*Text*", "lasttoken"), ("*", "mean_tokens"))
"""(name pattern of a model class, its pooling without a `modules.json`). CLIP and SigLIP take the end of the text; for all others,
sentence-transformers takes the mean.
"""


@dataclass(frozen=True, slots=True)
class Embedding:
    """How the vector of an input is made of the main output."""

    poolings: tuple[str, ...]
    """The names in `POOLINGS` whose vectors are concatenated. Empty if the output already is one vector per input."""
    dense: tuple[Layer, ...]
    """The linear layers that follow, in float32 on both sides: a recipe does not cast them."""
    what: str
    """What the vector is, for the user, such as `mean over tokens (1_Pooling/config.json)`."""
    why_not: str = ""
    """Why there is no vector although the checkpoint is said to make one, or "" if there is one."""

    @classmethod
    def of(cls, model: LiveModel, name: str, dimensions: int, batch: Batch) -> Embedding | None:
        """Return how vectors are made of the main output of a model, or None if it is no model for vectors.

        A model has vectors if its output is a last hidden state of text or one of `_VECTORS`. If its folder has a `modules.json`
        and its output is another, it is said why there are none. name, dimensions: the name of the main output, and how many
        dimensions it has. batch: one of the inputs.
        """
        if name in _VECTORS:
            return cls((), (), name) if dimensions == 2 else None
        try:
            modules = None if model.folder is None else embedding_modules(model.folder)
            folders = () if modules is None or model.folder is None else map(model.folder.joinpath, modules.dense)
            layers = tuple(map(_layer, folders))
        except UserError as error:
            return _without(str(error))
        is_decoded = getattr(getattr(model.module, "config", None), "is_encoder_decoder", False)
        hidden = name == _HIDDEN and dimensions == 3 and not is_decoded
        if modules is None:
            return _without_file(model, batch) if hidden else None
        if not hidden:
            of = "that of a decoder" if is_decoded else printable(name, 100)
            return _without(f"{MODULES} describes an embedding, and the output is {of}")
        unknown = [*modules.others, *(each for each in modules.poolings if each not in POOLINGS)]
        if unknown or not modules.poolings:
            what = f"{printable(unknown[0], 60)}, which is not computed here" if unknown else "no pooling"
            return _without(f"{MODULES} has {what}")
        after = f", then {plural(len(layers), 'linear layer')}" if layers else ""
        return cls(modules.poolings, layers, f"{_named(modules.poolings)}{after} ({modules.file})")

    def vectors(self, output: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """Return the vector of each input of a batch, float32 [inputs, width] on the CPU.

        output: the main output. kept: a mask that is False at padding, bool [inputs, tokens]; None if there is no padding.
        """
        output = output.detach().float()
        if self.poolings:
            rows = [each if kept is None else each[kept[at]] for at, each in enumerate(output)]
            output = torch.stack([torch.cat([POOLINGS[name][1](each) for name in self.poolings]) for each in rows])
        output = output.cpu()
        with torch.autocast("cpu", enabled=False):  # in which the candidate may run
            for layer in self.dense:
                output = layer(output)
        return output


def neighbors_notice(embedding: Embedding, inputs: int) -> str:
    """Return a notice that says which vectors the recall at 10 compares and what it is by chance, or why it is not measured.
    inputs: the number of inputs that have vectors.
    """
    if embedding.why_not:
        return f"recall@10 is not measured: {embedding.why_not}"
    if inputs < FEWEST:
        return f"recall@10 is not measured: it needs {FEWEST} inputs or more, better some hundred, and this run has {inputs}"
    first = "the first " if inputs == MOST else ""
    return (
        f"recall@10 compares one vector per input, {embedding.what}, among {first}{inputs:,} inputs: by chance it is "
        f"{100 * by_chance(inputs):.2g} %"
    )


def _without(why: str) -> Embedding:
    return Embedding((), (), "", why)


def _layer(folder: Path) -> Layer:
    """Return the linear layer and its activation in the folder of a `Dense` (sentence_transformers/models/Dense.py). Raises
    UserError if they can't be read.
    """
    config, path = read_json(folder / "config.json"), folder / "model.safetensors"
    name = str(config.get("activation_function", "")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UserError(f"{folder.name} has the activation {printable(name, 60)}, which is not computed here")
    with reading(path):
        content = read_beside(path, _LARGEST_LAYER)
    with failures_as(UserError, f"{path} is no safetensors file"):
        tensors = {key: value.float() for key, value in load(content).items()}
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise UserError(f"{path} has no linear.weight [outputs, inputs], or a linear.bias of another size")

    def layer(vectors: torch.Tensor) -> torch.Tensor:
        if vectors.shape[1] != weight.shape[1]:
            raise UserError(f"{path} takes vectors of {weight.shape[1]} numbers, and they have {vectors.shape[1]}")
        return _ACTIVATIONS[name](torch.nn.functional.linear(vectors, weight, bias))

    return layer


def _without_file(model: LiveModel, batch: Batch) -> Embedding | None:
    given = batch.named(model.module)
    if not hasattr(model.module, "config") or "input_ids" not in given or "pixel_values" in given:
        return None
    of_class = type(model.module).__name__
    pooling = next(pooling for pattern, pooling in _WITHOUT_FILE if fnmatchcase(of_class, pattern))
    return Embedding((pooling,), (), f"{_named((pooling,))} (there is no {MODULES})")


def _named(poolings: tuple[str, ...]) -> str:
    return " and ".join(POOLINGS[name][0] for name in poolings)


def _weighted(rows: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, len(rows) + 1, dtype=rows.dtype, device=rows.device)[:, None]
    return (rows * weights).sum(0) / weights.sum()
