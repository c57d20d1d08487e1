"""Every target's matcher, written again from that tool's own rules, must read our output as the plan says.

A tensor is either as planned, or it is listed as left out together with what it gets instead, and that must be true too.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import json
import pkgutil
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import paths
from torch import nn

from dtype_engine.checkpoint.source import locate
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import LLAMA_TYPES, llama_type
from dtype_engine.core.options import Options
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, make_plan, targets
from dtype_engine.recipe.lint import lint
from dtype_engine.recipe.targets import TARGET_SUFFIXES, Context, Conversion, target_named
from dtype_engine.recipe.targets.llama_cpp import NEEDS_IMATRIX
from dtype_engine.recipe.targets.name_patterns import globs, regexes
from dtype_engine.runtime.building.describe import describe
from dtype_engine.runtime.numerics.roundings import _DAMPING


def llama_tree() -> Tree:
    """Tied head, biases on one projection, mixed stored dtypes, an island, a persistent and a non-persistent buffer."""
    classes = {"": "LlamaForCausalLM", "model": "LlamaModel", "model.embed_tokens": "Embedding", "lm_head": "Linear"}
    classes |= {"model.norm": "LlamaRMSNorm", "model.rotary_emb": "LlamaRotaryEmbedding"}
    tensors = [TensorInfo("model.embed_tokens.weight", (64, 32), "bfloat16", aliases=("lm_head.weight",))]
    for layer in range(12):
        at = f"model.layers.{layer}"
        classes |= {at: "LlamaDecoderLayer", f"{at}.self_attn": "LlamaAttention", f"{at}.mlp": "LlamaMLP"}
        classes |= {f"{at}.input_layernorm": "LlamaRMSNorm", f"{at}.post_attention_layernorm": "LlamaRMSNorm"}
        tensors += [TensorInfo(f"{at}.input_layernorm.weight", (32,), "float32")]
        tensors += [TensorInfo(f"{at}.post_attention_layernorm.weight", (32,), "bfloat16")]
        for local in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            classes[f"{at}.{local}"] = "Linear"
            tensors.append(TensorInfo(f"{at}.{local}.weight", (16, 32), "bfloat16"))
        tensors.append(TensorInfo(f"{at}.self_attn.q_proj.bias", (16,), "bfloat16"))
        classes[f"{at}.mlp.down_proj"] = "Linear"
        tensors.append(TensorInfo(f"{at}.mlp.down_proj.weight", (32, 20), "bfloat16"))
    tensors += [
        TensorInfo("model.norm.weight", (32,), "bfloat16"),
        TensorInfo("model.norm.scale", (32,), "float32", "buffer"),
        TensorInfo("model.norm.steps", (), "int64", "buffer"),
        TensorInfo("model.rotary_emb.inv_freq", (16,), "float32", "non-persistent buffer"),
    ]
    tree = Tree(tensors, classes)
    tree.modules["model.layers.3.mlp"].keep_in_fp32 = "declared by the model (_keep_in_fp32_modules_strict)"
    tree.modules["model.layers.4.input_layernorm"].keep_in_fp32 = "declared by the model (_keep_in_fp32_modules)"
    return tree


def moe_tree() -> Tree:
    """Routers, experts one by one in some layers and packed in others."""
    classes = {"": "Qwen3MoeForCausalLM", "model": "Qwen3MoeModel", "model.embed_tokens": "Embedding"}
    classes |= {"lm_head": "Linear", "model.norm": "Qwen3MoeRMSNorm"}
    tensors = [TensorInfo("model.embed_tokens.weight", (64, 32), "bfloat16")]
    for layer in range(4):
        at = f"model.layers.{layer}"
        classes |= {f"{at}.self_attn.o_proj": "Linear", f"{at}.input_layernorm": "Qwen3MoeRMSNorm"}
        tensors += [TensorInfo(f"{at}.self_attn.o_proj.weight", (32, 32), "bfloat16")]
        tensors += [TensorInfo(f"{at}.input_layernorm.weight", (32,), "bfloat16")]
        classes[f"{at}.mlp.gate"] = "Linear" if layer % 2 else "Qwen3MoeTopKRouter"
        tensors.append(TensorInfo(f"{at}.mlp.gate.weight", (11, 32), "bfloat16"))
        if layer < 2:
            for expert in range(11):
                for local in ("gate_proj", "up_proj", "down_proj"):
                    classes[f"{at}.mlp.experts.{expert}.{local}"] = "Linear"
                    tensors.append(TensorInfo(f"{at}.mlp.experts.{expert}.{local}.weight", (32, 32), "bfloat16"))
        else:
            classes[f"{at}.mlp.experts"] = "Qwen3MoeExperts"
            tensors.append(TensorInfo(f"{at}.mlp.experts.gate_up_proj", (11, 64, 32), "float16"))
            tensors.append(TensorInfo(f"{at}.mlp.experts.down_proj", (11, 32, 32), "float16"))
    tensors.append(TensorInfo("model.norm.weight", (32,), "bfloat16"))
    tensors.append(TensorInfo("lm_head.weight", (64, 32), "float32"))
    return Tree(tensors, classes)


LLAMA, MOE = llama_tree(), moe_tree()
PATTERNS = [
    "*", "*.mlp", "*.self_attn", "*.weight", "*.bias", "model.layers.1", "model.layers.{2..7}.mlp", "*.layers.1*", "lm_head",
    "model.layers.{0,3}", "*.mlp.gate", "*.{gate,up}_proj", "type:Linear", "type:*Norm", "type:Embedding", "*.inv_freq",
    "re:.*layers\\.\\d*[13579]\\..*proj", "model.embed_tokens", "*.experts.{0..4}", "*.experts", "model.norm", "*.down_proj",
    "*.experts.3.up_proj", "*.q_proj.bias",
]  # fmt: skip
DTYPES = [*dtypes.CASTABLE_DTYPES, dtypes.STORED, "bfloat16", "bfloat16", "float8_e4m3fn", "int8"]
RECIPES = st.lists(st.builds(Rule, st.sampled_from(PATTERNS), st.sampled_from(DTYPES)), max_size=6).map(Recipe.of)
CONTEXTS = st.builds(
    lambda model, recipe: Context(model[0], make_plan(model[0], recipe), "m", model[1]),
    st.sampled_from([(LLAMA, "llama"), (MOE, "qwen3_moe")]),
    RECIPES,
)
PresetEffect = Mapping[str, str]


def all_in(context: Context, base: str | None) -> dict[str, str]:
    assert base is not None
    return {t.name: base if t.persistent and t.castable else t.dtype for t in context.tree.tensors.values()}


def loaded(context: Context, base: str | None) -> dict[str, str]:
    """Return the dtype of every tensor after `from_pretrained(dtype=base)`, by `_get_dtype_plan` of transformers."""
    found = all_in(context, base)
    for name, module in context.tree.modules.items():
        strict = "_strict" in (module.keep_in_fp32 or "")
        if module.keep_in_fp32 and (base == "float16" or (strict and base == "bfloat16")):
            for tensor in context.tree.below(name):
                found[tensor.name] = "float32" if tensor.castable else tensor.dtype
    return found


def as_torchao(context: Context, written: Conversion) -> PresetEffect:
    """Apply FqnToConfig: the exact parameter, the exact module, every expression that fits the parameter, then the first that fits
    the module. Expressions must match whole names.
    """
    config = json.loads(written.text)
    entries = config["quantization_config"]["quant_type"]["default"]["_data"]["fqn_to_config"]
    found = loaded(context, config["dtype"])
    for module, node in context.tree.modules.items():
        for local, tensor in node.tensors.items():
            name = f"{module}.{local}"
            hits = [key for key in entries if key.startswith("re:") and re.fullmatch(key[3:], name)]
            assert len(hits) <= 1
            hits = [name] if name in entries else hits
            if not hits and local == "weight":
                hits = [key for key in entries if key == module or re.fullmatch(key.removeprefix("re:"), module)]
            if hits:
                data = entries[hits[0]]["_data"]
                if entries[hits[0]]["_type"] == "NVFP4WeightOnlyConfig":
                    assert node.class_name == "Linear"
                    assert hits[0].removeprefix("re:") != name, "it is asked for by its module"
                    found[tensor.name] = "nvfp4"
                    continue
                if entries[hits[0]]["_type"] == "IntxWeightOnlyConfig":
                    assert data["mapping_type"]["_data"] == "SYMMETRIC"
                    size = data["granularity"]["_data"]["group_size"]
                    found[tensor.name] = f"{data['weight_dtype']['_data']}@g{size}"
                    continue
                low = data["weight_dtype"]["_data"] if "weight_dtype" in data else "int8"
                found[tensor.name] = low + ("@tensor" if data["granularity"]["_type"] == "PerTensor" else "")
    return found


def as_llm_compressor(context: Context, written: Conversion) -> PresetEffect:
    """Apply compressed-tensors: `re.match`, an exact name or a class name, for modules. Only weights are quantized."""
    modifiers = yaml.safe_load(written.text)["quant_stage"]["quant_modifiers"]
    assert set(modifiers) <= {"QuantizationModifier", "GPTQModifier"}
    groups = [group for modifier in modifiers.values() for group in modifier["config_groups"].values()]
    found = loaded(context, written.base)
    for module, node in context.tree.modules.items():
        hits = [
            group
            for group in groups
            for target in group["targets"]
            if (re.match(target[3:], module) if target.startswith("re:") else target in (module, node.class_name))
        ]
        assert len(hits) <= 1
        for group in hits:
            assert node.class_name == "Linear"
            found[node.tensors["weight"].name] = by_scheme(group["weights"])
    return found


def by_scheme(weights: Mapping[str, Any]) -> str:
    """Return the dtype that a scheme of compressed-tensors means, after its presets."""
    kind, bits, size = weights["type"], weights["num_bits"], weights.get("group_size")
    if weights["strategy"] in ("tensor", "channel"):
        assert bits == 8
        low = {"float": "float8_e4m3fn", "int": "int8"}[kind]
        return low + {"tensor": "@tensor", "channel": ""}[weights["strategy"]]
    if weights["strategy"] == "block":
        assert (kind, bits, weights["block_structure"]) == ("float", 8, [128, 128])
        return "fp8@128x128"
    if kind == "int":
        return f"int{bits}@g{size}" + ("" if weights["symmetric"] else "a")
    named = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}[bits, size]
    assert weights["scale_dtype"] == ("torch.float8_e4m3fn" if named == "nvfp4" else "torch.uint8")
    assert weights["strategy"] == ("tensor_group" if named == "nvfp4" else "group")
    return named


def as_modelopt(context: Context, written: Conversion) -> PresetEffect:
    """Apply ModelOpt: `fnmatch` on names of quantizers; the last entry that matches wins."""
    entries = json.loads(written.text)["quant_cfg"]
    found = loaded(context, written.base)
    for module, node in context.tree.modules.items():
        for quantizer in ("weight_quantizer", "input_quantizer", "output_quantizer", "k_bmm_quantizer"):
            config = None
            for entry in entries:
                if fnmatch.fnmatchcase(f"{module}.{quantizer}", entry["quantizer_name"]):
                    config = entry["cfg"] if entry["enable"] else None
            if config is not None:
                assert quantizer == "weight_quantizer"
                assert node.class_name in ("Linear", "Embedding")
                low = "int8" if config["num_bits"] == 8 else "float8_e4m3fn"
                if sizes := config.get("block_sizes"):
                    found[node.tensors["weight"].name] = modelopt_blocks(config["num_bits"], sizes)
                    continue
                assert config["num_bits"] in (8, [4, 3])
                found[node.tensors["weight"].name] = low + ("@tensor" if config["axis"] is None else "")
    return found


def modelopt_blocks(bits: object, sizes: dict[str, Any]) -> str:
    """The format of a quantizer with blocks, by ModelOpt's own: exponents are rounded up."""
    if sizes == {"-1": 128, "-2": 128}:
        assert bits == [4, 3]
        return "fp8@128x128"
    if isinstance(bits, int):
        assert set(sizes) == {"-1"}
        return f"int{bits}@g{sizes['-1']}"
    named = {((2, 1), 16): "nvfp4", ((2, 1), 32): "mxfp4:rceil", ((4, 3), 32): "mxfp8:rceil"}
    found = named[(bits[0], bits[1]), sizes["-1"]]  # type: ignore[index]
    assert sizes == {"-1": sizes["-1"], "type": "dynamic", "scale_bits": [4, 3] if found == "nvfp4" else [8, 0]}
    return found


def as_comfyui(context: Context, written: Conversion) -> PresetEffect:
    metadata = json.loads(json.loads(written.text)["_quantization_metadata"])
    assert metadata["format_version"] == "1.0"
    found = all_in(context, written.base)
    for layer, entry in metadata["layers"].items():
        node = context.tree.modules[layer]
        assert node.class_name == "Linear"
        found[node.tensors["weight"].name] = entry["format"].removesuffix("_tensorwise") + "@tensor"
    return found


VLLM_SCHEMES: dict[tuple[str, int], tuple[str, ...]] = {
    ("fp8_per_tensor", 2): ("float8_e4m3fn@fused",),
    ("fp8_per_tensor", 3): ("float8_e4m3fn",),
    ("fp8_per_channel", 2): ("float8_e4m3fn", "float8_e4m3fn@row"),
    ("fp8_per_channel", 3): ("float8_e4m3fn@row",),
    **{("fp8_per_block", ndim): ("fp8@128x128",) for ndim in (2, 3)},
    **{("mxfp8", ndim): ("mxfp8:rceil",) for ndim in (2, 3)},
    **{("mxfp4", ndim): ("mxfp4", "mxfp4:even") for ndim in (2, 3)},
    ("int8_per_channel_weight_only", 2): ("int8@row", "int8"),
    ("int8_per_channel_weight_only", 3): ("int8@row",),
    **{("nvfp4_per_token", ndim): ("nvfp4",) for ndim in (2, 3)},
}
"""The formats with the scales of vLLM's online schemes, by the dimensions of the weight."""
VLLM_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def as_vllm(context: Context, written: Conversion) -> PresetEffect:
    """Apply `quantization_config.targets`: a layer takes the scheme whose pattern it matches (`re.match`), fused layers one by one
    and all with the same result, experts as the one layer that holds them.
    """
    targets = json.loads(written.text)["targets"]
    found = all_in(context, written.base)
    layers: dict[str, list[str]] = {}
    for name, tensor in context.tree.tensors.items():
        if len(tensor.shape) < 2 or tensor.kind != "parameter":
            continue
        module = name.removesuffix(".weight")
        if ".experts." in module:
            module = module.partition(".experts.")[0] + ".experts"
        fused = next((key for key, parts in VLLM_FUSED.items() if module.rpartition(".")[2] in parts), None)
        layers.setdefault(f"{module.rpartition('.')[0]}.{fused}" if fused else module, []).append(name)
    for layer, names in layers.items():
        shards = [f"{layer.rpartition('.')[0]}.{part}" for part in VLLM_FUSED.get(layer.rpartition(".")[2], ())] or [
            layer
        ]
        hits = [[key for key in targets if re.match(key.removeprefix("re:"), shard)] for shard in shards]
        assert all(len(each) <= 1 for each in hits)
        assert len({targets[key] for each in hits for key in each}) <= 1
        assert all(hits) or not any(hits)
        for name in names if all(hits) else ():
            tensor, planned = context.tree.tensors[name], context.plan.dtypes[name]
            scheme = targets[hits[0][0]]
            assert layer.endswith(".experts") or scheme.startswith(("fp8", "mxfp"))
            same = VLLM_SCHEMES[scheme, len(tensor.shape)]
            alone = scheme == "fp8_per_tensor" and len(names) == 1 and len(tensor.shape) == 2 and "experts" not in layer
            found[name] = planned if planned in same or (alone and planned.endswith("@tensor")) else same[0]
    return found


SGLANG_FORMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("fp8", "matrix"): ("float8_e4m3fn", "float8_e4m3fn@row"),
    ("fp8", "expert"): ("float8_e4m3fn@fused",),
    ("fp8", "stack"): ("float8_e4m3fn",),
    **{("mxfp8", shape): ("mxfp8:rceil",) for shape in ("matrix", "expert", "stack")},
    **{("nvfp4_online", shape): ("nvfp4",) for shape in ("expert", "stack")},
}
"""The formats with the scales of SGLang's schemes, by what the model holds: `nvfp4_online` has others, and is not measured."""
SGLANG_SHARDS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def sglang_skips(prefix: str, ignored: list[str]) -> bool:
    """Return whether `is_layer_skipped` of SGLang leaves a layer wide: a name is ignored with all names that have it as a part
    between dots. Parts of a fused layer have to agree.
    """
    stem, dot, last = prefix.rpartition(".")
    shards = [f"{stem}{dot}{part}" for part in SGLANG_SHARDS.get(last, (last,))]
    found = {any(f".{each}." in f".{shard}." for each in ignored) for shard in shards}
    assert len(found) == 1, "SGLang refuses a layer of which it ignores some parts"
    return found.pop()


def sglang_command(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment and the options of a command for a shell."""
    words = shlex.split(text)
    environment = dict(word.split("=", 1) for word in words[: words.index("python")])
    assert words[len(environment) :][:3] == ["python", "-m", "sglang.launch_server"]
    options = words[len(environment) + 3 :]
    return environment, dict(zip(options[::2], options[1::2], strict=True))


def as_sglang(context: Context, written: Conversion) -> PresetEffect:
    """Quantize every linear layer and all experts that the environment does not name, but neither routers nor the output layer."""
    environment, options = sglang_command(written.text)
    found = all_in(context, options["--dtype"])
    scheme = options.get("--quantization")
    if scheme is None:
        assert not environment
        return found
    for_experts = scheme == "nvfp4_online"
    ignored = environment.get("SGLANG_FP4_IGNORED_LAYERS" if for_experts else "SGLANG_FP8_IGNORED_LAYERS", "").split(
        ","
    )
    assert len(environment) <= 1
    for name, tensor in context.tree.tensors.items():
        module = name.removesuffix(".weight")
        shape = "stack" if len(tensor.shape) == 3 else "expert" if ".experts." in name else "matrix"
        if shape == "matrix":
            linear = context.tree.modules.get(module)
            is_linear = linear is not None and linear.class_name == "Linear" and name.endswith(".weight")
            if for_experts or not is_linear or module.endswith(("lm_head", ".gate")):
                continue
            stem, dot, last = module.rpartition(".")
            fused = next((key for key, parts in SGLANG_SHARDS.items() if last in parts), None)
            prefix = f"{stem}{dot}{fused or last}"
        else:
            prefix = name.partition(".experts.")[0] + ".experts"
        if sglang_skips(prefix, [each for each in ignored if each]):
            continue
        same, planned = SGLANG_FORMS[scheme, shape], context.plan.dtypes[name]
        found[name] = planned if planned in same else same[0]
    return found


def as_diffusers(context: Context, written: Conversion) -> PresetEffect:
    """Apply layerwise casting from the root down: a pattern found anywhere in a name spares the module and all below it."""
    body = ast.parse(written.text).body
    assigned = next(node for node in body if isinstance(node, ast.Assign))
    patterns = ast.literal_eval(assigned.value)
    calls = {
        keyword.arg: ast.unparse(keyword.value).removeprefix("torch.")
        for node in ast.walk(ast.Module(body, []))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "apply_layerwise_casting"
        for keyword in node.keywords
    }
    found = all_in(context, written.base)
    if not calls:
        return found
    assert calls["compute_dtype"] == written.base

    def visit(module: str) -> None:
        if any(re.search(pattern, module) for pattern in patterns):
            return
        node = context.tree.modules[module]
        if node.class_name in ("Linear", "Embedding"):
            for tensor in context.tree.below(module):
                found[tensor.name] = calls["storage_dtype"]
            return
        for child in node.children.values():
            visit(child.name)

    visit("")
    return found


def module_like(tree: Tree, load_in: str) -> nn.Module:
    """A module with a tree's tensors, as loading leaves them."""
    made: dict[str, nn.Module] = {name: nn.Module() for name in tree.modules}
    for name, module in made.items():
        if name:
            parent, _, local = name.rpartition(".")
            made[parent].add_module(local, module)
    for tensor in tree.tensors.values():
        dtype = getattr(torch, load_in if tensor.castable and tensor.persistent else tensor.dtype)
        data = torch.zeros(tensor.shape, dtype=dtype)
        value = nn.Parameter(data, requires_grad=False) if tensor.kind == "parameter" else data
        for name in tensor.names:
            parent, _, local = name.rpartition(".")
            if tensor.kind == "parameter":
                made[parent].register_parameter(local, value)  # type: ignore[arg-type]
            else:
                made[parent].register_buffer(local, value, persistent=tensor.persistent)
    return made[""]


def as_transformers(context: Context, written: Conversion) -> PresetEffect:
    """Run the written Python and return the resulting dtypes."""
    load_in = re.search(r"dtype=torch\.(\w+)\)\)", written.text)
    assert load_in is not None
    namespace: dict[str, Any] = {}
    exec(compile(written.text.replace("import transformers", "").replace("=transformers.", "=torch."
         ).replace("torch.AutoModelForCausalLM", "None"), "snippet", "exec"), namespace)  # fmt: skip
    for pattern, _ in namespace["DTYPES"]:
        for name in context.all_names():
            hits = [other for other, _ in namespace["DTYPES"] if re.fullmatch(other, name)]
            assert len(hits) <= 1, pattern
    module = namespace["cast"](module_like(context.tree, load_in[1]))
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: str(held[name].dtype).removeprefix("torch.") for name in context.tree.tensors}


GGUF = {
    "self_attn.q_proj": ["attn_q"], "self_attn.k_proj": ["attn_k"], "self_attn.v_proj": ["attn_v"], "mlp.gate": ["ffn_gate_inp"],
    "self_attn.o_proj": ["attn_output"], "input_layernorm": ["attn_norm"], "post_attention_layernorm": ["ffn_norm"],
    "mlp.gate_proj": ["ffn_gate"], "mlp.up_proj": ["ffn_up"], "mlp.down_proj": ["ffn_down"],
    "mlp.experts.gate_proj": ["ffn_gate_exps"], "mlp.experts.up_proj": ["ffn_up_exps"],
    "mlp.experts.down_proj": ["ffn_down_exps"], "mlp.experts.gate_up_proj": ["ffn_gate_exps", "ffn_up_exps"],
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_names(tensor: TensorInfo) -> list[str]:
    name = re.sub(r"experts\.\d+\.", "experts.", tensor.name)
    packed = ".experts." in name and not name.endswith(".weight")
    module, _, local = (name, "", "weight") if packed else name.rpartition(".")
    inside = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
    if inside:
        return [f"blk.{inside[1]}.{part}.{local}" for part in GGUF[inside[2]]]
    return [f"{TOP[module]}.{local}"] if module in TOP and local in ("weight", "bias") else []


def tensor_types(text: str) -> list[tuple[str, str]]:
    """Read a file as `llama-quantize --tensor-type-file` does (`parse_tensor_type_file` in quantize.cpp): words of PATTERN=TYPE,
    divided at the first `=`. Returns (pattern in lower case, ggml type) in order. Raises ValueError where llama-quantize stops.
    """
    found = []
    for word in text.split():
        pattern, equals, type_ = word.partition("=")
        if not pattern or not equals or type_.upper() not in gguf.GGMLQuantizationType.__members__:
            raise ValueError(f"malformed tensor type {word!r}")
        if "(?" in pattern or re.search(r"\\[^\W\d_bBdDsSwW]", pattern):
            raise ValueError(f"{pattern!r} means something else to std::regex")
        found.append((pattern.lower(), type_.lower()))
    return found


def as_llama_cpp(context: Context, written: Conversion) -> PresetEffect:
    """Apply llama-quantize to Q8_0: `regex_search` in the GGUF name, only for matrices that it quantizes."""
    lines = tensor_types(written.text)
    types = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "q8_0", "mxfp4": "mxfp4:floor"}
    types |= {name: name for name in LLAMA_TYPES}
    found: dict[str, str] = {}
    for tensor in context.tree.tensors.values():
        results = set()
        for name in gguf_names(tensor):
            hits = [type_ for pattern, type_ in lines if re.search(pattern, name)]
            assert len(hits) <= 1
            vector = len(tensor.shape) < 2 or not name.endswith("weight") or name.endswith("_norm.weight")
            if vector or "ffn_gate_inp" in name:
                assert not hits
                results.add("float32")
            else:
                assert hits, "the type would depend on the mixture asked for"
                block = LLAMA_TYPES[hits[0]].block if hits[0] in LLAMA_TYPES else 32 if hits[0] == "mxfp4" else 1
                assert tensor.shape[-1] % block == 0, "llama.cpp stops there"
                results.add(types[hits[0]])
        assert len(results) <= 1
        if llama_type(context.given.dtypes[tensor.name]) and tensor.name in context.roundings:
            assert NEEDS_IMATRIX in written.notes
        found[tensor.name] = results.pop() if results else "q8_0" if tensor.persistent else tensor.dtype
    return found


READERS: dict[str, Callable[[Context, Conversion], PresetEffect]] = {
    "torchao": as_torchao,
    "llama.cpp": as_llama_cpp,
    "diffusers": as_diffusers,
    "llm-compressor": as_llm_compressor,
    "transformers": as_transformers,
    "modelopt": as_modelopt,
    "comfyui": as_comfyui,
    "vllm": as_vllm,
    "sglang": as_sglang,
}


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGET_SUFFIXES))
@given(context=CONTEXTS)
@settings(max_examples=60, deadline=None)
def test_converted_recipe_of_every_target_gives_the_planned_dtypes(target: str, context: Context) -> None:
    written = target_named(target).convert(context)
    outcome = READERS[target](context, written)
    left_out = {name: entry for entry in written.left_out if entry.part == "dtype" for name in entry.tensors}
    rescaled = {name: entry for entry in written.left_out if entry.part == "scale" for name in entry.tensors}
    assert not left_out.keys() & rescaled.keys()
    for tensor in context.tree.tensors.values():
        planned, got = context.plan.dtypes[tensor.name], outcome[tensor.name]
        if entry := left_out.get(tensor.name) or rescaled.get(tensor.name):
            assert (entry.planned, entry.instead) == (planned, got), tensor.name
            assert entry.part == "scale" or got != planned
            if entry.part == "scale" and target != "llama.cpp":
                assert (
                    len({re.sub("@(tensor|fused|row)$", "", dtype).partition(":")[0] for dtype in (got, planned)}) == 1
                )
        elif tensor.castable:
            assert got == planned, tensor.name
        else:
            assert got == tensor.dtype or target == "llama.cpp"


def converted(target: str, tree: Tree, *rules: Rule, model_type: str = "llama") -> Conversion:
    return target_named(target).convert(Context(tree, make_plan(tree, Recipe(rules)), "m", model_type))


def test_quantized_activations_are_converted_or_noted_as_unsupported() -> None:
    """llm-compressor supports them; for other tools a note says that activations are not quantized."""
    plan = make_plan(LLAMA, Recipe((Rule("*.q_proj", "float8_e4m3fn"),)))
    for activations in ("none", "weights"):
        context = Context(LLAMA, plan, "m", "llama", activations=activations)  # type: ignore[arg-type]
        stages = yaml.safe_load(target_named("llm-compressor").convert(context).text)["quant_stage"]
        (group,) = stages["quant_modifiers"]["QuantizationModifier"]["config_groups"].values()
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        assert group.get("input_activations") == (inputs if activations == "weights" else None)
        for tool in ("torchao", "modelopt", "llama.cpp"):
            notes = " ".join(target_named(tool).convert(context).notes)
            assert ("activations stay wide" in notes) is (activations == "weights")
    own = make_plan(LLAMA, Recipe((Rule("*.q_proj", "q4_0"),)))
    context = Context(LLAMA, own, "m", "llama", activations="weights")
    assert "activations" not in " ".join(target_named("llama.cpp").convert(context).notes), "llama.cpp rounds them"


ROUNDED = (Rule("*.mlp", "int4@g32:gptq"), Rule("*.down_proj", "float8_e4m3fn:gptq"), Rule("*.q_proj", "int4@g32"))
"""`down_proj` has no rows of 32. The biases of `q_proj` have no formats with scales."""


def test_llm_compressor_gets_weights_to_round_by_gptq_in_a_modifier_of_their_own() -> None:
    written = converted("llm-compressor", LLAMA, *ROUNDED, Rule("*.k_proj", "nvfp4:imatrix"))
    modifiers = yaml.safe_load(written.text)["quant_stage"]["quant_modifiers"]
    assert list(modifiers) == ["QuantizationModifier", "GPTQModifier"]
    gptq, plain = modifiers["GPTQModifier"], modifiers["QuantizationModifier"]
    assert (gptq["actorder"], gptq["dampening_frac"]) == ("static", _DAMPING)
    assert "actorder" not in plain
    assert [by_scheme(group["weights"]) for group in gptq["config_groups"].values()] == ["int4@g32", "float8_e4m3fn"]
    assert {by_scheme(group["weights"]): group["weights"].get("observer") for group in plain["config_groups"].values()} == {
        "int4@g32": None, "nvfp4": "imatrix_mse"
    }  # fmt: skip
    assert {group["weights"]["observer"] for group in gptq["config_groups"].values()} == {"imatrix_mse"}
    assert "&id" not in written.text, "each group has its own entries"
    rescaled = {name for entry in written.left_out if entry.part == "scale" for name in entry.tensors}
    assert rescaled == {name for name in LLAMA.tensors if re.search(r"(mlp.*|k_proj)\.weight", name)}
    assert any("need calibration data" in note for note in written.notes)
    assert not any("rounds by its own rule" in note for note in written.notes)
    assert not any(
        "calibration" in note for note in converted("llm-compressor", LLAMA, Rule("*.k_proj", "nvfp4")).notes
    )


@pytest.mark.parametrize("target", sorted(set(TARGET_SUFFIXES) - {"llm-compressor"}))
def test_other_targets_get_the_format_and_a_note_that_they_round_otherwise(target: str) -> None:
    unrounded = [Rule(rule.pattern, dtypes.unrounded(rule.dtype)) for rule in ROUNDED]
    with_it, without = converted(target, LLAMA, *ROUNDED), converted(target, LLAMA, *unrounded)
    assert (with_it.text, with_it.patterns, with_it.left_out) == (without.text, without.patterns, without.left_out)
    lost = {name for entry in with_it.left_out if entry.part == "dtype" for name in entry.tensors}
    kept = {name for name in LLAMA.tensors if ".mlp." in name} - lost
    (*notes, last) = with_it.notes
    if kept:
        assert (
            f"rounds by its own rule, not by :gptq: values differ from those that were measured in {len(kept)} weights"
            in last
        )
        assert tuple(notes) == without.notes
    else:
        assert with_it.notes == without.notes
    assert bool(kept) is (target not in ("llama.cpp", "transformers"))


def test_modelopt_quantizes_by_the_converted_recipe() -> None:
    """Runs if ModelOpt is installed, with the hook of the note. ModelOpt has no CPU kernels for NVFP4 and MX."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    from dtype_engine.runtime.numerics.quantize import values_in

    tree = Tree([TensorInfo(f"{name}.weight", (256, 128), "float32") for name in "ab"], {"a": "Linear", "b": "Linear"})
    rules = (Rule("a", "fp8@128x128"), Rule("b", "int4@g128"))
    written = converted("modelopt", tree, *rules)
    assert "amax / 7" in written.left_out[0].why
    entries = json.loads(
        written.text,
        object_hook=lambda entry: {int(key) if key.lstrip("-").isdigit() else key: item for key, item in entry.items()},
    )
    module = nn.ModuleDict({name: nn.Linear(128, 256, bias=False) for name in "ab"})
    before = {name: layer.weight.detach().clone() for name, layer in module.items()}
    mtq.quantize(module, entries)
    fp8 = module["a"].weight_quantizer(before["a"])
    assert torch.allclose(fp8, values_in(before["a"], "fp8@128x128", torch.float32), rtol=0, atol=1e-7)
    rows = before["b"].abs().amax(1, keepdim=True) / 7
    assert torch.allclose(module["b"].weight_quantizer(before["b"]), (before["b"] / rows).round() * rows, atol=1e-6)


def test_converted_patterns_do_not_match_layers_or_modules_with_similar_names() -> None:
    low = Rule("model.layers.1.mlp", "float8_e4m3fn")
    taken = "model\\.layers\\.1\\.mlp\\.(down_proj|gate_proj|up_proj)"
    assert converted("torchao", LLAMA, low).patterns == ((f"re:{taken}\\.weight", "float8_e4m3fn"),)
    assert converted("llm-compressor", LLAMA, low).patterns == ((f"re:{taken}$", "float8_e4m3fn"),)
    assert [pattern for pattern, _ in converted("modelopt", LLAMA, low).patterns] == [
        f"model.layers.1.mlp.{local}.weight_quantizer" for local in ("down_proj", "gate_proj", "up_proj")
    ]
    gate = converted("llm-compressor", MOE, Rule("*.mlp.gate", "int8"))
    assert gate.patterns == (("re:model\\.layers\\.(1|3)\\.mlp\\.gate$", "int8"),)
    assert gate.left_out[0].tensors == ("model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight")


def test_converted_recipe_of_a_regular_plan_has_few_patterns() -> None:
    rules = (Rule("*", "bfloat16"), Rule("*.{self_attn,mlp}", "float8_e4m3fn"), Rule("*.bias", "bfloat16"))
    for target in ("torchao", "llm-compressor", "diffusers"):
        assert len(converted(target, LLAMA, *rules).patterns) <= 4
    experts = converted("llm-compressor", MOE, Rule("*.experts", "int8"))
    assert (
        experts.patterns[0][0] == "re:model\\.layers\\.[0-9]+\\.mlp\\.experts\\.[0-9]+\\.(down_proj|gate_proj|up_proj)$"
    )


def test_casts_that_a_target_cannot_express_are_listed() -> None:
    low = Rule("*.mlp", "float8_e5m2")
    rules = (low, Rule("*.q_proj", "int8"), Rule("*.input_layernorm", "float64"), Rule("lm_head", "int8"))
    for target in TARGET_SUFFIXES:
        listed = {name for entry in converted(target, LLAMA, *rules).left_out for name in entry.tensors}
        assert ("model.layers.0.input_layernorm.weight" in listed) is (target != "transformers"), target
        assert ("model.layers.0.mlp.up_proj.weight" in listed) is (target != "torchao"), target  # e5m2, or its scales
        assert "model.layers.0.self_attn.q_proj.bias" in listed
        assert "model.embed_tokens.weight" in listed


def test_conversion_to_llama_cpp_requires_a_known_model_type() -> None:
    with pytest.raises(UserError, match="model_type"):
        target_named("llama.cpp").convert(Context(LLAMA, make_plan(LLAMA, Recipe())))
    with pytest.raises(UserError, match="'no_such_type'"):
        converted("llama.cpp", LLAMA, model_type="no_such_type")


NAMES = st.lists(st.sampled_from(["a", "b", "c", "0", "1", "2", "10", "a+b", "[x]"]), min_size=1, max_size=4)
UNIVERSES = st.sets(NAMES.map(".".join), min_size=1, max_size=30)


@pytest.mark.slow
@given(UNIVERSES, st.data())
def test_patterns_made_from_a_list_of_names_match_exactly_these_names(universe: set[str], data: st.DataObject) -> None:
    wanted = data.draw(st.sets(st.sampled_from(sorted(universe))))
    for patterns, matches in (
        (regexes(sorted(wanted), universe), lambda pattern, name: re.fullmatch(pattern, name) is not None),
        (globs(sorted(wanted), universe), lambda pattern, name: fnmatch.fnmatchcase(name, pattern)),
    ):
        for name in universe:
            hits = [pattern for pattern in patterns if matches(pattern, name)]
            assert len(hits) == (name in wanted), (name, hits)


@pytest.mark.parametrize("kept", [{}, {"norm": "float32", "q_proj": "float16"}])
def test_converted_transformers_script_loads_bitwise_equal_weights(
    make_llama: Callable[..., Path], kept: dict[str, str]
) -> None:
    import dtype_engine as de

    folder = make_llama(dtype="bfloat16", dtypes=kept)
    recipe = Recipe((Rule("*.mlp", "float32"), Rule("*.1.mlp", "float16"), Rule("lm_head", "float32")))
    session = de.open(str(folder))
    session.apply(recipe)
    context = Context(session.tree, session.plan)
    written = target_named("transformers").convert(context)
    assert written.left_out == ()
    namespace: dict[str, Any] = {}
    exec(compile(written.text, "snippet", "exec"), namespace)
    loaded = namespace["load"](folder).state_dict()
    for name, tensor in session.model.module.state_dict().items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float16", "bfloat16"])
def test_transformers_keeps_wo_of_t5_in_the_listed_dtype(tmp_path: Path, base: str) -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    found = describe(locate(str(tmp_path)), Options(device="cpu"))
    plan = make_plan(found.tree, Recipe((Rule("*", base),)))
    written = target_named("llm-compressor").convert(Context(found.tree, plan, kinds=found.kinds))
    instead = {name: entry.instead for entry in written.left_out for name in entry.tensors}
    assert any("wo" in name for name in instead) is (base == "float16")
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=getattr(torch, base))
    for name, parameter in model.named_parameters():
        assert str(parameter.dtype) == f"torch.{instead.get(name, plan.dtypes[name])}", name


# --- lint --------------------------------------------------------------------------------------------------------------


def read(target: str, tree: Tree, *rules: Rule, model_type: str = "llama") -> Any:
    return lint(Context(tree, make_plan(tree, Recipe(rules)), "m", model_type), target_named(target))


def test_lint_reports_tensors_that_a_pattern_matches_only_in_the_target_library() -> None:
    found = read("diffusers", LLAMA, Rule("model.layers.1", "int8")).rules[0]
    assert found.only_here == ()
    assert {name.split(".")[2] for name in found.only_there} == {"10", "11"}
    gate = read("llm-compressor", MOE, Rule("re:.*\\.mlp\\.gate", "int8"), model_type="qwen3_moe").rules[0]
    assert gate.differs is False
    proj = read("llm-compressor", LLAMA, Rule("re:.*\\.mlp\\.gate", "int8")).rules[0]
    assert (len(proj.only_there), proj.here) == (12, 0)


@pytest.mark.parametrize("target", ["torchao", "llm-compressor", "llama.cpp", "diffusers", "transformers", "comfyui"])
def test_lint_reports_a_glob_given_as_a_regex(target: str) -> None:
    found = read(target, LLAMA, Rule("*.mlp", "int8"))
    assert found.differs
    assert len(found.rules[0].only_here) >= 24
    assert found.rules[0].problem or target == "transformers"


def test_lint_matches_patterns_by_the_rules_of_each_target_library() -> None:
    assert not read("modelopt", LLAMA, Rule("*.mlp.*", "int8")).differs
    assert read("modelopt", LLAMA, Rule("*.mlp", "int8")).differs
    assert not read("llm-compressor", LLAMA, Rule("type:Linear", "int8")).differs
    assert read("torchao", LLAMA, Rule("type:Linear", "int8")).differs
    assert not read("comfyui", LLAMA, Rule("model.layers.1.mlp.up_proj", "int8")).differs


def test_lint_reports_tensors_to_which_the_target_applies_another_rule() -> None:
    rules = (Rule("re:.*proj", "int8"), Rule("re:.*\\.mlp\\.\\w+_proj", "float8_e4m3fn"))
    there_first = read("torchao", LLAMA, *rules)
    assert not any(rule.differs for rule in there_first.rules)
    assert {tensor.split(".")[3] for tensor, _, _ in there_first.overruled} == {"mlp"}
    assert there_first.differs
    assert there_first.overruled[0][1:] == (rules[1].pattern, rules[0].pattern)
    exact = (Rule("model.layers.1.mlp.up_proj", "int8"), Rule("re:.*\\.mlp\\.\\w+_proj", "float8_e4m3fn"))
    assert [name for name, _, _ in read("torchao", LLAMA, *exact).overruled] == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGET_SUFFIXES))
@given(context=CONTEXTS)
@settings(max_examples=25, deadline=None)
def test_numbers_of_matched_tensors_in_lint_agree_with_the_lists_of_differences(target: str, context: Context) -> None:
    for rule, taken in zip(lint(context, target_named(target)).rules, context.plan.selections, strict=True):
        assert rule.here == len(taken)
        assert rule.here - rule.beyond - len(rule.only_here) == rule.there - len(rule.only_there)


# --- commands ----------------------------------------------------------------------------------------------------------


def test_every_target_of_the_package_is_listed() -> None:
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.iter_modules(targets.__path__, "dtype_engine.recipe.targets.")
    ]
    assert {module.TARGET.name for module in modules if hasattr(module, "TARGET")} == set(TARGET_SUFFIXES)
    assert [target_named(name).name for name in TARGET_SUFFIXES] == list(TARGET_SUFFIXES)
    with pytest.raises(UserError, match="unknown target 'base'"):
        target_named("base")


DEMO = str(paths.DEMO)


def recipe_file(tmp_path: Path, *rules: str, model: str | None = None) -> str:
    listed = "".join(
        f"  - {{pattern: {json.dumps(rule.rpartition('=')[0])}, dtype: {rule.rpartition('=')[2]}}}\n" for rule in rules
    )
    path = tmp_path / "recipe.yaml"
    path.write_text("version: 1\n" + (f"model: {json.dumps(model)}\n" if model else "") + "rules:\n" + listed)
    return str(path)


@pytest.mark.slow
def test_convert_command_uses_the_model_that_the_recipe_file_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe_file(tmp_path, "*=bf16", "type:Linear=fp8", "lm_head=bf16", model=DEMO)
    assert run(cli, "dtype-engine", ["recipe", "convert", file, "--to", "llm-compressor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["base"] == "bfloat16"
    assert found["left_out"] == []
    assert len(found["patterns"]) == 2
    assert yaml.safe_load(found["text"])["quant_stage"]
    for target in TARGET_SUFFIXES:
        assert run(cli, "dtype-engine", ["recipe", "convert", file, "--to", target]) == 0
        said = capsys.readouterr()
        assert said.out
        assert "left out: " in said.err or target in (
            "torchao",
            "llm-compressor",
            "modelopt",
            "comfyui",
            "diffusers",
            "vllm",
            "sglang",
        )
        written = ["recipe", "convert", file, "--to", target, "-o", str(tmp_path / target)]
        assert run(cli, "dtype-engine", written) == 0
        assert capsys.readouterr().out == ""
        assert (tmp_path / target).read_text() == said.out
        assert run(cli, "dtype-engine", written) == 2
        assert "--force" in capsys.readouterr().err
    nameless = recipe_file(tmp_path, "*=bf16")
    assert run(cli, "dtype-engine", ["recipe", "convert", nameless, "--to", "torchao"]) == 2
    assert "add --model" in capsys.readouterr().err


@pytest.mark.slow
def test_lint_command_exits_with_1_if_the_target_matches_differently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe_file(tmp_path, "*.mlp=fp8")
    arguments = ["recipe", "lint", file, "--model", DEMO, "--for"]
    assert run(cli, "dtype-engine", [*arguments, "torchao"]) == 1
    text = capsys.readouterr().out
    assert "! *.mlp=float8_e4m3fn: matches 18 tensors in dtype-engine, 0 in torchao" in text
    assert "    not in torchao: " in text
    assert "it is a name, not a pattern" in text
    assert run(cli, "dtype-engine", [*arguments, "torchao", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rules"][0]["differs"] is True
    assert run(cli, "dtype-engine", [*arguments, "torchao", "--sarif"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    tree = describe(locate("demo"), Options()).tree
    named = {result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] for result in found["results"]}
    assert named == {name for name in tree.tensors if fnmatch.fnmatch(name, "*.mlp*.weight")}
    place = found["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == Path(file).as_uri()
    assert "*.mlp" in Path(file).read_text().splitlines()[place["region"]["startLine"] - 1]
    assert run(cli, "dtype-engine", [*arguments, "torchao", "--sarif", "--json"]) == 2
    capsys.readouterr()
    same = recipe_file(tmp_path, "type:Linear=fp8")
    assert run(cli, "dtype-engine", ["recipe", "lint", same, "--model", DEMO, "--for", "llm-compressor"]) == 0
    assert "no difference" in capsys.readouterr().out


@pytest.mark.slow
def test_converting_a_rule_without_matches_exits_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe_file(tmp_path, "*.no_such=fp8")
    assert run(cli, "dtype-engine", ["recipe", "convert", file, "--to", "torchao", "--model", DEMO]) == 2
    assert "matches nothing" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["blk.0.attn_q", "=q8_0", "^a$=", "^a$=q9_k", "^(?=a)$=q8_0", "a=b=q8_0"])
def test_lines_at_which_llama_quantize_stops_are_not_read(line: str) -> None:
    with pytest.raises(ValueError, match=r"malformed|something else"):
        tensor_types(f"^ok$=q8_0\n{line}\n")


def test_lines_with_types_of_llama_cpp_are_read_type_by_type() -> None:
    names = ("model.embed_tokens", *(f"model.layers.{layer}.mlp.down_proj" for layer in range(3)))
    tree = Tree([TensorInfo(f"{name}.weight", (64, 256), "float32") for name in names], {"": "LlamaForCausalLM"})
    rules = (Rule.parse("*=iq4_xs:imatrix"), Rule.parse("*.layers.1=q5_1"), Rule.parse("*embed_tokens=q6_k:imatrix"))
    read = tensor_types(converted("llama.cpp", tree, *rules).text)
    found = {}
    for name in ("token_embd.weight", *(f"blk.{layer}.ffn_down.weight" for layer in range(3))):
        (found[name],) = [type_ for pattern, type_ in read if re.search(pattern, name)]
    assert found == {
        "token_embd.weight": "q6_k", "blk.0.ffn_down.weight": "iq4_xs", "blk.1.ffn_down.weight": "q5_1",
        "blk.2.ffn_down.weight": "iq4_xs",
    }  # fmt: skip


def test_embedding_at_which_llama_quantize_stops_is_named() -> None:
    tensors = [TensorInfo(name, (64, 256), "float32") for name in ("model.embed_tokens.weight", "lm_head.weight")]
    untied, tied = Tree(tensors, {"": "LlamaForCausalLM"}), Tree(tensors[:1], {"": "LlamaForCausalLM"})
    rule = Rule.parse("*=iq2_xs:imatrix")
    stops = (
        "llama-quantize stops at token_embd.weight in iq2_xs, for which no imatrix has anything: give it another type"
    )
    assert stops in converted("llama.cpp", untied, rule).notes
    assert stops not in converted("llama.cpp", untied, rule, Rule.parse("*embed_tokens=q4_k:imatrix")).notes
    assert stops not in converted("llama.cpp", tied, rule).notes, "the imatrix has what the output gets"
