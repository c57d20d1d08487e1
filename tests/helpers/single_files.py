"""Single files of tiny diffusion models, in the layouts of their first authors, made by hand from pipelines of diffusers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
_UNET = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2", "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0", "conv_out": "out.2", "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}  # fmt: skip
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def _renamed(name: str, table: dict[str, str]) -> str:
    """Return a name in which the longest matching beginning is replaced."""
    found = [key for key in table if name == key or name.startswith(f"{key}.")]
    key = max(found, key=len)
    return table[key] + name.removeprefix(key)


def unet_name(name: str, layers: int, blocks: int) -> str:
    """Return the name of a UNet's tensor in Stable Diffusion's own code. layers: of each block. blocks: how many blocks go down."""
    if (found := re.match(r"(down|up)_blocks\.(\d+)\.(\w+?)\.(\d+|conv)\.?(.*)", name)) is not None:
        way, block, part, index, rest = found.groups()
        down = way == "down"
        per_block = layers + 1
        if part in ("downsamplers", "upsamplers"):
            rest = rest.removeprefix("conv.")
            if down:
                return f"input_blocks.{1 + int(block) * per_block + layers}.0.op.{rest}"
            with_attention = int(block) > 0  # the first block up of the tiny model has none
            return f"output_blocks.{int(block) * per_block + layers}.{2 if with_attention else 1}.conv.{rest}"
        number = int(block) * per_block + int(index) + (1 if down else 0)
        where = f"{'input' if down else 'output'}_blocks.{number}"
        if part == "resnets":
            return f"{where}.0.{_renamed(rest, _RESNET)}"
        return f"{where}.1.{rest}"
    if (found := re.match(r"mid_block\.(resnets|attentions)\.(\d+)\.(.*)", name)) is not None:
        part, index, rest = found.groups()
        if part == "attentions":
            return f"middle_block.1.{rest}"
        return f"middle_block.{2 * int(index)}.{_renamed(rest, _RESNET)}"
    return _renamed(name, _UNET)


def vae_name(name: str, blocks: int) -> str:
    """Return the name of a VAE's tensor in Stable Diffusion's own code. blocks: how many go up."""
    name = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", name)
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"up_blocks\.(\d+)\.resnets\.(\d+)", lambda m: f"up.{blocks - 1 - int(m[1])}.block.{m[2]}", name)
    name = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{blocks - 1 - int(m[1])}.upsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    if (found := re.match(r"(\w+)\.mid_block\.attentions\.0\.(.*)", name)) is not None:
        return f"{found[1]}.mid.attn_1.{_renamed(found[2], _VAE_ATTENTION)}"
    return name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")


def stable_diffusion(pipeline: Any, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a pipeline of Stable Diffusion 1 as a single file in its first layout: attention of the VAE as 1 x 1 convolutions."""
    layers = pipeline.unet.config.layers_per_block
    layers = layers if isinstance(layers, int) else layers[0]
    tensors = {}
    for name, tensor in pipeline.unet.state_dict().items():
        blocks = len(pipeline.unet.config.down_block_types)
        tensors[f"model.diffusion_model.{unet_name(name, layers, blocks)}"] = tensor
    for name, tensor in pipeline.vae.state_dict().items():
        own = vae_name(name, len(pipeline.vae.config.up_block_types))
        matrix = ".attn_1." in own and tensor.ndim == 2
        tensors[f"first_stage_model.{own}"] = tensor[:, :, None, None] if matrix else tensor
    for name, tensor in pipeline.text_encoder.state_dict().items():
        tensors[f"cond_stage_model.transformer.text_model.{name.removeprefix('text_model.')}"] = tensor
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, path)
    return path


_SD3 = {
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "pos_embed.proj": "x_embedder.proj",
    "pos_embed.pos_embed": "pos_embed",
    "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}
_SD3_BLOCK = {
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
}
_JOINED = {"x_block": ("to_q", "to_k", "to_v"), "context_block": ("add_q_proj", "add_k_proj", "add_v_proj")}


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    """Exchange the halves that scale and shift, which SD3 has in the other order."""
    scale, shift = tensor.chunk(2)
    return torch.cat([shift, scale])


def sd3_transformer(transformer: Any, path: Path, dtype: torch.dtype) -> Path:
    """Save a transformer of SD3 in its first layout: query, key and value are one matrix."""
    state = transformer.state_dict()
    last = transformer.config.num_layers - 1
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        block = re.match(r"transformer_blocks\.(\d+)\.(.*)", name)
        if block is None:
            own = _renamed(name, _SD3)
            tensors[own] = _swapped(tensor) if own.startswith("final_layer.adaLN") else tensor
        elif not re.match(r"attn\.(to_[qkv]|add_[qkv]_proj)\.", block[2]):
            own = f"joint_blocks.{block[1]}.{_renamed(block[2], _SD3_BLOCK)}"
            swapped = int(block[1]) == last and "context_block.adaLN" in own
            tensors[own] = _swapped(tensor) if swapped else tensor
    for index in range(last + 1):
        for side, parts in _JOINED.items():
            for kind in ("weight", "bias"):
                names = [f"transformer_blocks.{index}.attn.{part}.{kind}" for part in parts]
                tensors[f"joint_blocks.{index}.{side}.attn.qkv.{kind}"] = torch.cat([state[name] for name in names])
    prefixed = {f"model.diffusion_model.{name}": tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(prefixed, path)
    return path
