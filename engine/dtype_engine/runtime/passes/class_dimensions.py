"""Finds out whether a model's main output is a distribution, and which of its dimensions holds the classes.

The output's name does not show this: transformers uses `logits` for class scores, pixels and mask values alike. The model's class
and its configuration decide, unless the setting `classes_dim` is given.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn

from dtype_engine.core.errors import UserError
from dtype_engine.core.options import ClassesDim

_LAST = -1
_BY_CLASS: tuple[tuple[str, int | None], ...] = (
    # Segmentation outputs a distribution over classes for every pixel: [batch, classes, height, width].
    ("*ForSemanticSegmentation", 1),
    ("*ForDensePrediction", 1),
    # Masks have an independent sigmoid for each pixel.
    ("*ForImageSegmentation", None),
    # These detectors are trained with cross-entropy over the classes of a query; all others have one sigmoid per class.
    ("DetrForObjectDetection", _LAST),
    ("TableTransformerForObjectDetection", _LAST),
    ("YolosForObjectDetection", _LAST),
    ("*ForObjectDetection", None),
    # Pretraining that reconstructs pixels with a squared error.
    ("*MAEForPreTraining", None),
    ("HieraForPreTraining", None),
    # Pretraining that predicts for every token whether it was replaced: [batch, positions], one sigmoid each.
    ("ElectraForPreTraining", None),
    ("FunnelForPreTraining", None),
    # Several answers or speakers may be correct at once, so each has a sigmoid.
    ("ViltForQuestionAnswering", None),
    ("*ForAudioFrameClassification", None),
    # The start and end of a video clip, the motion of pixels and depths are real numbers.
    ("*ForVideoGrounding", None),
    ("*ForOpticalFlow", None),
    ("*ForDepthEstimation", None),
    # SigLIP compares each image and text independently; CLIP computes a softmax over the texts.
    ("Siglip*Model", None),
)
"""Pairs (name pattern of a model class, dimension of its main output that holds the classes, or None if it is no distribution). The
first pair whose pattern matches is used.
"""
_OUTPUTS = ("logits", "logits_per_image", "start_logits", "prediction_logits", "class_queries_logits")
"""Names of outputs that hold class scores along their last dimension, for model classes that `_BY_CLASS` does not match."""
_NOT_EXCLUSIVE = ("regression", "multi_label_classification")
"""Values of `config.problem_type` for classifiers whose outputs are real numbers or independent sigmoids, not a distribution."""


def classes_dimension(module: nn.Module, name: str, output: torch.Tensor, setting: ClassesDim = "auto") -> int | None:
    """Return the dimension (from 0) of the main output that holds class or token logits, or None if there is none. name: the
    output's name, such as "logits". setting: "auto" to decide by the model's class and the name, or the user's choice. Raises
    UserError if `setting` names a dimension that the output does not have, or one with fewer than two values.
    """
    if setting == "none":
        return None
    dimension = _known_dimension(module, name, output) if setting == "auto" else setting
    if dimension is not None and -output.ndim <= dimension < output.ndim and output.shape[dimension] >= 2:
        return dimension % output.ndim
    if setting != "auto":
        raise UserError(
            f"the output ({name}, {tuple(output.shape)}) has no dimension {setting} with two or more classes: "
            "choose another dimension, none or auto for classes_dim (--classes-dim)"
        )
    return None


def _known_dimension(module: nn.Module, name: str, output: torch.Tensor) -> int | None:
    if name not in _OUTPUTS or output.ndim < 2:
        return None
    config = getattr(module, "config", None)
    classes = [base.__name__ for base in type(module).__mro__]
    if getattr(config, "problem_type", None) in _NOT_EXCLUSIVE and any("Classification" in each for each in classes):
        return None
    for each in classes:
        for pattern, dimension in _BY_CLASS:
            if fnmatchcase(each, pattern):
                return dimension
    # An output with four dimensions consists of maps. For an unknown model class, the dimension of the classes is unknown.
    return _LAST if output.ndim <= 3 else None
