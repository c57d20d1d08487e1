"""Checks input files, and parses the line in which the user of the app types a model's inputs."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from dtype_engine.core.errors import UserError
from dtype_engine.core.execution import PLAIN
from dtype_engine.core.options import FLOAT32, InputOptions, Options
from dtype_engine.core.pipeline_settings import parse_settings
from dtype_engine.core.regular_files import open_regular, read_text, reading
from dtype_engine.core.text import printable
from dtype_engine.core.user_folders import expanded

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
AUDIO = (".wav", ".flac", ".ogg", ".mp3")
TENSORS = (".safetensors", ".npz", ".pt", ".pth")
TEXTS = (".txt", ".md", ".jsonl", ".ndjson", ".py")


def check_files(options: Options) -> None:
    """Raise UserError, before anything is loaded, for a file that can't be read or for inputs that exclude each other."""
    check_logits(options)
    if options.data:
        if not options.metrics:
            raise UserError("--data has the examples of a --metric: name one, or give inputs by --text, --inputs, ...")
        check_files(data_options(options))
    for files in filter(None, (options.calibration, options.held_out)):
        check_files(other_inputs(options, files))
    for path in options.texts:
        read_text(path, options.limits)
    for path in (*options.images, *options.audio, *((options.tensors,) if options.tensors else ())):
        with reading(path), open_regular(path) as file:
            empty = not file.read(1)
        if empty:
            raise UserError(f"{path} is empty")
    if options.tensors is not None and options.tensors.suffix.lower() not in TENSORS:
        raise UserError(f"{options.tensors}: tensors come from a file that ends in {', '.join(TENSORS)}")
    if options.tensors is not None and (options.prompts or options.texts or options.images or options.audio):
        raise UserError(
            f"{options.tensors} has all the arguments of a forward pass: leave the prompts, texts, images and sounds out"
        )


def check_logits(options: Options) -> None:
    """Raise UserError for options that exclude a file of outputs, by which one of the two runs is replaced."""
    if options.against_logits is None and options.reference_logits is None:
        return
    if options.against_logits is not None and options.reference_logits is not None:
        raise UserError("--against-logits and --reference-logits: the model has to be one of the two; leave one out")
    option = "--reference-logits" if options.against_logits is None else "--against-logits"
    if options.prompts or options.texts or options.images or options.audio or options.tensors is not None:
        raise UserError(f"{option}: the tokens come from its file: leave --prompt, --text and other inputs out")
    if options.metrics or options.held_out:
        raise UserError(
            f"{option}: the file has outputs for its own tokens alone: leave --metric, --eval and --held-out out"
        )
    if option == "--reference-logits" and options.reference != FLOAT32:
        raise UserError("--reference-logits: the file is the reference: leave --reference and --against out")
    if option == "--against-logits" and options.settings.execution != PLAIN:
        raise UserError("--against-logits: the file is the candidate: leave --candidate out")


def parse_inputs_line(options: Options, line: str) -> Options:
    """Return the options with the inputs that a line names: a prompt, paths of text, image, audio or tensor files, or settings of a
    pipeline, such as `steps=20 size=512x384`.

    Text replaces text, images replace images, and a tensor file replaces all inputs. An empty line restores the defaults. The files
    of `calibration` and `held_out` stay. Raises UserError for a file that can't be read.
    """
    text = line.strip()
    if not text:
        kept = InputOptions(limits=options.limits, calibration=options.calibration, held_out=options.held_out)
        return dataclasses.replace(options, **vars(kept))
    if (settings := parse_settings(text, options.pipeline)) is not None:
        return dataclasses.replace(options, pipeline=settings)
    paths = _paths(text)
    prompt = dataclasses.replace(options, prompts=(text,), texts=(), tensors=None)
    changed = prompt if paths is None else with_files(options, paths)
    check_files(changed)
    return changed


def with_files(options: Options, paths: Sequence[Path]) -> Options:
    """Return the options with these files as inputs; their extensions show whether they hold text, images, audio or tensors.

    A tensor file replaces all inputs. Other files replace the inputs of their own kind, and text files also the prompts. Raises
    UserError if other files are named beside a tensor file.
    """
    found = {kind: tuple(path for path in paths if _kind(path) == kind) for kind in ("texts", "images", "audio")}
    tensors = [path for path in paths if _kind(path) == "tensors"]
    if tensors and len(paths) > 1:
        raise UserError("a tensor file has all the arguments of a forward pass: don't name other files with it")
    if tensors:
        return dataclasses.replace(parse_inputs_line(options, ""), tensors=tensors[0])
    return dataclasses.replace(
        options,
        tensors=None,
        prompts=() if found["texts"] else options.prompts,
        texts=found["texts"] or options.texts,
        images=found["images"] or options.images,
        audio=found["audio"] or options.audio,
    )


def data_options(options: Options) -> Options:
    """Return the options with the files of `options.data` as the only inputs, or unchanged if `options.data` is empty."""
    if not options.data:
        return options
    without = dataclasses.replace(parse_inputs_line(options, ""), data=(), chat=options.chat, pipeline=options.pipeline)
    return with_files(without, options.data)


def other_inputs(options: Options, files: Sequence[Path]) -> Options:
    """Return the options with some files as the only inputs, split into sequences as the texts of `options` are. Raises UserError
    as `with_files` does.
    """
    without = dataclasses.replace(
        parse_inputs_line(options, ""),
        data=(),
        metrics=(),
        calibration=(),
        held_out=(),
        chat=options.chat,
        sequence_length=options.sequence_length,
        sequences=options.sequences,
        pipeline=options.pipeline,
    )
    return with_files(without, files)


def _paths(text: str) -> list[Path] | None:
    """Return the files that a line names, or None if the line is a prompt. Raises UserError if all words name files and one is
    missing.
    """
    whole = expanded(text)
    if _exists(whole):
        return [whole]
    try:
        words = [expanded(word) for word in shlex.split(text)]
    except ValueError:  # a prompt with an apostrophe
        return None
    if words and all(_exists(word) for word in words):
        return words
    if words and all(_named(word) for word in words):
        missing = next(word for word in words if not _exists(word))
        raise UserError(f"there is no file {printable(str(missing), 200)}")
    return None


def _named(path: Path) -> bool:
    return path.suffix.lower() in (*IMAGES, *AUDIO, *TENSORS, *TEXTS) and len(path.stem) > 0


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a prompt is too long for a name, or has a null character
        return False


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    return "images" if suffix in IMAGES else "audio" if suffix in AUDIO else "tensors" if suffix in TENSORS else "texts"
