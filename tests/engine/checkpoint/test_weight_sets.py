"""Of several sets of weights in a folder, every command reads the set that `from_pretrained` loads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import dtype_engine as de
from dtype_engine.checkpoint import needs_torch, open_checkpoint, peek_first_shard
from dtype_engine.checkpoint.components import read_components
from dtype_engine.checkpoint.discovery import find_models
from dtype_engine.checkpoint.weight_files import find_weight_files
from dtype_engine.checkpoint.weight_sets import OF_TRANSFORMERS, weight_sets
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.weights.checkpoint_weights import source_of

NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


def write_set(folder: Path, name: str, tensors: Tensors, variant: str = "") -> None:
    """Write a set of weights under the name by which transformers finds it, in two shards if this is an index."""
    suffix = "bin" if ".bin" in name else "safetensors"
    stem = name.partition(".")[0]
    middle = f".{variant}" if variant else ""

    def save(file: str, held: Tensors) -> None:
        held = {key: value.clone() for key, value in held.items()}
        if suffix == "bin":
            torch.save(held, folder / file)
        else:
            save_file(held, folder / file, {"format": "pt"})

    if not name.endswith(".json"):
        save(f"{stem}{middle}.{suffix}", tensors)
        return
    names = sorted(tensors)
    files = [f"{stem}{middle}-{number:05d}-of-00002.{suffix}" for number in (1, 2)]
    where = {key: files[place >= len(names) // 2] for place, key in enumerate(names)}
    for file in files:
        save(file, {key: tensors[key] for key in names if where[key] == file})
    index = f"{stem}.{suffix}.index{middle}.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.fixture
def several(make_llama: Callable[..., Path]) -> Callable[..., Path]:
    """A function that writes a Llama with the sets of weights of given names. In each set, the norm has a value of its own: the
    place of the set's name in `OF_TRANSFORMERS`, plus 1.
    """
    folder = make_llama("several", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()

    def write(names: Iterable[str]) -> Path:
        for place, name in enumerate(OF_TRANSFORMERS):
            if name in names:
                write_set(folder, name, tensors | {NORM: torch.full((32,), place + 1.0)})
        return folder

    return write


def value_read(folder: Path) -> float:
    return float(source_of(open_checkpoint(folder), NORM).read()[0])


def value_loaded(folder: Path) -> float:
    return float(transformers.LlamaForCausalLM.from_pretrained(folder).model.norm.weight.detach()[0])


SUBSETS = [subset for count in range(1, 5) for subset in itertools.combinations(OF_TRANSFORMERS, count)]


@pytest.mark.parametrize("names", SUBSETS, ids=" ".join)
def test_weights_are_read_from_the_files_that_transformers_loads(
    names: tuple[str, ...], several: Callable[..., Path]
) -> None:
    folder = several(names)
    loaded = value_loaded(folder)
    assert value_read(folder) == loaded
    assert float(de.load_pretrained(folder).get_parameter(NORM).detach()[0]) == loaded
    first = OF_TRANSFORMERS[int(loaded) - 1]
    assert needs_torch(folder) == (".bin" in first)
    (said,) = open_checkpoint(folder).notices if len(names) > 1 else ("",)
    assert (f"{first} is read, as transformers does" in said) == (len(names) > 1)
    assert all((name in said) == (len(names) > 1) for name in names)


def test_single_file_beside_shards_is_measured_and_exported(
    several: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = several(["model.safetensors.index.json"])
    shards = [load_file(file) for file in sorted(folder.glob("model-*.safetensors"))]
    halves = {name: (value / 2).bfloat16() for shard in shards for name, value in shard.items()}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})
    assert run(cli, "dtype-engine", ["inspect", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {tensor["dtype"] for tensor in shown["tensors"]} == {"bfloat16"}
    assert shown["passed_over"] == ["model.safetensors.index.json"]
    assert run(cli, "dtype-engine", ["inspect", str(folder)]) == 0
    assert "model.safetensors is read, as transformers does" in capsys.readouterr().out
    assert run(cli, "dtype-engine", ["export", str(folder), "-o", str(tmp_path / "out")]) == 0
    written = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="bfloat16").state_dict()
    plain = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="bfloat16").state_dict()
    assert all(torch.equal(written[name], plain[name]) for name in plain)
    assert "model.safetensors is read" in capsys.readouterr().err, "a note of the export"
    assert run(cli, "dtype-engine", ["weights", str(folder), "--cast", "*=f16"]) == 0
    assert "model.safetensors is read" in capsys.readouterr().err
    assert run(cli, "dtype-engine", ["weights", str(folder), "--against", str(tmp_path / "out")]) == 0
    assert "several: the folder has more than one set of weights" in capsys.readouterr().err
    assert run(cli, "dtype-engine", ["verify", str(tmp_path / "out"), "--against", str(folder)]) == 0


def test_stale_index_beside_a_single_file_is_reported_by_check_and_not_used(
    several: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = several(["model.safetensors", "model.safetensors.index.json"])
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
    assert value_read(folder) == value_loaded(folder) == 1.0
    assert run(cli, "dtype-engine", ["check", str(folder), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["kind"] == "second-set"
    assert "names 2 files that are not here" in finding["what"]
    (folder / "model.safetensors.index.json").write_text("{")
    assert value_read(folder) == value_loaded(folder) == 1.0


def test_index_that_names_only_the_single_file_is_not_a_second_set_of_weights(several: Callable[..., Path]) -> None:
    folder = several(["model.safetensors"])
    held = load_file(folder / "model.safetensors")
    index = {"weight_map": {name: "model.safetensors" for name in held if name != NORM}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.passed_over == ()
    assert checkpoint.index is not None
    assert checkpoint.index.unnamed == (NORM,)


@pytest.mark.parametrize(
    "others", [["model.safetensors"], ["model.safetensors.index.json"], ["pytorch_model.bin"]], ids=" ".join
)
def test_check_reports_a_second_set_of_weights_in_the_same_format(
    others: list[str], several: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = several(["model.safetensors.index.json", *others])
    (folder / "consolidated.safetensors").write_bytes(next(folder.glob("model-00001*")).read_bytes())
    status = run(cli, "dtype-engine", ["check", str(folder), "--json"])
    report = json.loads(capsys.readouterr().out)
    kinds = [(finding["kind"], finding["tensor"]) for finding in report["findings"]]
    unchecked = next(each for each in report["unchecked"] if each.startswith("files of weights that are not loaded"))
    assert "consolidated.safetensors" in unchecked
    assert ("pytorch_model.bin" in unchecked) == (others == ["pytorch_model.bin"])
    if others == ["model.safetensors"]:
        assert (status, kinds) == (1, [("second-set", "model.safetensors.index.json")])
    else:
        assert (status, kinds) == (0, [])


def test_check_reports_shards_without_an_index_beside_a_single_file(
    several: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = several(["model.safetensors", "model.safetensors.index.json"])
    (folder / "model.safetensors.index.json").unlink()
    assert value_read(folder) == value_loaded(folder) == 1.0
    assert run(cli, "dtype-engine", ["check", str(folder), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["kind"], finding["tensor"]) == ("second-set", "model-00001-of-00002.safetensors and 1 more")


def test_weight_file_named_by_the_config_is_read_first(several: Callable[..., Path]) -> None:
    folder = several(["model.safetensors", "model.safetensors.index.json"])
    config = json.loads((folder / "config.json").read_text())
    for named, value in (("model.safetensors.index.json", 2.0), ("model.safetensors", 1.0)):
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
        assert value_read(folder) == value_loaded(folder) == value
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "../model.safetensors"}))
    with pytest.raises(UserError, match="is not the name of a file in this folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("plain", [True, False])
def test_fp16_variant_is_read_only_if_there_are_no_other_weights(
    plain: bool, several: Callable[..., Path], make_llama: Callable[..., Path]
) -> None:
    folder = several(["pytorch_model.bin"] if plain else [])
    tensors = load_file(make_llama("other", tie_word_embeddings=False) / "model.safetensors")
    for name, value in (("model.safetensors", 7.0), ("model.safetensors.index.json", 8.0)):
        write_set(folder, name, tensors | {NORM: torch.full((32,), value)}, "fp16")
    variant = None if plain else "fp16"
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder, variant=variant).model.norm.weight
    assert value_read(folder) == float(loaded.detach()[0])
    assert float(de.load_pretrained(folder).get_parameter(NORM).detach()[0]) == float(loaded.detach()[0])


def test_diffusers_reads_an_index_before_a_single_file() -> None:
    single, index = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"
    names = [index, single, "diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.safetensors"]
    config: dict[str, Any] = {"_class_name": "UNet2DModel"}
    assert [each.name for each in weight_sets(names, config)] == [index, single, *names[2:]]
    assert next(iter(weight_sets([*names, "model.safetensors"], config))).name == index
    assert next(iter(weight_sets([*names, "model.safetensors"], None))).name == "model.safetensors"


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_weight_files_of_a_pipeline_component_are_chosen_as_by_its_library(library: str, tmp_path: Path) -> None:
    stem = "diffusion_pytorch_model" if library == "diffusers" else "model"
    part = tmp_path / "unet"
    part.mkdir()
    config = {"_class_name": "UNet2DModel"} if library == "diffusers" else {"model_type": "clip_text_model"}
    (part / "config.json").write_text(json.dumps(config))
    for place, name in enumerate((f"{stem}.safetensors", f"{stem}.safetensors.index.json")):
        write_set(part, name, {"a": torch.full((2,), float(place)), "b": torch.ones(2)})
    (component,), _ = read_components(tmp_path, {"unet": [library, "X"]})
    assert len(component.files) == (2 if library == "diffusers" else 1)
    assert f"as {library} does" in component.notices[0]


def test_weights_of_a_diffusers_model_equal_those_that_diffusers_loads(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    module = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=2, latent_channels=1)
    module.save_pretrained(tmp_path)
    single = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    name = "decoder.conv_in.bias"
    write_set(tmp_path, "diffusion_pytorch_model.safetensors.index.json", single | {name: single[name] + 1})
    write_set(tmp_path, "diffusion_pytorch_model.bin", single | {name: single[name] + 2})
    for left_out in ("", "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors"):
        if left_out:
            (tmp_path / left_out).unlink()
        loaded = diffusers.AutoencoderKL.from_pretrained(tmp_path).get_parameter(name)
        assert torch.equal(source_of(open_checkpoint(tmp_path), name).read(), loaded)


def test_first_shown_tree_is_read_from_the_header_of_one_shard(
    several: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtype_engine.checkpoint.folder._LONG_HEADERS", 1)
    folder = several(["model.safetensors.index.json"])
    save_file({"strange": torch.ones(2)}, folder / "consolidated.safetensors")
    tree = peek_first_shard(folder)
    assert tree is not None
    assert set(tree.tensors) == set(load_file(folder / "model-00001-of-00002.safetensors"))
    write_set(folder, "model.safetensors", {"strange": torch.ones(2)})
    assert peek_first_shard(folder) is None


def test_missing_shard_is_an_error_unless_absent_shards_are_allowed(several: Callable[..., Path]) -> None:
    folder = several(["model.safetensors.index.json"])
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="is missing"):
        open_checkpoint(folder)
    checkpoint = open_checkpoint(folder, absent_shards=True)
    assert checkpoint.index is not None
    assert {file for _, file in checkpoint.index.missing} == {"model-00002-of-00002.safetensors"}
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="is missing"):
        find_weight_files(folder, None, absent_shards=True)


@pytest.mark.parametrize("names", SUBSETS, ids=" ".join)
def test_listed_model_size_counts_only_the_files_that_are_read(
    names: tuple[str, ...], several: Callable[..., Path]
) -> None:
    folder = several(names)
    (model,) = find_models(folder)
    assert model.nbytes == sum(file.stat().st_size for file in open_checkpoint(folder).files)


@pytest.mark.parametrize(
    "name", ["quant_model_weights.safetensors", "quant_model_weight_w8a8_dynamic.safetensors.index.json"]
)
def test_weights_of_msmodelslim_are_read_if_they_are_the_only_ones(name: str, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4)}
    write_set(tmp_path, name, tensors)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.tensors.keys(), checkpoint.passed_over) == (tensors.keys(), ())
    write_set(tmp_path, "model.safetensors", {"c.weight": torch.ones(5)})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == {"c.weight"}
    assert checkpoint.passed_over == (name,)
