"""What a file may ask for while inputs are made of it: every bound is met before the memory or the time is spent."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import transformers
from PIL import Image
from tests.helpers import checkpoint_folders
from tests.helpers.checkpoint_folders import CHAT, tokenizer

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.runtime.inputs import limited_child
from dtype_engine.runtime.inputs.audio import open_sound
from dtype_engine.runtime.inputs.images import open_picture
from dtype_engine.runtime.inputs.processor_limits import made_values

LIMITS = de.InputLimits()
PREPROCESSOR = "preprocessor_config.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns a saved folder, written once."""
    models = tmp_path_factory.mktemp("models")
    return lambda name: path if (path := models / name).exists() else checkpoint_folders.save(name, path)


@pytest.fixture
def edited(saved: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A function that returns a copy of a saved folder with changes to its JSON files."""

    def edit(name: str, files: dict[str, dict[str, Any]] | None = None) -> Path:
        folder = shutil.copytree(saved(name), tmp_path / name)
        for file, changes in (files or {}).items():
            (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
        return folder

    return edit


def no_forward(folder: Path, **options: Any) -> str:
    """Open the model of a folder, which can't be run. Returns the reason."""
    said = de.open(str(folder), options=de.Options(**options)).no_forward
    assert said is not None
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("size", "says"),
    [({"shortest_edge": 12000}, "ViTImageProcessor.* asks for 432,000,000 values, more than the limit of 67,108,864"),
     ({"height": 8000, "width": 8000}, "asks for 192,000,000 values"), (10**9, "asks for 1,000,000,000 values"),
     (-5, r"size in preprocessor_config.json is -5, not a number"), ("x", "is 'x', not a number"), (0, "is 0, not a number"),
     ({"height": "x", "width": 3}, "is 'x', not a number"), ({"shortest_edge": True}, "is True, not a number")],
)  # fmt: skip
def test_image_processor_size_is_limited(edited: Callable[..., Path], size: Any, says: str) -> None:
    assert re.search(says, no_forward(edited("vit", {PREPROCESSOR: {"size": size}})))


def test_number_of_patches_is_limited(edited: Callable[..., Path]) -> None:
    asked = {"size": {"height": 448, "width": 448}, "max_patches": 10**6}
    said = no_forward(edited("vit", {PREPROCESSOR: asked}))
    assert "the number of patches in preprocessor_config.json asks for 602,112,000,000 values" in said


def test_picture_size_in_config_is_limited(edited: Callable[..., Path], saved: Callable[[str], Path]) -> None:
    """The weights of this model do not depend on the picture size, and its folder has no processor."""
    said = no_forward(edited("swin", {"config.json": {"image_size": 8000}}))
    assert "a picture of 8000 x 8000, the size in config.json, asks for 192,000,000 values" in said
    options = de.Options(limits=de.InputLimits(values=3071))
    assert "a picture of 32 x 32, the size in config.json, asks for 3,072 values" in str(
        de.open(str(saved("swin")), options=options).no_forward
    )


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [("wav2vec2", {"sampling_rate": 10**9}, "the highest rate is 1,000,000 Hz"),
     ("wav2vec2", {"sampling_rate": -5}, "sampling_rate in preprocessor_config.json is -5, not a number"),
     ("wav2vec2", {"sampling_rate": "x"}, "is 'x'"), ("wav2vec2", {"sampling_rate": 0}, "is 0"),
     ("whisper", {"chunk_length": 10**6}, "asks for 16,000,000,000 values"),
     ("whisper", {"feature_size": 10**7}, "n_fft times feature_size"),
     ("whisper", {"hop_length": 1, "chunk_length": 100}, "asks for 640,000,000 values")],
)  # fmt: skip
def test_audio_feature_extractor_settings_are_limited(
    edited: Callable[..., Path], model: str, changes: dict[str, Any], says: str
) -> None:
    assert says in no_forward(edited(model, {PREPROCESSOR: changes}))


def test_predicted_input_sizes_match_those_of_processors(saved: Callable[[str], Path]) -> None:
    for name in ("vit", "clip", "llava", "qwen2_5_vl"):
        processor = transformers.AutoImageProcessor.from_pretrained(saved(name))
        for width, height in ((48, 40), (300, 100)):
            made = processor(images=Image.new("RGB", (width, height)), return_tensors="np")["pixel_values"].size
            assert made / 2 <= made_values(processor, width, height) <= 4 * made


def test_predicted_input_sizes_know_the_multiple_that_edges_are_rounded_to(saved: Callable[[str], Path]) -> None:
    """Qwen2-VL rounds each edge to a multiple of patch_size x merge_size pixels, at least to one, whatever `size` says."""
    for merge in (2, 16, 64):
        processor = transformers.AutoImageProcessor.from_pretrained(saved("qwen2_5_vl"), merge_size=merge)
        made = processor(images=Image.new("RGB", (48, 40)), return_tensors="np")["pixel_values"].size
        assert made <= made_values(processor, 48, 40) <= 4 * made


def test_picture_of_many_pixels_is_refused_by_its_header(tmp_path: Path) -> None:
    """13,300 x 13,300 pixels in 22 kB; decoded they are 531 MB."""
    row = b"\x00" + bytes(1663)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", 13_300, 13_300, 1, 0, 0, 0, 0),
        b"IDAT": zlib.compress(row * 13_300, 9),
        b"IEND": b"",
    }
    path = tmp_path / "large.png"
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    assert path.stat().st_size < 25_000
    with pytest.raises(
        de.UserError, match=r"large\.png has 176,890,000 pixels, more than the limit of 67,108,864"
    ) as said:
        open_picture(path, LIMITS)
    assert "--input-limit pixels=176890000 raises it" in str(said.value)
    small = checkpoint_folders.write_picture(tmp_path / "small.png", 20, 10)
    with pytest.raises(de.UserError, match=r"small\.png has 200 pixels"):
        open_picture(small, de.InputLimits(pixels=199))
    assert open_picture(small, de.InputLimits(pixels=200)).size == (20, 10)


def claiming(path: Path, samples: int) -> Path:
    """A FLAC file of 8 channels at 48 kHz whose header claims so many samples."""
    soundfile.write(path, np.zeros((480, 8), np.float32), 48_000)
    data = bytearray(path.read_bytes())
    at = data.index(b"fLaC") + 8 + 13  # 36 bits in the block STREAMINFO
    data[at : at + 5] = (data[at] >> 4 << 36 | samples).to_bytes(5, "big")
    path.write_bytes(data)
    return path


def test_audio_of_many_samples_is_refused_by_its_header(tmp_path: Path) -> None:
    slow = tmp_path / "slow.wav"
    soundfile.write(slow, np.zeros(1600, np.float32), 1, subtype="PCM_16")
    assert slow.stat().st_size == 3244
    for path, says in (
        (slow, r"slow\.wav has 1,600 seconds, more than the limit of 600; --input-limit seconds=1600"),
        (claiming(tmp_path / "a.flac", 2**36 - 1), r"a\.flac has 1,431,656 seconds"),
        (claiming(tmp_path / "b.flac", 30 * 60 * 48_000), r"b\.flac has 1,800 seconds"),
        (claiming(tmp_path / "c.flac", 10 * 60 * 48_000), r"c\.flac has 230,400,000 values"),
        (claiming(tmp_path / "d.flac", 0), r"d\.flac does not say how long it is"),
    ):
        with pytest.raises(de.UserError, match=says):
            open_sound(path, 16_000, LIMITS)
    fast = tmp_path / "fast.wav"
    soundfile.write(fast, np.zeros(500, np.float32), 1, subtype="PCM_16")
    with pytest.raises(de.UserError, match=r"fast\.wav at 1,000,000 Hz has 500,000,000 values"):
        open_sound(fast, 1_000_000, LIMITS)
    assert len(open_sound(fast, 10, LIMITS)) == 5000


def test_texts_of_many_tokens_are_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a " * 2000)
    folder, given = str(saved("llama")), (tmp_path / "long.txt",)
    for tokens, says in ((249, "at 16 characters per token, has 250 tokens"), (1500, "has 2,002 tokens")):
        options = de.Options(texts=given, limits=de.InputLimits(tokens=tokens))
        with pytest.raises(de.UserError, match=rf"long\.txt.* {says}"):
            de.open(folder, options=options)
    few = de.open(folder, options=de.Options(texts=given, limits=de.InputLimits(tokens=1500), sequences=2))
    assert few.inputs is not None
    assert len(few.inputs.batches) == 2


def chat_folder(folder: Path, template: str) -> Path:
    tokenizer(chat_template=template).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "says"),
    [("{{ 'a' * 6000000000 }}", "needs more memory than the 1,024 MiB"), ("{{ 9**(9**9) }}", "needs over 1 s"),
     ("{% for i in range(30000) %}{{ 'a' * 99 }}{% endfor %}", "has 2,970,000 bytes, more than the limit of 1,048,576"),
     ("{{ raise_exception('no\nway') }}", "prompt 1: the chat template of llama refuses this conversation: no way")],
)  # fmt: skip
def test_chat_template_is_limited_in_time_and_text_size(
    edited: Callable[..., Path], template: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = chat_folder(edited("llama"), template)
    capsys.readouterr()
    given = ["--prompt", "x", "--chat", "--input-limit", "template-seconds=1"]
    assert run(cli, "dtype-engine", ["drift", str(folder), *given]) == 2
    said = capsys.readouterr().err.strip()
    assert says in said
    assert "\n" not in said
    de.open(str(folder), options=de.Options(prompts=("x",)))  # unasked, the template does not run


def test_text_from_the_chat_template_equals_that_of_transformers(edited: Callable[..., Path], tmp_path: Path) -> None:
    template = (
        CHAT
        + "{{ cls_token }}{% generation %}{{ {'a': 'ü'} | tojson }}{% endgeneration %}{{ messages[0].keys() | list }}"
    )
    folder = chat_folder(edited("llama"), template)
    own = transformers.AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "one", "name": None}, {"role": "assistant", "content": "two"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}) + '\n{"text": "three"}\n')
    session = de.open(str(folder), options=de.Options(texts=(tmp_path / "talks.jsonl",), chat=True))
    assert session.inputs is not None
    said = [own.apply_chat_template(talk, tokenize=False)]
    said += [
        own.apply_chat_template([{"role": "user", "content": "three"}], tokenize=False, add_generation_prompt=True)
    ]
    assert [batch.text for batch in session.inputs.batches] == said


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def adding(kind: str, pieces: int, ids: int) -> dict[str, Any]:
    """Return a post-processor that adds pieces x ids tokens to a text, or to a pair of texts. kind: `single` or `pair`."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    templates = {"single": [text], "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}]}
    templates[kind] = [{"SpecialToken": {"id": "s", "type_id": 0}}] * pieces + templates[kind]
    tokens = {"s": {"id": "s", "ids": [0] * ids, "tokens": ["s"] * ids}}
    return {"type": "TemplateProcessing", **templates, "special_tokens": tokens}


MANY = [replacing({"String": "a"}, "a" * 60)] * 5
SPACING = {"type": "BPEDecoder", "suffix": ""}  # puts a space beside each character of a token
PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "replacements": ({"normalizer": {"type": "Sequence", "normalizers": MANY}}, "its tokenizer.json needs "),
    "decoder": ({"decoder": {"type": "Sequence", "decoders": MANY}}, "may make 777,600,000 characters of one"),
    "decoders that put in spaces": (
        {"decoder": {"type": "Sequence", "decoders": [SPACING] * 40}},
        f"may make {2**40:,} characters of one",
    ),
    "bytes of bytes": (  # each step makes two bytes of one that is not ASCII
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}},
        "needs more memory than the 1,024 MiB",
    ),
    "template": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 3000,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {},
            }
        },
        "the post-processor in its tokenizer.json repeats a text 3,000 times",
    ),
    **{
        f"special tokens of the {kind} template": (
            {"post_processor": {"type": "Sequence", "processors": [adding(kind, 300, 20_000)]}},
            "the post-processor in its tokenizer.json asks for ",
        )
        for kind in ("single", "pair")
    },
    "expression": (
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "([a-z ]+)+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        "",  # the library itself stops such a search: the tokenizer is damaged, and token ids are drawn at random
    ),
    "harmless": ({"normalizer": replacing({"Regex": " {2,}"}, "b")}, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_slow_tokenizer_is_tried_in_a_separate_process(edited: Callable[..., Path], part: str) -> None:
    changes, says = PARTS[part]
    own = {"tokenizer_class": "PreTrainedTokenizerFast"}  # what stands in tokenizer.json, not what is written for BERT
    folder = edited("llama", {"tokenizer_config.json": own, "tokenizer.json": changes})
    said = de.open(str(folder)).no_forward
    assert says in said if said is not None else not says


def test_tokenizer_has_one_time_limit_for_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit for each text, many texts could take that long each."""
    allowed: list[int] = []
    monkeypatch.setattr(limited_child, "limit_seconds", allowed.append)
    monkeypatch.setattr(limited_child, "limit_memory", lambda more: None)
    job = {"texts": ["a"] * 50, "normalizer": None, "pre_tokenizer": None, "added": [], "memory": 0, "seconds": 5}
    assert limited_child.split(job) == []
    limited_child.split(job | {"texts": ["a" * 600_000] * 2})
    assert allowed == [5, 10]


def test_ordinary_tokenizers_run_without_a_separate_process(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("subprocess.run", started)
    for name in ("llama", "bert", "clip"):
        assert de.open(str(saved(name))).inputs is not None


def test_slow_tokenizer_is_tried_only_once_for_the_same_texts(
    edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"tokenizer_class": "PreTrainedTokenizerFast"}
    changes = {"normalizer": replacing({"Regex": " {3,}"}, "c")}
    folder = edited("llama", {"tokenizer_config.json": own, "tokenizer.json": changes})
    started: list[object] = []
    run_child = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *of, **how: (started.append(of), run_child(*of, **how))[1])
    assert de.open(str(folder)).inputs is not None
    assert len(started) == 1


@pytest.mark.parametrize("given", ["pixels", "pixels=", "pixels=-1", "colours=3", "pixels=1e9", "template_bytes=1"])
def test_invalid_input_limit_option_is_refused_in_one_line(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", ["drift", "demo", "--input-limit", given]) == 2
    said = capsys.readouterr().err
    assert "give KIND=NUMBER, where KIND is pixels, seconds, values, tokens, template-seconds or template-bytes" in said
    assert said.count("\n") == 1


def test_more_token_ids_in_a_file_than_the_limit_are_refused(tmp_path: Path, make_llama: Callable[..., Path]) -> None:
    np.savez_compressed(tmp_path / "ids.npz", input_ids=np.zeros((1, 2000), dtype=np.int64))
    options = de.Options(tensors=tmp_path / "ids.npz", limits=de.InputLimits(tokens=1000))
    with pytest.raises(
        de.UserError, match=r"ids.npz has 2,000 tokens, more than the limit of 1,000; --input-limit tokens"
    ):
        de.open(str(make_llama()), options=options)
