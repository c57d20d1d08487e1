"""From what a user pointed at to a live model, by the loading code that everybody uses.

Hugging Face folders go through `from_pretrained`, which leaves the weights mapped from the file. Where that
changes what is stored (a mixed checkpoint comes back in one dtype; `_keep_in_fp32_modules` are widened) the stored
tensors are put back, so that every weight has the dtype that its file has.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint, FileIdentity, open_checkpoint
from dtype_engine.checkpoint.components import variant_of
from dtype_engine.checkpoint.folder import OWN_SUFFIX
from dtype_engine.checkpoint.memory_fit import shortfall
from dtype_engine.checkpoint.pickle_zip import is_compressed
from dtype_engine.checkpoint.pickles import load_pickle
from dtype_engine.checkpoint.source import Source
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward, UserError, one_line
from dtype_engine.core.options import Options
from dtype_engine.core.text import printable
from dtype_engine.runtime.model.architecture import architecture, make, reason, without_quantization
from dtype_engine.runtime.model.hub import offline
from dtype_engine.runtime.model.live import LiveModel, inventory, trim_heap
from dtype_engine.runtime.model.mapped_tensors import read_all, read_mapped, read_stored
from dtype_engine.runtime.model.name_mapping import Placed, placed, restorable, stored_dtypes
from dtype_engine.runtime.numerics.quantize import dequantize, dtype_name, torch_dtype

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
    if reason := shortfall(checkpoint):
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
    loaded = load_module(checkpoint, source.title, options, say)
    say("taking stock of the weights")
    live = LiveModel.wrap(
        loaded.module,
        source.title,
        device,
        scaled=loaded.scaled,
        files=checkpoint.files,
        folder=folder,
        notices=loaded.notices,
        checkpoint=checkpoint,
        trust_remote_code=options.trust_remote_code,
        identities=checkpoint.identities,
    )
    _unpack(loaded.module)
    return live


def _unpack(module: nn.Module) -> None:
    """Let compressed-tensors unpack its weights now. It would do so inside the first forward pass, which may be stopped halfway."""
    compressor = getattr(getattr(module, "hf_quantizer", None), "compressor", None)
    if compressor is not None and hasattr(module, "ct_decompress_hook"):
        with _quiet():
            compressor.decompress_model(module)
        module.requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module with every weight as stored; `scaled` has the dtype and scales of the storage-only ones by live name."""

    module: nn.Module
    scaled: dict[str, tuple[str, torch.Tensor]]
    notices: tuple[str, ...] = ()


def load_module(checkpoint: Checkpoint, title: str, options: Options, say: Say = lambda step: None) -> Loaded:
    """The module of a checkpoint by `from_pretrained`, on the CPU, every tensor in the dtype that its file has.

    Raises NoForward where there is no architecture, or transformers can't load it.
    """
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if checkpoint.form in _NO_ARCHITECTURE:
        raise NoForward(f"{title}: no forward pass: {_NO_ARCHITECTURE[checkpoint.form]}; planning works")
    if checkpoint.config is None:
        raise NoForward(
            f"{title}: no forward pass: no config.json beside the weights says which architecture they belong to. Open the "
            f"model's own code with file.py:Name --weights {printable(checkpoint.path.name)} to run it; planning works"
        )
    if checkpoint.form == "pickle" and any(map(is_compressed, checkpoint.files)):
        raise NoForward(
            f"{title}: no forward pass, because its weights are in a compressed archive, which transformers would map as if it "
            "were not; save them again with torch.save. Planning, weights and export work"
        )
    say("importing transformers")
    with _quiet(), ExitStack() as meanwhile:
        import transformers

        meanwhile.enter_context(offline(options.download))
        _silence_transformers()
        say("reading the configuration")
        chosen = architecture(transformers, checkpoint, options)
        make(chosen, checkpoint)  # on the meta device: what can't be loaded is refused before memory is taken for it
        model_class = chosen.model_class
        say(f"loading {model_class.__name__}")
        more: dict[str, Any] = {"config": chosen.config}
        if checkpoint.scaled:
            # Scaled weights are brought back here, from the file's own scales; no other package has a say in it.
            more["config"] = without_quantization(chosen.config)
            more["key_mapping"] = {rf"^(.+){OWN_SUFFIX}$": r"\1"}
        try:
            module, found = as_stored(model_class, checkpoint).from_pretrained(
                folder,
                dtype=torch_dtype(loading_dtype(checkpoint)),
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=checkpoint.form == "safetensors",
                variant=variant_of(checkpoint.files[0].name),
                trust_remote_code=options.trust_remote_code,
                **more,
            )
        except (UserError, MemoryError):
            raise
        except Exception as error:  # what files and configurations can make it raise has no common class
            raise NoForward(f"{title}: transformers can't load {model_class.__name__}: {reason(error)}") from error
        if isinstance(model_class, type) and type(module).__mro__[1:2] == (model_class,):
            module.__class__ = model_class
    module.requires_grad_(False)
    places = placed(module, restorable(checkpoint))
    _restore_stored(module, checkpoint, places)
    scaled = {
        places[name].name: (tensor.dtype, read_mapped(tensor.scale).reshape(-1).clone())
        for name, tensor in checkpoint.scaled.items()
        if name in places
    }
    notices = [*checkpoint.notices, *chosen.notices]
    if missing := sorted(found.get("missing_keys") or ()):
        notices.append(f"{len(missing)} weights are not in the checkpoint and were made at random, first {missing[0]}")
    scales = {tensor.scale.name for tensor in checkpoint.scaled.values()}
    if unused := sorted(set(found.get("unexpected_keys") or ()) - scales):
        notices.append(
            f"{len(unused)} tensors of the checkpoint are not used by {type(module).__name__}, first {unused[0]}"
        )
    return Loaded(module, scaled, tuple(notices))


def load_pretrained(folder: Path, module: nn.Module | None = None, options: Options | None = None) -> nn.Module:
    """A model with every weight in exactly the dtype that its checkpoint stores, on the CPU, mapped from the files.

    `from_pretrained` of transformers 5 brings a checkpoint of several dtypes into one. Weights stored in a storage-only
    dtype with scales come back as values in the dtype that `config.json` names, as a plain module has no place for scales;
    `dtype_engine.open` keeps them as they are stored. `module`: for a checkpoint without `config.json`, the model to put
    the weights into, which is changed in place. Raises UserError.
    """
    checkpoint = open_checkpoint(folder)
    loaded = (
        fill(module, checkpoint) if module is not None else load_module(checkpoint, folder.name, options or Options())
    )
    module = loaded.module
    state = dict(inventory(module)[1])
    compute = torch_dtype(loading_dtype(checkpoint))
    for name, (_, scale) in loaded.scaled.items():
        state[name].data = dequantize(state[name].data, scale, compute)
    trim_heap()
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return module.eval()


def fill(module: nn.Module, checkpoint: Checkpoint) -> Loaded:
    """Put a checkpoint's tensors into a module that was made without it, mapped, each in its stored dtype.

    Raises UserError for a tensor that has no place in the module, or one of the module's that the checkpoint lacks.
    """
    module.requires_grad_(False)
    infos, tensors = inventory(module)
    by_any_name = {name: info for info in infos for name in info.names if info.persistent}
    scaled = {}
    filled = set()
    for name, stored in checkpoint.weights.items():
        info = by_any_name.get(name)
        if info is None or info.shape != stored.shape:
            what = "is not in this model" if info is None else f"has the shape {list(info.shape)} in this model"
            raise UserError(f"{checkpoint.path}: tensor {printable(name)} {what}")
        tensors[info.name].data = read_stored(checkpoint, stored)
        filled.add(info.name)
        if (found := checkpoint.scaled.get(name)) is not None:
            scaled[info.name] = (found.dtype, read_mapped(found.scale).reshape(-1).clone())
    if missing := [info.name for info in infos if info.persistent and info.name not in filled]:
        raise UserError(f"{checkpoint.path} lacks {len(missing)} tensors of this model, first {missing[0]}")
    return Loaded(module, scaled)


def skeleton(checkpoint: Checkpoint, options: Options) -> nn.Module | None:
    """A checkpoint's architecture without data, on the meta device; None where it is not known or can't be made so.

    Raises UserError for an architecture in `options` that transformers does not have.
    """
    if checkpoint.config is None:
        return None
    with _quiet():
        import transformers

        with offline(options.download):
            try:
                return make(architecture(transformers, checkpoint, options), checkpoint)
            except NoForward:
                return None


def loading_dtype(checkpoint: Checkpoint) -> str:
    """The dtype to load in so that no stored value is rounded: the widest float dtype that is stored."""
    return widest(checkpoint.dtype(name) for name in checkpoint.weights)


def widest(stored: Iterable[str]) -> str:
    """The dtype that holds the values of all the computed ones among these; float32 where there is none."""
    found = {dtype for dtype in stored if dtype in dtypes.COMPUTE_DTYPES}
    if not found:
        return "float32"
    if found >= {"bfloat16", "float16"}:
        found.add("float32")
    return next(name for name in dtypes.COMPUTE_DTYPES if name in found)


def as_stored(model_class: Any, checkpoint: Checkpoint) -> Any:
    """The class, made to load every tensor in its stored dtype at once where this transformers asks its classes for that.

    Otherwise tensors of other dtypes than the one loaded in are copied, only to be put back from the file afterwards.
    """
    if not isinstance(model_class, type) or not hasattr(model_class, "_get_dtype_plan"):
        return model_class

    def plan(self: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
        by_dtype: dict[str, list[str]] = {}
        for name, stored in stored_dtypes(checkpoint, placed(self, restorable(checkpoint))).items():
            by_dtype.setdefault(dtypes.BY_NAME[stored].torch_name, []).append(re.escape(name))
        return {f"^(?:{'|'.join(names)})$": torch_dtype(stored) for stored, names in by_dtype.items()}

    same = {"_get_dtype_plan": plan, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), same)


def _restore_stored(module: nn.Module, checkpoint: Checkpoint, places: Mapping[str, Placed]) -> None:
    """Give every tensor whose dtype loading changed the stored data back, mapped from the file.

    One packed of several stored tensors goes back to their dtype, which gives their values again: loading only widened.
    """
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    wanted = stored_dtypes(checkpoint, places)
    for name, place in places.items():
        tensor, dtype = tensors.get(place.name), wanted[place.name]
        if tensor is None or dtype_name(tensor.dtype) == dtypes.BY_NAME[dtype].torch_name:
            continue
        stored = checkpoint.weights[name]
        if not place.part and stored.shape == tuple(tensor.shape):
            tensor.data = read_stored(checkpoint, stored)
        elif dtype in dtypes.COMPUTE_DTYPES:
            tensor.data = tensor.data.to(torch_dtype(dtype))


def _load_weights(
    module: nn.Module, file: Path, trust: bool, title: str
) -> tuple[tuple[str, ...], tuple[FileIdentity, ...]]:
    """Put a checkpoint's tensors into a module, mapped and in the dtypes they are stored in.

    Returns notices, and the files as they were before they were read.
    """
    checkpoint = open_checkpoint(file, trust)
    values = read_all(checkpoint)
    own = set(module.state_dict())
    ties = [info.names for info in inventory(module)[0] if info.aliases]
    if not own & set(values) and all(name.startswith("module.") for name in values):
        values = {
            name.removeprefix("module."): tensor for name, tensor in values.items()
        }  # saved by DistributedDataParallel
    try:
        found = module.load_state_dict(values, strict=False, assign=True)
    except RuntimeError as error:
        reason = one_line(error, 300, with_type=True).replace("RuntimeError: ", "")
        raise UserError(f"{file} does not fit {title}: {reason}") from None
    if len(found.missing_keys) == len(own):
        raise UserError(f"{file} has none of the tensors of {title}: it has {', '.join(list(values)[:3])}, ...")
    notices = list(checkpoint.notices)
    tied = _tie_again(module, ties, values)
    if missing := [name for name in found.missing_keys if name not in tied]:
        notices.append(f"{len(missing)} weights are not in {file.name}, first {missing[0]}")
    if apart := [names for names in ties if not tied.issuperset(names) and any(name in values for name in names)]:
        notices.append(f"the model ties {' and '.join(apart[0])}, and {file.name} has different values for them")
    if found.unexpected_keys:
        notices.append(
            f"{len(found.unexpected_keys)} tensors of {file.name} are not used, first {found.unexpected_keys[0]}"
        )
    return tuple(notices), checkpoint.identities


def _tie_again(
    module: nn.Module, ties: Iterable[tuple[str, ...]], values: Mapping[str, torch.Tensor]
) -> frozenset[str]:
    """Put one tensor in all places that the module had one in, as loading gave each place a tensor of its own.

    Returns the names that are tied now. Where the file has different values for them they are left apart.
    """
    tied: set[str] = set()
    for names in ties:
        given = [name for name in names if name in values]
        if not given or not all(torch.equal(values[given[0]], values[name]) for name in given[1:]):
            continue
        parent, _, local = given[0].rpartition(".")
        holder = module.get_submodule(parent)
        one = holder._parameters.get(local, holder._buffers.get(local))
        for name in names:
            parent, _, local = name.rpartition(".")
            holder = module.get_submodule(parent)
            (holder._parameters if local in holder._parameters else holder._buffers)[local] = one  # type: ignore[assignment]
        tied |= set(names)
    return frozenset(tied)


def _from_python(source: Source, options: Options, device: torch.device, say: Say) -> LiveModel:
    """A class or function of the user's own that gives an `nn.Module`, and `example_inputs()` beside it."""
    assert source.attribute is not None
    say(f"importing {source.path or source.module}")
    with _quiet():
        namespace = _import_file(source.path) if source.path else _import_module(source.module or "")
        made_by = getattr(namespace, source.attribute, None)
        if made_by is None:
            offers = sorted(
                name for name, value in vars(namespace).items() if _may_make_a_model(value, namespace.__name__)
            )
            hint = f"; it has {', '.join(offers)}" if offers else ""
            raise UserError(f"{source.title}: there is no {source.attribute!r} in {source.path or source.module}{hint}")
        say(f"making {source.attribute}")
        try:
            module = made_by if isinstance(made_by, nn.Module) else made_by()
        except Exception as error:
            raise UserError(
                f"{source.title}: calling {source.attribute}() failed: {one_line(error, 300, with_type=True)}"
            ) from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{source.title}: {source.attribute}() gave a {type(module).__name__}, not an nn.Module")
    notices: tuple[str, ...] = ()
    identities: tuple[FileIdentity, ...] = ()
    if options.weights is not None:
        say(f"reading {options.weights}")
        notices, identities = _load_weights(module, options.weights, options.trust_pickle, source.title)
    return LiveModel.wrap(
        module,
        source.title,
        device,
        notices=notices,
        identities=identities,
        files=(options.weights,) if options.weights is not None and options.weights.is_file() else (),
        folder=source.path.parent if source.path else None,
        example_inputs=getattr(namespace, "example_inputs", None),
    )


def _may_make_a_model(value: Any, module: str) -> bool:
    """Whether a name of a Python file may be what the user means: a model, its class, or a function to call without arguments."""
    if isinstance(value, nn.Module):
        return True
    if getattr(value, "__module__", None) != module or getattr(value, "__name__", "_").startswith("_"):
        return False
    if isinstance(value, type):
        return issubclass(value, nn.Module)
    if not inspect.isfunction(value) or value.__name__ == "example_inputs":
        return False
    needed = inspect.Parameter.empty
    return all(
        parameter.default is not needed or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in inspect.signature(value).parameters.values()
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
        raise UserError(f"{path}: importing it failed: {one_line(error, 300, with_type=True)}") from error
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(f"{name}: importing it failed: {one_line(error, 300, with_type=True)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep libraries from writing to the terminal, which may be showing the app."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported, which transformers does
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
