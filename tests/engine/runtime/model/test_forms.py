"""One real example of every form a checkpoint has on disk, opened through the same door."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.file_edits import write_gguf
from tests.helpers.hub_server import hub_of
from torch import nn

import dtype_engine as de
from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.source import Source, locate
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.runtime.building.load import load
from dtype_engine.runtime.weights.checkpoint_weights import source_of

Make = Callable[..., Path]


def opened(path: Path, **how: Any) -> Checkpoint:
    checkpoint = locate(str(path), **how).open()
    assert checkpoint is not None
    return checkpoint


def values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: source_of(checkpoint, name).read() for name in checkpoint.weights}


def why_not_run(path: Path, **how: Any) -> str:
    with pytest.raises(NoForward) as caught:
        load(locate(str(path), **how), de.Options())
    return str(caught.value)


def small() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layer.0.weight": torch.randn(3, 2, generator=generator),
        "layer.0.bias": torch.randn(3, generator=generator).half(),
        "layer.1.weight": torch.randn(2, 3, generator=generator).bfloat16(),
        "steps": torch.tensor([7]),
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def test_safetensors_file_is_opened(tmp_path: Path) -> None:
    save_file(small(), tmp_path / "x.safetensors")
    assert same(values(opened(tmp_path / "x.safetensors")), small())
    assert "no config.json" in why_not_run(tmp_path / "x.safetensors")


def test_single_and_sharded_folders_are_opened_and_measured(make_llama: Make) -> None:
    for folder in (make_llama("one"), make_llama("many", max_shard_size="20KB")):
        session = de.open(str(folder))
        session.cast("*.mlp", "bfloat16")
        assert session.drift().output.max_abs > 0


@pytest.mark.parametrize("nested", [None, "state_dict", "model", "model_state_dict", "my_own_entry"])
@pytest.mark.parametrize("zipped", [True, False])
def test_nested_state_dicts_and_those_in_the_old_file_format_are_opened(
    tmp_path: Path, nested: str | None, zipped: bool
) -> None:
    path = tmp_path / "x.pth"
    held = small() if nested is None else {nested: small(), "epoch": 3, "optimizer": {"lr": 0.1}}
    torch.save(held, path, _use_new_zipfile_serialization=zipped)
    checkpoint = opened(path)
    assert same(values(checkpoint), small())
    assert checkpoint.notices == (() if nested is None else (f"x.pth: the weights are its entry {nested!r}",))
    assert "--weights x.pth" in why_not_run(path)
    assert list(checkpoint.tree().modules["layer"].children) == ["0", "1"]


def test_state_dict_is_memory_mapped(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3_000_000)}, tmp_path / "x.pt")
    tensor = values(opened(tmp_path / "x.pt"))["weight"]
    assert tensor.numel() == 3_000_000
    address = tensor.data_ptr()
    maps = Path("/proc/self/maps").read_text().splitlines()
    held = [line for line in maps if int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)]
    assert held[0].endswith("x.pt")


def test_folder_of_pickles_is_opened_and_measured(make_llama: Make) -> None:
    from safetensors.torch import load_file

    folder = make_llama("pickled", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    whole = de.open(str(folder))
    expected = whole.drift().output.elements
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, held in parts.items():
        torch.save({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    session = de.open(str(folder))
    assert session.drift().output.elements == expected
    assert same(values(opened(folder)), tensors)


def test_pickled_module_is_opened_only_with_trust_pickle(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    torch.save(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), path)
    with pytest.raises(UserError, match=r"torch.nn.modules.container.Sequential.*only with --trust-pickle"):
        opened(path)
    assert set(opened(path, trust_pickle=True).tensors) == {"0.weight", "0.bias"}
    live = load(locate(str(path), trust_pickle=True), de.Options())
    assert type(live.module) is nn.Sequential


def test_pickled_module_runs_on_example_inputs_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    pass\ndef example_inputs():\n    return (torch.ones(3, 2),)\n"
    )
    monkeypatch.chdir(tmp_path)
    save = "import my_net, torch; torch.save(my_net.Net(2, 2), 'whole.pth')"
    subprocess.run([sys.executable, "-c", save], check=True)
    with pytest.raises(UserError, match=r"my_net\.Net"):
        de.open("whole.pth")
    session = de.open("whole.pth", options=de.Options(trust_pickle=True))
    assert session.drift().inputs == "example_inputs()"


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "owned"))


@pytest.mark.parametrize("raw", [True, False])
def test_malicious_pickle_is_refused_without_running_its_code(tmp_path: Path, raw: bool) -> None:
    path, witness = tmp_path / "evil.pth", tmp_path / "witness"
    held = {"weight": torch.zeros(2), "extra": Evil(witness)}
    if raw:
        path.write_bytes(pickle.dumps(held))
    else:
        torch.save(held, path)
    with pytest.raises(UserError) as caught:
        opened(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not witness.exists()


def test_state_dict_is_loaded_into_a_module_of_user_code(tmp_path: Path) -> None:
    from tests.helpers.paths import TINYNET

    torch.manual_seed(5)
    code = de.open(f"{TINYNET}:TinyNet")
    state = {name: torch.randn_like(tensor) for name, tensor in code.model.module.state_dict().items()}
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path / "trained.pth")
    session = de.open(f"{TINYNET}:TinyNet", options=de.Options(weights=tmp_path / "trained.pth"))
    for name, tensor in state.items():
        assert torch.equal(session.model.module.state_dict()[name], tensor)
    session.cast("*", "bfloat16")
    assert session.drift().output.max_abs > 0
    first, *others = state
    torch.save({**{name: state[name] for name in others}, "other": torch.zeros(1)}, tmp_path / "part.pth")
    part = de.open(f"{TINYNET}:TinyNet", options=de.Options(weights=tmp_path / "part.pth"))
    assert part.model.notices == (
        "1 tensor of part.pth not used, first other",
        f"1 tensor of the model not in part.pth, first {first}: the model's code made the values",
    )
    assert str(part.drift().coverage) == f"{len(others)} of {len(state)} tensors found"
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="has none of the tensors"):
        de.open(f"{TINYNET}:TinyNet", options=de.Options(weights=tmp_path / "other.pth"))


def test_diffusers_folder_is_opened_as_several_components(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    for component, file in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        (folder / component).mkdir(parents=True)
        save_file(small(), folder / component / f"{file}.safetensors")
    (folder / "scheduler").mkdir()
    (folder / "model_index.json").write_text(
        json.dumps(
            {
                "_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"],
                "text_encoder": ["transformers", "CLIPTextModel"], "scheduler": ["diffusers", "PNDMScheduler"],
                "safety_checker": [None, None],
            }
        )
    )  # fmt: skip
    checkpoint = opened(folder)
    assert list(checkpoint.tree().root.children) == ["unet", "text_encoder"]
    expected = {f"{part}.{name}": tensor for part in ("unet", "text_encoder") for name, tensor in small().items()}
    assert same(values(checkpoint), expected)
    assert "a pipeline has several models" in why_not_run(folder)


def test_gguf_file_is_opened(tmp_path: Path) -> None:
    import gguf

    plain, kind = np.arange(6, dtype=np.float32).reshape(2, 3), gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32), kind)
    tensors = {"attn_norm": plain, "ffn_up": plain.astype(np.float16), "ffn_down": (blocks, kind)}
    path = write_gguf(tmp_path / "x.gguf", {f"blk.0.{name}.weight": held for name, held in tensors.items()})
    checkpoint = opened(path)
    tree = checkpoint.tree()
    assert {name: tensor.dtype for name, tensor in tree.tensors.items()} == {
        "blk.0.attn_norm.weight": "float32", "blk.0.ffn_up.weight": "float16", "blk.0.ffn_down.weight": "gguf:q8_0",
    }  # fmt: skip
    down = tree.tensors["blk.0.ffn_down.weight"]
    assert (down.shape, down.nbytes, down.castable) == ((4, 64), 4 * 2 * 34, True)
    assert torch.equal(source_of(checkpoint, "blk.0.attn_norm.weight").read(), torch.from_numpy(plain))
    values = gguf.quants.dequantize(blocks, kind)
    assert torch.equal(source_of(checkpoint, "blk.0.ffn_down.weight").read(), torch.from_numpy(values))
    assert "the architecture of this GGUF file is not known" in why_not_run(path)


def test_notice_about_an_adapter_names_its_base_model(tmp_path: Path) -> None:
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(2, 3)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta/llama"}))
    checkpoint = opened(tmp_path)
    assert checkpoint.base == "meta/llama"
    assert "adapter for meta/llama" in checkpoint.notices[0]
    assert "--base" in why_not_run(tmp_path)


QUANTISED = {
    "fp8 with block scales": ({"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}, {}),
    "compressed-tensors": (
        {"weight_packed": torch.int32, "weight_scale": torch.bfloat16, "weight_shape": torch.int64},
        {},
    ),
    "bitsandbytes": ({"weight": torch.uint8, "weight.absmax": torch.float32, "weight.quant_map": torch.float32}, {}),
    "gptq, 4 bit": (
        {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ),
}


@pytest.mark.parametrize("what", QUANTISED)
def test_quantized_weights_are_named_and_never_cast(tmp_path: Path, what: str) -> None:
    parts, config = QUANTISED[what]
    tensors = {f"layer.{part}": torch.zeros(2, 2).to(dtype) for part, dtype in parts.items()}
    tensors["norm.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tree = opened(tmp_path).tree()
    for part in parts:
        assert what in str(tree.tensors[f"layer.{part}"].uncastable_reason)
        assert not tree.tensors[f"layer.{part}"].castable
    assert tree.tensors["norm.weight"].castable


def test_model_is_downloaded_only_on_request(tmp_path: Path, make_llama: Make) -> None:
    with hub_of(tmp_path / "cache", someone__llama=make_llama()) as hub:
        with pytest.raises(UserError, match="--download fetches one"):
            locate("someone/llama")
        assert hub.requests == []
        source = locate("someone/llama", download=True)
        assert hub.requests != []
        assert source.open() is not None
        before = len(hub.requests)
        assert locate("someone/llama", download=True).path == locate("someone/llama").path == source.path
        assert len(hub.requests) == before


def test_model_larger_than_memory_is_reported_without_importing_torch(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.mkdir()
    header = json.dumps({"w.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 42))
    (path / "config.json").write_text('{"model_type": "llama"}')
    script = (
        "import sys\nfrom dtype_engine import Options\nfrom dtype_engine.service import events\n"
        "from dtype_engine.service.worker import Worker\n"
        "from dtype_engine.checkpoint.source import locate\nimport threading\nheard, failed = [], threading.Event()\n"
        "with_torch = []\n"
        "def hear(event):\n"
        "    heard.append(event)\n"
        "    if isinstance(event, events.OpenFailed):\n"
        "        with_torch.append('torch' in sys.modules)\n"
        "        failed.set()\n"
        f"worker = Worker(locate({str(path)!r}), Options(), hear, read_headers=True)\nworker.start()\n"
        "failed.wait(50)\n"
        "print([type(e).__name__ for e in heard], [e.message for e in heard if isinstance(e, events.OpenFailed)])\n"
        "print(with_torch, flush=True)\n"
        "import os; os._exit(0)\n"  # torch is still being imported there
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "HeadersRead" in ran.stdout
    assert "4.00 TiB" in ran.stdout
    assert ran.stdout.strip().endswith("[False]")
    assert isinstance(locate(str(path)), Source)
