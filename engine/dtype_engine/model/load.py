"""From what a user pointed at to a live model, by the loading code that everybody uses.

Hugging Face folders go through `from_pretrained`, which leaves the weights mapped from the file. Where that
changes what is stored (a mixed checkpoint comes back in one dtype; `_keep_in_fp32_modules` are widened) the stored
tensors are put back, so that every weight has the dtype that its file has.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .. import dtypes
from ..checkpoint import Checkpoint, CheckpointTensor, open_checkpoint
from ..checkpoint.pickles import load_pickle
from ..errors import NoForward, UserError
from ..options import Options
from ..storage import dtype_name, torch_dtype
from ..tensor_reader import read_all
from ..tree import Tree
from .live import LiveModel, tree_of
from .room import no_room
from .source import Source

Say = Callable[[str], None]


def pick_device(wanted: str) -> torch.device:
    """The device for "cpu", "cuda" (or "cuda:1") or "auto". Raises UserError when it is not there."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"unknown device {wanted!r}: use cpu, cuda or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {wanted}: this torch ({torch.__version__}) sees no CUDA device; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {wanted!r} is not supported: use cpu, cuda or auto")
    return device


def load(source: Source, options: Options, say: Say = lambda step: None) -> LiveModel:
    """Open `source` as a live model on the device asked for. `say` hears what is being done.

    Raises NoForward when there are tensors but no architecture for them, UserError for anything else that is wrong.
    """
    device = pick_device(options.device)
    if source.kind == "python":
        return _from_python(source, options, device, say)
    if options.weights is not None:
        raise UserError("--weights goes with the code of a model, as in file.py:Name --weights model.pth")
    checkpoint = source.open()
    assert checkpoint is not None
    if reason := no_room(checkpoint):
        raise NoForward(reason)
    if checkpoint.form == "pickle" and source.trust_pickle and checkpoint.path.is_file():
        whole = load_pickle(checkpoint.path, trust=True)
        if isinstance(whole, nn.Module):
            return LiveModel.wrap(whole, source.title, device)
    if checkpoint.form in _NO_ARCHITECTURE:
        raise NoForward(f"{source.title}: no forward pass: {_NO_ARCHITECTURE[checkpoint.form]}; planning works")
    return _from_checkpoint(checkpoint, source, options, device, say)


_NO_ARCHITECTURE = {
    "gguf": "GGUF files are for llama.cpp; open the checkpoint that this one was made from to run it here",
    "diffusers": "a pipeline has several models that call each other; open one of its folders to run it here",
    "adapter": "an adapter alone is no model; merge it into its base model and open that to run it here",
}


def _from_checkpoint(
    checkpoint: Checkpoint, source: Source, options: Options, device: torch.device, say: Say
) -> LiveModel:
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if checkpoint.config is None:
        instead = (
            f", or open the model's own code with file.py:Name --weights {checkpoint.path.name}"
            if checkpoint.form == "pickle"
            else ""
        )
        raise NoForward(
            f"{source.title}: no forward pass, because there is no config.json beside the weights that says which "
            f"architecture they belong to{instead}; planning works"
        )
    say("importing transformers")
    with _quiet():
        import transformers

        _silence_transformers()
        say("reading the configuration")
        model_class = _architecture(transformers, checkpoint, folder, options)
        say(f"loading {model_class.__name__}")
        dtype = _loading_dtype(checkpoint)
        try:
            module, found = model_class.from_pretrained(
                folder,
                dtype=torch_dtype(dtype),
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=checkpoint.form == "safetensors",
                trust_remote_code=options.trust_remote_code,
            )
        except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError, AttributeError) as error:
            raise NoForward(
                f"{source.title}: transformers can't load {model_class.__name__}: {_first_line(error)}"
            ) from error
    _restore_stored(module, checkpoint)
    notices = list(checkpoint.notices)
    if missing := sorted(found.get("missing_keys") or ()):
        notices.append(f"{len(missing)} weights are not in the checkpoint and were made at random, first {missing[0]}")
    if unused := sorted(found.get("unexpected_keys") or ()):
        notices.append(
            f"{len(unused)} tensors of the checkpoint are not used by {model_class.__name__}, first {unused[0]}"
        )
    say("taking stock of the weights")
    return LiveModel.wrap(module, source.title, device, files=checkpoint.files, folder=folder, notices=tuple(notices))


def expected_tree(source: Source, options: Options) -> Tree | None:
    """The tree that a checkpoint's architecture will have once loaded, without its weights; None where that is not known.

    It may have names that the files do not: tied heads, experts that loading packs into one tensor, module classes. Dtypes
    are those of a new model; `dtype_engine.model.described` has the stored ones.
    """
    module = expected_module(source, options)
    return None if module is None else tree_of(module)


def expected_module(source: Source, options: Options) -> nn.Module | None:
    """A checkpoint's architecture on the meta device; None where it is not known."""
    checkpoint = source.open()
    if checkpoint is None or checkpoint.config is None or checkpoint.path.is_file():
        return None
    with _quiet():
        import transformers

        try:
            config = transformers.AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
            model_class = _architecture(transformers, checkpoint, checkpoint.path, options)
            make = getattr(model_class, "from_config", None) or model_class
            with torch.device("meta"):
                module: nn.Module = make(config)
        except Exception:
            return None
    return module


def _architecture(transformers: ModuleType, checkpoint: Checkpoint, folder: Path, options: Options) -> Any:
    """The class that the configuration names, or an auto class where it needs the checkpoint's own code."""
    config = checkpoint.config or {}
    known = str(config.get("model_type", "")) in transformers.CONFIG_MAPPING
    if config.get("auto_map") and not options.trust_remote_code and not known:
        raise NoForward(
            f"{folder}: this model brings its own Python code, which is not run unless you pass --trust-remote-code"
        )
    for name in config.get("architectures") or ():
        found = getattr(transformers, str(name), None)
        if found is not None:
            return found
    if config.get("auto_map") and options.trust_remote_code:
        auto = next((key for key in ("AutoModelForCausalLM", "AutoModel") if key in config["auto_map"]), "AutoModel")
        return getattr(transformers, auto)
    if known:
        return transformers.AutoModel
    named = ", ".join(map(str, config.get("architectures") or ())) or config.get("model_type") or "none"
    raise NoForward(
        f"{folder}: no forward pass, because transformers {transformers.__version__} does not know the architecture "
        f"named in config.json ({named})"
    )


def _loading_dtype(checkpoint: Checkpoint) -> str:
    """The dtype to load in so that no stored value is rounded: the widest float dtype that is stored."""
    stored = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype in dtypes.COMPUTED}
    if not stored:
        return "float32"
    if stored >= {"bfloat16", "float16"}:
        stored.add("float32")
    return next(name for name in dtypes.COMPUTED if name in stored)


def _restore_stored(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Give every tensor whose dtype loading changed the stored data back, mapped from the file."""
    prefix = getattr(module, "base_model_prefix", "") or ""

    def stored_as(name: str) -> CheckpointTensor | None:
        spellings = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        return next((checkpoint.tensors[key] for key in spellings if key in checkpoint.tensors), None)

    changed: dict[Path, list[tuple[torch.Tensor, CheckpointTensor]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        stored = stored_as(name)
        if stored is None or stored.shape != tuple(tensor.shape) or stored.dtype == dtype_name(tensor.dtype):
            continue
        if stored.dtype in dtypes.COMPUTED and tensor.dtype.is_floating_point:
            changed.setdefault(stored.file, []).append((tensor, stored))
    if changed:
        from safetensors import safe_open

        for file, tensors in changed.items():
            if checkpoint.values is not None:
                for tensor, stored in tensors:
                    tensor.data = checkpoint.values[stored.name]
                continue
            with safe_open(file, framework="pt") as opened:
                for tensor, stored in tensors:
                    tensor.data = opened.get_tensor(stored.name)


def _load_weights(module: nn.Module, file: Path, trust: bool, title: str) -> tuple[str, ...]:
    """Put a checkpoint's tensors into a module, mapped and in the dtypes they are stored in. Returns notices."""
    checkpoint = open_checkpoint(file, trust)
    values = read_all(checkpoint)
    own = set(module.state_dict())
    if not own & set(values) and all(name.startswith("module.") for name in values):
        values = {
            name.removeprefix("module."): tensor for name, tensor in values.items()
        }  # saved by DistributedDataParallel
    try:
        found = module.load_state_dict(values, strict=False, assign=True)
    except RuntimeError as error:
        reason = _first_line(error).replace("RuntimeError: ", "")
        raise UserError(f"{file} does not fit {title}: {reason}") from None
    if len(found.missing_keys) == len(own):
        raise UserError(f"{file} has none of the tensors of {title}: it has {', '.join(list(values)[:3])}, ...")
    notices = list(checkpoint.notices)
    if found.missing_keys:
        notices.append(f"{len(found.missing_keys)} weights are not in {file.name}, first {found.missing_keys[0]}")
    if found.unexpected_keys:
        notices.append(
            f"{len(found.unexpected_keys)} tensors of {file.name} are not used, first {found.unexpected_keys[0]}"
        )
    return tuple(notices)


def _from_python(source: Source, options: Options, device: torch.device, say: Say) -> LiveModel:
    """A class or function of the user's own that gives an `nn.Module`, and `example_inputs()` beside it."""
    assert source.attribute is not None
    say(f"importing {source.path or source.module}")
    with _quiet():
        namespace = _import_file(source.path) if source.path else _import_module(source.module or "")
        made_by = getattr(namespace, source.attribute, None)
        if made_by is None:
            offers = sorted(
                name for name, value in vars(namespace).items()
                if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == namespace.__name__
            )  # fmt: skip
            hint = f"; it has {', '.join(offers)}" if offers else ""
            raise UserError(f"{source.title}: there is no {source.attribute!r} in {source.path or source.module}{hint}")
        say(f"making {source.attribute}")
        try:
            module = made_by if isinstance(made_by, nn.Module) else made_by()
        except Exception as error:
            raise UserError(f"{source.title}: calling {source.attribute}() failed: {_first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{source.title}: {source.attribute}() gave a {type(module).__name__}, not an nn.Module")
    notices: tuple[str, ...] = ()
    if options.weights is not None:
        say(f"reading {options.weights}")
        notices = _load_weights(module, options.weights, options.trust_pickle, source.title)
    return LiveModel.wrap(
        module,
        source.title,
        device,
        notices=notices,
        files=(options.weights,) if options.weights is not None and options.weights.is_file() else (),
        folder=source.path.parent if source.path else None,
        example_inputs=getattr(namespace, "example_inputs", None),
    )


def _import_file(path: Path) -> ModuleType:
    """Run a Python file as a module. Its folder is importable, as it is when the file is run as a program."""
    name = f"_dtype_engine_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise UserError(f"{path}: importing it failed: {_first_line(error)}") from error
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(f"{name}: importing it failed: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """An exception in one line: its name where the text alone would not say what it is."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else f"{text[:297]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep libraries from writing to the terminal, which may be showing the app."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            yield
        finally:
            if "transformers" in sys.modules:  # whoever imported it
                _silence_transformers()


def _silence_transformers() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
