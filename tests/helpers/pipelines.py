"""Tiny diffusion pipelines of seven families, with random weights. They need the package diffusers."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _clip(projection: int | None = None) -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, projection_dim=32,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(config)


def _t5(multilingual: bool = False) -> Any:
    import transformers

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    if multilingual:
        return transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes))
    return transformers.T5EncoderModel(transformers.T5Config(**sizes))


def _clip_tokenizer() -> Any:
    import transformers

    letters = {letter: at + 3 for at, letter in enumerate(string.ascii_lowercase)}
    ends = {f"{letter}</w>": at + 30 for at, letter in enumerate(string.ascii_lowercase)}
    vocabulary = {"<|startoftext|>": 0, "<pad>": 1, "<|endoftext|>": 2, **letters, **ends}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16)


def _t5_tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [(one, -3.0) for one in " ▁" + string.ascii_lowercase]
    tokenizer = Tokenizer(models.Unigram(pieces, 2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=16
    )


def _vae(channels: int = 4, **more: Any) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=[32, 64], in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2, latent_channels=channels, sample_size=32, **more,
    )  # fmt: skip


def sd15() -> Any:
    import diffusers

    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
    )  # fmt: skip
    return diffusers.StableDiffusionPipeline(
        vae=_vae(), text_encoder=_clip(), tokenizer=_clip_tokenizer(), unet=unet, safety_checker=None, feature_extractor=None,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1), requires_safety_checker=False,
    )  # fmt: skip


def sdxl() -> Any:
    import diffusers

    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2), projection_class_embeddings_input_dim=80, cross_attention_dim=64,
    )  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(force_upcast=True, scaling_factor=0.13025), text_encoder=_clip(), text_encoder_2=_clip(32),
        tokenizer=_clip_tokenizer(), tokenizer_2=_clip_tokenizer(), unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(steps_offset=1, timestep_spacing="leading"),
    )  # fmt: skip


def sd3() -> Any:
    import diffusers

    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4, qk_norm="rms_norm",
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False), text_encoder=_clip(32),
        tokenizer=_clip_tokenizer(), text_encoder_2=_clip(32), tokenizer_2=_clip_tokenizer(), text_encoder_3=_t5(),
        tokenizer_3=_t5_tokenizer(),
    )  # fmt: skip


def flux() -> Any:
    import diffusers

    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8], guidance_embeds=True,
    )  # fmt: skip
    return diffusers.FluxPipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(1, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False), text_encoder=_clip(),
        tokenizer=_clip_tokenizer(), text_encoder_2=_t5(), tokenizer_2=_t5_tokenizer(),
    )  # fmt: skip


def wan() -> Any:
    import diffusers

    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=32,
        freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return diffusers.WanPipeline(
        tokenizer=_t5_tokenizer(), text_encoder=_t5(multilingual=True), transformer=transformer, vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )  # fmt: skip


def ltx() -> Any:
    import diffusers

    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, num_attention_heads=4, attention_head_dim=8,
        cross_attention_dim=32, num_layers=1, caption_channels=32,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTXVideo(
        in_channels=3, out_channels=3, latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5, spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4, upsample_factor=(1,) * 4, timestep_conditioning=False, patch_size=1, patch_size_t=1,
        encoder_causal=True, decoder_causal=False,
    )  # fmt: skip
    vae.use_framewise_encoding = False
    return diffusers.LTXPipeline(
        tokenizer=_t5_tokenizer(), text_encoder=_t5(), transformer=transformer, vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def dit() -> Any:
    import diffusers

    transformer = diffusers.DiTTransformer2DModel(
        sample_size=16, num_layers=2, patch_size=4, attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=8,
        attention_bias=True, activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )  # fmt: skip
    return diffusers.DiTPipeline(transformer=transformer, vae=_vae(), scheduler=diffusers.DDIMScheduler())


def cogvideox() -> Any:
    """A table of positions has as many rows for tokens of the prompt as the pipeline pads a prompt to: 226."""
    import diffusers

    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=32,
        num_layers=1, sample_width=4, sample_height=4, sample_frames=9, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=226,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLCogVideoX(
        in_channels=3, out_channels=3, down_block_types=("CogVideoXDownBlock3D",) * 4, block_out_channels=(8,) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2,
    )  # fmt: skip
    return diffusers.CogVideoXPipeline(
        tokenizer=_t5_tokenizer(),
        text_encoder=_t5(),
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.DDIMScheduler(),
    )


def stable_audio() -> Any:
    import diffusers
    import transformers

    transformer = diffusers.StableAudioDiTModel(
        sample_size=4, in_channels=3, num_layers=2, attention_head_dim=4, num_key_value_attention_heads=2, out_channels=3,
        cross_attention_dim=4, time_proj_dim=8, global_states_input_dim=8, cross_attention_input_dim=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3, decoder_input_channels=3, audio_channels=2,
        channel_multiples=[2, 4], sampling_rate=4,
    )  # fmt: skip
    config = transformers.T5Config(vocab_size=64, d_model=4, d_kv=4, d_ff=37, num_layers=2, num_heads=2)
    return diffusers.StableAudioPipeline(
        vae=vae, text_encoder=transformers.T5EncoderModel(config), tokenizer=_t5_tokenizer(), transformer=transformer,
        projection_model=diffusers.StableAudioProjectionModel(4, 4, 0, 32),
        scheduler=diffusers.DPMSolverMultistepScheduler(solver_order=2),
    )  # fmt: skip


def audioldm() -> Any:
    import diffusers
    import transformers

    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=8, sample_size=32, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=(8, 16), class_embed_type="simple_projection", projection_class_embeddings_input_dim=8,
        class_embeddings_concat=True,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=[8, 16], in_channels=1, out_channels=1, norm_num_groups=8, latent_channels=4,
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
    )  # fmt: skip
    text = transformers.ClapTextConfig(
        hidden_size=8, intermediate_size=37, num_attention_heads=1, num_hidden_layers=1, vocab_size=64, projection_dim=8,
        bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    waves = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8, sampling_rate=16000, upsample_initial_channel=16, upsample_rates=[2, 2], upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3, 7], resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]], normalize_before=False,
    )  # fmt: skip
    return diffusers.AudioLDMPipeline(
        vae=vae, text_encoder=transformers.ClapTextModelWithProjection(text), tokenizer=_t5_tokenizer(), unet=unet,
        scheduler=diffusers.DDIMScheduler(), vocoder=transformers.SpeechT5HifiGan(waves),
    )  # fmt: skip


FURTHER: dict[str, Callable[[], Any]] = {"cogvideox": cogvideox, "stable_audio": stable_audio, "audioldm": audioldm}
"""Pipelines that need more than those of `FAMILIES`: a length of prompts, another output than pictures, other conditions."""
FAMILIES: dict[str, Callable[[], Any]] = {
    "sd15": sd15, "sdxl": sdxl, "sd3": sd3, "flux": flux, "wan": wan, "ltx": ltx, "dit": dit,
}  # fmt: skip
COMPONENTS = [(name, "vae") for name in FAMILIES] + [
    (name, "unet" if name.startswith("sd1") or name == "sdxl" else "transformer") for name in FAMILIES
]


def make_pipeline(family: str) -> Any:
    """Return a pipeline, whose models are in evaluation mode and have the same weights each time."""
    torch.manual_seed(0)
    pipeline = (FAMILIES | FURTHER)[family]()
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


def save_pipeline(family: str, folder: Path) -> Path:
    """Save a pipeline of a family in its usual layout, unless it is there, and return its folder."""
    if not (folder / family).is_dir():
        make_pipeline(family).save_pretrained(folder / family)
    return folder / family
