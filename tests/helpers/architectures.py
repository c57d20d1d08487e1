"""Small randomly initialised models of many architectures: what the execution tests run on.

Each entry makes a module in float32 and inputs for it, from real transformers configurations or plain torch.
`python -m tests.helpers.architectures` prints how all of them fare in all palettes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tests.helpers.measured_on import placed
from torch import nn
from torch.overrides import TorchFunctionMode

from dtype_engine import Recipe, Rule
from dtype_engine.runtime.scan.routing import record_topk

VOCABULARY = 64


@dataclass(frozen=True)
class Entry:
    """`make` gives a module in evaluation mode and the keyword arguments or the tuple to call it with."""

    family: str
    make: Callable[[], tuple[nn.Module, Any]]


def tokens(length: int = 12, batch: int = 1, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return placed(torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0)))


def picture(size: int = 32, channels: int = 3) -> torch.Tensor:
    return placed(torch.randn(1, channels, size, size, generator=torch.Generator().manual_seed(0)))


def _text(model: str, config: str, **settings: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        made = getattr(transformers, config)(vocab_size=VOCABULARY, **settings)
        ids = tokens()
        return getattr(transformers, model)(made), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return make


def _decoded(model: str, config: str, **settings: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        made = getattr(transformers, config)(vocab_size=VOCABULARY, **settings)
        return getattr(transformers, model)(made), {"input_ids": tokens(), "decoder_input_ids": tokens(6)}

    return make


def _vision(model: str, config: str, **settings: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        made = getattr(transformers, config)(**settings)
        return getattr(transformers, model)(made), {"pixel_values": picture()}

    return make


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_GROUPED = {**_SMALL, "num_key_value_heads": 1}


def _whisper() -> tuple[nn.Module, Any]:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=16, max_source_positions=20,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    sound = torch.randn(1, 16, 40, generator=torch.Generator().manual_seed(0))
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": sound,
        "decoder_input_ids": tokens(6),
    }


def _blip() -> tuple[nn.Module, Any]:
    config = transformers.BlipConfig(
        text_config={
            **_SMALL, "vocab_size": VOCABULARY, "encoder_hidden_size": 32, "max_position_embeddings": 32,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 2,
        },
        vision_config={**_SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )  # fmt: skip
    model = transformers.BlipForConditionalGeneration(config)
    return model, {"pixel_values": picture(), "input_ids": tokens(6)}


def _clip() -> tuple[nn.Module, Any]:
    config = transformers.CLIPConfig(
        text_config={
            **_SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={**_SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )  # fmt: skip
    return transformers.CLIPModel(config), {"pixel_values": picture(), "input_ids": tokens(6)}


def _llava() -> tuple[nn.Module, Any]:
    config = transformers.LlavaConfig(
        text_config={**_GROUPED, "model_type": "llama", "vocab_size": VOCABULARY},
        vision_config={
            **_SMALL,
            "model_type": "clip_vision_model",
            "image_size": 32,
            "patch_size": 16,
            "projection_dim": 16,
        },
        image_token_index=VOCABULARY - 1,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    ids = tokens(8, vocabulary=VOCABULARY - 1)
    ids[:, 1:5] = VOCABULARY - 1
    return model, {"pixel_values": picture(), "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _wav2vec2() -> tuple[nn.Module, Any]:
    config = transformers.Wav2Vec2Config(
        **_SMALL, vocab_size=32, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    sound = torch.randn(1, 400, generator=torch.Generator().manual_seed(0))
    return transformers.Wav2Vec2ForCTC(config), {"input_values": sound}


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.recurrent = kind(16, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(ids))[0])


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        return self.norm(hidden + self.attention(hidden, hidden, hidden)[0])


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(ids))


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, groups=2, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10),
    )  # fmt: skip


_MAMBA = {"hidden_size": 32, "num_hidden_layers": 2}

ZOO: dict[str, Entry] = {
    "llama": Entry("decoder", _text("LlamaForCausalLM", "LlamaConfig", **_GROUPED, tie_word_embeddings=True)),
    "gpt2": Entry("decoder", _text("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=2, n_positions=32)),
    "gemma3": Entry("decoder", _text("Gemma3ForCausalLM", "Gemma3TextConfig", **_GROUPED, head_dim=16)),
    "qwen3": Entry("decoder", _text("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, head_dim=16)),
    "phi3": Entry("decoder", _text("Phi3ForCausalLM", "Phi3Config", **_GROUPED, pad_token_id=0)),
    "falcon": Entry(
        "decoder",
        _text("FalconForCausalLM", "FalconConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
    ),
    "gpt_neox": Entry("decoder", _text("GPTNeoXForCausalLM", "GPTNeoXConfig", **_SMALL)),
    "bert": Entry("encoder", _text("BertForMaskedLM", "BertConfig", **_SMALL)),
    "roberta": Entry("encoder", _text("RobertaForSequenceClassification", "RobertaConfig", **_SMALL, pad_token_id=1)),
    "deberta": Entry(
        "encoder",
        _text("DebertaV2Model", "DebertaV2Config", **_SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    ),
    "t5": Entry(
        "encoder-decoder",
        _decoded("T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2),
    ),
    "bart": Entry(
        "encoder-decoder",
        _decoded(
            "BartForConditionalGeneration", "BartConfig", d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
            max_position_embeddings=32,
        ),
    ),
    "whisper": Entry("encoder-decoder", _whisper),
    "vit": Entry("vision", _vision("ViTForImageClassification", "ViTConfig", **_SMALL, image_size=32, patch_size=8)),
    "resnet": Entry(
        "vision",
        _vision(
            "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
            layer_type="basic",
        ),
    ),
    "convnext": Entry(
        "vision",
        _vision(
            "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
            patch_size=4,
        ),
    ),
    "swin": Entry(
        "vision",
        _vision(
            "SwinForImageClassification", "SwinConfig", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2],
            num_heads=[2, 2], window_size=4,
        ),
    ),
    "blip": Entry("multimodal", _blip),
    "clip": Entry("multimodal", _clip),
    "llava": Entry("multimodal", _llava),
    "wav2vec2": Entry("audio", _wav2vec2),
    "mixtral": Entry("mixture of experts", _text("MixtralForCausalLM", "MixtralConfig", **_GROUPED, num_local_experts=4)),
    "qwen3_moe": Entry(
        "mixture of experts",
        _text(
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=24,
        ),
    ),
    "deepseek_v3": Entry(
        "mixture of experts",
        _text(
            "DeepseekV3ForCausalLM", "DeepseekV3Config", **_SMALL, num_key_value_heads=2, moe_intermediate_size=24,
            n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16,
            kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_shared_experts=1,
        ),
    ),
    "mamba": Entry("state space", _text("MambaForCausalLM", "MambaConfig", **_MAMBA, state_size=8)),
    "mamba2": Entry(
        "state space",
        _text(
            "Mamba2ForCausalLM", "Mamba2Config", **_MAMBA, state_size=8, num_heads=4, head_dim=16, n_groups=1,
            chunk_size=8,
        ),
    ),
    "qwen3_next": Entry(
        "linear attention",
        _text(
            "Qwen3NextForCausalLM", "Qwen3NextConfig", **_GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=24, shared_expert_intermediate_size=24, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=16, linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "torch_encoder": Entry("plain torch", lambda: (_Encoder(), (tokens(),))),
    "torch_attention": Entry("plain torch", lambda: (_Attention(), (tokens(),))),
    "torch_lstm": Entry("plain torch", lambda: (_Recurrent(nn.LSTM), (tokens(),))),
    "torch_gru": Entry("plain torch", lambda: (_Recurrent(nn.GRU), (tokens(),))),
    "torch_convolutional": Entry("plain torch", lambda: (_convolutional(), (picture(),))),
}  # fmt: skip


def make(name: str) -> tuple[nn.Module, Any]:
    """Return a new model of the zoo, always with the same weights, and its inputs, on the device of the tests."""
    torch.manual_seed(0)
    module, inputs = ZOO[name].make()
    return placed((module.eval(), inputs))


class _Margins(TorchFunctionMode):
    """Records the margins of all top-k choices: the k-th score minus the next one, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        selection = record_topk(0, args, kwargs or {}) if func.__name__ == "topk" else None
        if selection is not None:
            self.found.append(selection.margins[torch.isfinite(selection.margins)])
        return func(*args, **kwargs or {})


def decided(
    name: str, sequences: int, length: int, apart: float = 0.1, steps: int = 150
) -> tuple[nn.Module, torch.Tensor, float]:
    """Train a mixture of experts a little to noisy labels, so that each token's k-th score is `apart` from the next. Returns the
    module, its inputs [sequences, length], and the smallest margin.
    """
    module, _ = make(name)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (sequences, length), generator=generator)
    follows = placed(torch.randperm(VOCABULARY, generator=generator)[ids])
    ids = placed(ids)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for _ in range(steps):
        noise = placed(torch.randint(0, VOCABULARY, ids.shape, generator=generator))
        labels = torch.where(placed(torch.rand(ids.shape, generator=generator)) < 0.5, follows, noise)
        optimizer.zero_grad()
        with _Margins() as margins:
            logits = module(input_ids=ids).logits
        near = sum(torch.relu(apart - found).sum() for found in margins.found) / ids.numel()
        (nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 10 * near).backward()
        optimizer.step()
    with torch.enable_grad(), _Margins() as margins:
        module(input_ids=ids)
    return module, ids, min(float(found.detach().min()) for found in margins.found if len(found))


PALETTES = {
    "bf16": ["bfloat16"],
    "fp16": ["float16"],
    "fp32+bf16": ["float32", "bfloat16"],
    "all computed": ["float64", "float32", "bfloat16", "float16"],
    "fp32+bf16+fp8": ["float32", "bfloat16", "float8_e4m3fn"],
}
RECIPES = 2


def random_recipe(session: Any, palette: list[str], seed: int) -> Recipe:
    chooser = random.Random(seed)
    return Recipe(
        tuple(
            Rule(name, chooser.choice(palette))
            for name, tensor in session.tree.tensors.items()
            if tensor.castable and tensor.persistent
        )
    )


def main() -> None:
    """Print architectures x palettes: the lowest SQNR over the recipes, or what went wrong."""
    import dtype_engine as de

    print(f"{'architecture':<20} {'family':<19}" + "".join(f"{name:>16}" for name in PALETTES) + "   dB")
    finished = kernel_errors = other = 0
    for name, entry in ZOO.items():
        module, inputs = make(name)
        session = de.open(module, inputs=inputs)
        cells = []
        for palette in PALETTES.values():
            worst: list[float] = []
            for seed in range(RECIPES if len(palette) > 1 else 1):
                session.apply(random_recipe(session, palette, seed))
                try:
                    worst.append(session.drift().output.sqnr_db)
                    finished += 1
                except de.KernelError:
                    kernel_errors += 1
                except de.UserError:
                    other += 1
            cells.append(f"{min(worst):.1f}" if worst else "failed")
        print(f"{name:<20} {entry.family:<19}" + "".join(f"{cell:>16}" for cell in cells))
    print(f"{len(ZOO)} architectures: {finished} runs finished, {kernel_errors} kernel errors, {other} other failures")


if __name__ == "__main__":
    main()
