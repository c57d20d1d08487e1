"""Which dimension holds the classes: figures of transformers' models against a softmax that is taken here in plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers.measured_on import placed
from torch import nn

import dtype_engine as de
from dtype_engine import RunSettings
from dtype_engine.results.drift import NATS, NATS_PER_EXAMPLE, NATS_PER_PIXEL, SQUARED
from dtype_engine.runtime.passes.class_dimensions import classes_dimension

MODEL_INPUTS = RunSettings(float_inputs="model")


def segformer() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    torch.manual_seed(0)
    config = SegformerConfig(
        num_encoder_blocks=2, hidden_sizes=[8, 16], depths=[1, 1], num_attention_heads=[1, 2], sr_ratios=[8, 4],
        patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[4, 4], decoder_hidden_size=16, num_labels=5,
    )  # fmt: skip
    model = SegformerForSemanticSegmentation(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.3)
    return model, {"pixel_values": torch.randn(1, 3, 64, 96)}


def vit(problem: str | None) -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        num_labels=4, problem_type=problem,
    )  # fmt: skip
    return ViTForImageClassification(config).eval(), {"pixel_values": torch.randn(2, 3, 16, 16)}


def vit_mae() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    torch.manual_seed(0)
    config = ViTMAEConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32,
    )  # fmt: skip
    return ViTMAEForPreTraining(config).eval(), {"pixel_values": torch.randn(2, 3, 16, 16), "noise": torch.rand(2, 4)}


def clipseg() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import CLIPSegConfig, CLIPSegForImageSegmentation

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = CLIPSegConfig(
        text_config={**sizes, "vocab_size": 50, "max_position_embeddings": 8, "eos_token_id": 49},
        vision_config={**sizes, "image_size": 32, "patch_size": 16},
        projection_dim=16, extract_layers=[0], reduce_dim=8, decoder_num_attention_heads=2, decoder_intermediate_size=16,
    )  # fmt: skip
    ids = torch.tensor([[1, 2, 3, 49], [1, 4, 5, 49]])
    return CLIPSegForImageSegmentation(config).eval(), {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}


def kl(model: Any, given: dict[str, torch.Tensor], dim: int) -> tuple[float, float, int]:
    """Mean KL and top-1 agreement of a bfloat16 copy in plain torch, and over how many positions."""
    wide, narrow = (placed(copy.deepcopy(model).to(dtype)) for dtype in (torch.float32, torch.bfloat16))
    with torch.no_grad():
        reference = wide(**given).logits.cpu().double()
        candidate = (
            narrow(**{k: v.bfloat16() if v.is_floating_point() else v for k, v in given.items()}).logits.cpu().double()
        )
    p, q = reference.log_softmax(dim), candidate.log_softmax(dim)
    divergences = (p.exp() * (p - q)).sum(dim)
    return float(divergences.mean()), float((p.argmax(dim) == q.argmax(dim)).double().mean()), divergences.numel()


def test_segmentation_model_has_a_distribution_at_every_pixel() -> None:
    model, given = segformer()
    mean, top1, positions = kl(model, given, 1)
    session = de.open(copy.deepcopy(model), inputs=given, options=de.Options(settings=MODEL_INPUTS))
    session.cast("*", "bfloat16")
    report = session.drift()
    assert report.output.positions == positions == 384
    assert report.output.kl_mean == pytest.approx(mean, rel=1e-6)
    assert report.output.top1_agreement == pytest.approx(top1)
    assert (report.sequences.positions, report.sequences.of_tokens) == (384, False)
    causes = session.causes()
    assert causes.unit == NATS_PER_PIXEL


def test_scan_scores_of_a_segmentation_model_equal_its_drift() -> None:
    model, given = segformer()
    session = de.open(model, inputs=given)
    name = "decode_head.classifier.weight"
    for exact in (False, True):
        scan = session.scan(["float8_e4m3fn"], exact=exact, draws=None if exact else 64)
        assert scan.unit == NATS_PER_PIXEL
        score = scan.scores()[name, "float8_e4m3fn"]
        session.cast(name, "float8_e4m3fn")
        expected = session.drift().output.kl_mean
        session.undo()
        assert expected is not None
        assert score == pytest.approx(expected, rel=0.3 if not exact else 1e-9)


@pytest.mark.parametrize(
    ("made", "unit"),
    [
        (lambda: vit(None), NATS_PER_EXAMPLE),
        (lambda: vit("single_label_classification"), NATS_PER_EXAMPLE),
        (lambda: vit("multi_label_classification"), SQUARED),
        (lambda: vit("regression"), SQUARED),
        (vit_mae, SQUARED),
        (clipseg, SQUARED),
    ],
    ids=["classes", "one label", "labels", "regression", "pixels", "masks"],
)
def test_kl_is_measured_if_class_and_config_say_that_outputs_are_logits(made: Any, unit: str) -> None:
    model, given = made()
    session = de.open(model, inputs=given)
    session.cast("*", "bfloat16")
    output = session.drift().output
    of_distribution = (output.kl_mean, output.kl_max, output.top1_agreement, output.positions)
    assert all((figure is None) == (unit == SQUARED) for figure in of_distribution)
    assert (session.floor().kl_mean is None) == (unit == SQUARED)
    assert session.scan(["bfloat16"], draws=1).unit == session.causes().unit == unit


def test_classes_dim_setting_overrides_the_dimension_found_by_model_class() -> None:
    model, given = vit("regression")
    expected, _, positions = kl(model, given, 1)
    session = de.open(copy.deepcopy(model), inputs=given, options=de.Options(settings=MODEL_INPUTS))
    session.cast("*", "bfloat16")
    assert session.drift().output.kl_mean is None
    assert session.floor().kl_mean is None
    session.settings = RunSettings(float_inputs="model", classes_dim=-1)
    found = session.drift()
    assert found.output.kl_mean == pytest.approx(expected, rel=1e-6)
    assert found.output.positions == positions == 2
    assert session.floor().kl_mean is not None
    assert found.settings == "floating inputs follow the model, classes in dimension -1"
    session.settings = RunSettings(classes_dim="none")
    assert session.drift().output.kl_mean is None
    session.settings = RunSettings(classes_dim=2)
    with pytest.raises(
        de.UserError, match=r"the output \(logits, \(2, 4\)\) has no dimension 2 with two or more classes"
    ):
        session.drift()


@pytest.mark.parametrize(
    ("class_name", "name", "shape", "expected"),
    [
        ("LlamaForCausalLM", "logits", (1, 5, 9), 2),
        ("DetrForObjectDetection", "logits", (1, 100, 92), 2),
        ("RTDetrForObjectDetection", "logits", (1, 100, 92), None),
        ("ElectraForPreTraining", "logits", (2, 7), None),
        ("BertForPreTraining", "prediction_logits", (2, 7, 30), 2),
        ("CLIPModel", "logits_per_image", (2, 3), 1),
        ("SiglipModel", "logits_per_image", (2, 3), None),
        ("UperNetForSemanticSegmentation", "logits", (1, 1, 8, 8), None),
        ("BertForQuestionAnswering", "start_logits", (2, 7), 1),
        ("BertModel", "last_hidden_state", (2, 7, 16), None),
        ("MyMaps", "logits", (1, 5, 8, 8), None),
        ("MyClassifier", "logits", (3, 5), 1),
    ],
)
def test_classes_dimension_of_an_output_is_found_by_the_name_of_the_model_class(
    class_name: str, name: str, shape: tuple[int, ...], expected: int | None
) -> None:
    module = type(class_name, (nn.Module,), {})()
    derived = type("Mine", (type(module),), {})()
    for each in (module, derived):
        assert classes_dimension(each, name, torch.zeros(shape)) == expected


def test_language_model_has_a_distribution_at_every_token() -> None:
    session = de.open()
    assert session.scan(["bfloat16"], draws=1).unit == NATS
