"""Files outside a model's folder, to which its files are links or which its settings name, are not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.helpers import preloaded
from tests.helpers.paths import ROOT

import dtype_engine as de
from dtype_engine.checkpoint.source import component_of
from dtype_engine.checkpoint.weight_files import refuse_links_out
from dtype_engine.core.errors import UserError

DEMO = ROOT / "engine" / "dtype_engine" / "demo"
SECRET = "a secret text"
NAMES = (
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/other.jinja", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "spiece.model",
    "preprocessor_config.json", "processor_config.json", "image_processor/preprocessor_config.json", "tokenizer/tokenizer.json",
    "video_preprocessor_config.json", "generation_config.json", "config.json", "adapter_config.json", "hf_quant_config.json",
    "quantize_config.json", "recipe.yaml", "model.safetensors.index.json", "model.safetensors",
)  # fmt: skip
OPENING = """
import os, sys, dtype_engine as de
opened = []
sys.addaudithook(lambda event, given: opened.append(given[0]) if event == "open" and isinstance(given[0], (str, bytes)) else None)
for folder in sys.argv[1:]:
    for options in (de.Options(prompts=("import os",)), de.Options(prompts=("import os",), chat=True), de.Options()):
        try:
            session = de.open(folder, options=options)
            session.cast("*.mlp", "fp8")
            print(session.inputs.description, session.drift().output.sqnr_db)
        except de.UserError as error:
            print(str(error).replace("\\n", " "))
print("OPENED", [path for path in map(os.fsdecode, opened) if "/outside/" in os.path.realpath(path)])
"""


def with_link(folder: Path, name: str) -> Path:
    """Copy the built-in model to `folder`, with the file `name` replaced by a link to a copy elsewhere."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    outside = folder.parent / "outside" / folder.name / Path(name).name
    outside.parent.mkdir(parents=True)
    path = folder / name
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text(json.dumps({"chat_template": SECRET, "weight_map": {"a": SECRET}}))
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(outside)
    return folder


@pytest.mark.slow
def test_symlinks_to_files_outside_the_model_folder_are_not_read(tmp_path: Path) -> None:
    folders = [with_link(tmp_path / str(number), name) for number, name in enumerate(NAMES)]
    done = preloaded.run(OPENING, *map(str, folders))
    assert done.returncode == 0, done.stderr
    assert "OPENED []" in done.stdout
    assert SECRET not in done.stdout + done.stderr
    for folder, name in zip(folders, NAMES, strict=True):
        if not name.endswith((".yaml", "quantize_config.json")):  # of these, only the name of a method would be shown
            assert f"{folder / name} is a link out of its folder" in done.stdout, name


@pytest.mark.slow
def test_chat_template_that_is_a_symlink_out_of_its_folder_is_refused_by_name(tmp_path: Path) -> None:
    folder = with_link(tmp_path / "model", "chat_template.jinja")
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    with pytest.raises(
        UserError, match=r"chat_template.jinja is a link out of its folder.*prompts and texts can't be used"
    ):
        de.open(str(folder), options=de.Options(texts=(chat,)))
    session = de.open(str(folder))
    assert "is a link out of its folder" in session.inputs.description


@pytest.mark.slow
def test_links_within_the_model_folder_and_to_blobs_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123456789abcdef"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(each for each in sorted(DEMO.iterdir()) if each.suffix in (".json", ".safetensors")):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    (snapshot / "real.jinja").write_text("{{ messages[0].content }}")
    (snapshot / "chat_template.jinja").symlink_to("real.jinja")
    options = de.Options(prompts=("import os",), chat=True)
    session = de.open(str(snapshot), options=options)
    assert session.inputs.batches[0].text == "import os"
    drifts = []
    for folder in (snapshot, DEMO):
        session = de.open(str(folder), options=de.Options(prompts=("import os",)))
        session.cast("*.mlp", "fp8")
        drifts.append(session.drift().output.sqnr_db)
    assert drifts[0] == drifts[1]


@pytest.mark.parametrize(
    "name", ["README.md", "model-00001-of-00002.safetensors", "runs", ".cache", "gone.json", "picture.PNG"]
)
def test_links_out_of_the_model_folder_are_allowed_if_tokenizers_do_not_read_them(tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "model", tmp_path / "outside"
    folder.mkdir()
    if name == "runs":
        outside.mkdir()
    elif name != "gone.json":
        outside.write_text("{}")
    (folder / name).symlink_to(outside)
    refuse_links_out(folder)


@pytest.mark.parametrize(
    "name", ["bpe.codes", "dict.txt", "source.spm", "prophetnet.tokenizer", "no_suffix", "tokenizer"]
)
def test_links_out_of_the_model_folder_are_refused_if_tokenizers_may_read_them(tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "model", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "file").write_text("{}")
    (folder / name).symlink_to(outside if name == "tokenizer" else outside / "file")
    with pytest.raises(UserError, match=f"{name} is a link out of its folder"):
        refuse_links_out(folder)
    (folder / name).unlink()
    (folder / "one").symlink_to(outside / "file")  # of several links in a row, the last counts
    (folder / name).symlink_to("one")
    with pytest.raises(UserError, match="is a link out of its folder"):
        refuse_links_out(folder)


def test_component_of_a_pipeline_that_is_a_link_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text("{}")
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "unet").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="pipeline/unet is a link out of its folder"):
        component_of(str(tmp_path / "pipeline"), "unet")


NAMING: dict[str, tuple[str, object]] = {
    "absolute": ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "vocab": "{outside}/words.txt"}),
    "relative to the folder": ("tokenizer_config.json", {"fast_tokenizer_files": ["../outside/tokenizer.5.0.json"]}),
    "relative to the current folder": ("tokenizer_config.json", {"vocab": "words.txt"}),
    "nested": ("tokenizer_config.json", {"sp_model_kwargs": {"model_file": "{outside}/words.txt"}}),
    "special tokens": ("special_tokens_map.json", {"vocab": "{outside}/words.txt"}),
    "a folder": ("preprocessor_config.json", {"repo_path": "{outside}", "class_info_file": "words.txt"}),
    "a model": ("processor_config.json", {"audio_tokenizer": {"audio_tokenizer_name_or_path": "{outside}"}}),
    "in a subfolder": ("tokenizer/tokenizer_config.json", {"vocab": "../../outside/words.txt"}),
}


@pytest.mark.parametrize("case", NAMING)
def test_files_outside_the_model_folder_that_settings_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    folder, outside = tmp_path / "model", tmp_path / "outside"
    outside.mkdir()
    for name in ("words.txt", "tokenizer.5.0.json"):
        (outside / name).write_text(SECRET)
    monkeypatch.chdir(outside)
    name, content = NAMING[case]
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text(json.dumps(content).replace("{outside}", str(outside)))
    with pytest.raises(
        UserError, match=r"_(config|map).json: \w+ names .*outside.*, which is outside its folder; remove"
    ):
        refuse_links_out(folder)


def test_settings_that_name_no_file_outside_the_model_folder_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Makefile").write_text("a token of this name is no file")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "vocab.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    elsewhere = str(tmp_path / "Makefile")
    content = {
        "name_or_path": str(tmp_path), "special_tokens_map_file": elsewhere, "tokenizer_file": elsewhere, "vocab_file": "vocab.txt",
        "merges_file": None, "added_tokens_decoder": {"0": {"content": "Makefile"}, "1": {"content": "/"}},
        "chat_template": "a/b " * 2000, "gone_file": "/no/such/file", "null": "a/\0",
    }  # fmt: skip
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(content))
    (tmp_path / "model" / "preprocessor_config.json").write_text("no JSON")
    refuse_links_out(tmp_path / "model")


@pytest.mark.slow
def test_text_file_named_as_a_vocabulary_is_not_read(tmp_path: Path) -> None:
    """BertTokenizer makes a token of each line of the file."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "tokenizer*"))
    (tmp_path / "words.txt").write_text(f"[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\nimport\nos\n{SECRET}\n")
    config = {"tokenizer_class": "BertTokenizer", "vocab": str(tmp_path / "words.txt")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"vocab names .*words.txt, which is outside its folder.*prompts and texts can't"
    ):
        de.open(str(folder), options=de.Options(prompts=("import os",)))
