"""The models that are offered if none was named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtype_engine.checkpoint.discovery import find_models
from dtype_engine.checkpoint.source import locate


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(path: Path, nbytes: int = 10, age: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0" * nbytes)
    os.utime(path, (1.7e9 - age, 1.7e9 - age))


def test_models_in_the_current_folder_are_listed_newest_first(tmp_path: Path, cache: Path) -> None:
    here = tmp_path / "here"
    put(here / "old.safetensors", 100, age=900)
    put(here / "new.pth", 200, age=100)
    put(here / "notes.txt")
    put(here / "llama" / "config.json", 10, age=500)
    put(here / "llama" / "model-1.safetensors", 1000, age=500)
    put(here / "pipe" / "model_index.json", age=700)
    put(here / "photos" / "cat.png")
    put(here / ".hidden" / "config.json")
    found = find_models(here)
    assert [(one.model, one.nbytes) for one in found] == [
        ("new.pth", 200), ("llama/", 1000), ("pipe/", None), ("old.safetensors", 100),
    ]  # fmt: skip
    assert {one.place for one in found} == {"this folder"}


def test_checkpoint_folder_is_listed_once_without_its_shards(tmp_path: Path, cache: Path) -> None:
    here = tmp_path / "here"
    put(here / "config.json")
    for shard in (1, 2):
        put(here / f"model-{shard}-of-2.safetensors", 50)
    assert [(one.model, one.nbytes) for one in find_models(here)] == [(".", 100)]


def test_cached_models_are_listed_by_their_hub_ids(tmp_path: Path, cache: Path) -> None:
    snapshot = cache / "models--org--tiny-net" / "snapshots" / "abcdef0"
    put(snapshot / "config.json")
    put(snapshot / "model.safetensors", 64)
    put(cache / "models--org--empty" / "refs" / "main")
    put(cache / "datasets--org--data" / "snapshots" / "abc" / "config.json")
    found = find_models(tmp_path / "missing")
    assert [(one.model, one.place, one.nbytes) for one in found] == [("org/tiny-net", "Hugging Face cache", 64)]
    assert locate("org/tiny-net").path == snapshot


def test_empty_folder_lists_no_models(tmp_path: Path, cache: Path) -> None:
    assert find_models(tmp_path) == []


def test_unreadable_folder_is_skipped(tmp_path: Path, cache: Path) -> None:
    here = tmp_path / "here"
    put(here / "a.gguf", 5)
    (here / "broken.safetensors").symlink_to(here / "nowhere")
    assert [one.model for one in find_models(here)] == ["a.gguf"]
