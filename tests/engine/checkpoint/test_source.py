from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.paths import TINYNET

from dtype_engine.checkpoint.source import locate
from dtype_engine.core.errors import UserError


def test_command_without_a_model_opens_the_demo() -> None:
    source = locate(None)
    checkpoint = source.open()
    assert source.title == "demo"
    assert checkpoint is not None
    assert sum(file.stat().st_size for file in source.path.iterdir()) < 3_000_000  # type: ignore[union-attr]


def test_folders_and_files_are_located(make_llama: Callable[..., Path]) -> None:
    folder = make_llama("my-model")
    for path in (folder, folder / "model.safetensors"):
        source = locate(str(path))
        assert source.title == path.name
        checkpoint = source.open()
        assert checkpoint is not None
        assert len(checkpoint.tensors) == 20
        assert checkpoint.config is not None


def test_python_files_and_modules_are_located(monkeypatch: pytest.MonkeyPatch) -> None:
    source = locate(f"{TINYNET}:TinyNet")
    assert (source.kind, source.title, source.attribute, source.open()) == (
        "python",
        "tinynet.py:TinyNet",
        "TinyNet",
        None,
    )
    monkeypatch.chdir(TINYNET.parent)
    assert locate("tinynet:TinyNet").module == "tinynet"


def test_hub_cache_ids_are_located(
    make_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_llama()
    revision = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "hub" / "models--some--model"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(revision)
    (home / "snapshots").mkdir()
    folder.rename(home / "snapshots" / revision)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    source = locate("some/model")
    assert source.title == "some/model"
    assert source.open() is not None
    (home / "refs" / "main").write_text("../../../etc")
    assert locate("some/model").path == home / "snapshots" / revision


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("no/such", "no such folder or file, and no Hugging Face model"),
        ("nothing.py:Name", "there is no file nothing.py"),
        ("nothing.py", "there is no file"),
        ("no_such_module:Name", "there is no Python module no_such_module"),
        ("a b:Name", "neither a Python file nor a module"),
        (f"{TINYNET}:1x", "not the name of a class"),
        (f"{TINYNET}", "add the class or function"),
        ("\x1b[2Jevil", "no such folder"),
        (
            "https://x/y.safetensors",
            "https://x/y.safetensors is an address: name a folder or file on this machine, or hf://",
        ),
        ("https://x:80/y", "is an address"),
        ("file:///etc/passwd", "is an address"),
        ("ssh://host/model", "is an address: .* ssh://HOST/PATH with dtype-tui"),
    ],
)
def test_path_without_a_model_is_refused(model: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        locate(model)
    assert str(caught.value).isprintable()


def test_files_with_invalid_content_are_refused(tmp_path: Path) -> None:
    for name, says in {"a.pth": "no PyTorch file", "a.gguf": "no GGUF file", "a.txt": "no checkpoint"}.items():
        (tmp_path / name).write_text("x")
        with pytest.raises(UserError, match=says):
            locate(str(tmp_path / name)).open()


def test_headers_are_read_again_only_after_a_file_changed(make_llama: Callable[..., Path]) -> None:
    folder = make_llama()
    source = locate(str(folder))
    first = source.open()
    assert first is not None
    assert source.open() is first
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    second = source.open()
    assert second is not None
    assert second is not first
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # another time of change
    assert source.open() is not second
    assert source == locate(str(folder))  # what was read is no part of what was named
    weights.unlink()
    with pytest.raises(UserError):
        source.open()
