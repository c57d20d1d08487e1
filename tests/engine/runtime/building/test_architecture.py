"""Models made from config.json have the right class, errors in it are one line, and nothing is downloaded because of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.helpers import checkpoint_folders, preloaded

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.runtime.building import load as loading
from dtype_engine.runtime.inputs.preprocessing import no_tokenizer

Make = Callable[..., Path]


def changed(folder: Path, **values: Any) -> Path:
    """Change values in config.json of the folder, which is returned. None removes an entry."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def notices(folder: Path, **options: Any) -> tuple[type, tuple[str, ...]]:
    session = de.open(str(folder), options=de.Options(**options))
    return type(session.model.module), session.drift().notices


def test_config_without_architectures_opens_the_bare_model_with_a_notice(make_llama: Make) -> None:
    folder = make_llama(tie_word_embeddings=False)
    assert notices(folder) == (transformers.LlamaForCausalLM, ())
    for wrong in (None, 5, {"LlamaForCausalLM": 1}, ["Trainer"], ["pipeline", "torch"]):
        module, said = notices(changed(folder, architectures=wrong))
        assert module is transformers.LlamaModel
        backbone = next(line for line in said if "opened as the bare LlamaModel" in line)
        assert "last hidden state, not logits" in backbone
        assert "--architecture LlamaForCausalLM" in backbone
        assert any("1 tensor of the checkpoint not used by LlamaModel, first lm_head.weight" in line for line in said)
    assert any("is no list of names" in line for line in notices(changed(folder, architectures={"a": 1}))[1])


def test_architectures_given_as_a_string_is_accepted_with_a_notice(make_llama: Make) -> None:
    module, said = notices(changed(make_llama(), architectures="LlamaForCausalLM"))
    assert module is transformers.LlamaForCausalLM
    assert said == ("architectures in config.json is no list: taken as the name LlamaForCausalLM",)


def test_architecture_option_chooses_the_model_class(make_llama: Make) -> None:
    folder = changed(make_llama(tie_word_embeddings=False), architectures=None)
    module, said = notices(folder, architecture="LlamaForCausalLM")
    assert (module, said) == (transformers.LlamaForCausalLM, ())
    ours = de.load_pretrained(folder, options=de.Options(architecture="LlamaForCausalLM")).state_dict()
    for name, tensor in transformers.LlamaForCausalLM.from_pretrained(folder).state_dict().items():
        assert torch.equal(ours[name], tensor), name
    built = loading.build_on_meta(open_checkpoint(folder), de.Options(architecture="LlamaForCausalLM"))
    assert built is not None
    assert type(built[0]) is transformers.LlamaForCausalLM


def test_architecture_option_opens_a_part_of_a_composite_model(tmp_path: Path) -> None:
    checkpoint_folders.save("clip", tmp_path / "clip")
    session = de.open(str(tmp_path / "clip"), options=de.Options(architecture="CLIPTextModel"))
    assert type(session.model.module) is transformers.CLIPTextModel
    whole = transformers.CLIPModel.from_pretrained(tmp_path / "clip").text_model.state_dict()
    for name, tensor in session.model.module.state_dict().items():
        assert torch.equal(tensor, whole[name.removeprefix("text_model.")]), name


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLm",
        "Nope",
        "Trainer",
        "LlamaConfig",
        "torch",
        "PreTrainedModel",
        "LlamaPreTrainedModel",
        "a b",
        "",
    ],
)
def test_architecture_option_that_is_not_a_model_class_is_refused(
    make_llama: Make, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    for arguments in (["drift"], ["export", "--cast", "type:Linear=bf16", "-o", str(tmp_path / "out")]):
        rc = run(cli, "dtype-engine", [arguments[0], str(folder), *arguments[1:], "--architecture", name])
        said = capsys.readouterr().err.strip()
        assert rc == 2
        assert said.startswith(f"dtype-engine: --architecture {name}: transformers")
        assert "\n" not in said
    if name == "LlamaForCausalLm":
        assert said.endswith("did you mean LlamaForCausalLM?")
    if name in transformers.__all__:
        assert said.endswith(" can make no model of this class here; name one such as LlamaForCausalLM")


def test_architecture_option_whose_class_does_not_fit_the_weights_is_refused(make_llama: Make) -> None:
    with pytest.raises(NoForward, match="not the weights of a GPT2LMHeadModel"):
        de.open(str(make_llama()), options=de.Options(architecture="GPT2LMHeadModel"))


WRONG = {
    "a negative width": ({"hidden_size": -5}, "hidden_size is -5"),
    "a width that is a text": ({"hidden_size": "96"}, "hidden_size: expected int, got str"),
    "a width that is none": ({"vocab_size": [None]}, "vocab_size: expected int, got list"),
    "heads that are a list": ({"num_attention_heads": [1, 2]}, "num_attention_heads: expected int, got list"),
    "no heads": ({"num_attention_heads": 0}, "ZeroDivisionError"),
    "a fraction of a layer": ({"num_hidden_layers": 1.5}, "num_hidden_layers: expected int, got float"),
    "a rope that is a number": ({"rope_parameters": 5}, "rope_parameters: with value 5"),
    "an unknown activation": ({"hidden_act": "nope"}, "nope"),
    "labels that are a number": ({"id2label": 5}, "int"),
    "an unknown dtype": ({"dtype": "nope"}, "nope"),
    "padding outside the vocabulary": ({"pad_token_id": 9999}, "Padding_idx"),
    "a quantization that is a number": ({"quantization_config": 7}, "int"),
    "a type that is a list": ({"model_type": ["llama"], "architectures": None}, "does not know the architecture"),
    "another width than the files": ({"hidden_size": 34}, "the files have [64, 32]"),
    "another vocabulary than the files": ({"vocab_size": 65}, "the files have [64, 32]"),
    "a million layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, and there are"),
    "nine hundred layers": ({"num_hidden_layers": 900}, "a model of over"),
    "a width of 10^9": ({"hidden_size": 10**9}, "hidden_size is 1000000000, and there are at most"),
    "a width that is no float": ({"hidden_size": 10**400}, "hidden_size is beyond 1e300"),
    "10^12 words": ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
    "10^13 positions": ({"max_position_embeddings": 10**13}, "no model has over"),
    "10^9 heads": ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000"),
    "10^8 labels": ({"num_labels": 10**8}, "num_labels is 100000000"),
    "a deep part": ({"text_config": {"num_hidden_layers": 10**7}}, "text_config.num_hidden_layers is 10000000"),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_config_is_reported_in_one_line(
    make_llama: Make, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values, expected = WRONG[what]
    folder = changed(make_llama(), **values)
    capsys.readouterr()  # what making it wrote
    assert run(cli, "dtype-engine", ["drift", str(folder)]) == 2
    said = capsys.readouterr().err.strip()
    assert expected in said
    assert "\n" not in said
    assert len(said) < 600
    # What needs no module goes on by the names in the files.
    assert run(cli, "dtype-engine", ["inspect", str(folder), "--preset", "bf16"]) in (0, 2)
    export = ["export", str(folder), "--cast", "*.mlp=bf16", "-o", str(tmp_path / "out")]
    assert run(cli, "dtype-engine", export) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_config_with_large_numbers_of_real_models_is_accepted(make_llama: Make) -> None:
    folder = changed(make_llama(), max_position_embeddings=10_485_760, sliding_window=1_048_576, bos_token_id=1)
    assert de.open(str(folder)).drift().output.elements > 0


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of accesses to the network and of kernels that transformers tries to load, as if the kernels package were
    installed.
    """
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels

    found: list[str] = []

    def refuse(what: str) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            found.append(f"{what}{arguments}")
            raise OSError(f"{what} was reached")

        return call

    for module in (modeling_utils, hub_kernels):
        monkeypatch.setattr(module, "is_kernels_available", lambda *arguments: True)
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", refuse("flash attention"))
    for name in ("get_kernel", "lazy_load_kernel", "load_and_register_attn_kernel"):
        monkeypatch.setattr(hub_kernels, name, refuse(name))
    monkeypatch.setattr(socket, "getaddrinfo", refuse("network"))
    return found


KERNELS = {
    "both spellings": {"attn_implementation": "evil/evil", "_attn_implementation": "kernels-community/evil"},
    "a revision and a function": {"attn_implementation": "evil/evil@v1:forward"},
    "a map": {"attn_implementation": {"": "evil/evil"}},
    "flash attention, which is fetched where it is not installed": {"attn_implementation": "flash_attention_2"},
    "experts": {"experts_implementation": "sonicmoe"},
    "experts, the inner spelling": {"_experts_implementation": "deepgemm"},
}


@pytest.mark.parametrize("what", KERNELS)
def test_kernels_named_by_a_config_are_not_downloaded(make_llama: Make, reached: list[str], what: str) -> None:
    folder = changed(make_llama(), **KERNELS[what])
    _, said = notices(folder)
    assert reached == []
    assert any("which is native code from elsewhere" in line for line in said)
    assert loading.build_on_meta(open_checkpoint(folder), de.Options()) is not None
    assert reached == []


def test_kernels_named_by_parts_of_a_composite_model_are_not_downloaded(tmp_path: Path, reached: list[str]) -> None:
    folder = checkpoint_folders.save("clip", tmp_path / "clip")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["_attn_implementation"] = "evil/text"
    config["vision_config"]["attn_implementation"] = "evil/pictures"
    changed(folder, **config)
    _, said = notices(folder)
    assert reached == []
    assert all(any(name in line for line in said) for name in ("evil/text", "evil/pictures"))


def test_backbone_named_by_a_config_is_not_downloaded(make_llama: Make, reached: list[str]) -> None:
    folder = changed(
        make_llama(), model_type="detr", architectures=["DetrModel"], backbone="evil/backbone", use_timm_backbone=False,
        backbone_config=None,
    )  # fmt: skip
    for download in (False, True):
        with pytest.raises(NoForward, match="offline mode is enabled"):
            de.open(str(folder), options=de.Options(download=download))
    assert reached == []


def test_weight_file_named_by_a_config_is_loaded(make_llama: Make) -> None:
    one, norm = make_llama("one"), "model.norm.weight"
    weights = load_file(one / "model.safetensors")
    save_file(weights | {norm: torch.full_like(weights[norm], 3.0)}, one / "named.safetensors", {"format": "pt"})
    folder = changed(one, transformers_weights="named.safetensors")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).get_parameter(norm)
    session = de.open(str(folder))
    assert torch.equal(session.model.module.get_parameter(norm), plain)
    assert float(plain.detach()[0]) == 3.0
    for named in ("../one/named.safetensors", "absent.safetensors"):
        with pytest.raises(UserError):
            de.open(str(changed(one, transformers_weights=named)))


def test_hub_offline_setting_is_restored_after_opening(make_llama: Make) -> None:
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    de.open(str(make_llama()))
    assert before == constants.HF_HUB_OFFLINE


def test_damaged_tokenizer_and_tokenizer_that_needs_code_are_reported(tmp_path: Path) -> None:
    folder = checkpoint_folders.save("llama", tmp_path / "llama")
    assert no_tokenizer(de.open(str(folder)).model) == "has a tokenizer"
    (folder / "tokenizer.json").write_text('{"model": {"vocab": "\\u0000"')
    session = de.open(str(folder))
    assert session.inputs is not None
    assert "the folder has a tokenizer that is damaged or can't be loaded" in session.inputs.description
    with pytest.raises(UserError, match="has a tokenizer that is damaged") as caught:
        de.open(str(folder), options=de.Options(prompts=("hello",)))
    assert "\n" not in str(caught.value)
    (folder / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "needs its own Python code" in no_tokenizer(de.open(str(folder)).model)
    assert not (tmp_path / "ran").exists()
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    assert no_tokenizer(de.open(str(folder)).model) == "has no tokenizer"


@pytest.mark.slow
def test_warning_about_the_model_type_is_not_printed(make_llama: Callable[..., Path]) -> None:
    path = make_llama() / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": 5}))
    command = [sys.executable, "-c", preloaded.COMMAND, "check", str(path.parent)]  # its first import of transformers
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""
