"""The forms that models have on disk and in Python, each made for real, with what a loader that is not ours reads from it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import Adapter, matrices, pair, save_adapter
from tests.helpers.hub_server import hub_of
from tests.helpers.quantized import CASES
from tests.helpers.quantized.block_scaled import FP4_EXPERT
from tests.helpers.quantized.case import Case
from torch import nn

from . import net

HERE = Path(__file__).parent
Tensors = dict[str, torch.Tensor]


@dataclass
class Made:
    """One model in one form.

    model, options: as on the command line. tensors: by the names of the files (or of the module), as `loader` reads them.
    module: the model in float32, made without our code; None where nothing but us runs on this form. inputs: the arguments of
    its forward pass. parameters: how many it has. fixed: tensors that no cast takes. stored: bytes of tensors that are stored
    in a form of their own.
    """

    model: str
    tensors: Tensors
    loader: str
    parameters: int
    options: tuple[str, ...] = ()
    module: nn.Module | None = None
    inputs: dict[str, torch.Tensor] | tuple[torch.Tensor, ...] | None = None
    inputs_file: Path | None = None
    fixed: frozenset[str] = frozenset()
    stored: dict[str, int] = field(default_factory=dict)
    scales: Tensors = field(default_factory=dict)
    """Tensors of the files that belong to others of them."""
    packed: Tensors = field(default_factory=dict)
    """The tensors by the names of the module, where loading packs several of the files into one."""
    unloaded: frozenset[str] = frozenset()
    """Names of tensors of the files that transformers does not load."""
    folder: Path | None = None
    """Folder that has to be the current one."""
    hub: Path | None = None
    """The folder that a hub has to serve as `org/name`."""
    live: bool = False
    """It has no name on a command line."""
    mixes: bool = False
    """Whether its scheme's runtimes fuse no siblings, so that these may differ in format."""
    elsewhere: int = 0
    """How many tensors are in files outside of its folder."""
    linears: frozenset[str] | None = frozenset()
    """The castable tensors that linear layers hold, under every name; None where nothing says which classes there are."""

    @property
    def runs(self) -> nn.Module:
        """The module of a form that runs."""
        assert self.module is not None, "it ran, and nothing says what is right"
        return self.module

    @property
    def castable(self) -> Tensors:
        """The tensors that a cast takes."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if tensor.is_floating_point() and name not in self.fixed
        }

    @property
    def loaded(self) -> Tensors:
        """The tensors as a model that was loaded has them."""
        return self.packed or self.tensors

    @property
    def castable_loaded(self) -> Tensors:
        """Those of them that a cast takes."""
        return {name: tensor for name, tensor in self.packed.items() if tensor.is_floating_point()} or self.castable

    @property
    def castable_each(self) -> Tensors:
        """Those that a cast takes, parts of what is packed each by itself."""
        parts = {name: tensor for name, tensor in self.castable.items() if ".experts." in name}
        whole = {name: tensor for name, tensor in self.castable_loaded.items() if ".experts." not in name}
        return parts | whole if self.packed else self.castable

    def stored_bytes(self) -> int:
        """Bytes as stored, tied tensors once."""
        return sum(self.stored.get(name, tensor.nbytes) for name, tensor in distinct(self.tensors).items())

    def __post_init__(self) -> None:
        if self.linears is not None and self.module is not None:
            self.linears = linear_tensors(self.module)

    def planned_bytes(self, dtype: torch.dtype, only: Callable[[str], bool] = lambda name: True) -> int:
        """Bytes with every tensor that a cast takes (of those named) in `dtype`."""
        castable = self.castable
        return sum(
            tensor.numel() * dtype.itemsize if name in castable and only(name) else self.stored.get(name, tensor.nbytes)
            for name, tensor in distinct(self.tensors).items()
        )


def distinct(tensors: Tensors) -> Tensors:
    """Tensors that share all their memory once, under the first name."""
    seen: set[Any] = set()
    kept: Tensors = {}
    for name, tensor in tensors.items():
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor
    return kept


def linear_tensors(module: nn.Module) -> frozenset[str]:
    """Names of what linear layers hold, under every name of a tied one."""
    inside = {
        id(tensor)
        for child in module.modules()
        if type(child) is nn.Linear
        for tensor in child.parameters(recurse=False)
    }
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, tensor in named if id(tensor) in inside)


def parameter_count(module: nn.Module) -> int:
    """As people count: every distinct parameter once."""
    return count(module.parameters())


def count(tensors: Iterable[torch.Tensor]) -> int:
    return sum(map(torch.numel, tensors))


# -- without a configuration: a network of the user's own ---------------------------------------------------------------


def own_net() -> net.Net:
    return net.Net().eval()


def _lone(folder: Path, write: Callable[[Tensors, Path], None], suffix: str, read: Callable[[Path], Tensors]) -> Made:
    path = folder / f"net{suffix}"
    write(own_net().state_dict(), path)
    loader = "safetensors.torch.load_file" if suffix == ".safetensors" else "torch.load"
    return Made(str(path), read(path), loader, parameter_count(own_net()), linears=None)


def _torch_load(path: Path) -> Tensors:
    found = torch.load(path, weights_only=True)
    found = found.get("model", found)
    return dict(found.get("state_dict", found))


def _trainers(folder: Path) -> Made:
    """As training scripts leave it: deeper nested, beside the optimizer's tensors, with a name that ends in no suffix of ours."""

    def write(held: Tensors, path: Path) -> None:
        moments = {number: {"exp_avg": torch.zeros(3), "step": 7} for number in range(40)}
        torch.save({"epoch": 3, "optimizer": {"state": moments}, "model": {"args": {}, "state_dict": held}}, path)

    return _lone(folder, write, ".pth.tar", _torch_load)


def _deflated(tensors: Tensors, path: Path) -> None:
    torch.save(tensors, path.with_suffix(".plain"))
    with (
        zipfile.ZipFile(path.with_suffix(".plain")) as plain,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    path.with_suffix(".plain").unlink()


def _views(tensors: Tensors, path: Path) -> None:
    """Several views of one storage: slices, a transposed one, and one name for the whole of another."""
    whole = torch.randn(40, 16, generator=torch.Generator().manual_seed(9))
    more = {"view.rows": whole[4:12], "view.turned": whole[12:28].T, "view.columns": whole[:, 3:5]}
    tied = {"tied.one": tensors["out.weight"], "tied.two": tensors["out.weight"]}
    torch.save({**tensors, **more, **tied}, path)


def _pth(folder: Path, write: Callable[[Tensors, Path], None]) -> Made:
    made = _lone(folder, write, ".pth", _torch_load)
    shared = {"out.weight", "tied.one", "tied.two"}
    if "tied.one" in made.tensors:
        made.parameters += count(tensor for name, tensor in made.tensors.items() if name.startswith("view."))
        assert len({made.tensors[name].data_ptr() for name in shared}) == 1
    return made


def _whole_module(folder: Path) -> Made:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    path = folder / "whole.pt"
    torch.save(module, path)
    inputs = {"input": torch.randn(2, 6, generator=torch.Generator().manual_seed(1))}
    file = folder / "inputs.safetensors"
    save_file(inputs, file)
    loaded: nn.Module = torch.load(path, weights_only=False)
    return Made(
        str(path), dict(loaded.state_dict()), "torch.load", parameter_count(module), ("--trust-pickle",),
        module=loaded, inputs=inputs, inputs_file=file,
    )  # fmt: skip


# -- Hugging Face folders ----------------------------------------------------------------------------------------------


def _llama(**settings: Any) -> Any:
    import transformers

    transformers.set_seed(0)
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "eos_token_id": None,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **settings})).eval()


def _ids(folder: Path, rows: int = 2) -> tuple[Tensors, Path]:
    inputs = {"input_ids": torch.randint(0, 64, (rows, 12), generator=torch.Generator().manual_seed(7))}
    file = folder.parent / "inputs.safetensors"
    save_file(inputs, file)
    return inputs, file


def _of_folder(folder: Path, inputs: Tensors, file: Path, **more: Any) -> Made:
    """A folder that transformers wrote, read back by transformers and by the loader of its files."""
    import transformers

    model_class = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    module = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        tensors |= load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    loader = "safetensors.torch.load_file" if next(folder.glob("*.safetensors"), None) else "torch.load"
    return Made(
        str(folder), tensors, loader, parameter_count(module), module=module, inputs=inputs, inputs_file=file, **more
    )


def _llama_folder(folder: Path, shard: str = "1GB", dtype: torch.dtype = torch.float32, **settings: Any) -> Made:
    target = folder / "llama"
    _llama(**settings).to(dtype).save_pretrained(target, max_shard_size=shard)
    return _of_folder(target, *_ids(target))


def _on_hub(folder: Path) -> Made:
    made = _llama_folder(folder)
    made.model, made.hub, made.module = "hf://org/name", Path(made.model), None
    return made


def _mixed_folder(folder: Path) -> Made:
    made = _llama_folder(folder)
    file = Path(made.model) / "model.safetensors"
    wide = {"norm": torch.float32, "mlp": torch.float16}
    tensors = {
        name: tensor.to(next((dtype for part, dtype in wide.items() if part in name), torch.bfloat16))
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return _of_folder(Path(made.model), *_ids(Path(made.model)))


def _bin_folder(folder: Path, parts: int) -> Made:
    target = folder / "llama"
    model = _llama(tie_word_embeddings=True)
    model.save_pretrained(target)
    (target / "model.safetensors").unlink()
    state = model.state_dict()  # the tied weight under both its names, as `torch.save(model.state_dict())` has it
    if parts == 1:
        torch.save(state, target / "pytorch_model.bin")
    else:
        names = list(state)
        files = {f"pytorch_model-{n + 1:05}-of-{parts:05}.bin": names[n::parts] for n in range(parts)}
        for file, held in files.items():
            torch.save({name: state[name].clone() for name in held if name != "lm_head.weight"}, target / file)
        weight_map = {name: file for file, held in files.items() for name in held if name != "lm_head.weight"}
        index = {"metadata": {}, "weight_map": weight_map}
        (target / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return _of_folder(target, *_ids(target))


def _draft_head_folder(folder: Path) -> Made:
    """A folder with a draft head, which transformers does not load with the model. Some of its layers keep recurrent states."""
    from tests.helpers import draft_heads

    target = folder / "head"
    head = draft_heads.with_head("qwen3_next", target)
    made = _of_folder(target, *_ids(target, rows=1))  # recurrent states are rounded in one sequence at a time
    made.parameters = count(made.tensors.values())
    made.packed = dict(made.runs.state_dict()) | head
    made.unloaded = frozenset(head)
    assert made.linears is not None
    made.linears |= {f"{name}.weight" for name in draft_heads.linear_layers(head)}
    return made


def _zoo_folder(folder: Path, name: str) -> Made:
    from tests.helpers import architectures

    module, inputs = architectures.make(name)
    target = folder / name
    module.save_pretrained(target)
    file = folder / "inputs.safetensors"
    given = {key: value.contiguous() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    save_file(given, file)
    made = _of_folder(target, given, file)
    if any(".experts.0." in name for name in made.tensors):
        made.packed = dict(made.runs.state_dict())
    return made


# -- other programs' files ---------------------------------------------------------------------------------------------


def _gguf(folder: Path, kind: str) -> Made:
    import gguf
    import numpy as np

    path = folder / f"tiny-{kind}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    random = np.random.default_rng(0)
    shapes = {"blk.0.attn_q.weight": (64, 256), "blk.0.ffn_down.weight": (32, 256), "output.weight": (16, 256)}
    writer.add_tensor("blk.0.attn_norm.weight", random.normal(size=64).astype(np.float32))
    own = None if kind == "f16" else gguf.GGMLQuantizationType[kind.upper()]
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32)
        if own is None:
            writer.add_tensor(name, values.astype(np.float16))
        elif kind == "q4_k":  # gguf-py only reads these blocks: any bytes are some weights, with finite scales
            blocks = random.integers(0, 256, (shape[0], shape[1] // 256 * 144), dtype=np.uint8)
            blocks.reshape(-1, 144)[:, :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
            writer.add_tensor(name, blocks, raw_dtype=own)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, own), raw_dtype=own)
    _write(writer)
    tensors: Tensors = {}
    stored: dict[str, int] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(extent) for extent in reversed(tensor.shape.tolist()))
        plain = tensor.tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        values = tensor.data if plain else gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = torch.from_numpy(np.array(values)).reshape(shape)
        if not plain:
            stored[tensor.name] = int(tensor.n_bytes)
    parameters = count(tensors.values())
    return Made(str(path), tensors, "gguf.quants.dequantize", parameters, stored=stored, linears=None)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _of_components(pipeline: Path) -> Tensors:
    """The tensors of all folders of a pipeline, with the folder's name before each."""
    return {
        f"{path.parent.name}.{name}": tensor
        for path in sorted(pipeline.glob("*/*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _diffusers(folder: Path) -> Made:
    import transformers

    target = folder / "pipeline"
    transformers.set_seed(1)
    encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16,
        )
    )  # fmt: skip
    encoder.save_pretrained(target / "text_encoder")
    generator = torch.Generator().manual_seed(2)
    for component in ("unet", "vae"):
        (target / component).mkdir()
        held = {
            f"{component}_in.weight": torch.randn(6, 4, generator=generator),
            "out.bias": torch.randn(4, generator=generator),
        }
        save_file(held, target / component / "diffusion_pytorch_model.safetensors")
        (target / component / "config.json").write_text(json.dumps({"_class_name": component}))
    (target / "scheduler").mkdir()
    (target / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')
    (target / "tokenizer").mkdir()
    (target / "tokenizer" / "vocab.json").write_text("{}")
    index = {
        "_class_name": "StableDiffusionPipeline", "text_encoder": ["transformers", "CLIPTextModel"],
        "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "DDIMScheduler"], "tokenizer": ["transformers", "CLIPTokenizer"],
    }  # fmt: skip
    (target / "model_index.json").write_text(json.dumps(index))
    tensors = _of_components(target)
    parameters = count(tensor for tensor in tensors.values() if tensor.is_floating_point())
    return Made(str(target), tensors, "safetensors.torch.load_file", parameters, linears=None)


class _Pipeline(nn.Module):
    """A pipeline of diffusers, its models under the names of their folders: (seed, settings of a call) to pictures [B, 3, H, W]."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        pipeline.set_progress_bar_config(disable=True)
        self.__dict__["pipeline"] = pipeline
        for name, part in pipeline.components.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part.eval())

    def forward(self, seed: torch.Tensor, **call: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        pictures: torch.Tensor = self.__dict__["pipeline"](**call, generator=generator, output_type="pt")[0]
        return pictures


def _pipeline(folder: Path) -> Made:
    """A pipeline that diffusers wrote and runs itself. What it is run on is what the program chooses."""
    import diffusers
    from tests.helpers.pipelines import save_pipeline

    import dtype_engine as de

    target = save_pipeline("sd15", folder)
    tensors = _of_components(target)
    module = _Pipeline(diffusers.StableDiffusionPipeline.from_pretrained(target))
    (batch,) = de.open(str(target)).need_inputs().batches
    return Made(
        str(target), tensors, "safetensors.torch.load_file", parameter_count(module), module=module,
        inputs=dict(batch.kwargs),
    )  # fmt: skip


def _adapter(folder: Path) -> Made:
    target = folder / "adapter"
    target.mkdir()
    generator = torch.Generator().manual_seed(4)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": torch.randn(4, 32, generator=generator),
        f"{prefix}.lora_B.weight": torch.randn(32, 4, generator=generator),
    }
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "base_model_name_or_path": "someone/llama", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"],
    }  # fmt: skip
    (target / "adapter_config.json").write_text(json.dumps(config))
    found = load_file(target / "adapter_model.safetensors")
    return Made(str(target), found, "safetensors.torch.load_file", count(tensors.values()), linears=None)


def _merged_adapter(folder: Path) -> Made:
    """An adapter that opens onto its base. What opens is compared with a model into which plain torch merged it."""
    base = _llama_folder(folder)
    model, tensors, stored = base.runs, load_file(Path(base.model) / "model.safetensors"), {}
    of_adapter: Tensors = {}
    for seed, layer in enumerate(("self_attn.q_proj", "mlp.down_proj")):
        name = f"model.layers.1.{layer}"
        outputs, inputs = tensors[f"{name}.weight"].shape
        # Products of multiples of 1/64 are exact, so that base and product are rounded once, in whichever order they are added.
        down, up = (torch.round(64 * each) / 64 for each in matrices(outputs, inputs, seed=seed))
        of_adapter |= pair(name, down, up)
        stored[f"{name}.weight"] = tensors[f"{name}.weight"].nbytes + down.nbytes + up.nbytes
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + 2.5 * (up @ down)
    model.load_state_dict(tensors)
    target = save_adapter(folder / "adapter", base.model, Adapter(of_adapter, {}))
    more: dict[str, Any] = {"stored": stored, "elsewhere": len(tensors)}
    return dataclasses.replace(base, model=str(target), tensors=tensors, loader="B @ A by hand", **more)


# -- quantized already -------------------------------------------------------------------------------------------------

_UP = "model.layers.0.mlp.up_proj"
_PLACES = {
    "a.0.x": _UP,
    "a.1.x": "model.layers.0.mlp.gate_proj",
    "a.1*": "model.layers.0.mlp.gate*",
    "x": _UP,
    "m": _UP,
}
"""The modules, and patterns of them, that the cases of `helpers/quantized` name, and the modules that have their weights here."""


def _placed(name: str) -> str:
    """The name of a tensor, or a pattern of modules, in the model."""
    stem = next((stem for stem in _PLACES if name == stem or name.startswith(f"{stem}.")), None)
    return name if stem is None else _PLACES[stem] + name[len(stem) :]


def _renamed(value: Any) -> Any:
    """Settings with the model's names as keys, also in the texts of JSON among them."""
    if isinstance(value, dict):
        return {_placed(key): _renamed(each) for key, each in value.items()}
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps(_renamed(json.loads(value)))
    return value


def _holder(case: Case) -> Any:
    """A model of one layer that has a place for the weights of a case, whatever their shapes."""
    import transformers

    small = {
        "vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "tie_word_embeddings": False, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    transformers.set_seed(6)
    (first, *_), (shape, *_) = case.right, (each.shape for each in case.right.values())
    if ".ffn." in " ".join(case.right):
        settings = {
            **small, "head_dim": 32, "hidden_size": shape[1], "q_lora_rank": shape[0], "n_routed_experts": 2,
            "moe_intermediate_size": case.right[FP4_EXPERT].shape[0], "num_experts_per_tok": 2, "o_groups": 2,
            "o_lora_rank": 16, "hc_mult": 2, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"],
            "num_nextn_predict_layers": 0, "partial_rotary_factor": 0.5,
        }  # fmt: skip
        return transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**settings))
    if first.endswith(".gate_up_proj"):
        settings = {**small, "num_local_experts": shape[0], "num_experts_per_tok": 2, "hidden_size": shape[1]}
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings, intermediate_size=shape[2] // 2))
    if ".experts." in first:
        settings = {**small, "num_experts": len(case.right), "num_experts_per_tok": 2, "hidden_size": shape[1]}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings, moe_intermediate_size=shape[0]))
    settings = {**small, "num_attention_heads": 1, "hidden_size": shape[1], "intermediate_size": shape[0]}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def quantized(folder: Path, make: Callable[[], Case]) -> Made:
    """A model in which some weights are those of a case, as its scheme stores them, and the others are plain."""
    case, target = make(), folder / "quantized"
    model = _holder(case)
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            torch.nn.init.normal_(parameter)
    model.save_pretrained(target)
    file = target / "model.safetensors"
    strip = "model." if any(name.startswith("layers.") for name in case.right) else ""  # as DeepSeek-V4 is released
    plain = {name.removeprefix(strip): tensor for name, tensor in load_file(file).items()}
    values = {_placed(name): torch.from_numpy(np.ascontiguousarray(each)) for name, each in case.right.items()}
    assert values.keys() <= plain.keys()
    save_file(plain | values, file, {"format": "pt"})
    module = type(model).from_pretrained(target).eval()
    parts = {_placed(name): tensor for name, tensor in case.tensors.items()}
    stored = {name: _bytes_of(name.removesuffix("weight"), parts) for name in values}
    # What is none's alone, as a stack of experts.
    stored[next(iter(values))] += _bytes_of("", parts) - sum(stored.values())
    held = {name: tensor for name, tensor in plain.items() if name not in values} | parts
    config = json.loads((target / "config.json").read_text()) | _renamed(case.config)
    beside = _renamed(case.beside)
    Case(held, {}, "", config, _renamed(case.metadata), _renamed(case.hf_quant_config), beside).save(target)
    made = Made(
        str(target), plain | values, "codes and scales by hand", parameter_count(module), module=module, stored=stored,
        mixes=case.format.startswith(("mlx", "comfy", "sdnq")),
    )  # fmt: skip
    if plain.keys() != module.state_dict().keys():
        made.packed = dict(module.state_dict())
        layers = [tensor for name, tensor in module.named_parameters() if name in linear_tensors(module)]
        made.linears = frozenset(
            name for name, tensor in made.tensors.items() if any(torch.equal(tensor, layer) for layer in layers)
        )
    made.inputs, made.inputs_file = _ids(target)
    return made


def _bytes_of(module: str, parts: Tensors) -> int:
    """The bytes of all tensors whose names begin with that of a module."""
    return sum(tensor.nbytes for name, tensor in parts.items() if name.startswith(module))


def _gguf_model(folder: Path) -> Made:
    """A Llama in a GGUF file with llama.cpp's names, which runs: the rows of its queries and keys are in llama.cpp's order."""
    import gguf
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, rms_norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    module, path = transformers.LlamaForCausalLM(config).eval(), folder / "tiny-llama.gguf"
    writer, kind = gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType.Q8_0
    for name, value in (("block_count", 2), ("embedding_length", 64), ("feed_forward_length", 96), ("head_count", 4),
                        ("head_count_kv", 2), ("vocab_size", 64), ("layer_norm_rms_eps", 1e-6)):  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    names, stored = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2), dict[str, int]()
    for name, tensor in module.state_dict().items():
        new, values = names.get_name(name, (".weight",)), tensor.numpy()
        assert new is not None
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                values = values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if values.ndim < 2:
            writer.add_tensor(new, values)
            continue
        blocks = gguf.quants.quantize(values, kind)
        writer.add_tensor(new, blocks, raw_dtype=kind)
        stored[name] = blocks.nbytes
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)))
    _write(writer)
    held, loader = dict(module.state_dict()), "gguf.quants.dequantize"
    made = Made(str(path), held, loader, parameter_count(module), module=module, stored=stored)
    made.inputs, made.inputs_file = _ids(folder)
    return made


def _without_model(folder: Path, make: Callable[[], Case]) -> Made:
    """A file of a weight that belongs to no known model."""
    case = make()
    stored = dict.fromkeys(case.right, _bytes_of("", case.tensors))
    case.tensors["x.norm"] = torch.linspace(0.5, 2, 64)
    path = case.save(folder / "quantized")
    tensors = {name: torch.from_numpy(each) for name, each in case.right.items()}
    tensors["x.norm"] = case.tensors["x.norm"]
    parameters = count(tensors.values())
    return Made(str(path), tensors, "codes and scales by hand", parameters, stored=stored, linears=None)


def _own_export(folder: Path) -> Made:
    """An export of ours with fp8 weights and their scales, its tensors as safetensors has them."""
    import dtype_engine as de

    source = _llama_folder(folder)
    session = de.open(source.model)
    session.cast("*.mlp", "float8_e4m3fn")
    session.export(folder / "exported")
    stored = load_file(folder / "exported" / "model.safetensors")
    codes = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    scales = {f"{name}_scale" for name in codes}
    assert codes
    made = Made(
        str(folder / "exported"),
        {name: tensor for name, tensor in stored.items() if name not in scales},
        "safetensors.torch.load_file",
        source.parameters,
        fixed=frozenset(codes),
        scales={name: stored[name] for name in scales},
        stored={name: stored[name].nbytes + stored[f"{name}_scale"].nbytes for name in codes},
        inputs=source.inputs,
        inputs_file=source.inputs_file,
    )
    made.module = copy.deepcopy(source.runs)
    made.linears = linear_tensors(made.module)
    made.module.load_state_dict(
        {
            name: stored[name].float() * stored[f"{name}_scale"] if name in codes else stored[name]
            for name in made.tensors
        }
    )
    return made


# -- Python ------------------------------------------------------------------------------------------------------------


def _python(folder: Path, name: str, weights: bool = False, package: bool = False, example: bool = True) -> Made:
    home = folder / "own" if package else folder
    home.mkdir(exist_ok=True)
    (home / "__init__.py").touch()
    text = (HERE / "net.py").read_text()
    file = home / ("own_net.py" if package else "net.py")
    file.write_text(text if example else text.partition("def example_inputs")[0])
    module = own_net()
    options: tuple[str, ...] = ()
    if weights:
        trained = {n: t + 0.25 if t.is_floating_point() else t for n, t in module.state_dict().items()}
        torch.save(trained, folder / "net.pth")
        module.load_state_dict(torch.load(folder / "net.pth", weights_only=True))
        options = ("--weights", str(folder / "net.pth"))
    model = f"own.own_net:{name}" if package else f"{file}:{name}"
    inputs = net.example_inputs() if example else None
    return Made(
        model, dict(module.state_dict()), "module.state_dict()", parameter_count(module), options, module=module,
        inputs=inputs, folder=folder if package else None,
    )  # fmt: skip


def _live(folder: Path) -> Made:
    module = own_net()
    return Made(
        "", dict(module.state_dict()), "module.state_dict()", parameter_count(module), module=module,
        inputs=net.example_inputs(), live=True,
    )  # fmt: skip


_save_old = partial(torch.save, _use_new_zipfile_serialization=False)
FORMS: dict[str, Callable[[Path], Made]] = {
    "safetensors file": lambda at: _lone(at, save_file, ".safetensors", load_file),
    "folder": _llama_folder,
    "folder, bf16": partial(_llama_folder, dtype=torch.bfloat16),
    "folder, sharded": partial(_llama_folder, shard="20KB"),
    "folder, mixed dtypes": _mixed_folder,
    "folder, tied": partial(_llama_folder, tie_word_embeddings=True),
    "folder, encoder": partial(_zoo_folder, name="bert"),
    "folder, BLIP": partial(_zoo_folder, name="blip"),
    "folder, experts": partial(_zoo_folder, name="mixtral"),
    "folder, draft head": _draft_head_folder,
    "folder on a hub": _on_hub,
    "folder, .bin": partial(_bin_folder, parts=1),
    "folder, .bin shards": partial(_bin_folder, parts=2),
    ".pth zip": lambda at: _pth(at, torch.save),
    ".pth deflated": lambda at: _pth(at, _deflated),
    ".pth legacy": lambda at: _pth(at, _save_old),
    ".pth nested": lambda at: _pth(at, lambda held, path: torch.save({"epoch": 3, "state_dict": held}, path)),
    ".pth.tar": _trainers,
    ".pth views": lambda at: _pth(at, _views),
    "whole module": _whole_module,
    "GGUF F16": partial(_gguf, kind="f16"),
    "GGUF Q8_0": partial(_gguf, kind="q8_0"),
    "GGUF Q4_K": partial(_gguf, kind="q4_k"),
    "diffusers": _diffusers,
    "diffusers, runs": _pipeline,
    "adapter": _adapter,
    "adapter, with its base": _merged_adapter,
    "GPTQ": partial(quantized, make=CASES["gptq"]),
    "AWQ": partial(quantized, make=CASES["awq"]),
    "bitsandbytes": partial(quantized, make=CASES["bnb nf4"]),
    "fp8 blocks": partial(quantized, make=CASES["fp8 in blocks"]),
    "compressed-tensors": partial(quantized, make=CASES["ct int4 in groups"]),
    "own fp8 export": _own_export,
    "file.py:Class": partial(_python, name="Net"),
    "file.py:function": partial(_python, name="make"),
    "file.py, compiled": partial(_python, name="compiled"),
    "file.py --weights": partial(_python, name="Net", weights=True),
    "file.py, no inputs": partial(_python, name="Net", example=False),
    "package.module:Name": partial(_python, name="Net", package=True),
    "live module": _live,
}


NEEDS = {"diffusers, runs": "diffusers"}
"""The packages that some forms need besides those of the tests. Where one is not installed, its forms are left out."""
_ALONE = "ct int4 stacked"  # no model of transformers has a weight of this shape
SCHEMES: dict[str, Callable[[Path], Made]] = {
    name: partial(_without_model if name == _ALONE else quantized, make=make) for name, make in CASES.items()
} | {"GGUF, with its model": _gguf_model}
"""Every way to store a quantized weight, in a small model."""


def made(name: str, folder: Path) -> Made:
    """The model of a form or of a scheme, in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return {**FORMS, **SCHEMES}[name](folder)


def names() -> Iterable[str]:
    """Of all forms."""
    return FORMS


@contextlib.contextmanager
def entered(made: Made) -> Iterator[None]:
    """In a folder that holds the package of the model, as the person who has it would be, or with the hub that has it."""
    if made.hub is not None:
        with hub_of(made.hub.parent / "cache", org__name=made.hub):
            yield
        return
    folder = made.folder
    if folder is None:
        yield
        return
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name == "own" or name.startswith("own.")]:
        del sys.modules[name]
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
