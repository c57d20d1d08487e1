"""Inputs of every kind: the defaults of saved folders, the user's files, and what is said of those that do not fit."""

from __future__ import annotations

import dataclasses
import json
import math
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import soundfile
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tests.helpers import architectures, checkpoint_folders
from tests.helpers.paths import TINYNET

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.input_args import parse_inputs_line
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.inputs.audio import open_sound, resampled
from dtype_engine.runtime.inputs.text import read_jsonl
from dtype_engine.runtime.inputs.validate import check_fits

MODALITIES = {
    "llama": "2 default prompts",
    "bert": "2 default prompts",
    "t5": "2 default prompts",
    "whisper": "a synthetic tone, 2.0 s",
    "vit": "a synthetic picture, 32 x 32",
    "blip": "a synthetic picture, 32 x 32, and a prompt",
    "clip": "a synthetic picture, 32 x 32, compared with 4 texts",
    "wav2vec2": "a synthetic tone, 2.0 s",
    "llava": "a synthetic picture, 32 x 32, and a prompt",
    "qwen2_5_vl": "a synthetic picture, 224 x 224, and a prompt",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that gives a saved folder, written once."""
    models = tmp_path_factory.mktemp("models")

    def folder(name: str, processed: bool = True) -> Path:
        path = models / f"{name}-{processed}"
        return path if path.exists() else checkpoint_folders.save(name, path, processed)

    return folder


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return checkpoint_folders.write_picture(tmp_path / "noise.png")


def opened(folder: Path, **options: Any) -> de.Session:
    return de.open(str(folder), options=de.Options(**options))


def kwargs_of(session: de.Session, index: int = 0) -> dict[str, Any]:
    assert session.inputs is not None
    return session.inputs.batches[index].kwargs


@pytest.mark.parametrize("name", MODALITIES)
def test_every_saved_model_runs_on_default_inputs(name: str, saved: Callable[..., Path]) -> None:
    session = opened(saved(name), sequences=2)
    reading = session.inputs_reading
    assert reading is not None, session.no_forward
    assert reading.description.startswith(MODALITIES[name])
    assert all("can be loaded" not in part and "has no" not in part for part in reading.made_of), reading.made_of
    assert session.drift().output.max_abs == 0
    session.cast("*", "bfloat16")
    report = session.drift()
    assert 10 < report.output.sqnr_db < 100
    assert report.inputs == reading.description


@pytest.mark.parametrize("name", MODALITIES)
def test_inputs_of_a_model_without_a_processor_are_made_from_its_config(name: str, saved: Callable[..., Path]) -> None:
    session = opened(saved(name, processed=False), sequences=2)
    reading = session.inputs_reading
    assert reading is not None, session.no_forward
    assert any("folder" in part for part in reading.made_of), "where they come from is said"
    session.cast("*", "bfloat16")
    assert 10 < session.drift().output.sqnr_db < 100


@pytest.mark.parametrize("name", ["vit", "blip"])
def test_chat_and_sequences_options_are_noted_as_unused_by_models_with_pictures(
    name: str, saved: Callable[..., Path]
) -> None:
    reading = opened(saved(name), chat=True, sequences=2).inputs_reading
    assert reading is not None
    assert reading.made_of[-1] == "--chat and --sequences not used: they are for models of text alone"


def test_picture_file_is_processed_by_the_processor_of_the_model(saved: Callable[..., Path], picture: Path) -> None:
    for name in ("vit", "blip", "clip", "llava", "qwen2_5_vl"):
        folder = saved(name)
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        expected = processor(images=Image.open(picture), return_tensors="pt")
        found = kwargs_of(opened(folder, images=(picture,)))
        assert torch.equal(found["pixel_values"], expected["pixel_values"])


def test_llava_prompt_equals_that_built_by_its_processor(saved: Callable[..., Path], picture: Path) -> None:
    """Its chat template is applied only if asked for."""
    folder = saved("llava")
    processor = transformers.AutoProcessor.from_pretrained(folder)
    session = opened(folder, images=(picture,), prompts=("what is it",))
    plain = processor(images=Image.open(picture), text="<image>what is it", return_tensors="pt")
    assert torch.equal(kwargs_of(session)["input_ids"], plain["input_ids"])
    session = opened(folder, images=(picture,), prompts=("what is it",), chat=True)
    assert not any("--chat" in part for part in session.inputs_reading.made_of)  # type: ignore[union-attr]
    expected = processor(images=Image.open(picture), text="<image>what is it so ", return_tensors="pt")
    assert torch.equal(kwargs_of(session)["input_ids"], expected["input_ids"])
    assert (kwargs_of(session)["input_ids"] == checkpoint_folders.IMAGE_TOKEN).sum() == 4, "(32 / 16)² patches"
    assert len(session.generate(3)[0].candidate.ids) >= 1


def test_number_of_image_tokens_equals_the_number_of_image_features(saved: Callable[..., Path], picture: Path) -> None:
    found = kwargs_of(opened(saved("qwen2_5_vl"), images=(picture,)))
    grid = found["image_grid_thw"]
    assert (found["input_ids"] == checkpoint_folders.IMAGE_TOKEN).sum() == int(grid.prod()) // 4, (
        "two by two patches are one"
    )
    assert torch.equal(found["mm_token_type_ids"].bool(), found["input_ids"] == checkpoint_folders.IMAGE_TOKEN)


def test_clip_compares_all_pictures_with_all_prompts(saved: Callable[..., Path], tmp_path: Path) -> None:
    pictures = tuple(checkpoint_folders.write_picture(tmp_path / f"{size}.png", size, size) for size in (20, 30, 40))
    session = opened(saved("clip"), images=pictures, prompts=("a cat", "a large dog"))
    report = session.drift()
    assert report.output_name == "logits_per_image"
    assert (report.output.elements, report.output.positions) == (3 * 2, 3)
    mask = kwargs_of(session)["attention_mask"]
    assert mask[0].sum() < mask[1].sum() == mask.shape[1]


def test_sound_file_is_resampled_for_the_feature_extractor(saved: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "tone.wav"
    time = np.arange(44_100) / 44_100
    stereo = np.stack([0.8 * np.sin(2 * np.pi * 440 * time), 0.4 * np.sin(2 * np.pi * 440 * time)], axis=1)
    soundfile.write(path, stereo, 44_100)
    found = open_sound(path, 16_000, de.InputLimits())
    expected = 0.6 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert found.shape == expected.shape
    assert np.abs(found - expected)[200:-200].max() < 2e-3, "the filter rings at the ends only"
    whisper = opened(saved("whisper"), audio=(path,), prompts=("hello",))
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(saved("whisper"))
    features = extractor(found, sampling_rate=16_000, return_tensors="pt")["input_features"]
    assert torch.equal(kwargs_of(whisper)["input_features"], features)
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved("whisper"))
    assert kwargs_of(whisper)["decoder_input_ids"].tolist() == [tokenizer("hello")["input_ids"]]
    both = opened(saved("whisper"), audio=(path,), prompts=("hello", "you")).inputs
    assert both is not None
    assert [len(batch.kwargs["decoder_input_ids"][0]) for batch in both.batches] == [7, 5]
    assert whisper.generate(2)[0].prompt == "a sound"
    assert whisper.drift().inputs == "your audio tone.wav, 1.0 s"
    values = kwargs_of(opened(saved("wav2vec2"), audio=(path,)))["input_values"]
    assert values.shape == (1, 16_000)
    assert abs(float(values.mean())) < 1e-4
    assert float(values.var()) == pytest.approx(1, abs=1e-3)


def test_audio_resampling_removes_frequencies_above_half_the_target_rate(tmp_path: Path) -> None:
    path = tmp_path / "high.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(48_000)
        samples = 0.9 * np.sin(2 * np.pi * 12_000 * np.arange(48_000) / 48_000)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    assert np.abs(open_sound(path, 16_000, de.InputLimits()))[200:-200].max() < 1e-2


@pytest.mark.parametrize(("own_rate", "rate"), [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (11_025, 24_000)])
def test_audio_resampling_is_more_accurate_than_scipy(own_rate: int, rate: int) -> None:
    def tones(hertz: int) -> np.ndarray:
        time = np.arange(hertz) / hertz
        return 0.4 * np.sin(2 * np.pi * 440 * time) + 0.3 * np.sin(2 * np.pi * 2500 * time)

    wave, middle = tones(own_rate).astype("float32"), slice(500, -500)  # filters ring at the ends
    common = math.gcd(own_rate, rate)
    ours, theirs = resampled(wave, own_rate, rate), scipy.signal.resample_poly(wave, rate // common, own_rate // common)
    assert ours.shape == theirs.shape
    assert ours.dtype == np.float32
    assert np.abs(ours - theirs)[middle].max() < 3e-3
    wrong, wrong_of_scipy = (np.abs(wave - tones(rate))[middle].max() for wave in (ours, theirs))
    assert wrong < min(1e-5, wrong_of_scipy)


@pytest.mark.parametrize("samples", [1, 2, 3, 7])
def test_audio_resampling_of_a_few_samples_gives_the_expected_length(samples: int) -> None:
    for own_rate in (8_000, 44_100, 48_000, 192_000, 10**9):
        found = resampled(np.ones(samples, "float32"), own_rate, 16_000)
        assert len(found) == math.ceil(samples * 16_000 / own_rate) > 0
        assert np.isfinite(found).all()


def test_text_is_cut_into_sequences_of_the_requested_length(tmp_path: Path) -> None:
    path = tmp_path / "code.txt"
    path.write_text("import os\n" * 200)
    session = de.open(options=de.Options(texts=(path,), sequence_length=50, sequences=3))
    assert session.inputs is not None
    tokenizer = session.inputs.tokenizer
    ids = tokenizer(path.read_text())["input_ids"]
    parts = [batch.kwargs["input_ids"][0].tolist() for batch in session.inputs.batches]
    assert parts == [ids[:50], ids[50:100], ids[100:150]]
    assert session.inputs_reading.positions == 150  # type: ignore[union-attr]
    random = opened(checkpoint_folders.save("llama", tmp_path / "bare", False), sequence_length=7, sequences=2)
    assert [tuple(batch.kwargs["input_ids"].shape) for batch in random.inputs.batches] == [(1, 7)] * 2  # type: ignore[union-attr]


def test_sequences_longer_than_the_model_allows_are_refused() -> None:
    with pytest.raises(de.UserError, match=r"sequences of 99999 tokens are too long for .*: it has \d+ positions"):
        de.open(options=de.Options(sequence_length=99_999))


def test_length_limit_of_roberta_excludes_positions_up_to_the_padding_token(tmp_path: Path) -> None:
    config = transformers.RobertaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=34, pad_token_id=1,
    )  # fmt: skip
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path)
    session = opened(tmp_path)
    assert kwargs_of(session)["input_ids"].shape == (1, 32)
    assert session.drift().output.max_abs == 0
    with pytest.raises(de.UserError, match="it has 32 positions"):
        opened(tmp_path, sequence_length=33)


def test_input_name_that_forward_does_not_accept_is_refused() -> None:
    class Own(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids * 2

    model = de.open(Own(), inputs=(torch.ones(2),)).model
    check_fits(model, Batch(kwargs={"input_ids": torch.ones(3)}), "here")
    with pytest.raises(de.UserError, match="here: the forward pass of Own has no argument 'ids'; it takes input_ids"):
        check_fits(model, Batch(kwargs={"ids": torch.ones(3)}), "here")


def test_token_id_beyond_the_vocabulary_of_the_model_is_refused(tmp_path: Path) -> None:
    folder = checkpoint_folders.save("llama", tmp_path / "llama", processed=False)
    words = dict.fromkeys(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "horse"]) | {"zebra": None}
    vocabulary = {word: 99 if word == "zebra" else place for place, word in enumerate(words)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    assert opened(folder, prompts=("horse",)).drift().output.elements
    with pytest.raises(de.UserError, match=r"prompt 2: the tokenizer of llama gives the token id 99, .* \(0 to 63\)"):
        opened(folder, prompts=("horse", "horse zebra")).drift()


def test_texts_prompts_and_conversations_are_read_from_jsonl(saved: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    path.write_text("\n".join(map(json.dumps, ({"text": "one two"}, {"prompt": "three"}, {"messages": talk}, "four"))))
    with pytest.raises(de.UserError, match=r"line 3: .* has no chat template"):
        opened(saved("bert"), texts=(path,))
    folder = tmp_path / "chat"
    checkpoint_folders.save("llama", folder, processed=False)
    checkpoint_folders.tokenizer(chat_template=checkpoint_folders.CHAT).save_pretrained(folder)
    session = opened(folder, texts=(path,))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = [
        tokenizer("one two")["input_ids"], tokenizer("three")["input_ids"],
        tokenizer("hi yes ", add_special_tokens=False)["input_ids"], tokenizer("four")["input_ids"],
    ]  # fmt: skip
    assert [batch.kwargs["input_ids"][0].tolist() for batch in session.inputs.batches] == expected  # type: ignore[union-attr]
    chat = opened(folder, prompts=("hi",), chat=True)
    assert kwargs_of(chat)["input_ids"].tolist() == [tokenizer("hi so ", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: no valid JSON"),
        ('{"other": 1}', "line 2: needs a text"),
        ('{"text": 3}', "line 2: needs a text"),
        ('{"messages": [{"content": "x"}]}', "line 2: needs a text"),
        ("17", "line 2: needs a text"),
    ],
)
def test_invalid_jsonl_line_is_refused_with_its_number(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(de.UserError, match=said):
        list(read_jsonl(path, de.InputLimits()))


def test_tensor_files_of_every_kind_give_the_same_inputs(saved: Callable[..., Path], tmp_path: Path) -> None:
    first, second = architectures.tokens(5).cpu(), architectures.tokens(9).cpu()
    save_file({"0.input_ids": first.int(), "1.input_ids": second.int()}, tmp_path / "calls.safetensors")
    np.savez(tmp_path / "calls.npz", **{"0.input_ids": first.numpy(), "1.input_ids": second.numpy()})
    torch.save([{"input_ids": first}, {"input_ids": second}], tmp_path / "calls.pt")
    expected = None
    for suffix in (".safetensors", ".npz", ".pt"):
        session = opened(saved("llama"), tensors=tmp_path / f"calls{suffix}")
        session.cast("*", "bfloat16")
        found = session.drift().output
        assert torch.equal(kwargs_of(session, 0)["input_ids"], first)
        assert torch.equal(kwargs_of(session, 1)["input_ids"], second)
        assert session.inputs_reading.positions == 14  # type: ignore[union-attr]
        assert expected in (None, found)
        expected = found
    assert expected is not None
    assert expected.positions == 14


def test_tensor_file_replaces_example_inputs(tmp_path: Path) -> None:
    torch.save(torch.tensor([[1, 1], [0, 1]]), tmp_path / "ids.pt")
    session = de.open(f"{TINYNET}:TinyNet", options=de.Options(tensors=tmp_path / "ids.pt"))
    assert session.inputs is not None
    assert session.inputs.batches[0].args[0].tolist() == [[1, 1], [0, 1]]
    assert session.drift().output.max_abs == 0


IDS, PICTURE = architectures.tokens(6), architectures.picture()


def ids(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, **more}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"inputs": IDS}, "LlamaForCausalLM has no argument 'inputs'; it takes input_ids, "),
    ("llama", {"input_ids": IDS.float()}, "input_ids holds token ids, so it must be integers; it is float32"),
    ("llama", {"input_ids": IDS[0]}, r"input_ids is \[6\]; it must be \[batch, positions\]"),
    ("llama", {"input_ids": IDS + 60}, r"input_ids holds \d+, beyond the vocabulary of .* \(0 to 63\)"),
    ("llama", {"input_ids": IDS - 64}, r"input_ids holds -\d+, beyond the vocabulary"),
    ("llama", ids(attention_mask=torch.ones(1, 5)), r"attention_mask is \[1, 5\] and input_ids is \[1, 6\]"),
    (
        "bert",
        ids(token_type_ids=torch.full_like(IDS, 2)),
        r"token_type_ids holds 2, beyond the segment ids of .* \(0 to 1\)",
    ),
    ("bert", {"input_ids": architectures.tokens(600)}, "input_ids has 600 positions, and .* has learned 512"),
    ("t5", ids(decoder_input_ids=torch.tensor([[70]])), "decoder_input_ids holds 70, beyond the vocabulary"),
    (
        "vit",
        {"pixel_values": PICTURE[0]},
        r"pixel_values is \[3, 32, 32\]; it must be \[batch, channels, height, width\]",
    ),
    ("vit", {"pixel_values": architectures.picture(32, 4)}, "which has 4 channels; .* takes 3"),
    ("vit", {"pixel_values": (PICTURE * 9).to(torch.uint8)}, "pixel_values is uint8; the model takes it as floating"),
    ("wav2vec2", {"input_values": torch.zeros(400)}, r"input_values is \[400\]; it must be \[batch, samples\]"),
    (
        "whisper",
        {"input_features": torch.zeros(1, 80, 40)},
        r"input_features is \[1, 80, 40\]; the model takes 16 mel bins",
    ),
    ("clip", {"pixel_values": PICTURE, "image": PICTURE + 1}, "CLIPModel has no argument 'image'"),
]


@pytest.mark.parametrize(("name", "tensors", "said"), WRONG)
def test_tensors_that_do_not_fit_the_model_are_refused_in_one_sentence(
    name: str, tensors: dict[str, Any], said: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "wrong.safetensors")
    with pytest.raises(de.UserError, match=said):
        opened(saved(name), tensors=tmp_path / "wrong.safetensors")


def test_too_many_positional_tensors_are_refused(tmp_path: Path) -> None:
    torch.save((architectures.tokens(), architectures.tokens(), architectures.tokens()), tmp_path / "three.pt")
    with pytest.raises(de.UserError, match=r"three\.pt does not fit the forward pass of TinyNet: too many positional"):
        de.open(f"{TINYNET}:TinyNet", options=de.Options(tensors=tmp_path / "three.pt"))


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must never run",)


def test_unreadable_input_files_are_refused_in_one_sentence(
    saved: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in (".png", ".wav", ".safetensors", ".npz", ".pt"):
        (tmp_path / f"broken{suffix}").write_bytes(b"\x80\x00 this is nothing of the kind" * 9)
    whole = checkpoint_folders.write_picture(tmp_path / "whole.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "program.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    )
    torch.save({"input_ids": Malicious()}, tmp_path / "code.pt")
    torch.save({"input_ids": "text"}, tmp_path / "words.pt")
    np.savez(tmp_path / "objects.npz", input_ids=np.array([None]))
    np.savez(tmp_path / "words.npz", input_ids=np.array(["a"]))
    for given, said in (
        ({"images": (tmp_path / "broken.png",)}, "can't read the picture"),
        ({"images": (tmp_path / "half.png",)}, "can't read the picture"),
        ({"images": (tmp_path / "program.png",)}, "no picture in a format"),
        ({"audio": (tmp_path / "broken.wav",)}, "can't read the audio|accepts no audio"),
        ({"tensors": tmp_path / "broken.safetensors"}, "can't read the tensors"),
        ({"tensors": tmp_path / "broken.npz"}, "is not an .npz file"),
        ({"tensors": tmp_path / "broken.pt"}, "can't read the tensors|holds more than tensors"),
        ({"tensors": tmp_path / "code.pt"}, "holds more than tensors"),
        ({"tensors": tmp_path / "words.pt"}, "without tensors"),
        ({"tensors": tmp_path / "objects.npz"}, "holds Python objects, so it is not read"),
        ({"tensors": tmp_path / "words.npz"}, "which torch does not know"),
    ):
        with pytest.raises(de.UserError, match=said):
            opened(saved("vit"), **given)
    with pytest.raises(de.UserError, match="can't read the audio"):
        opened(saved("wav2vec2"), audio=(tmp_path / "broken.wav",))
    assert "must never run" not in capsys.readouterr().out


def test_inputs_of_the_wrong_kind_are_refused_in_one_sentence(saved: Callable[..., Path], picture: Path) -> None:
    for name, given, said in (
        ("llama", {"images": (picture,)}, "accepts no pictures"),
        ("vit", {"prompts": ("x",)}, "accepts pictures and no text"),
        ("vit", {"audio": (picture,)}, "accepts no audio"),
        ("wav2vec2", {"prompts": ("x",)}, "accepts audio and no text"),
    ):
        with pytest.raises(de.UserError, match=said):
            opened(saved(name), **given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image", "nowhere.png"], "can't read nowhere.png: No such file or directory"),
        (["--inputs", "nowhere.npz"], "can't read nowhere.npz: No such file or directory"),
        (["--inputs", str(TINYNET)], "tensors come from a file that ends in .safetensors, .npz"),
        (["--audio", str(TINYNET.parent)], "is a folder, not a file"),
        (["--sequence-length", "99999"], "sequences of 99999 tokens are too long"),
    ],
)
def test_invalid_input_options_exit_with_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, "dtype-engine", ["drift", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error


def test_line_typed_as_inputs_is_parsed_as_a_prompt_or_files(tmp_path: Path) -> None:
    picture, text = checkpoint_folders.write_picture(tmp_path / "my picture.png"), tmp_path / "notes.txt"
    text.write_text("words")
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    before = de.Options(prompts=("old",), images=(Path("old.png"),), sequence_length=9)
    assert parse_inputs_line(de.Options(), "what's this?").prompts == ("what's this?",)
    new = parse_inputs_line(before, f" {picture} ")
    assert (new.images, new.prompts, new.sequence_length) == ((picture,), ("old",), 9)
    both = parse_inputs_line(de.Options(), f"'{picture}' {text}")
    assert (both.images, both.texts) == ((picture,), (text,))
    tensors = parse_inputs_line(de.Options(prompts=("old",), sequence_length=9), str(tmp_path / "x.safetensors"))
    assert tensors == de.Options(tensors=tmp_path / "x.safetensors")
    assert parse_inputs_line(tensors, "new").tensors is None
    assert parse_inputs_line(before, "steps=3") == dataclasses.replace(before, pipeline=de.PipelineSettings(steps=3))
    assert parse_inputs_line(before, "") == de.Options()
    for line, said in (
        ("nowhere.png", "there is no file nowhere.png"),
        (f"{tmp_path / 'x.safetensors'} {text}", "don't name other files"),
    ):
        with pytest.raises(de.UserError, match=said):
            parse_inputs_line(de.Options(), line)


def test_options_other_than_inputs_stay_when_inputs_are_switched() -> None:
    session = de.open(options=de.Options(sequences=1, precision=0.5, max_memory={"cpu": 1 << 30}, prompts=("first",)))
    session.use_inputs(de.Options(prompts=("second",)))
    options = session.options
    assert (options.prompts, options.sequences) == (("second",), None)
    assert (options.precision, options.max_memory) == (0.5, {"cpu": 1 << 30})


def test_open_session_can_switch_to_other_inputs(saved: Callable[..., Path], tmp_path: Path, picture: Path) -> None:
    session = opened(saved("vit"))
    first = session.drift()
    with pytest.raises(de.UserError, match="accepts pictures and no text"):
        session.use_inputs(de.Options(prompts=("x",)))
    save_file({"pixel_values": torch.zeros(1, 3, 48, 48)}, tmp_path / "large.safetensors")
    with pytest.raises(de.NoForward, match=r"48"):
        session.use_inputs(de.Options(tensors=tmp_path / "large.safetensors"))
    assert session.drift().output == first.output
    session.cast("*", "bfloat16")
    before = session.drift().output
    session.use_inputs(de.Options(images=(picture,)))
    after = session.drift()
    assert after.inputs == "your picture noise.png, 48 x 40"
    assert after.output != before
