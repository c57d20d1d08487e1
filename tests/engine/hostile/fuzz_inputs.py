"""The kinds of `fuzz.py` that are a part of a model's folder, or a file that inputs are made of: `dtype-engine drift` opens each
with the model beside it, and runs the model on what came of it.

What a chat template and a tokenizer do in a process of their own, they do in one that is forked here, under the same limits: a new
interpreter needs seconds until it has imported transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.mutations import STRANGE, changed

KINDS = ("tokenizer", "template", "processor", "picture", "sound")
_SIZES = (0, 1, 2, 3, 7, 64, 255, 4096, 12_000, 2**24, 2**31, 2**40, 10**9, -1, 0.5, 1e308)
_NORMALIZERS: tuple[dict[str, Any], ...] = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 60},
    {"type": "Replace", "pattern": {"Regex": "(a*)*$"}, "content": ""},
    {"type": "Replace", "pattern": {"String": ""}, "content": "xyz"},
    {"type": "Prepend", "prepend": ""},
    {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="},
    {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, {"type": "ByteLevel"}, {"type": "Nmt"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
)  # fmt: skip
_WORDS: tuple[dict[str, Any], ...] = (
    {"type": "Split", "pattern": {"Regex": "([a-z ]+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": True},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "MergedWithNext", "invert": False},
    {"type": "Metaspace", "replacement": "▁▁", "prepend_scheme": "always", "split": True},
    {"type": "FixedLength", "length": 0}, {"type": "Digits", "individual_digits": True}, {"type": "UnicodeScripts"},
    {"type": "CharDelimiterSplit", "delimiter": ""}, {"type": "Punctuation", "behavior": "Contiguous"}, {"type": "Whitespace"},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
)  # fmt: skip
_FIRST = {"Sequence": {"id": "A", "type_id": 0}}
_AFTER: tuple[dict[str, Any], ...] = (
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[GONE]", "type_id": 0}}, _FIRST], "pair": [],
     "special_tokens": {}},
    {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
    {"type": "TemplateProcessing", "single": [_FIRST] * 3000, "pair": [_FIRST], "special_tokens": {}},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 2**32 - 1}}, _FIRST], "pair": [_FIRST],
     "special_tokens": {"x": {"id": "x", "ids": [2**32 - 1] * 3, "tokens": ["x", "y", "z"]}}},
    {"type": "BertProcessing", "sep": ["", 2**32 - 1], "cls": ["", 0]},
    {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 2], "trim_offsets": True, "add_prefix_space": True},
)  # fmt: skip
_DECODERS: tuple[dict[str, Any], ...] = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 60}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 60},
    {"type": "Strip", "content": " ", "start": 2**62, "stop": 2**62}, {"type": "WordPiece", "prefix": "", "cleanup": True},
    {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}, {"type": "BPEDecoder", "suffix": ""},
)  # fmt: skip
_STEPS = {
    "normalizer": _NORMALIZERS, "pre_tokenizer": _WORDS, "post_processor": _AFTER, "decoder": _DECODERS,
    "padding": ({"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": 2**40, "pad_id": 0, "pad_type_id": 0,
                 "pad_token": "x"},),
    "truncation": ({"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5},),
    "model": ({"type": "WordLevel", "vocab": {}, "unk_token": "?"}, {"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0]]},
              {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}, {"type": "WordPiece", "vocab": {"a": 2**32 - 1},
               "unk_token": "", "continuing_subword_prefix": "", "max_input_chars_per_word": 0}),
}  # fmt: skip
_OF_CONFIGS = {
    "tokenizer_class": ("LlamaTokenizer", "BertTokenizer", "T5Tokenizer", "ByT5Tokenizer", "None", "PreTrainedTokenizerFast"),
    "model_max_length": _SIZES, "padding_side": ("", "left"), "pad_token": (None, "", "x" * 3000, {"content": 5}),
    "chat_template": ("{{ 1/0 }}", [], [{"name": "default", "template": "{{ x }}"}], {"default": 5}),
    "added_tokens_decoder": ({"0": {"content": "a"}}, {"x": {}}, {str(2**40): {"content": "b", "special": True}}),
    "auto_map": ({"AutoTokenizer": ["evil.T", None]}, {"AutoImageProcessor": "evil.P"}, "evil"),
    "extra_special_tokens": ([], {"image_token": "<image>"}, ["a"], 5), "bos_token": ("", "x", None),
    "image_processor_type": ("ViTImageProcessor", "DonutImageProcessor", "Idefics3ImageProcessor", "Gone", "../x"),
    "feature_extractor_type": ("WhisperFeatureExtractor", "ClapFeatureExtractor", "EncodecFeatureExtractor", "Gone"),
    "processor_class": ("LlavaProcessor", "Gone", "WhisperProcessor", "AutoProcessor"), "resample": (0, 5, 99, -1, "x"),
    "do_pad": (True,), "do_convert_rgb": (False, None), "do_resize": (False,), "do_rescale": ("no",), "do_normalize": (2,),
    "pad_size": ({"height": 9, "width": 9}, [8, 8]), "crop_size": ({"height": 30_000, "width": 1}, 3), "size_divisor": _SIZES,
    "image_grid_pinpoints": ([[64, 64]] * 500, [[1, 2**30]], "[(8, 8)]"), "rescale_factor": (0, 1e308, -1, "x"),
    "image_mean": ([0.5] * 7, 0, [], "x"), "image_std": ([0, 0, 0], [1e-320] * 3), "return_attention_mask": (True, 5),
    "padding_value": (float("inf"), "x"), "return_tensors": ("np", "tf", "pt"), "num_frames": _SIZES, "patch_size": _SIZES,
}  # fmt: skip
_TEMPLATES = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}so{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% elif m.role == 'x' %}"
    "{{ raise_exception('roles must alternate') }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
    "{% macro one(m) %}{{ m.content }} {% endmacro %}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ one(m) }}{{ loop.index }}{% endfor %}{{ ns.n }}{% generation %}{{ messages | tojson(indent=1) }}{% endgeneration %}",
    "{%- for m in messages %}{%- if loop.first and tools %}{{- tools | tojson }}{%- endif %}{{- m.content.split(' ')[-1] }}"
    "{%- if loop.index0 > 3 %}{%- break %}{%- endif %}{%- endfor %}{{ strftime_now('%Y') }}",
)
_OF_TEMPLATES = (
    "{{ 'a' * 10**10 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ '%0999999999d' % 1 }}", "{{ 9**(9**9) }}", "{% break %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ cycler.__init__.__globals__ }}", "{% include '/etc/passwd' %}", "{{",
    "{{ [1] * 10**10 }}", "{{ 'x' | center(10**10) }}", "{{ lipsum(n=10**5) }}", "{% set x = messages %}{{ x.append(x) or x }}",
    "{{ messages | tojson(indent=10**9) }}", "{% for a in messages recursive %}{{ loop([a]) }}{% endfor %}", "{{ ''.__class__ }}",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "{% if 1 %}" * 120, "{{ 1" + "+1" * 4000 + " }}", "{{ ''.join(messages) }}",
    "{{ 'a'.format_map(x) }}", "{{ '{0.__class__}'.format(1) }}", "{{ none.x }}", "{{ 1/0 }}", "{% raw %}", "{# ", "\0", "\udcff",
    "{% import 'os' as o %}", "{% extends 'x' %}", "{{ strftime_now('%' * 9999) }}", "{{ dict(a=1) | xmlattr }}", "{{ self }}",
    "{{ range(10**7) | list | length }}", "{% filter upper %}x{% endfilter %}", "{{ raise_exception(messages) }}", "{% continue %}",
    "{{ raise_exception('a\n\x1b[2J') }}", "{{ x() }}", "{{ messages | map('nope') | list }}", "{% trans %}x{% endtrans %}",
)  # fmt: skip


# -- good files ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Good:
    """A good file: its name in the folder of a model, or the ending of one that is given beside a model; what is in it; and what
    `drift` is told beside the model's folder.
    """

    model: str
    file: str
    content: bytes
    given: tuple[str, ...] = ()


def make_good(kind: str, folder: Path) -> list[bytes]:
    """The good files of a kind. Also writes the models that they are tried with to `folder`."""
    from tests.helpers import checkpoint_folders

    made = _GOOD[kind](folder)
    for name in {good.model for good in made}:
        if not (folder / name).exists():
            with contextlib.redirect_stderr(io.StringIO()):
                checkpoint_folders.save(name, folder / name)
    _places[kind] = [_taken(folder, good) for good in made]
    return [good.content for good in _places[kind]]


_places: dict[str, list[_Good]] = {}
"""What `make_good` made in this process."""


def _taken(folder: Path, good: _Good) -> _Good:
    """Return the good file. If it has no content, it gets that of the model's own file."""
    return dataclasses.replace(good, content=good.content or (folder / good.model / good.file).read_bytes())


def _tokenizers(folder: Path) -> list[_Good]:
    from tests.helpers.paths import DEMO
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "says", "hello", "world", "0123456789"]
    levels = Tokenizer(models.BPE())
    levels.pre_tokenizer, levels.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    levels.train_from_iterator(
        words * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], show_progress=False)
    )
    levels.post_processor = processors.ByteLevel()
    pieces = Tokenizer(models.Unigram())
    pieces.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    pieces.train_from_iterator(
        words,
        trainers.UnigramTrainer(vocab_size=60, special_tokens=["<s>", "<unk>"], unk_token="<unk>", show_progress=False),
    )
    pieces.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    demo = (DEMO / "tokenizer.json").read_bytes()
    own = ("--prompt", "hello  WORLD 123 é 한")
    texts = [levels.to_str().encode(), pieces.to_str().encode(), demo]
    made = [_Good("llama", "tokenizer.json", text, given) for text in texts for given in ((), own)]
    made += [_Good("llama", "tokenizer_config.json", b"", given) for given in ((), own)]
    return [*made, _Good("bert", "tokenizer.json", b"", own), _Good("clip", "tokenizer.json", texts[1])]


def _templates(folder: Path) -> list[_Good]:
    chat = ("--prompt", "hello world", "--chat", "--input-limit", "template-seconds=1")
    return [_Good("llama", "chat_template.jinja", template.encode(), chat) for template in _TEMPLATES]


def _processors(folder: Path) -> list[_Good]:
    from tests.helpers.checkpoint_folders import write_picture

    picture = ("--image", str(write_picture(folder / "given.png")))
    (folder / "given.wav").write_bytes(_sound("WAV", "PCM_16"))
    sound = ("--audio", str(folder / "given.wav"))
    preprocessor, processor = "preprocessor_config.json", "processor_config.json"
    return [
        _Good("vit", preprocessor, b""), _Good("vit", preprocessor, b"", picture), _Good("clip", processor, b""),
        _Good("llava", processor, b"", picture), _Good("blip", processor, b"", picture), _Good("qwen2_5_vl", preprocessor, b""),
        _Good("whisper", preprocessor, b""), _Good("whisper", preprocessor, b"", sound), _Good("wav2vec2", preprocessor, b""),
        _Good("llava", "tokenizer_config.json", b"", picture),
    ]  # fmt: skip


def _pictures(folder: Path) -> list[_Good]:
    import numpy as np
    from PIL import Image

    values = np.random.default_rng(0).integers(0, 256, (40, 48, 4), dtype=np.uint8)
    colour = Image.fromarray(values, "RGBA")
    plain, grey = colour.convert("RGB"), Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    turned = Image.Exif()
    turned[0x0112] = 6
    writings: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (plain, "PNG", {}), (colour, "PNG", {"exif": turned}), (grey, "PNG", {}), (plain.convert("P"), "PNG", {"transparency": 3}),
        (plain, "JPEG", {"exif": turned}), (plain.convert("CMYK"), "JPEG", {}), (plain, "JPEG", {"progressive": True}),
        (colour, "WEBP", {"exif": turned}), (plain, "WEBP", {"lossless": True}), (plain, "BMP", {}),
        (plain.convert("P"), "BMP", {}),
        (plain.convert("P"), "GIF", {"save_all": True, "append_images": [plain.convert("P")]}),
        (plain, "TIFF", {"compression": "tiff_lzw"}), (plain, "TIFF", {"compression": "jpeg"}), (grey, "TIFF", {"exif": turned}),
        (plain.convert("1"), "TIFF", {"compression": "group4"}), (plain, "TIFF", {"compression": "tiff_deflate"}),
        (plain, "PNG", {"save_all": True, "append_images": [plain]}),
    ]  # fmt: skip
    made = []
    for number, (image, form, more) in enumerate(writings):
        written = io.BytesIO()
        image.save(written, form, **more)
        made.append(_Good("vit" if number % 3 else "llava", f".{form.lower()}", written.getvalue(), ("--image",)))
    return made


def _sounds(folder: Path) -> list[_Good]:
    forms = (
        ("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAV", "ULAW"), ("WAV", "IMA_ADPCM"), ("WAV", "MS_ADPCM"),
        ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"),
    )  # fmt: skip
    return [
        _Good(model, f".{form.lower()}", _sound(form, coding), ("--audio",))
        for form, coding in forms
        for model in ("whisper", "wav2vec2")
    ]


def _sound(form: str, coding: str) -> bytes:
    import numpy as np
    import soundfile

    written = io.BytesIO()
    waves = np.sin(np.arange(3200, dtype=np.float32) / 9)[:, None] * np.ones((1, 2), np.float32) / 2
    soundfile.write(written, waves, 16_000, subtype=coding, format=form)
    return written.getvalue()


_GOOD: dict[str, Callable[[Path], list[_Good]]] = {
    "tokenizer": _tokenizers, "template": _templates, "processor": _processors, "picture": _pictures, "sound": _sounds,
}  # fmt: skip


# -- mutations -----------------------------------------------------------------------------------------------------


def mutated(kind: str, content: bytes, chooser: random.Random) -> bytes | None:
    """A good file with a part put in or swapped that its format knows, or None for whatever `fuzz.py` does to bytes."""
    if kind == "template" and chooser.random() < 0.7:
        return _other_template(content.decode(), chooser).encode("utf-8", "surrogatepass")
    if kind in ("tokenizer", "processor") and chooser.random() < 0.8:
        value = json.loads(content)
        for _ in range(chooser.randrange(1, 4)):
            value = _with_another_step(value, chooser) if chooser.random() < 0.5 else changed(value, chooser)
        return json.dumps(value).encode("utf-8", "surrogatepass")
    return None


def _with_another_step(value: Any, chooser: random.Random) -> Any:
    """A tokenizer with another step of one kind, or several; or a configuration with another setting."""
    if not isinstance(value, dict):
        return value
    if "model" in value and "added_tokens" in value:
        name = chooser.choice(list(_STEPS))
        one, many = (
            chooser.choice(_STEPS[name]),
            [chooser.choice(_STEPS[name]) for _ in range(chooser.choice((2, 5, 40)))],
        )
        inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
        sequence = {"type": "Sequence", inner.get(name, "decoders"): many}
        return value | {name: sequence if name in (*inner, "decoder") and chooser.random() < 0.3 else one}
    name = chooser.choice(list(_OF_CONFIGS))
    inside = [key for key, inner in value.items() if isinstance(inner, dict)]
    if inside and chooser.random() < 0.6:
        key = chooser.choice(inside)
        return value | {key: _with_another_step(value[key], chooser)}
    numbers = [key for key, inner in value.items() if isinstance(inner, int)]
    if numbers and chooser.random() < 0.4:
        return value | {chooser.choice(numbers): chooser.choice(_SIZES)}
    return value | {name: chooser.choice(_OF_CONFIGS[name])}


def _other_template(text: str, chooser: random.Random) -> str:
    """A template with statements put in, doubled, dropped or nested."""
    for _ in range(chooser.choice((1, 1, 2, 4))):
        places = [
            at
            for at in range(len(text) + 1)
            if text[at : at + 2] in ("{{", "{%", "") or text[at - 2 : at] in ("}}", "%}")
        ]
        begin, end = sorted((chooser.choice(places), chooser.choice(places)))
        what = chooser.random()
        if what < 0.6:
            text = text[:begin] + chooser.choice((*_OF_TEMPLATES, str(chooser.choice(STRANGE)))) + text[begin:]
        elif what < 0.8:
            text = text[:begin] + text[end:]
        else:
            text = text[:end] + text[begin:end] * chooser.choice((1, 2, 50)) + text[end:]
    return text


# -- one case ------------------------------------------------------------------------------------------------------


def command(kind: str, content: bytes, folder: Path, seed: int) -> list[str]:
    """Write the file of a case, and return what is run on it. A model's other files are as they were."""
    good = _places[kind][seed % len(_places[kind])]
    model = folder / good.model
    if good.given[-1:] in (("--image",), ("--audio",)):
        path = folder / f"case{good.file}"
        path.write_bytes(content)
        return ["drift", str(model), "--cast", "*=bf16", *good.given, str(path)]
    for other in {(each.model, each.file) for each in _places[kind]}:
        path = folder / other[0] / other[1]
        kept = path.with_suffix(".kept")
        if path.exists() and not kept.exists():
            path.rename(kept)
        if kept.exists():
            path.write_bytes(kept.read_bytes())
    if good.file == "tokenizer.json":  # what stands in the file, not what a class of the configuration writes itself
        config = model / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    (model / good.file).write_bytes(content)
    return ["drift", str(model), "--cast", "*=bf16", *good.given]


@contextlib.contextmanager
def children_are_forked() -> Iterator[None]:
    """The processes of `limited.py` are forked from this one. Whatever this one or they write to the descriptor 2 is added to
    standard error afterwards: a panic of Rust's does not ask Python.
    """
    from dtype_engine.runtime.inputs import limited

    kept: Any = limited.subprocess
    stand_in = {name: getattr(kept, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired", "CompletedProcess")}
    with tempfile.TemporaryFile("w+", errors="replace") as written:
        before = os.dup(2)
        os.dup2(written.fileno(), 2)
        limited.subprocess = types.SimpleNamespace(run=_forked, **stand_in)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            limited.subprocess = kept  # type: ignore[attr-defined]
            os.dup2(before, 2)
            os.close(before)
            written.seek(0)
            sys.stderr.write(written.read())


def _forked(
    arguments: Sequence[str], input: bytes, stdout: int, stderr: int, timeout: float, check: bool
) -> subprocess.CompletedProcess[bytes]:
    """As `subprocess.run`, for a program in Python whose path is the last of the arguments."""
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as told:
        given.write(input.decode())
        given.seek(0)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                sys.stdin, sys.stdout = given, told
                runpy.run_path(arguments[-1], run_name="__main__")
                told.flush()
                status = 0
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else 1
            finally:
                os._exit(status)
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except BaseException:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise
        told.seek(0)
        return subprocess.CompletedProcess(arguments, status, told.read().encode())
