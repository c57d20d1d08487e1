"""Damaged and hostile files of every kind but safetensors headers (`test_checkpoints.py` has those), through the programs.

`python -m tests.engine.hostile.fuzz 5000` makes as many of each kind, each from its own number, so that a case comes back by it:
`python -m tests.engine.hostile.fuzz --one pth 1234 FOLDER` writes the file and runs what is run on it, with a traceback.
`--from 5000 5000 tokenizer picture` makes other cases than the first run did, of these kinds only.

A case holds when the program ends with status 0 or 2 (or 1: for `recipe lint` where it differs, for `drift` where outputs are not
finite), without a traceback or an unexpected error, in 10 s and 1 GiB, and does not take the process down. Workers run many cases
each, and are forked from a process that has imported torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.engine.hostile import fuzz_events, fuzz_hub, fuzz_inputs, fuzz_models, fuzz_quantized, fuzz_saved
from tests.helpers import preloaded
from tests.helpers.mutations import STRANGE, changed

PROGRAM = preloaded.module("tests.engine.hostile.fuzz")
_OTHERS = (fuzz_inputs, fuzz_events, fuzz_quantized, fuzz_models, fuzz_saved, fuzz_hub)
_PAIRED = (*fuzz_inputs.KINDS, *fuzz_models.KINDS)
"""The kinds whose cases are each made of the good file by whose number they are run."""
KINDS = ("gguf", "pth", "recipe", "config", "session", "scan", *(kind for other in _OTHERS for kind in other.KINDS))
LONGEST_S = 10
MOST_BYTES = 1 << 30
_ADDRESS_SPACE = 12 << 30  # of which torch maps several without using them
_A_WORKER = 250
_EXTREMES = (0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
_YAML = (
    "&a [1, 2]", "*a", "!!python/object/apply:os.system [id]", "!!int zz", "!!timestamp x", "2024-13-45", "9" * 5000,
    "0x" + "f" * 5000, "[" * 200, "{" * 60, "? ", "<<: {a: 1}", "!!binary ====", "!!set {a}", "---", "...", "%YAML 9.9", "\t",
    "|", ">-", "'", '"', "1:2:3:4", "!<tag:yaml.org,2002:float> x", ".inf", "~", "\u2028", "\x85", "- - - -", ": : :",
)  # fmt: skip
_PIECES = (b"\0", b"\xff", b"(", b"]", b"}", b"2", b"0", b"R", b"\x94")


# -- good files ----------------------------------------------------------------------------------------------------


def make_good(kind: str, folder: Path) -> list[bytes]:
    """Write a few valid files of a kind, small enough that most mutations change something that is read, and the files that they
    are used with, such as the model of a recipe.
    """
    for other in _OTHERS:
        if kind in other.KINDS:
            return other.make_good(kind, folder)
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    tensors = {
        f"model.layers.{n}.{part}": torch.randn(4, 8) for n in range(2) for part in ("mlp.up.weight", "norm.bias")
    }
    save_file(tensors, folder / "model.safetensors")
    match kind:
        case "gguf":
            return [_gguf(folder, count) for count in (1, 3)]
        case "pth":
            whole = _pth(tensors)
            return [whole, _pth({"state_dict": tensors, "epoch": 3}), _pth(tensors, legacy=True), _deflated(whole)]
        case "recipe":
            return [_RECIPE.encode(), _recipe(folder)]
        case "config":
            return [_CONFIG.encode()]
        case "session":
            return fuzz_saved.make_good("session", folder)
    return fuzz_saved.make_good("scan", folder)


def _gguf(folder: Path, tensors: int) -> bytes:
    import gguf
    import numpy as np
    from tests.helpers.gguf_files import gguf_file

    with gguf_file(folder / "x.gguf", "llama") as writer:
        writer.add_name("name")
        writer.add_uint32("llama.block_count", 2)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "cc"])
        writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
        for number in range(tensors):
            values = np.arange(64, dtype=np.float32).reshape(2, 32)
            if number == 2:
                blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(f"blk.{number}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(f"blk.{number}.weight", values)
    return (folder / "x.gguf").read_bytes()


def _pth(value: Any, legacy: bool = False) -> bytes:
    import torch

    made = io.BytesIO()
    torch.save(value, made, _use_new_zipfile_serialization=not legacy)
    return made.getvalue()


def _rezipped(content: bytes, changed: Callable[[str, bytes], bytes], compression: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, changed(name, old.read(name)))
    return made.getvalue()


def _deflated(content: bytes) -> bytes:
    return _rezipped(content, lambda name, data: data, zipfile.ZIP_DEFLATED)


_RECIPE = """\
version: 1
model: net.safetensors  # what it was made for
rules:  # the last rule that matches wins
  - {pattern: "*", dtype: float16}
  - {pattern: "model.layers.{0..1}.mlp", dtype: bfloat16}
  - {pattern: "re:.*(up|down).*", dtype: float8_e4m3fn}
settings: {compute: float32, autocast: bfloat16, float_inputs: model, quantize_activations: weights}
measured: {kl_mean: 0.0013, top1: 99}
"""
_CONFIG = """\
theme: nord
ascii: auto
keys: {undo: f5, cast: ctrl+d}
defaults: {device: cpu, sequences: 8, prompt: [one, two], chat: false}
"""


def _recipe(folder: Path) -> bytes:
    from dtype_engine import Recipe, Rule
    from dtype_engine.recipe.file import write_recipe

    rules = Recipe((Rule("model.layers.*.norm", "float32"), Rule("*.mlp", "int8")))
    return write_recipe(rules, str(folder / "model.safetensors"), measured={"sqnr_db": 40.5}).encode()


# -- mutations -----------------------------------------------------------------------------------------------------


def mutated(kind: str, good: list[bytes], seed: int) -> bytes:
    """Return the file of a case."""
    chooser = random.Random(f"{kind} {seed}")
    content = good[seed % len(good)] if kind in _PAIRED else chooser.choice(good)
    if chooser.random() < 0.02:
        return content
    for other in _OTHERS:
        if kind in other.KINDS and (made := other.mutated(kind, content, chooser)) is not None:
            return made
    if kind == "pth" and content[:2] == b"PK" and chooser.random() < 0.6:
        return _with_another_pickle(content, chooser)
    if kind in ("session", "scan") and chooser.random() < 0.7:
        value = json.loads(content)
        for _ in range(chooser.randrange(1, 3)):
            value = changed(value, chooser)
        return json.dumps(value).encode("utf-8", "surrogatepass")
    if kind in ("recipe", "config") and chooser.random() < 0.7:
        return _other_yaml(content, chooser)
    return _other_bytes(content, good, chooser)


def _with_another_pickle(content: bytes, chooser: random.Random) -> bytes:
    """The same archive, whole, with bytes of its pickle (or, seldom, of another record) changed."""
    wanted = "data.pkl" if chooser.random() < 0.9 else ""
    compression = zipfile.ZIP_DEFLATED if chooser.random() < 0.3 else zipfile.ZIP_STORED
    return _rezipped(
        content, lambda name, data: _other_bytes(data, [data], chooser) if name.endswith(wanted) else data, compression
    )


def _other_bytes(content: bytes, good: list[bytes], chooser: random.Random) -> bytes:
    """Change, remove, insert or move bytes, take bytes of another file, or replace numbers by extreme ones."""
    data = bytearray(content)
    for _ in range(chooser.choice((1, 1, 2, 3))):
        if not data:
            break
        # Beginnings are denser: headers, and the first opcodes.
        place = chooser.randrange(min(len(data), 300) if chooser.random() < 0.4 else len(data))
        what = chooser.randrange(8)
        if what <= 1:
            data[place] = chooser.randrange(256)
        elif what == 2:
            data[place] ^= 1 << chooser.randrange(8)
        elif what == 3 and chooser.random() < 0.5:
            del data[place:]
        elif what == 4:
            data[place:place] = chooser.choice(_PIECES) * chooser.choice((1, 4, 3000))
        elif what == 5:
            other = chooser.choice(good)
            begin = chooser.randrange(len(other))
            piece = other[begin : begin + chooser.randrange(1, 200)]
            data[place : place + chooser.randrange(2) * len(piece)] = piece
        elif what == 6:
            width = chooser.choice((2, 4, 8))
            number = chooser.choice(_EXTREMES) & (256**width - 1)
            data[place : place + width] = number.to_bytes(width, chooser.choice(("little", "big")))  # type: ignore[arg-type]
        else:
            numbers = list(re.finditer(rb"\d+", bytes(data)))
            if numbers:
                found = chooser.choice(numbers)
                data[found.start() : found.end()] = str(chooser.choice((*_EXTREMES, -1, 10**400))).encode()
    return bytes(data)


def _other_yaml(content: bytes, chooser: random.Random) -> bytes:
    """Values swapped for strange ones, or pieces of YAML put into the text."""
    import yaml

    text = content.decode()
    if chooser.random() < 0.5:
        value = yaml.safe_load(text)
        for _ in range(chooser.randrange(1, 4)):
            value = changed(value, chooser)
        as_json = json.dumps(value)
        with contextlib.suppress(RecursionError):  # yaml writes no lists as deep as json does
            return (as_json if chooser.random() < 0.5 else yaml.safe_dump(value)).encode("utf-8", "surrogatepass")
        return as_json.encode("utf-8", "surrogatepass")
    for _ in range(chooser.randrange(1, 3)):
        spots = [found.end() for found in re.finditer(r": |\n|, |- |\{", text)]
        place = chooser.choice(spots) if spots else 0
        until = place if chooser.random() < 0.3 else place + len(re.match(r"[^,}\n]*", text[place:])[0])  # type: ignore[index]
        text = text[:place] + chooser.choice((*_YAML, *map(str, STRANGE))) + text[until:]
    return text.encode("utf-8", "surrogatepass")


# -- one case ------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """Raised if a case does not end in time. No code catches it before the fuzzer."""


def commands(kind: str, path: Path, folder: Path, seed: int) -> list[str]:
    """What is run on the file of a case: mostly what reads headers, sometimes what reads all."""
    model = str(folder / "model.safetensors")
    if kind in ("gguf", "pth"):
        target = str(folder / f"out-{seed}")
        some = (
            ["weights", str(path), "--cast", "*=bf16", "--json"],
            ["export", str(path), "--cast", "*=bf16", "-o", target],
        )
        return some[seed % 2] if seed % 5 == 0 else ["inspect", str(path), *(["--json"] if seed % 3 == 0 else [])]
    if kind == "recipe":
        lint = ["recipe", "lint", str(path), "--for", "transformers"]
        return (
            ["inspect", model, "--recipe", str(path)],
            [*lint, "--model", model],
            lint,
            ["recipe", "convert", str(path), "--to", "transformers", "--model", model],
        )[seed % 4]
    return []


def run_case(kind: str, content: bytes, folder: Path, seed: int) -> tuple[int, str]:
    """Run a case. Returns the exit status and the text on standard error. Errors of the program are not caught."""
    import click

    from dtype_engine.cli import cli
    from dtype_engine.cli.program import run

    said, out = io.StringIO(), io.StringIO()
    suffix = {"gguf": ".gguf", "pth": ".pth", "recipe": ".yaml"}.get(kind, ".json")
    path = folder / f"case{suffix}"
    path.unlink(missing_ok=True)
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        if kind in ("config", "session"):
            return _run_app(kind, content, folder), said.getvalue()
        if kind in fuzz_events.KINDS:
            return fuzz_events.run_case(content, folder, seed), said.getvalue()
        if kind in fuzz_quantized.KINDS:
            return fuzz_quantized.run_case(content, folder, seed), "refused\n"
        if kind in fuzz_hub.KINDS:
            return fuzz_hub.run_case(content, folder, seed), said.getvalue()
        if kind in fuzz_models.KINDS:
            return run(cli, "dtype-engine", fuzz_models.command(kind, content, seed)), said.getvalue()
        if kind in fuzz_inputs.KINDS:
            with fuzz_inputs.children_are_forked():
                status = run(cli, "dtype-engine", fuzz_inputs.command(kind, content, folder, seed))
            return status, said.getvalue()
        path.write_bytes(content)
        if kind in fuzz_saved.KINDS:
            whole = click.Command(kind, callback=lambda: fuzz_saved.use(kind, path))
            return run(whole, "dtype-engine", []), said.getvalue()
        if kind == "scan":
            from dtype_engine.runtime.scan.saved import read

            whole = click.Command("scan", callback=lambda: read(path, fuzz_saved.fingerprint(), 4) and None)
            return run(whole, "dtype-engine", []), said.getvalue()
        return run(cli, "dtype-engine", commands(kind, path, folder, seed)), said.getvalue()


def _run_app(kind: str, content: bytes, folder: Path) -> int:
    """`dtype-tui` up to where it needs a terminal: by then the configuration and the session are read."""
    from dtype_tui.cli import main as app

    place = folder / kind / "dtype-tui"
    place = place if kind == "config" else place / "sessions"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = place / ("config.yaml" if kind == "config" else "20260101-000000-00000000.json")
    file.write_bytes(content)
    file.chmod(0o600)
    os.environ["XDG_CONFIG_HOME"] = str(folder / "config" if kind == "config" else folder / "nowhere")
    os.environ["XDG_STATE_HOME"] = str(folder / "session" if kind == "session" else folder / "nowhere")
    app.configured.cache_clear()
    app.command.context_settings.pop("default_map", None)
    sys.argv = ["dtype-tui", *(["--resume"] if kind == "session" else ["demo"])]
    before = list(sys.path)
    try:
        app.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.path[:] = before
    return 0


@dataclasses.dataclass
class Seen:
    """What cases gave: how many were read and refused, the slowest, the most memory, and those that did not hold."""

    cases: int = 0
    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    most_bytes: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Seen) -> None:
        self.cases += other.cases
        self.read += other.read
        self.refused += other.refused
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.most_bytes = max(self.most_bytes, other.most_bytes)
        self.failures += other.failures


_NEEDS_A_TERMINAL = "this is not a terminal"


def judged(kind: str, seed: int, good: list[bytes], folder: Path, seen: Seen) -> None:
    """Run a case and add the result to `seen`."""
    from dtype_engine.runtime.session.process_memory import process_memory, reset_peak_rss

    content = mutated(kind, good, seed)
    reset_peak_rss()
    signal.alarm(LONGEST_S)
    started = time.process_time()
    wrong = ""
    status, said = 0, ""
    try:
        status, said = run_case(kind, content, folder, seed)
    except TooLong:
        wrong = f"took over {LONGEST_S} s"
    except BaseException as error:
        wrong = f"{type(error).__name__} came out: {traceback.format_exception_only(error)[-1].strip()[:200]}"
    signal.alarm(0)
    seen.cases += 1
    seen.slowest_s = max(seen.slowest_s, time.process_time() - started)
    most = process_memory().peak_rss or 0
    seen.most_bytes = max(seen.most_bytes, most)
    lines = [line for line in said.splitlines() if "note:" not in line]
    if wrong:
        pass
    elif status not in ((0, 1, 2) if kind in ("recipe", *fuzz_models.KINDS, *fuzz_inputs.KINDS) else (0, 2)):
        wrong = f"status {status}"
    elif "Traceback" in said or ": unexpected " in said[:30] or (status == 2 and len(lines) != 1):
        wrong = f"status {status}, said {said[:300]!r}"
    elif not said.replace("\n", "").isprintable():
        wrong = f"said {said[:300]!a}"
    elif most > MOST_BYTES:
        wrong = f"took {most / 1e9:.2f} GB"
    if wrong:
        seen.failures.append(f"{kind} {seed}: {wrong}")
    elif status == 2 and _NEEDS_A_TERMINAL not in said:
        seen.refused += 1
    else:
        seen.read += 1


def work(kind: str, first: int, count: int, progress: Path) -> Seen:
    """Cases one after the other in this process. `progress` holds the number of the one that is under way, and what those
    before it gave.
    """
    import torch

    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)  # several wait for each other busily, which beside other work takes longer than the cases

    def too_long(number: int, frame: object) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, too_long)
    seen = Seen()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        good = make_good(kind, folder)
        for seed in range(first, first + count):
            progress.write_text(json.dumps({"at": seed, "seen": dataclasses.asdict(seen)}))
            judged(kind, seed, good, folder, seen)
    return seen


# -- all of them ---------------------------------------------------------------------------------------------------


def run_all(
    count: int, kinds: tuple[str, ...] = KINDS, at_once: int = 1, each: int = _A_WORKER, begin: int = 0
) -> dict[str, Seen]:
    """`count` cases of each kind, from the number `begin` on, in processes of `each` cases. A process that dies is a failure of
    the case it was at, and the rest of its cases go on in another.
    """
    found = {kind: Seen() for kind in kinds}
    waiting = [(kind, begin + done, min(each, count - done)) for kind in kinds for done in range(0, count, each)]
    running: list[tuple[str, int, int, Path, preloaded.Program]] = []
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < at_once:
                kind, first, size = waiting.pop(0)
                progress = Path(scratch) / f"{kind}-{first}"
                program = preloaded.Program(PROGRAM, "--work", kind, str(first), str(size), str(progress))
                running.append((kind, first, size, progress, program))
            kind, first, size, progress, program = running.pop(0)
            ended = program.result()
            if ended.returncode == 0:
                found[kind].add(Seen(**json.loads(ended.stdout.splitlines()[-1])))
                continue
            left = json.loads(progress.read_text()) if progress.exists() else {"at": first, "seen": {}}
            at = int(left["at"])
            found[kind].add(Seen(**left["seen"]))
            found[kind].failures.append(
                f"{kind} {at}: the process ended with {ended.returncode}: {ended.stderr[-300:]!r}"
            )
            found[kind].cases += 1
            if at + 1 < first + size:
                waiting.insert(0, (kind, at + 1, first + size - at - 1))
    return found


def lines_of(found: dict[str, Seen]) -> Iterator[str]:
    for kind, seen in found.items():
        yield (
            f"{kind:8} {seen.cases:6} cases: {seen.read} read, {seen.refused} refused, {len(seen.failures)} failed; "
            f"slowest {seen.slowest_s:.2f} s of CPU, at most {seen.most_bytes / 1e6:.0f} MB"
        )
        yield from (f"    {failure}" for failure in seen.failures[:40])


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--work"]:
        kind, first, count, progress = arguments[1:]
        print(json.dumps(dataclasses.asdict(work(kind, int(first), int(count), Path(progress)))))
        return 0
    if arguments[:1] == ["--one"]:
        kind, seed, place = arguments[1:]
        os.environ["DTYPE_TUI_TRACEBACK"] = "1"
        folder = Path(place)
        content = mutated(kind, make_good(kind, folder), int(seed))
        (folder / f"{kind}-{seed}").write_bytes(content)
        print(run_case(kind, content, folder, int(seed)))
        return 0
    begin = 0
    if arguments[:1] == ["--from"]:
        begin, arguments = int(arguments[1]), arguments[2:]
    found = run_all(int(arguments[0]) if arguments else 5000, tuple(arguments[1:]) or KINDS, at_once=2, begin=begin)
    print("\n".join(lines_of(found)))
    return int(any(seen.failures for seen in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
