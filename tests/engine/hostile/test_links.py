"""Files in a model folder that are links to files elsewhere are not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.helpers import preloaded
from tests.helpers.paths import ROOT

import dtype_engine as de
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
def test_links_within_the_folder_and_to_the_blobs_of_the_cache_are_followed(tmp_path: Path) -> None:
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
def test_links_that_tokenizers_do_not_read_are_allowed(tmp_path: Path, name: str) -> None:
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
def test_links_that_tokenizers_may_read_are_refused(tmp_path: Path, name: str) -> None:
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
