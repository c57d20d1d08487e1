"""Resolves the command-line argument MODEL to a checkpoint or to Python code, without importing torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dtype_engine.checkpoint import (
    Checkpoint,
    FileIdentity,
    is_adapter,
    needs_torch,
    open_checkpoint,
    peek_first_shard,
)
from dtype_engine.checkpoint.file_kind import kind_of
from dtype_engine.checkpoint.weight_files import PIPELINE_INDEX, resolve_inside
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import NO_BASE, ModelOptions
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.core.user_folders import HEADERS, cache_folder, expanded

if TYPE_CHECKING:
    from dtype_engine.checkpoint.hub import HubModel, Progress

DEMO = Path(__file__).parent.parent / "demo"
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ON_HUB = "hf://"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_ALONE = f"--base {NO_BASE}"
_NAMES_BASE = "--base (in Python: Options(base=...)) names its base model"


@dataclass(frozen=True, slots=True)
class Source:
    """A model that was located: a checkpoint at `path`, a single file of diffusers there, whose configuration is in another folder,
    or the class or function `attribute` of a Python file or module.
    """

    kind: Literal["checkpoint", "single file", "python"]
    title: str
    path: Path | None = None
    module: str | None = None
    attribute: str | None = None
    trust_pickle: bool = False
    config: Path | None = None
    """The folder with the configuration of a single file, in the layout of diffusers."""
    hub: HubModel | None = field(default=None, compare=False)
    """The model on a hub of which only the headers are at `path`, or None for a model on this machine."""
    asked: str | None = field(default=None, compare=False)
    """The text from which `locate` found this model, or None for the demo."""
    base: Source | None = None
    """The base model into which this PEFT adapter is merged as it is opened, or None."""
    alone: str = ""
    """Why this PEFT adapter is opened without its base, as words that follow a colon. "" for any other model."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """What the list of a hub's files is to be said about, for `Checkpoint.notices`."""
    _opened: list[tuple[Checkpoint, tuple[FileIdentity, ...]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """The checkpoint that `open` has read, with the state of its JSON files at that time."""

    def open(self, absent_shards: bool = False) -> Checkpoint | None:
        """Return the checkpoint, or None for a Python source or a single file, whose tensors have other names in the model. The
        headers are read again only if a weights file or a JSON file beside it has changed. absent_shards: whether some of the files
        that the index names may be missing. Raises UserError.
        """
        if self.kind != "checkpoint" or self.path is None:
            return None
        described_by = self._described_by()
        for checkpoint, before in self._opened:
            if described_by == before and not any(file.change() for file in checkpoint.identities):
                return checkpoint
        if self.hub is None:
            checkpoint = open_checkpoint(self.path, self.trust_pickle, absent_shards)
        else:
            from dtype_engine.checkpoint.hub import with_absent_values

            try:
                checkpoint = with_absent_values(open_checkpoint(self.path), self.hub)
            except UserError as error:
                raise UserError(error.sentence.replace(str(self.path), str(self.hub.address))) from None
        if self.base is not None or self.alone:
            checkpoint = self._onto_base(checkpoint, absent_shards)
        if self.notices:
            checkpoint = dataclasses.replace(checkpoint, notices=(*checkpoint.notices, *self.notices))
        self._opened[:] = [(checkpoint, described_by)]
        return checkpoint

    def _described_by(self) -> tuple[FileIdentity, ...]:
        """Return the state of the JSON files that describe the weights, of an adapter also those of its base."""
        assert self.path is not None
        files = self.path.glob("*.json") if self.path.is_dir() else [self.path.with_name("config.json")]
        of_base = self.base._described_by() if self.base is not None else ()
        return (*(FileIdentity.of(file) for file in sorted(files) if file.is_file()), *of_base)

    def _onto_base(self, adapter: Checkpoint, absent_shards: bool) -> Checkpoint:
        """Return the base with this adapter merged or, without a base, the adapter alone with the reason. Raises UserError."""
        if self.base is None:
            return dataclasses.replace(
                adapter, alone=self.alone, notices=(*adapter.notices, f"not merged: {self.alone}")
            )
        from dtype_engine.checkpoint.adapter import onto_base  # few models are adapters

        base = self.base.open(absent_shards)
        assert base is not None
        try:
            return onto_base(adapter, base, self.base.title)
        except UserError as error:
            raise UserError(
                f"{self.path} can't be merged into its base: {error.sentence}; {_ALONE} opens it alone"
            ) from None

    def without_base(self) -> Source:
        """Return this model or, if it is an adapter, the adapter alone."""
        return dataclasses.replace(self, base=None)

    @property
    def no_headers(self) -> str:
        """Why `open` returns None, as words after the title."""
        return "is opened by --config" if self.kind == "single file" else "is code"

    def need_config(self) -> Path:
        """Return the folder of the configuration of a single file."""
        assert self.config is not None
        return self.config

    def peek(self) -> tuple[Tree | None, bool]:
        """Return (a module tree that can be shown at once, whether it is the whole tree). Of a very large checkpoint, it is the
        tree of the first shard. It is None for a Python source or a pickle, which need torch. Raises UserError.
        """
        if self.kind != "checkpoint" or self.path is None or needs_torch(self.path):
            return None, False
        first = peek_first_shard(self.path)
        if first is not None:
            return first, False
        checkpoint = self.open()
        assert checkpoint is not None
        return checkpoint.tree(), True

    def refuse_other_options(self, options: ModelOptions) -> None:
        """Raise UserError for an option that does not apply: `weights` for a checkpoint, `architecture` for Python code, `base` for
        what is no adapter.
        """
        if options.base not in (None, NO_BASE) and self.base is None and options.reference_model is None:
            raise UserError(f"--base goes with a PEFT adapter, and {self.title} is none")
        if self.kind != "python" and options.weights is not None:
            raise UserError(
                "--weights goes with the code of a model, as in file.py:Name --weights model.pth, and "
                f"{self.title} is no code; for --against, write functions that load the weights of both models"
            )
        if self.kind != "checkpoint" and options.architecture is not None:
            raise UserError(f"--architecture goes with a checkpoint; {self.title} makes its own module")


def locate(
    model: str | None,
    trust_pickle: bool = False,
    download: bool = False,
    python_only_by: str | None = None,
    on_progress: Progress = ignore,
    base: str | None = None,
    config: Path | None = None,
) -> Source:
    """Find the model that a text names: a folder or file of a checkpoint, `file.py:Name`, `package.module:Name`, a Hugging Face id
    in the local cache (with `download`, also on the hub), or `hf://org/name` on a hub. Of a model on a hub, only the headers are
    read unless `download` is set or the model is in the local cache. None means the built-in demo, and so does `demo` unless a file
    has this name.

    trust_pickle: whether pickles may run code. python_only_by: None if `model` may name Python code. If it may not, as
    in a file, this is an option such as `--model`, and the error says that this option can name Python code. on_progress: called
    while something is read from a hub. base: the base model if this is a PEFT adapter, as `ModelOptions.base`. config: the
    folder with the configuration of a single file of diffusers. Raises UserError, which lists where the model was looked for.
    """
    if config is not None:
        file = locate(model, trust_pickle, download, python_only_by, on_progress)
        return _single_file(file, expanded(str(config)))
    if model is None or not model.startswith(_ON_HUB):
        found = _located(model, trust_pickle, download, python_only_by, on_progress)
        return _with_base(dataclasses.replace(found, asked=model), base, download, on_progress)
    return _with_base(_on_hub(model, trust_pickle, download, on_progress), base, download, on_progress)


def locate_by(model: str | None, options: ModelOptions) -> Source:
    """Find the model that a text names, as `locate` does, with the options for opening it. Raises UserError."""
    return locate(model, options.trust_pickle, options.download, base=options.base, config=options.config)


def _on_hub(model: str, trust_pickle: bool, download: bool, on_progress: Progress) -> Source:
    from dtype_engine.checkpoint.hub import HubAddress

    found = HubAddress.parse(model).listing()
    folder = found.downloaded(hub_cache()) or (found.download(on_progress) if download else None)
    source = Source(
        "checkpoint", found.address.title, folder, trust_pickle=trust_pickle, asked=model, notices=found.notices
    )
    return source if folder is not None else dataclasses.replace(source, path=found.headers(on_progress), hub=found)


def _with_base(source: Source, base: str | None, download: bool, on_progress: Progress) -> Source:
    """Return a source with its base if it is a PEFT adapter. base: the model that the user named, "none", or None. If the adapter's
    configuration names a model that is not on this machine, the adapter stays alone. Raises UserError for what the user named.
    """
    if source.kind != "checkpoint" or source.path is None or source.hub is not None or not is_adapter(source.path):
        return source
    if base == NO_BASE:
        return dataclasses.replace(source, alone=f"{_ALONE} left its base model out")
    from dtype_engine.checkpoint.adapter import base_named

    named = base or base_named(source.path)
    if named is None:
        return dataclasses.replace(source, alone=f"it names no base model; {_NAMES_BASE}")
    try:
        if base is None and _SCHEME.match(named):  # no file makes the program ask a hub
            raise UserError(f"{printable(named, 200)} is an address, and no file chooses what is fetched")
        if is_python(named):
            raise UserError(f"{printable(named, 200)} is code, and the base of an adapter is a checkpoint")
        found = locate(named, download=download, on_progress=on_progress, base=NO_BASE)
    except UserError as error:
        if base is not None:
            raise
        return dataclasses.replace(source, alone=f"{error.sentence}; {_NAMES_BASE}")
    return dataclasses.replace(source, base=found, title=f"{source.title} on {found.title}")


def _located(
    model: str | None, trust_pickle: bool, download: bool, python_only_by: str | None, on_progress: Progress
) -> Source:
    path = _path(model)
    if model is None or (model == "demo" and not path.exists()):
        return Source("checkpoint", "demo", DEMO)
    if HEADERS in path.parts and path.absolute().is_relative_to(cache_folder() / HEADERS):
        raise UserError(f"{path} has the headers of a model on a hub and no weights: name it as {_ON_HUB}org/name")
    if path.is_dir():
        return Source("checkpoint", printable(path.resolve().name), path, trust_pickle=trust_pickle)
    if path.exists() or path.is_symlink():
        return _file(path, trust_pickle)
    refuse_address(model)
    before, colon, attribute = model.rpartition(":")
    if colon and before:
        if python_only_by is not None:
            raise UserError(
                f"{printable(model, 200)} is Python code, and no file chooses what code runs: name it with {python_only_by}"
            )
        return _python(before, attribute)
    if model.endswith(".py"):
        raise UserError(f"there is no file {printable(model, 200)}")
    if _HUB_ID.fullmatch(model) and (snapshot := _cached(model)) is not None:
        return Source("checkpoint", model, snapshot)
    if download and _HUB_ID.fullmatch(model):
        from dtype_engine.checkpoint.hub import HubAddress

        found = HubAddress.of_id(model).listing()
        return Source("checkpoint", model, found.download(on_progress), notices=found.notices)
    raise UserError(
        f"{printable(model, 200)}: no such folder or file, and no Hugging Face model of this name is in the local cache "
        f"({hub_cache()}); --download fetches one"
    )


def _single_file(found: Source, config: Path) -> Source:
    """Return a source as a single file whose configuration is in the folder `config`. Raises UserError."""
    if found.kind != "checkpoint" or found.path is None or not found.path.is_file():
        raise UserError(
            f"--config goes with a single file of a diffusion model, and {found.title} is none: leave it out"
        )
    if not any((config / name).is_file() for name in (PIPELINE_INDEX, "config.json")):
        raise UserError(
            f"{config} has no configuration: name a folder with the {PIPELINE_INDEX} of a pipeline of diffusers, or with the "
            "config.json of one of its models"
        )
    return dataclasses.replace(found, kind="single file", config=config)


def is_python(model: str | None) -> bool:
    """Return whether `locate` would treat a text as the name of Python code."""
    if model is None or model.startswith(_ON_HUB):
        return False
    try:
        path = _path(model)
    except UserError:
        return False
    before, colon, _ = model.rpartition(":")
    return bool(colon and before) and _SCHEME.match(model) is None and not (path.exists() or path.is_symlink())


def refuse_address(model: str) -> None:
    """Raise UserError for the address of anything but a model on a hub, such as `https://host/model.safetensors`."""
    if _SCHEME.match(model) and not model.startswith(_ON_HUB):
        opens = ", and ssh://HOST/PATH with dtype-tui" if model.startswith("ssh://") else ""
        raise UserError(
            f"{printable(model, 200)} is an address: name a folder or file on this machine, or {_ON_HUB}org/name{opens}"
        )


def component_of(model: str, name: str, download: bool = False) -> str:
    """Return the path of the folder of one component of a diffusers pipeline, such as "unet". For an address of a hub or of another
    machine, return the address with the name appended. Raises UserError if there is no such folder, or if it is a link out.
    """
    if model.startswith(("ssh://", _ON_HUB)):
        return f"{model.rstrip('/')}/{name}"
    folder = locate(model, download=download).path
    found = (
        sorted(entry.name for entry in folder.iterdir() if (entry / "config.json").is_file())
        if folder and folder.is_dir()
        else []
    )
    if folder is None or name not in found:
        has = f"it has {', '.join(map(printable, found))}" if found else "it has none"
        raise UserError(f"{printable(model, 200)} has no component {printable(name, 100)}; {has}")
    return str(resolve_inside(folder, name, PIPELINE_INDEX))


def locate_metric(text: str) -> Source:
    """Find the Python code of a metric, `file.py:NAME` or `package.module:NAME`, without running it. Raises UserError."""
    if not is_python(text):
        raise UserError(f"{printable(text, 200)} is no metric: write file.py:function")
    return locate(text)


def _path(model: str | None) -> Path:
    if model is None:
        return DEMO
    try:
        path = expanded(model)
        path.exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{printable(model)} is no model: {printable(str(reason), 200)}") from None
    return path


def _file(path: Path, trust_pickle: bool) -> Source:
    if path.suffix == ".py":
        raise UserError(f"{path} is a Python file: add the class or function that makes the model, as in {path}:Name")
    if not path.is_file():
        raise UserError(f"{path} is not a regular file")
    if kind_of(path) is not None:
        return Source("checkpoint", printable(path.name), path, trust_pickle=trust_pickle)
    raise UserError(
        f"{path} is no checkpoint: give a folder, a .safetensors, .pth, .bin or .gguf file, or file.py:Name"
    )


def _python(module_or_file: str, attribute: str) -> Source:
    if not attribute.isidentifier():
        raise UserError(f"{printable(attribute)!r} is not the name of a class or function: write file.py:Name")
    if module_or_file.endswith(".py"):
        path = expanded(module_or_file)
        if not path.is_file():
            raise UserError(f"there is no file {printable(module_or_file, 200)}")
        return Source("python", f"{path.name}:{attribute}", path=path, attribute=attribute)
    if not _DOTTED.fullmatch(module_or_file):
        raise UserError(
            f"{printable(module_or_file)!r} is neither a Python file nor a module: write file.py:Name or package.module:Name"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(module_or_file)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        raise UserError(f"there is no Python module {module_or_file} here; give its file as file.py:{attribute}")
    return Source("python", f"{module_or_file}:{attribute}", module=module_or_file, attribute=attribute)


def hub_cache() -> Path:
    """Return the Hugging Face hub's cache folder, without importing huggingface_hub, which is slow."""
    if hub := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return expanded(hub)
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return expanded(home) / "hub"


def _cached(model: str) -> Path | None:
    """Return a model's folder in the Hugging Face cache: the snapshot of revision `main`, or else the only snapshot, or None."""
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        named = folder / "snapshots" / revision
        if re.fullmatch(r"[0-9a-f]{7,64}", revision) and named.is_dir():
            return named
    except (OSError, UnicodeDecodeError):
        pass
    try:
        snapshots = [entry for entry in (folder / "snapshots").iterdir() if entry.is_dir()]
    except OSError:
        return None
    return snapshots[0] if len(snapshots) == 1 else None
