"""Lists the tensors of a model's KV cache with their sizes, from its module tree and `config.json`. Does not import torch.

The sizes are those of transformers' `DynamicCache`. The shapes of the projections decide wherever they can, since they are exact
for every layer; `config.json` tells only what shapes don't: windows, shared layers, and how a fused projection is divided. What
neither tells is stated in `KVCache.notes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint.schemes.configuration import size
from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import WORDS
from dtype_engine.core.kv_cache import KV_CACHE, KVCache, KVCacheTensor
from dtype_engine.core.text import printable
from dtype_engine.core.tree import MOST_MODULES, Module, Tree, is_number
from dtype_engine.core.units import plural


def kv_cache(tree: Tree, config: Mapping[str, Any] | None) -> KVCache:
    """Return the KV cache of a model, without tensors if the model does not generate text. config: `config.json`, or the live
    model's configuration as a dict, or None if unknown.
    """
    if config is None:
        return KVCache(none_because="no config.json tells the model's architecture, so that its KV cache is unknown")
    if (why := why_no_text(tree, config)) is not None:
        found = KVCache(none_because=f"{why}, so that it keeps no KV cache")
    else:
        found = _Reader(tree, config).read()
        if found.tensors:
            found = replace(found, declared=declared_formats(config))
    text = text_config(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype")).removeprefix("torch.")
    return replace(found, dtype=dtype if dtype in dtypes.COMPUTE_DTYPES else None, longest=_first(text, *_LONGEST))


def why_no_text(tree: Tree, config: Mapping[str, Any]) -> str | None:
    """Return a clause that says that the model does not generate text token by token, or None if it may."""
    architecture, named = tree.root.class_name, config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        architecture = named[0]
    if architecture is None or _generates(architecture, config):
        return None
    return f"{printable(architecture)} does not generate text"


def declared_formats(config: Mapping[str, Any] | None) -> tuple[tuple[str, str, str], ...]:
    """Return the formats of KV caches that the content of a `config.json` declares, as triples like those in `KVCache.declared`."""
    settings = (config or {}).get("quantization_config")
    if not isinstance(settings, Mapping):
        return ()
    from dtype_engine.checkpoint.schemes.registry import schemes

    return next(filter(None, (scheme.cache_formats(settings) for scheme in schemes())), ())


CACHE_SCALES = (".k_scale", ".v_scale")
"""The ends of the names of calibrated scales of a KV cache. No module of transformers has such a tensor."""
_GENERATING = re.compile(
    r"For(CausalLM|ConditionalGeneration|ImageTextToText|Vision2Seq|SpeechSeq2Seq|Seq2SeqLM)|LMHead|DoubleHeads|MTModel|EncoderDecoder"
)
IN_AN_ENCODER = re.compile(
    r"encoder|.*(vision|visual|audio|image|speech).*|.*_encoder|.*tower|qformer|perceiver.*|text_model_enc"
)
CROSS = re.compile(
    r"encoder_attn|EncDecAttention|cross_?att.*|encoder_attention|encoder_decoder_attention|multihead_attn", re.I
)
_ATTENTION = re.compile(r".*att(entio)?n.*", re.I)
KEYS = ("k_proj", "key_proj", "key", "k", "k_lin", "wk")
VALUES = ("v_proj", "value_proj", "value", "v", "v_lin", "wv")
_FUSED = (
    "qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "qkv_lin", "att_proj", "in_proj_qkv", "gqkv_proj", "kv_proj",
)  # fmt: skip
_COMPRESSED = ("kv_a_proj_with_mqa", "kv_a_proj")
_CONVOLUTIONS = ("conv1d", "conv", "conv_1d", "q_conv1d", "k_conv1d", "v_conv1d")
"""The convolutions of a recurrent layer. Files of some delta nets, such as Kimi Linear's, hold three for the module's one."""
_INKLING = "_sconv"
"""The end of the names of Inkling's convolutions, which run in float32 whatever the model's dtype."""
_OUTPUT = ("out_proj", "o_proj", "dense")
_SHARING = "mamba_decoder"
"""The child of each layer of Zamba that also runs an attention, whose weights these layers share and a file holds once."""
_CHILDREN = {*KEYS, *_FUSED, *_COMPRESSED, *_CONVOLUTIONS, _SHARING, "rg_lru", "receptance", "q_proj"}
"""A module is examined for a cache if it has one of these children, or if its name is that of an attention."""
_TEXT_CONFIGS = ("thinker_config", "text_config", "llm_config", "language_config", "decoder", "text")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_decoder_layers", "decoder_layers", "num_layers")
_QUERY_HEADS = ("num_attention_heads", "n_head", "decoder_attention_heads", "num_heads", "n_heads")
_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "seq_length")
_EVERY_LAYER = ("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2", "phi4_multimodal")
"""The model types in which all layers have the sliding window that `sliding_window` in config.json gives."""
_PATTERNS = {
    "gemma2": 2, "gpt_oss": 2, "vaultgemma": 2, "cohere2": 4, "olmo3": 4, "exaone4": 4, "gemma3n_text": 5, "gemma3_text": 6,
    "gemma4_text": 6,
}  # fmt: skip
"""The default of n in transformers for model types in which every n-th layer has full attention, and all others a window."""


@lru_cache(1024)  # the many modules of a large model have few labels
def _is_attention(label: str) -> bool:
    return _ATTENTION.fullmatch(label) is not None


def _generates(architecture: str, config: Mapping[str, Any]) -> bool:
    """Return whether a model of this class generates text token by token. BERT's classes do so only as a decoder."""
    if config.get("is_decoder") is True:
        return True
    return _GENERATING.search(architecture) is not None and not architecture.startswith("Bert")


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the value of the first of the named entries that is a positive whole number, or None if there is none."""
    return next((value for name in names if (value := size(config.get(name))) is not None), None)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a `config.json` that describes the model of the text, which may be all of it."""
    for name in _TEXT_CONFIGS:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return text_config(nested)
    return config


_States = dict[str, tuple[int, str | None]]
"""The states of a layer: their elements and dtypes, where None is the model's dtype, keyed by part."""


class _Reader:
    def __init__(self, tree: Tree, config: Mapping[str, Any]) -> None:
        self.tree = tree
        self.config = text = text_config(config)
        self.encoder_decoder = bool(config.get("is_encoder_decoder"))
        # The layers of BERT are in a module `encoder` even if they decode.
        self.encoder_decodes = text.get("is_decoder") is True
        self.layers = _first(text, *_LAYERS)
        self.query_heads = _first(text, *_QUERY_HEADS)
        self.heads = _first(text, *_HEADS) or self.query_heads
        if text.get("new_decoder_architecture") is True:
            self.heads = self.query_heads  # transformers repeats Falcon's keys for all heads of the queries
        elif text.get("multi_query") is True:
            self.heads = 1
        hidden = _first(text, "hidden_size", "n_embd", "d_model")
        self.head_dim = _first(text, "head_dim", "d_kv", "kv_channels")
        if self.head_dim is None and hidden and self.query_heads:
            self.head_dim = hidden // self.query_heads
        self.notes: dict[str, None] = {}
        self.windows = _Windows(text, self.notes)

    def read(self) -> KVCache:
        found: list[KVCacheTensor] = []
        sharing: dict[str, int] = {}
        unknown: list[str] = []
        beyond = 0
        inside = ""
        for module in self.tree.walk():
            known = not _CHILDREN.isdisjoint(module.children)
            if not known and not _is_attention(module.label):  # most modules of a large model are experts
                continue
            numbers = [int(part) for part in module.name.split(".") if is_number(part) and len(part) < 9]
            if not numbers or self._in_an_encoder(module.name) or (inside and module.name.startswith(inside)):
                continue
            if self.tree.draft.holds(module.name):
                self.notes[f"without the cache of the {WORDS}"] = None
                continue
            if _SHARING in module.children:
                sharing[module.name] = numbers[0]
                continue
            # Two attentions of one layer, as LongCat's `layers.3.self_attn.1`, are two layers of the cache.
            layer = 2 * numbers[0] + numbers[1] if is_number(module.label) and len(numbers) > 1 else numbers[0]
            tensors = list(self._of_module(module, layer))
            if tensors:
                inside = f"{module.name}."
                unknown = [name for name in unknown if not module.name.startswith(f"{name}.")]
            elif (
                _is_attention(module.label)
                and "norm" not in module.label
                and module.children  # a norm or a scale of Falcon or Zaya has none
                and not (unknown and module.name.startswith(f"{unknown[-1]}."))
            ):
                unknown.append(module.name)
            if self.layers is not None and numbers[0] >= self.layers:
                beyond += bool(tensors)
            else:
                found += tensors
        if beyond:
            self.notes[
                f"without the cache of {plural(beyond, 'layer')} after the last of {self.layers}, which predict further tokens "
                "(speculative decoding)"
            ] = None
        if unknown:
            more = f" and {plural(len(unknown) - 1, 'module')} more" if len(unknown) > 1 else ""
            self.notes[f"not counted: {printable(unknown[0])}{more}, whose cache is not known here"] = None
        if not found:
            reason = "none of the modules is an attention or a recurrent layer whose cache is known here"
            return KVCache(none_because="; ".join(self.notes) or reason)
        return KVCache(tuple(self._shared([*found, *_of_other_layers(sharing, found)])), tuple(self.notes))

    def _in_an_encoder(self, name: str) -> bool:
        parts = name.split(".")
        if self.encoder_decoder and "decoder" not in parts:
            return True
        decodes = ("encoder",) if self.encoder_decodes else ()
        return any(
            IN_AN_ENCODER.fullmatch(part) and part not in decodes and not CROSS.fullmatch(part) for part in parts
        )

    def _of_module(self, module: Module, layer: int) -> Iterator[KVCacheTensor]:
        def tensor(part: str, **sizes: Any) -> KVCacheTensor:
            return KVCacheTensor(f"{module.name}.{KV_CACHE}.{part}", layer, **sizes)

        children = module.children
        if (states := self._states(module)) is not None:
            for part, (elements, dtype) in states.items():
                yield tensor(part, fixed=elements, state_dtype=dtype)
            return
        if compressed := next((children[name] for name in _COMPRESSED if name in children), None):
            rank = _first(self.config, "kv_lora_rank") or _outputs(children.get("kv_a_layernorm"))
            whole = _outputs(compressed)
            rope = _first(self.config, "qk_rope_head_dim") or (whole - rank if whole and rank else None)
            if rank is None or rope is None:
                return
            window = self.windows.of(layer)
            yield tensor("latent", per_token=rank, window=window)
            yield tensor("rope", per_token=rope, window=window)
            if "indexer" in children and (keys := _outputs(children["indexer"].children.get("wk"))):
                yield tensor("indexer", per_token=keys)
            return
        if self.windows.kind(layer) == "linear_attention":
            return
        sizes = self._keys_and_values(module)
        if sizes is None:
            return
        cross = any(CROSS.fullmatch(part) for part in module.name.split("."))
        more: dict[str, Any] = {"window": None if cross else self.windows.of(layer)}
        if cross:
            more |= {"source": "encoder", "length": _first(self.config, "max_source_positions")}
            if more["length"] is None:
                self.notes["cross attention is counted with as many tokens of the encoder as the context has"] = None
        more["runs"] = self._runs(module)
        for part, elements in zip(("k", "v"), sizes, strict=True):
            heads = self.heads if self.heads and elements % self.heads == 0 else 1
            yield tensor(part, per_token=elements, heads=heads, **more)
        for part, (elements, dtype) in _states_in_attention(children).items():
            yield tensor(part, fixed=elements, state_dtype=dtype)

    def _states(self, module: Module) -> _States | None:
        """Return the states of a recurrent layer, or None for other layers. Recurrences run in float32 whatever the model's
        dtype, except MiniMax's.
        """
        children = module.children
        if "receptance" in children:
            shifted, width = _inputs(children["receptance"]), _outputs(children.get("key"))
            if shifted is None or width is None or self.config.get("model_type") != "rwkv":
                self.notes["the states of recurrent layers are not counted: their sizes are not known here"] = None
                return {}
            before: _States = {"conv_state": (shifted, None)}
            # The numerator, the denominator and the maximum of each channel.
            return before | ({"ssm_state": (3 * width, "float32")} if "time_decay" in module.tensors else {})
        shapes = [shape for name in _CONVOLUTIONS if (shape := _shape(children.get(name))) and len(shape) == 3]
        if shapes and "rg_lru" in children:  # RecurrentGemma: one state of each channel
            (channels, _, kernel), *_ = shapes
            return {"conv_state": (channels * (kernel - 1), None), "ssm_state": (channels, "float32")}
        if shapes:
            state = self._recurrent_state(module)
            dtype = "float32" if module.label.endswith(_INKLING) else None
            convolved: _States = {"conv_state": (sum(each[0] * each[2] for each in shapes), dtype)}
            return convolved | ({"ssm_state": (state, "float32")} if state else {})
        if "output_gate" in children and "qkv_proj" in children and self.query_heads and self.head_dim:
            return {"ssm_state": (self.query_heads * self.head_dim**2, None)}  # MiniMax's lightning attention
        return None

    def _runs(self, module: Module) -> int:
        """Return how often a pass runs an attention module: once, except in HRM. Its high stack runs once in each high cycle, its
        low stack several times.
        """
        stacks = set(module.name.split(".")) & {"H_module", "L_module"}
        high, low = _first(self.config, "H_cycles") or 2, _first(self.config, "L_cycles") or 3
        return (high * low if "L_module" in stacks else high) if stacks else 1

    def _keys_and_values(self, module: Module) -> tuple[int, int] | None:
        """Return (elements of the keys, elements of the values) for one token, or None if the module is not an attention with a
        known layout.
        """
        children = module.children
        planned = self.heads * self.head_dim if self.heads and self.head_dim else None
        keys = next((children[name] for name in KEYS if name in children), None)
        if keys is not None and ("k_proj" in children or _ATTENTION.search(module.name)):
            values = next((children[name] for name in VALUES if name in children), keys)
            sizes = _outputs(keys) or planned, _outputs(values) or planned
            return (sizes[0], sizes[1]) if sizes[0] and sizes[1] else None
        if not planned or not self.query_heads or not self.head_dim:
            return None
        fused = next((children[name] for name in _FUSED if name in children), None)
        if fused is not None:
            shape = _shape(fused)
            queries = self.query_heads * self.head_dim
            wholes = {queries + 2 * planned, 2 * queries + 2 * planned, 2 * planned}  # HRM's also has a gate
            if "kv_proj" in children and shape:  # of JetMoe; DeepSeek V4's has keys alone
                shape = shape[:1]
            return (planned, planned) if shape is None or not wholes.isdisjoint(shape) else None
        shares = "q_proj" in children and _first(self.config, "num_kv_shared_layers") is not None
        return (planned, planned) if shares else None

    def _recurrent_state(self, module: Module) -> int:
        """Return the number of elements of a recurrent layer's state, not counting its convolution's, or 0 if it is unknown."""
        decay = module.children.get("forget_gate", module).tensors.get("A_log")  # of Kimi Linear: in a child
        if decay is None:
            return 0  # a convolution alone, as in LFM2
        if len(decay.shape) == 2:  # Mamba: one state of each channel
            return decay.numel
        inner = next(filter(None, (_inputs(module.children.get(name)) for name in _OUTPUT)), None)
        state = _first(
            self.config, "linear_key_head_dim", "linear_head_dim", "state_size", "mamba_d_state", "ssm_state_size"
        )
        if inner is None or state is None:
            self.notes[
                f"not counted: the recurrent state of {printable(module.name)}, whose size config.json does not tell"
            ] = None
            return 0
        return inner * state

    def _shared(self, found: list[KVCacheTensor]) -> list[KVCacheTensor]:
        """Return `found`, with `shared_with` set for the last layers of Gemma 3n and 4, which read the cache of an earlier
        layer.
        """
        count = _first(self.config, "num_kv_shared_layers")
        if not count or not self.layers:
            return found
        first = self.layers - count
        owners = {(tensor.part, tensor.window): tensor.name for tensor in found if tensor.layer < first}
        return [
            replace(tensor, shared_with=owners.get((tensor.part, tensor.window))) if tensor.layer >= first else tensor
            for tensor in found
        ]


def _states_in_attention(children: Mapping[str, Module]) -> _States:
    """Return the states that an attention module keeps for its convolutions. children: the module's children."""
    inner = children["qkv_proj"].children if "qkv_proj" in children else children
    first, second = (_shape(inner.get(f"conv_qk_{kind}")) for kind in ("depthwise", "grouped"))
    if first and second and (width := _outputs(inner.get("v_proj_delayed"))):  # Zaya
        return {"conv_state": (first[0] * (first[-1] + second[-1] - 2), None), "ssm_state": (width, None)}
    shapes = [_shape(children[part + _INKLING].children.get("conv1d")) for part in "kv" if part + _INKLING in children]
    elements = sum(shape[0] * shape[-1] for shape in shapes if shape)
    return {"conv_state": (elements, "float32")} if elements else {}


def _of_other_layers(layers: Mapping[str, int], found: Iterable[KVCacheTensor]) -> Iterator[KVCacheTensor]:
    """Yield the caches of layers that have no attention weights, because they run the attention of another layer.

    layers: maps the name of each layer that may share an attention to its number. found: the caches of the layers with weights.
    """
    owned: dict[str, list[KVCacheTensor]] = {}
    for tensor in found:
        name, shared, _ = tensor.name.partition(".shared_")
        if shared and name in layers:
            owned.setdefault(name, []).append(tensor)
    owner, tensors = next(iter(owned.items()), ("", []))
    for name, number in layers.items():
        for tensor in tensors if name not in owned else ():
            yield replace(tensor, name=name + tensor.name.removeprefix(owner), layer=number)


class _Windows:
    """Tells how many tokens the sliding window of each layer has, according to config.json."""

    def __init__(self, config: Mapping[str, Any], notes: dict[str, None]) -> None:
        self._types = _layer_types(config)
        self._sliding = _first(config, "sliding_window", "sliding_window_size", "attention_window_size")
        self._chunk = _first(config, "attention_chunk_size")
        if config.get("use_sliding_window") is False:
            self._sliding = None
        if self._types is None and self._sliding is not None:
            if config.get("model_type") in _EVERY_LAYER:
                self._types = ["sliding_attention"] * _layer_count(config)
            else:
                notes[
                    f"config.json names a sliding window of {self._sliding} tokens and not the layers that have it: all layers are "
                    "counted at full length, which is an upper bound"
                ] = None

    def kind(self, layer: int) -> str:
        """Return the layer's entry in transformers' `layer_types`, such as "full_attention", or "" if it is unknown."""
        return self._types[layer] if self._types is not None and layer < len(self._types) else ""

    def of(self, layer: int) -> int | None:
        """Return the window of a layer in tokens, or None for full attention."""
        kind = self.kind(layer)
        if "sliding" in kind or kind == "local_attention":
            return self._sliding
        return self._chunk if "chunk" in kind else None


def _layer_types(config: Mapping[str, Any]) -> list[str] | None:
    """Return each layer's kind of attention from config.json or transformers' rules for the model type. None if unknown."""
    listed = config.get("layer_types")
    if isinstance(listed, list) and all(isinstance(kind, str) for kind in listed):
        return listed
    layers = _layer_count(config)
    model_type = str(config.get("model_type"))
    blocks = config.get("block_types")
    if model_type == "recurrent_gemma" and isinstance(blocks, list) and blocks:
        kinds = ["sliding_attention" if block == "attention" else "linear_attention" for block in blocks]
        return [kinds[index % len(kinds)] for index in range(layers)]
    if model_type == "llama4_text":
        every = _first(config, "no_rope_layer_interval") or 4
        listed = config.get("no_rope_layers")
        rotary = listed if isinstance(listed, list) and listed else [(index + 1) % every for index in range(layers)]
        return ["chunked_attention" if rotates else "full_attention" for rotates in rotary]
    if model_type.startswith("qwen"):
        first = _first(config, "max_window_layers") or 0
        return ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    pattern = _first(config, "sliding_window_pattern", "_sliding_window_pattern") or _PATTERNS.get(model_type)
    if pattern is None:
        return None
    return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)]


def _layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of layers in `config.json`, but at most `MOST_MODULES`, since the file may be damaged."""
    return min(_first(config, *_LAYERS) or 0, MOST_MODULES)


def _shape(module: Module | None) -> tuple[int, ...] | None:
    weight = None if module is None else module.tensors.get("weight")
    if weight is None or weight.uncastable_reason is not None or weight.logical_numel is not None:
        return None
    return weight.shape


def _outputs(module: Module | None) -> int | None:
    shape = _shape(module)
    return shape[0] if shape else None


def _inputs(module: Module | None) -> int | None:
    shape = _shape(module)
    return shape[1] if shape and len(shape) > 1 else None
