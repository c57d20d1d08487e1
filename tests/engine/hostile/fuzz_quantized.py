"""The kind of `fuzz.py` that is a checkpoint in the layout of another program's quantizer: its headers, its configuration, and the
small tensors and texts that describe its weights are changed. Each is inspected, checked, cast and decoded.

A case is JSON: the parts of a folder, or the fields and tensors of a GGUF file. Its files are always well-formed; what they say is
not.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

from tests.helpers.mutations import STRANGE, changed

from dtype_engine.core import dtypes

KINDS = ("quantized",)
_NUMBERS: tuple[Any, ...] = (
    *range(-1, 10), 16, 32, 64, 100, 128, 1 << 20, 2**31, 2**62, 2**63, 2**64, 10**30, 1.5, float("nan"), "128", "4", [128], [4, 4],
    [128, 128], [1, 2**62], [[8]], {"a": 4}, None, True, "8x8", "0x0", "-1x4",
)  # fmt: skip
_WORDS = (
    "gptq", "awq", "auto-round", "fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "modelopt", "quark", "bitsandbytes", "hqq",
    "torchao", "int", "float", "group", "channel", "tensor", "block", "tensor_group", "FP8", "NVFP4", "W4A16_AWQ", "MXFP8",
    "MIXED_PRECISION", "affine", "nvfp4", "mxfp8", "per_group", "per_channel", "fp4", "fp6_e3m2", "int4", "uint4", "int8",
    "gptq_v2", "re:.*", "*", "x", "m", "Linear",
)  # fmt: skip
_DTYPES = {code: row.bits // 8 for code, row in dtypes.BY_SAFETENSORS.items() if row.bits >= 8}
_TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4", "IQ4_XS", "TQ1_0")


def make_good(kind: str, folder: Path) -> list[bytes]:
    """A checkpoint of every scheme and variant, and GGUF files of two architectures."""
    from tests.helpers.quantized import CASES
    from tests.helpers.quantized.quantizers import mlx_affine

    stacked = mlx_affine(3, name="l.switch_mlp.up", shape=(2, 8, 64))
    cases = [stacked, *(make() for make in CASES.values())]
    made = [
        _folder(folder, case.tensors, case.metadata, None if case.alone else case.config, case.hf_quant_config)
        for case in cases
    ]
    return [json.dumps(each).encode() for each in (*made, *(_gguf(name) for name in ("llama", "gemma2", "qwen3moe")))]


def _folder(folder: Path, tensors: Any, metadata: Any, config: Any, beside: Any) -> dict[str, Any]:
    """A checkpoint as JSON: its configurations, its metadata, and (dtype, shape, bytes) of each tensor."""
    from safetensors.torch import save

    raw = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    size = int.from_bytes(raw[:8], "little")
    held = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        begin, end = entry["data_offsets"]
        held[name] = [entry["dtype"], entry["shape"], base64.b64encode(raw[8 + size + begin : 8 + size + end]).decode()]
    return {"config": config, "hf_quant_config": beside, "metadata": metadata, "tensors": held}


def _gguf(architecture: str) -> dict[str, Any]:
    """A GGUF file as JSON: the fields of its header, and (type, shape) of each tensor."""
    fields = {
        "general.architecture": architecture, "block_count": 1, "embedding_length": 256, "feed_forward_length": 256,
        "context_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4, "vocab_size": 8,
        "expert_count": 2 * (architecture == "qwen3moe"),
        "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (8, 256), "output_norm.weight": (256,), "blk.0.attn_q.weight": (256, 256),
        "blk.0.attn_k.weight": (128, 256), "blk.0.attn_q.bias": (256,), "blk.0.ffn_up.weight": (256, 256),
        "blk.0.ffn_up_exps.weight": (2, 16, 256), "blk.0.ffn_gate_inp_shexp.weight": (256,), "rope_freqs.weight": (8,),
    }  # fmt: skip
    types = {name: "F32" if len(shape) == 1 else _TYPES[place] for place, (name, shape) in enumerate(shapes.items())}
    named = {name if name.startswith("general") else f"{architecture}.{name}": value for name, value in fields.items()}
    return {"fields": named, "gguf": {name: [types[name], list(shape)] for name, shape in shapes.items()}}


def mutated(kind: str, content: bytes, chooser: random.Random) -> bytes | None:
    """A checkpoint with other settings, tensors or descriptions."""
    case = json.loads(content)
    for _ in range(chooser.choice((1, 1, 2, 3))):
        what = chooser.random()
        if "gguf" in case:
            _change_gguf(case, chooser)
        elif what < 0.45 and case["config"]:
            place = "hf_quant_config" if case["hf_quant_config"] and chooser.random() < 0.5 else "config"
            case[place] = _with_other_settings(case[place], chooser)
        elif what < 0.55 and case["metadata"]:
            name = chooser.choice(list(case["metadata"]))
            case["metadata"][name] = _other_text(case["metadata"][name], chooser)
        else:
            _change_tensor(case["tensors"], chooser)
    return json.dumps(case).encode("utf-8", "surrogatepass")


def _with_other_settings(value: Any, chooser: random.Random) -> Any:
    """The same JSON with one of its innermost values replaced, mostly by one that some setting may have."""
    if chooser.random() < 0.15:
        return changed(value, chooser)
    if isinstance(value, dict) and value:
        key = chooser.choice(list(value))
        return value | {key: _with_other_settings(value[key], chooser)}
    if isinstance(value, list) and value and chooser.random() < 0.7:
        place = chooser.randrange(len(value))
        return [*value[:place], _with_other_settings(value[place], chooser), *value[place + 1 :]]
    return chooser.choice((*_NUMBERS, *_WORDS, *STRANGE))


def _other_text(text: str, chooser: random.Random) -> str:
    """A text with JSON in it that says something else, or that is no JSON."""
    try:
        return json.dumps(_with_other_settings(json.loads(text), chooser))
    except (ValueError, RecursionError):
        return str(chooser.choice((*_WORDS, *STRANGE, "[" * 5000, '{"a":' * 900, "2bit_u8", "3bit_32")))


def _change_tensor(tensors: dict[str, Any], chooser: random.Random) -> None:
    """Drop, rename, reshape, retype, shorten or fill a tensor, or describe a weight otherwise in a small one."""
    if not tensors:
        return
    name = chooser.choice(list(tensors))
    dtype, shape, data = tensors[name]
    raw = base64.b64decode(data)
    what = chooser.randrange(8)
    if what == 0:
        del tensors[name]
        return
    if what == 1:
        tensors[
            chooser.choice(
                (*(f"{name}{end}" for end in ("_scale", "x", ".")), f"y.{name}", str(chooser.choice(STRANGE)))
            )
        ] = tensors.pop(name)
        return
    if what == 2:
        others = [other for other, width in _DTYPES.items() if width == _DTYPES.get(dtype)]
        dtype = chooser.choice(others or list(_DTYPES))
    elif what == 3:
        shape = chooser.choice(
            (shape[::-1], [1, *shape], [*shape, 1], [math.prod(shape)], [0, *shape[1:]], [], [len(raw)])
        )
    elif what == 4 and shape:
        shape = [max(0, shape[0] + chooser.choice((-1, 1, 3, 128))), *shape[1:]]
    elif what == 5 and len(raw) <= 4096:
        with contextlib.suppress(UnicodeDecodeError):
            raw = _other_text(raw.decode(), chooser).encode("utf-8", "surrogatepass")
            shape, dtype = (
                ([len(raw)], "U8") if raw[:1] in (b"{", b"[", b'"') or len(raw) != math.prod(shape) else (shape, dtype)
            )
    else:
        number = chooser.choice((0, 1, 3, 127, 255, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, 2**64 - 1))
        width = max(1, _DTYPES.get(dtype, 1))
        place = chooser.randrange(max(1, len(raw) // width)) * width
        piece = (number % 256**width).to_bytes(width, "little")
        raw = piece * (len(raw) // width) if chooser.random() < 0.3 else raw[:place] + piece + raw[place + width :]
    size = math.prod(shape) * _DTYPES.get(dtype, 1)
    tensors[name] = [dtype, shape, base64.b64encode(raw[:size].ljust(min(size, 1 << 22), b"\1")).decode()]


def _change_gguf(case: dict[str, Any], chooser: random.Random) -> None:
    """Change a field, or the type, the shape or the name of a tensor."""
    if chooser.random() < 0.6:
        name = chooser.choice(list(case["fields"]))
        case["fields"][name] = chooser.choice((*_NUMBERS, *STRANGE, "llama", "gemma", "qwen2moe", "phi3", "linear"))
        return
    name = chooser.choice(list(case["gguf"]))
    kind, shape = case["gguf"][name]
    what = chooser.randrange(4)
    if what == 0:
        del case["gguf"][name]
    elif what == 1:
        case["gguf"][
            name.replace(
                chooser.choice(("attn_q", "ffn_up", "blk.0", "weight")), chooser.choice(("attn_k", "blk.9", "bias", ""))
            )
        ] = case["gguf"].pop(name)
    elif what == 2:
        case["gguf"][name] = [chooser.choice(_TYPES), shape]
    else:
        case["gguf"][name] = [
            kind,
            chooser.choice(([1, 256], [3, 256], [256], [2, 3, 256], [1, 1, 1, 256], [7, 256], [5000, 1, 256])),
        ]
    case["gguf"] = case["gguf"] or {"x": ["F32", [2]]}


def run_case(content: bytes, folder: Path, seed: int) -> int:
    """The exit status of the command that failed, or that of `inspect`. Raises whatever comes out of the program, and
    AssertionError for what a command may not say.
    """
    from dtype_engine.checkpoint import open_checkpoint
    from dtype_engine.cli import cli
    from dtype_engine.cli.program import run
    from dtype_engine.core.errors import UserError
    from dtype_engine.runtime.weights.coded import CodedSource

    place = folder / "quantized"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    path = _written(json.loads(content), place)
    statuses = []
    for command in (["inspect"], ["check", "--values"], ["weights", "--cast", "*=bf16"]):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            status = run(cli, "dtype-engine", [command[0], str(path), *command[1:]])
        text = said.getvalue()
        lines = [line for line in text.splitlines() if "note:" not in line]
        fits = status in (0, 2) or (status == 1 and command[0] == "check")
        if not fits or "Traceback" in text or ": unexpected " in text[:30] or (status == 2 and len(lines) != 1):
            raise AssertionError(f"{command[0]}: status {status}, said {text[:300]!a}")
        assert text.replace("\n", "").isprintable(), f"{command[0]} said {text[:300]!a}"
        statuses.append(status)
    with contextlib.suppress(UserError):
        for weight in open_checkpoint(path).coded.values():
            with contextlib.suppress(UserError):
                values = CodedSource(weight).read()
                assert tuple(values.shape) == weight.shape, (
                    f"{weight.name} is {weight.shape}, and its values {list(values.shape)}"
                )
                assert str(values.dtype) == "torch.float32"
    return 2 if 2 in statuses else 0


def _written(case: dict[str, Any], folder: Path) -> Path:
    """Write the files of a case. Returns what is to be opened."""
    if "gguf" in case:
        return _written_gguf(case, folder / "x.gguf")
    header: dict[str, Any] = {
        "__metadata__": {key: value for key, value in case["metadata"].items() if isinstance(value, str)}
    }
    data = b""
    for name, (dtype, shape, text) in case["tensors"].items():
        raw = base64.b64decode(text)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    for name in ("config", "hf_quant_config"):
        if case[name] is not None:
            (folder / f"{name}.json").write_text(json.dumps(case[name]))
    return folder if case["config"] is not None else folder / "model.safetensors"


def _written_gguf(case: dict[str, Any], path: Path) -> Path:
    import gguf
    import numpy as np
    from tests.helpers.gguf_files import gguf_file

    with gguf_file(path, "none") as writer:
        writer.kv_data[0].clear()
        for name, value in case["fields"].items():
            with contextlib.suppress(Exception):  # what the writer can't write is left out
                if isinstance(value, bool):
                    writer.add_bool(name, value)
                elif isinstance(value, int) and -(2**63) <= value < 2**64:
                    (
                        writer.add_uint32
                        if 0 <= value < 2**32
                        else writer.add_int64
                        if value < 2**63
                        else writer.add_uint64
                    )(name, value)
                elif isinstance(value, float):
                    (writer.add_float32 if abs(value) < 3e38 else writer.add_float64)(name, value)
                elif isinstance(value, str):
                    value.encode()
                    writer.add_string(name, value)
                elif (
                    isinstance(value, list) and value and all(type(item) is int and abs(item) < 2**31 for item in value)
                ):
                    writer.add_array(name, value)
        for name, (kind, shape) in case["gguf"].items():
            of_type = gguf.GGMLQuantizationType[kind]
            block, width = gguf.GGML_QUANT_SIZES[of_type]
            raw = np.ones((*shape[:-1], -(-shape[-1] // block) * width), np.uint8)
            writer.add_tensor(name, raw, raw_dtype=of_type)
    return path
