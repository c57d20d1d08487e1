"""What a candidate computes against plain torch: the same module with its tensors cast by hand, and no mode.

Where plain torch raises, a mode of this file adds the casts that the design names, written without any of the engine's code. The
default runs some recipes of some architectures; `DTYPE_TUI_WIDE=1` runs all.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.helpers import architectures
from tests.helpers.candidate_output import candidate_output
from tests.helpers.measured_on import DEVICE
from torch import nn
from torch.overrides import TorchFunctionMode

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.runtime.passes.outputs import main_output

DTYPES = ["float64", "float32", "bfloat16", "float16"]
WIDE = bool(os.environ.get("DTYPE_TUI_WIDE"))


class PaddedEncoder(nn.Module):
    """torch's own encoder over sentences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        padding = (input_ids if attention_mask is None else attention_mask) == 0
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=padding)
        return {"logits": self.head(hidden)}


class Writes(nn.Module):
    """Writes parts of a weighted sum into a tensor of its own, in every way that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.first(x), self.second(x)
        y[torch.tensor([0, 2])] = z[:2]
        y.index_add_(0, torch.tensor([1]), z[:1])
        y += z * self.scale
        return torch.where(y > z, y, z).lerp(z, 0.3) @ self.scale


def padded() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    ids = architectures.tokens(8, 3, 50)
    ids[1, 5:] = ids[2, 3:] = 0
    return PaddedEncoder().eval(), {"input_ids": ids}


def padded_bert() -> tuple[nn.Module, Any]:
    module, _ = architectures.make("bert")
    ids = architectures.tokens(8, 3)
    mask = torch.ones_like(ids)
    mask[1, 5:] = mask[2, 3:] = 0
    return module, {"input_ids": ids, "attention_mask": mask}


def with_router_bias() -> tuple[nn.Module, Any]:
    """A DeepSeek-V3 whose scores of experts are decided by the bias that is added to them."""
    module, inputs = architectures.make("deepseek_v3")
    for name, buffer in module.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.copy_(torch.linspace(6.8, 7.1, buffer.numel()))
    return module, inputs


def rescaled() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    config = transformers.RwkvConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, attention_hidden_size=32, intermediate_size=48,
        context_length=64, rescale_every=2,
    )  # fmt: skip
    return transformers.RwkvForCausalLM(config).eval(), {"input_ids": architectures.tokens(), "use_cache": False}


def writes() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Writes().eval(), (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**SMALL, "num_key_value_heads": 1, "vocab_size": architectures.VOCABULARY}
MAMBA2 = {"mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}


def published() -> tuple[nn.Module, Any]:
    """A Qwen3-Next as it is published: bfloat16, and `A_log` in float32."""
    module, inputs = architectures.make("qwen3_next")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not name.endswith(("A_log", "inv_freq")):
            tensor.data = tensor.data.bfloat16()
    return module, inputs


def made(name: str, masked: bool = False, size: int = 0, **settings: Any) -> Callable[[], tuple[nn.Module, Any]]:
    """A model of transformers by the name of its class, over texts, or over pictures of a size."""

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model_class = getattr(transformers, name)
        module = model_class(model_class.config_class(**settings)).eval()
        if size:
            return module, {"pixel_values": architectures.picture(size)}
        ids = architectures.tokens(12, 2)
        if not masked:
            return module, {"input_ids": ids}
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        more = {"decoder_input_ids": ids[:, :6]} if module.config.is_encoder_decoder else {}
        return module, {"input_ids": ids, "attention_mask": mask, **more}

    return make


def detr() -> tuple[nn.Module, Any]:
    stages = transformers.ResNetConfig(**STAGES, embedding_size=8, layer_type="basic", out_features=["stage2"])
    return made(
        "DetrForObjectDetection", size=32, use_timm_backbone=False, backbone_config=stages, backbone=None,
        use_pretrained_backbone=False, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, num_queries=5, num_labels=4,
    )()  # fmt: skip


def rt_detr() -> tuple[nn.Module, Any]:
    stages = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    return made(
        "RTDetrForObjectDetection", size=64, backbone_config=stages, encoder_hidden_dim=16, encoder_in_channels=[8, 16, 16],
        encoder_layers=1, encoder_ffn_dim=24, encoder_attention_heads=2, d_model=16, num_queries=5, decoder_ffn_dim=24,
        decoder_in_channels=[16, 16, 16], decoder_layers=1, decoder_attention_heads=2, num_denoising=0, num_labels=4,
    )()  # fmt: skip


def upernet() -> tuple[nn.Module, Any]:
    stages = transformers.ConvNextConfig(**STAGES, num_stages=2, patch_size=4, out_features=["stage1", "stage2"])
    return made(
        "UperNetForSemanticSegmentation", size=64, backbone_config=stages, hidden_size=16, pool_scales=[1, 2],
        use_auxiliary_head=False, num_labels=5,
    )()  # fmt: skip


MAKE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{name: functools.partial(architectures.make, name) for name in architectures.ZOO},
    "qwen3_next as published": published,
    "detr": detr,
    "rt_detr": rt_detr,
    "yolos": made(
        "YolosForObjectDetection", size=32, **SMALL, image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=4
    ),
    "segformer": made(
        "SegformerForSemanticSegmentation", size=32, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16, num_labels=5,
    ),
    "upernet": upernet,
    "jamba": made(
        "JambaForCausalLM", **GROUPED, num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_expand=2, mamba_dt_rank=4, pad_token_id=0,
    ),
    "bamba": made("BambaForCausalLM", **GROUPED, **MAMBA2, attn_layer_indices=[1], mamba_n_heads=4, pad_token_id=0),
    "falcon_h1": made("FalconH1ForCausalLM", **GROUPED, **MAMBA2, mamba_d_ssm=32, mamba_n_heads=2),
    "granite_hybrid": made(
        "GraniteMoeHybridForCausalLM", **GROUPED, **MAMBA2, layer_types=["mamba", "attention"], num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=24, mamba_n_heads=4,
    ),
    "lfm2": made("Lfm2ForCausalLM", **GROUPED, layer_types=["conv", "full_attention"]),
    "gpt_oss": made("GptOssForCausalLM", **GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": made(
        "Glm4MoeForCausalLM", **GROUPED, head_dim=16, moe_intermediate_size=24, n_routed_experts=4, n_shared_experts=1,
        n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
    ),
    "padded_gemma2": made("Gemma2ForCausalLM", True, **GROUPED, head_dim=16),
    "padded_modernbert": made(
        "ModernBertForMaskedLM", True, **SMALL, vocab_size=architectures.VOCABULARY, pad_token_id=0, local_attention=4
    ),
    "padded_t5": made(
        "T5ForConditionalGeneration", True, vocab_size=architectures.VOCABULARY, d_model=32, d_kv=16, d_ff=48,
        num_layers=2, num_heads=2,
    ),
    "padded_encoder": padded,
    "padded_bert": padded_bert,
    "router_bias": with_router_bias,
    "rwkv": rescaled,
    "writes": writes,
}  # fmt: skip
QUICK = (
    "llama",
    "t5",
    "whisper",
    "padded_encoder",
    "router_bias",
    "mamba2",
    "qwen3_next",
    "torch_lstm",
    "rwkv",
    "writes",
)


class CastsByHand(TorchFunctionMode):
    """Plain torch, and where it raises the casts of the design: to the dtype of the parameters and buffers (or views of these)
    that the call has, else the promoted one; an operation in place to that of what it writes to.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self.acted = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        floats = [each for each in flat if isinstance(each, torch.Tensor) and each.is_floating_point()]
        try:
            return func(*args, **kwargs)
        except (RuntimeError, ValueError):
            if len({tensor.dtype for tensor in floats}) < 2:
                raise
        weights = [tensor for tensor in floats if id(tensor) in self.own or id(tensor._base) in self.own]
        target = functools.reduce(torch.promote_types, (tensor.dtype for tensor in weights or floats))
        if func.__name__.endswith("_") and (func.__name__ == "__setitem__" or not func.__name__.endswith("__")):
            target = args[0].dtype
        flat = [
            each.to(target) if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in flat
        ]
        args, kwargs = torch.utils._pytree.tree_unflatten(flat, spec)
        self.acted = True
        return func(*args, **kwargs)


def by_hand(make: Callable[[], tuple[nn.Module, Any]], recipe: dict[str, str]) -> tuple[torch.Tensor, bool]:
    """Return the main output of the model with its tensors cast by hand, and whether casts had to be added."""
    module, inputs = make()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in recipe:
            tensor.data = tensor.data.to(getattr(torch, recipe[name]))
    adds = CastsByHand(module)

    def joined(layer: nn.RNNBase, args: Any) -> Any:
        """Cast by hand for modules that compare dtypes before they call torch."""
        dtypes = {weight.dtype for weight in layer.parameters()}
        target = functools.reduce(torch.promote_types, dtypes)
        if dtypes == {args[0].dtype}:
            return None
        adds.acted = True
        for weight in layer.parameters():
            weight.data = weight.data.to(target)
        return args[0].to(target), *args[1:]

    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(joined)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it is off for reference and candidate alike
    try:
        with torch.no_grad(), adds:
            output = main_output(module(**inputs) if isinstance(inputs, dict) else module(*inputs))[1]
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return output, adds.acted


def recipes(session: de.Session, count: int) -> list[dict[str, str]]:
    """Return recipes with one dtype for all weights, with all weights but one in bfloat16, and with random dtypes."""
    names = [name for name, tensor in session.tree.tensors.items() if tensor.castable and tensor.persistent]
    chance = random.Random(len(names))
    mixed: list[dict[str, str]] = [dict.fromkeys(names, dtype) for dtype in DTYPES[2:]]
    for number in range(count):
        mixed.append(dict.fromkeys(names, "bfloat16") | {chance.choice(names): "float32"})
        palette = DTYPES[1:3] if number % 2 else DTYPES
        mixed.append({name: chance.choice(palette) for name in names})
    return mixed


@pytest.mark.parametrize("name", MAKE if WIDE else QUICK)
def test_candidate_in_mixed_dtypes_equals_plain_torch(name: str) -> None:
    module, inputs = MAKE[name]()
    session = de.open(module, inputs=inputs)
    session.drift()
    for recipe in recipes(session, 12 if WIDE else 2):
        session.apply(Recipe(tuple(Rule(pattern, dtype) for pattern, dtype in recipe.items())))
        try:
            expected, added = by_hand(MAKE[name], recipe)
        except RuntimeError:  # torch has no kernel: that is tested in test_candidate
            continue
        found = candidate_output(session)
        assert found.dtype == expected.dtype
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert error <= 1e-6, (recipe, added)
        flow = session.flow()
        assert any(row.torch_raises for row in flow) == added


def test_drift_of_a_mixed_checkpoint_without_rules_equals_plain_torch() -> None:
    """A Qwen3-Next in bfloat16 with a float32 `A_log`, without any rule: torch promotes, and raises nothing."""
    module, inputs = published()
    wide, _ = published()
    for tensor in (*wide.parameters(), *wide.buffers()):
        tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
    with torch.no_grad():
        r, c = (each(**inputs).logits.double() for each in (wide, module))
    p, q = r.log_softmax(-1), c.log_softmax(-1)
    output = de.open(module, inputs=inputs).drift().output
    assert output.kl_mean == pytest.approx(
        float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-6 if DEVICE == "cpu" else 1e-4
    )
    assert output.sqnr_db == pytest.approx(20 * float((r.norm() / (r - c).norm()).log10()), rel=1e-6)


def test_flow_lists_the_promotions_of_torch() -> None:
    """With all weights in bfloat16, torch adds a router's bias to float32 scores. No other call has several dtypes."""
    found = []

    class Promotions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **kwargs or {})
            given = {
                each.dtype for each in args if isinstance(each, torch.Tensor) and each.is_floating_point() and each.ndim
            }
            if len(given) > 1 and isinstance(output, torch.Tensor) and output.is_floating_point():
                found.extend((func.__name__.strip("_"), dtype, output.dtype) for dtype in given - {output.dtype})
            return output

    module, inputs = with_router_bias()
    session = de.open(module, inputs=inputs)
    session.cast("*", "bfloat16")
    rows = {(row.operation, getattr(torch, row.source), getattr(torch, row.target)) for row in session.flow()}
    by_hand, inputs = with_router_bias()
    persistent = by_hand.state_dict(keep_vars=True).values()
    for tensor in persistent:
        tensor.data = tensor.data.bfloat16()
    with torch.no_grad(), Promotions():
        by_hand(**inputs)
    assert rows == set(found)
    assert rows >= {("add", torch.bfloat16, torch.float32)}


@pytest.mark.parametrize("masked", [False, True], ids=["mask of forward", "mask of inputs"])
def test_drift_of_a_cast_head_ignores_padded_rows_of_the_encoder(masked: bool) -> None:
    """Without a mode, torch's fast path would set the padded rows to 0. The expected drift is over the other rows."""
    module, inputs = padded()
    real = inputs["input_ids"] != 0
    if masked:
        inputs["attention_mask"] = real.long()
    other, _ = padded()
    weight = other.head.weight.data
    scale = weight.abs().amax(1, keepdim=True) / 127
    other.head.weight.data = (weight / scale).round() * scale
    with torch.no_grad(), Watched():  # a mode of any kind turns the fast path off
        r, c = (each(**inputs)["logits"].double() for each in (module, other))
    p, q = r.log_softmax(-1), c.log_softmax(-1)
    each = (p.exp() * (p - q)).sum(-1)
    expected = float(each[real].mean())
    session = de.open(module, inputs=inputs)
    session.cast("head", "float64")
    assert session.drift().output.kl_mean < 1e-12
    session.undo()
    session.cast("head.weight", "int8")
    output = session.drift().output
    assert output.kl_mean == pytest.approx(expected, rel=1e-4)
    assert (output.top1_agreement, output.positions) == (1, 16)
    session.undo()
    scan = session.scan(["int8"], exact=True)
    assert scan.scores()["head.weight", "int8"] == pytest.approx(output.kl_mean, rel=1e-9)


class Watched(TorchFunctionMode):
    """Does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})
