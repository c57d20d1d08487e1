"""The ways to use a model without a screen. Each either checks what comes out against `outside`, or meets a refusal."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import re
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

from . import outside
from .forms import Made, Tensors, distinct, own_net

ALL_BF16 = "*=bfloat16"
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Cell:
    """What became of one way on one form: the oracle that it was checked against, or the sentence that refused it."""

    oracle: str = ""
    refusal: str = ""


def where(error: Exception) -> str:
    """What went wrong with a cell, and in which line of the matrix."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "/matrix/" in frame.filename), frames[-1])
    return f"{type(error).__name__}: {str(error)[:2000]} (at {Path(last.filename).name}:{last.lineno}: {last.line})"


class Refused(Exception):
    """The program said no in one line."""


def program(*arguments: str, status: int | None = 0) -> str:
    """Standard output of `dtype-engine`. Raises Refused for exit status 2 with its one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = run(cli, "dtype-engine", list(arguments))
    said = err.getvalue()
    if found == 2:
        lines = [line for line in said.splitlines() if line.startswith("dtype-engine: ")]
        assert len(lines) == 1, said
        assert "Traceback" not in said, said
        raise Refused(lines[0].removeprefix("dtype-engine: "))
    assert status is None or found == status, (found, out.getvalue(), said)
    return out.getvalue()


def answer(*arguments: str, status: int | None = 0) -> dict[str, Any]:
    """The JSON object that `dtype-engine ... --json` prints."""
    found = json.loads(program(*arguments, "--json", status=status))
    assert isinstance(found, dict)
    return found


@dataclass(frozen=True)
class Job:
    """A made model, and a folder of its own to write to."""

    made: Made
    work: Path

    @property
    def model(self) -> tuple[str, ...]:
        return (self.made.model, *self.made.options)

    @property
    def run(self) -> tuple[str, ...]:
        """With the inputs to run on, where they are in a file."""
        given = ("--inputs", str(self.made.inputs_file)) if self.made.inputs_file is not None else ()
        return (*self.model, *given)

    @property
    def options(self) -> de.Options:
        """Those of the command line, without inputs."""
        given = self.made.options
        weights = Path(given[given.index("--weights") + 1]) if "--weights" in given else None
        return de.Options(weights=weights, trust_pickle="--trust-pickle" in given)

    def open(self) -> de.Session:
        """The model as the command line would open it."""
        return de.open(self.made.model, options=dataclasses.replace(self.options, tensors=self.made.inputs_file))

    def session(self) -> de.Session:
        """The module in memory."""
        return de.open(self.made.runs, inputs=self.made.inputs)

    def exported(self) -> Path:
        """The folder of an export in bfloat16."""
        target = self.work / "out"
        if not target.exists():
            program("export", *self.model, "--cast", ALL_BF16, "-o", str(target))
        return target


Way = Callable[[Job], str]


def inspect(job: Job) -> str:
    made = job.made
    found = answer("inspect", *job.model, "--cast", ALL_BF16)
    assert found["stored_bytes"] == made.stored_bytes()
    assert found["planned_bytes"] == made.planned_bytes(BF16)
    assert found["parameters"] == made.parameters
    assert sum(kind["bytes"] for kind in found["kinds"]) == made.planned_bytes(BF16)
    rows = [row for row in found["tensors"] if row["kind"] != "non-persistent buffer"]
    listed = {name for row in rows for name in (row["name"], *row["tied"])}
    if made.module is None:
        assert listed == set(made.tensors)
        for row in rows:
            assert list(made.tensors[row["name"]].shape) == row["shape"], row
    if made.linears is None:
        with_class = refusal("inspect", *job.model, "--cast", "type:Linear=bfloat16")
        assert "class" in with_class or "architecture" in with_class, with_class
    else:
        linears = made.linears
        found = answer("inspect", *job.model, "--cast", "type:Linear=bfloat16")
        assert found["planned_bytes"] == made.planned_bytes(BF16, lambda name: name in linears)
    assert "matches nothing" in refusal("inspect", *job.model, "--cast", "nothing.here=bfloat16")
    return made.loader


def refusal(*arguments: str) -> str:
    """The one line with which `dtype-engine` says no."""
    try:
        program(*arguments)
    except Refused as error:
        return str(error)
    raise AssertionError(f"not refused: {arguments}")


def memory(job: Job) -> str:
    """The bytes of the weights as stored; and of the cache that transformers makes, where the model is one of its decoders."""
    found = answer("memory", *job.model, "--context", "8", "--batch", "2", "--activations", "none")
    assert found["weights_bytes"] == job.made.stored_bytes()
    assert found["total_bytes"] == found["weights_bytes"] + found["kv_bytes"]
    itemsizes = {getattr(torch, dtype).itemsize for dtype in found["kv_dtypes"]} or {1}
    held = outside.cache_bytes(job.made, 2, 8, *itemsizes)
    if held is None:
        return job.made.loader
    assert found["kv_bytes"] == held
    return "transformers' cache"


def weights(job: Job) -> str:
    made = job.made
    found = {row["name"]: row for row in answer("weights", *job.model, "--cast", ALL_BF16)["weights"]}
    castable = made.castable_each
    truth = outside.round_trip_errors(distinct(castable), BF16)
    assert set(found) == set(truth)
    for name, (largest, mean) in truth.items():
        assert found[name]["elements"] == castable[name].numel()
        assert near(found[name]["max_abs"], largest, 1e-6)
        assert near(found[name]["mean_abs"], mean, 1e-5)
    return made.loader


def weights_against(job: Job) -> str:
    """Compared with a file that safetensors wrote, of what plain torch makes of the source."""
    file = job.work / "twin.safetensors"
    save_file(cast_by_torch(job.made), file)
    found = answer("weights", *job.model, "--against", str(file), status=None)
    rows = {row["name"]: row for row in found["weights"]}
    truth = outside.round_trip_errors(distinct(job.made.castable), BF16)
    assert truth.keys() <= rows.keys(), found
    for name, (largest, mean) in truth.items():
        assert near(rows[name]["max_abs"], largest, 1e-6)
        assert near(rows[name]["mean_abs"], mean, 1e-5)
        assert rows[name]["equal"] == (largest == 0)
    return job.made.loader


def cast_by_torch(made: Made) -> Tensors:
    """The tensors of the source with all that a cast takes in bfloat16."""
    castable = made.castable
    return {
        name: (tensor.to(BF16) if name in castable else tensor).contiguous().clone()
        for name, tensor in distinct(made.tensors).items()
    }


def check(job: Job) -> str:
    """Nothing is wrong with these files, except where a quantized layer has a plain sibling. After somebody else has written a NaN
    into one of them, that is found as well.
    """
    known = known_findings(job.made)
    found = answer("check", *job.model, "--values", status=1 if known else 0)
    assert [(each["kind"], each["tensor"]) for each in found["findings"]] == known
    source = Path(job.made.model)
    files = sorted(source.rglob("*.safetensors")) if source.is_dir() else [source]
    if files[:1] == [] or files[0].suffix != ".safetensors":
        assert any("are not read" in each for each in found["unchecked"])
        return job.made.loader
    held = {file: load_file(file) for file in files}
    assert found["tensors"] == sum(map(len, held.values())) + job.made.elsewhere
    places = [(file, name) for file, tensors in held.items() for name in tensors]
    file, name = max(places, key=lambda place: _numbers_in(held[place[0]][place[1]]))
    copied = job.work / "damaged" / source.name
    if source.is_dir():
        shutil.copytree(source, copied)
    else:
        copied.parent.mkdir()
    held[file][name].view(-1)[-1] = float("nan")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(held[file], copied / file.relative_to(source) if source.is_dir() else copied, metadata)
    damaged = answer("check", str(copied), *job.made.options, "--values", status=1)
    *others, last = [(each["kind"], each["tensor"]) for each in damaged["findings"]]
    assert others == known
    assert last[0] == "not-finite"
    assert last[1].endswith(name)
    assert damaged["kinds"]["not-finite"]["why"]
    return "safetensors.torch.save_file"


def known_findings(made: Made) -> list[tuple[str, str]]:
    """The MLPs of which one projection is stored otherwise than its sibling."""
    if made.mixes:
        return []
    pairs = [("gate_proj.weight", "up_proj.weight"), ("w3.weight", "w1.weight")]
    return [
        ("mixed-siblings", name.removesuffix(f".{one}"))
        for one, other in pairs
        for name in sorted(made.tensors)
        if name.endswith(one) and made.stored.get(name) != made.stored.get(name.removesuffix(one) + other)
    ]


def _numbers_in(tensor: torch.Tensor) -> int:
    """How many values a tensor has that are no codes of a scheme."""
    return tensor.numel() if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) else 0


def near(found: float, truth: float, share: float) -> bool:
    """Whether two figures differ by no more than a share of the second, or are both smaller than normal floats."""
    return abs(found - truth) <= share * abs(truth) + 1e-38


def drift(job: Job) -> str:
    made = job.made
    found = answer("drift", *job.run, "--cast", ALL_BF16)
    check_drift(made, found)
    assert found["memory"]["stored_bytes"] == made.stored_bytes()
    assert found["memory"]["planned_bytes"] == made.planned_bytes(BF16)
    assert "matches nothing" in refusal("drift", *job.run, "--cast", "nothing.here=bfloat16")
    return "plain torch"


def _metric(job: Job) -> str:
    """A metric of the user's own, the mean absolute value of the main output, as an argument of `--metric`."""
    file = job.work / "size.py"
    file.write_text(
        "def size(output, inputs):\n"
        "    while not hasattr(output, 'abs'):\n"
        "        output = next(iter(output.values() if isinstance(output, dict) else output))\n"
        "    return output.double().abs().mean()\n"
    )
    return f"{file}:size"


def _check_metric(made: Made, found: dict[str, Any], share: float = 1e-5) -> None:
    """Both sides are what plain torch gives, the candidate with everything in bfloat16."""
    twins = ((outside.in_dtype(made.runs, dtype), dtype) for dtype in (torch.float32, BF16))
    sizes = [outside.call(module, made.inputs, dtype).abs().mean().item() for module, dtype in twins]
    assert near(found["reference"], sizes[0], share), (found, sizes)
    assert near(found["candidate"], sizes[1], 1e-2), (found, sizes)


def drift_metric(job: Job) -> str:
    metric = _metric(job)
    (found,) = answer("drift", *job.run, "--cast", ALL_BF16, "--metric", metric)["metrics"]
    _check_metric(job.made, found)
    assert "there is no 'other'" in refusal("drift", *job.run, "--metric", metric.replace(":size", ":other"))
    return "plain torch"


def sweep_metric(job: Job) -> str:
    metric = _metric(job)
    found = answer("sweep", job.made.model, str(_recipe_file(job)), *job.run[1:], "--metric", metric)
    _check_metric(job.made, found["rows"][0]["metrics"][0])
    return "plain torch"


def search_metric(job: Job) -> str:
    """Of the recipes that are measured, the smallest has everything in bfloat16 that a cast takes, that has no smaller form, and
    that the model runs.
    """
    chosen = ("--dtypes", "bf16", "--draws", "1", "--verify", "2", "--min", "size=-100")
    found = answer("search", *job.run, *chosen, "--metric", _metric(job))
    smallest = min(found["candidates"], key=lambda row: row["planned_bytes"])
    left = job.made.unloaded | (
        set() if job.made.elsewhere else job.made.stored.keys()
    )  # an adapter makes no weight smaller
    assert smallest["planned_bytes"] == job.made.planned_bytes(BF16, lambda name: name not in left)
    _check_metric(job.made, smallest["metrics"][0])
    return "plain torch"


def check_drift(made: Made, found: dict[str, Any]) -> None:
    """Two runs of the same kernels differ in how work is split among threads, not in more."""
    check_output(found, outside.drift(made, BF16))


def check_output(found: dict[str, Any], truth: tuple[float, float]) -> None:
    """The largest and the mean |Δ| of an answer of `drift` are these."""
    assert truth[0] > 0
    for name, expected in zip(("max_abs", "mean_abs"), truth, strict=True):
        assert near(found["output"][name], expected, 0.02), (name, found["output"], expected)


def drift_of_an_execution(job: Job) -> str:
    made = job.made
    chosen = ("--cast", ALL_BF16, "--execution", "mkldnn=no")
    (row,) = answer("check-execution", *job.run, *chosen)["rows"]
    module = outside.in_dtype(made.runs, BF16)
    base = outside.call(module, made.inputs, BF16)
    with torch.backends.mkldnn.flags(enabled=False):
        largest = float((outside.call(module, made.inputs, BF16) - base).abs().max())
    assert near(row["output"]["max_abs"], largest, 0.02), (row, largest)
    return "plain torch"


def flow(job: Job) -> str:
    if job.made.module is None or job.made.inputs is None:
        answer("flow", *job.run, "--cast", ALL_BF16)
        raise AssertionError("it ran, and nothing says what is right")
    layer = outside.first_linear(job.made)
    raises, elements = outside.raises_in(job.made, layer)
    assert raises
    rows = answer("flow", *job.run, "--cast", "*=float32", "--cast", f"{layer}=bfloat16")["casts"]
    (row,) = [row for row in rows if row["module"] == layer and row["torch_raises"]]
    assert (row["source"], row["target"]) == ("float32", "bfloat16")
    assert row["elements"] == elements * row["count"]
    return "plain torch raises there"


def scan(job: Job) -> str:
    found = answer("scan", *job.run, "--dtypes", "int8", "--draws", "64")
    return _check_scan(job.made, {row["name"]: row["score"] for row in found["weights"]}, found["unit"])


def _check_scan(made: Made, scores: dict[str, float], unit: str) -> str:
    assert outside.rank_correlation(scores, outside.alone_in_int8(made, "nats" in unit)) > 0.75
    return "each alone in plain torch, ranked"


def export(job: Job) -> str:
    check_export(job.made, job.exported())
    return "safetensors.torch.load_file"


def export_file(job: Job) -> str:
    target = job.work / "out.pth"
    program("export", *job.model, "--cast", ALL_BF16, "-o", str(target))
    check_values(job.made, torch.load(target, weights_only=True))
    return "torch.load"


def check_export(made: Made, target: Path) -> None:
    """Every tensor of the source is in the export, cast by plain torch, to the last bit, and nothing else is."""
    check_values(made, read_export(target))


def check_values(made: Made, found: Tensors) -> None:
    """The same of the tensors that a loader found in an export."""
    castable = made.castable
    for name, tensor in distinct(made.tensors).items():
        expected = tensor.to(BF16) if name in castable else tensor
        assert name in found, f"{name} is not in the export"
        assert outside.same_bits(found[name], expected), f"{name} is not what was stored, cast"
    for name in found.keys() - distinct(made.tensors).keys():
        expected = made.scales[name] if name in made.scales else made.tensors[name].to(BF16)
        assert outside.same_bits(found[name], expected), f"{name} is not what was stored, cast"


def read_export(target: Path) -> Tensors:
    """What safetensors reads; tensors of a folder in it with the folder's name before them."""
    tensors: Tensors = {}
    for path in sorted(target.rglob("*.safetensors")):
        prefix = "" if path.parent == target else f"{path.parent.name}."
        tensors |= {f"{prefix}{name}": tensor for name, tensor in load_file(path).items()}
    return tensors


def verify(job: Job) -> str:
    target = job.exported()
    program("verify", str(target), "--against", *job.model)
    file = max(target.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the lowest bit of a value, or its sign: one bit that is not what was stored
    kept = file.read_bytes()
    file.write_bytes(data)
    said = program("verify", str(target), "--against", *job.model, status=1)
    file.write_bytes(kept)
    assert "not the same" in said
    return "a flipped bit is found"


def verify_theirs(job: Job) -> str:
    """A file that safetensors wrote, of what plain torch makes of the source, is an exact cast until one value is changed."""
    cast, file = cast_by_torch(job.made), job.work / "theirs.safetensors"
    codes = {name for name, tensor in cast.items() if job.made.scales and tensor.dtype == torch.float8_e4m3fn}
    name = max(cast, key=lambda name: _numbers_in(cast[name]))
    for changed in (set(), {name}):
        for each in changed:
            cast[each].view(torch.uint8).view(-1)[-1] ^= 0x80  # the sign
        save_file(cast, file)
        wrong = codes | changed  # codes without their scales are other values
        found = answer("verify", str(file), "--against", *job.model, status=1 if wrong else 0)
        assert found["same"] == (not wrong)
        assert {each["name"] for each in found["tensors"] if each["differing"] != 0} == wrong
        assert not found["differences"]
        assert not found["uncompared"]
    return "safetensors.torch.save_file"


def load_back(job: Job) -> str:
    """What others' loaders, and ours, make of the export."""
    made, target = job.made, job.exported()
    if (target / "model_index.json").exists():
        import transformers

        encoder = transformers.CLIPTextModel.from_pretrained(target / "text_encoder", dtype="auto")
        for name, tensor in encoder.state_dict().items():
            source = made.tensors.get(f"text_encoder.{name}")
            assert source is None or outside.same_bits(tensor, source.to(BF16)), name
        assert json.loads((target / "model_index.json").read_text()) == json.loads(
            (Path(made.model) / "model_index.json").read_text()
        )
        source = Path(made.model)
        for file in (*source.glob("scheduler/*"), *source.glob("tokenizer/*"), source / "unet" / "config.json"):
            assert (target / file.relative_to(source)).read_bytes() == file.read_bytes()
        if made.module is None:
            return "transformers.from_pretrained"
        import diffusers

        loaded = diffusers.DiffusionPipeline.from_pretrained(target, torch_dtype=BF16)
        for name in ("unet", "vae"):
            for key, tensor in getattr(loaded, name).state_dict().items():
                assert outside.same_bits(tensor, made.tensors[f"{name}.{key}"].to(BF16)), (name, key)
        return "diffusers.from_pretrained"
    if (target / "adapter_config.json").exists():
        assert (target / "adapter_config.json").read_bytes() == (Path(made.model) / "adapter_config.json").read_bytes()
        assert set(load_file(target / "adapter_model.safetensors")) == set(made.tensors)
        return "safetensors.torch.load_file"
    if (target / "config.json").exists() and made.module is not None:
        import transformers

        model_class = getattr(transformers, type(made.module).__name__)
        loaded = model_class.from_pretrained(target, dtype="auto").state_dict()
        loaded |= {name: tensor for name, tensor in read_export(target).items() if name in made.unloaded}
        for name, tensor in distinct(made.loaded).items():
            expected = tensor.to(BF16) if name in made.castable_loaded else tensor
            wide = loaded[name].dtype == torch.float32  # as some architectures keep some weights
            assert outside.same_bits(loaded[name], expected.float() if wide else expected), name
        return "transformers.from_pretrained"
    if made.module is not None or set(made.tensors) == set(own_net().state_dict()):
        return _check_loaded(made, de.load_pretrained(target, module=copy.deepcopy(made.module or own_net())))
    return export_again(job)


def _check_loaded(made: Made, loaded: torch.nn.Module) -> str:
    for name, tensor in loaded.state_dict().items():
        expected = made.tensors[name]
        assert outside.same_bits(tensor, expected.to(BF16) if name in made.castable else expected), name
    return "module.state_dict()"


def export_again(job: Job) -> str:
    """Where no code of a model is at hand: the export is itself a checkpoint, whose tensors are those of the first one."""
    target = job.work / "out"
    found = answer("inspect", str(target))
    assert found["stored_bytes"] == sum(tensor.nbytes for tensor in read_export(target).values())
    return "safetensors.torch.load_file"


def drift_against(job: Job) -> str:
    """The export in bfloat16, or the model itself in bfloat16 where the export has no architecture, against the model."""
    made, target = job.made, job.work / "out"
    candidate = (str(target),) if (target / "config.json").exists() else (made.model, "--cast", ALL_BF16)
    found = answer("drift", *job.run, "--against", *candidate)
    assert found["reference"] == made.model
    check_drift(made, found)
    return "plain torch"


def report(job: Job) -> str:
    made, file = job.made, job.work / "report.md"
    program("report", *job.run, "--cast", ALL_BF16, "--metric", _metric(job), "-o", str(file))
    text = file.read_text()
    assert human(made.stored_bytes()) in text
    assert human(made.planned_bytes(BF16)) in text
    if made.module is not None and made.inputs is not None:
        largest, _ = outside.drift(made, BF16)
        figures = [float(found) for found in re.findall(r"\d\.\d+e[+-]\d+", text)]
        assert any(near(figure, largest, 0.02) for figure in figures), (largest, figures)
        before, after = re.findall(r"^\| size \| (\S+) → ([^ ,]+)", text, re.MULTILINE)[0]
        _check_metric(made, {"reference": float(before), "candidate": float(after)}, 1e-3)
        return "plain torch"
    assert re.search(r"no forward pass|can't load", text), text[:2000]
    return f"{made.loader}; no drift, and why"


def human(nbytes: int, decimals: int = 2) -> str:
    """Bytes as the program writes them: in the largest binary unit."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.{decimals}f} {unit}"


def _recipe_file(job: Job) -> Path:
    file = job.work / "recipe.yaml"
    file.write_text('version: 1\nrules:\n  - {pattern: "*", dtype: bfloat16}\n')
    return file


def recipe_convert(job: Job) -> str:
    """The patterns for transformers, matched with plain `re`, take every tensor that the recipe takes, and no other."""
    made = job.made
    found = answer("recipe", "convert", str(_recipe_file(job)), "--to", "transformers", "--model", *job.model)
    patterns = [(row["pattern"], row["dtype"]) for row in found["patterns"]]
    left_out = {name for entry in found["left_out"] for name in entry["tensors"]}
    names = dict(made.module.named_parameters()) if made.module is not None else made.castable
    for name in names:
        first = next((dtype for pattern, dtype in patterns if re.fullmatch(pattern, name)), None)
        assert first == "bfloat16" or name in left_out or name in made.fixed, (name, patterns)
    return "re.fullmatch"


def recipe_lint(job: Job) -> str:
    """How many tensors every rule takes here, counted without us."""
    made = job.made
    asked = (str(_recipe_file(job)), "--for", "transformers", "--model", *job.model)
    found = answer("recipe", "lint", *asked, status=None)
    (rule,) = found["rules"]
    castable = distinct(made.castable_loaded)
    assert rule["here"] == len(castable), (rule["here"], sorted(castable))
    return made.loader


def tree(job: Job) -> str:
    """The trees of the files and of the loaded model have the model's weights, and nothing else."""
    made = job.made
    trees = [(open_checkpoint(Path(made.model)).tree(), made.tensors)]
    trees += [(job.open().model.tree, made.loaded)] if made.module is not None else []
    for found, tensors in trees:
        shapes = {info.name: info.shape for info in found.tensors.values() if info.persistent}
        assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        totals = found.totals()[""]  # names do not always tell which tensors are buffers
        assert totals.parameters + totals.buffers == sum(map(torch.numel, distinct(tensors).values()))
        assert totals.total_bytes == made.stored_bytes()
    return made.loader


def cast_everything(made: Made) -> Made:
    """The same with the module in bfloat16."""
    return dataclasses.replace(made, module=outside.in_dtype(made.runs, BF16))


def generate(job: Job) -> str:
    """The model, and its copy in bfloat16, continue the first input as transformers does."""
    made, session = job.made, job.open()
    session.cast("*", "bfloat16")
    first = session.generate(4)[0]
    for written, model in ((first.reference, made), (first.candidate, cast_everything(made))):
        assert list(written.ids) == outside.generated(model, 4)[-len(written.ids) :]
    return "transformers"


def tokens(job: Job) -> str:
    """The model writes as transformers does, and a bfloat16 copy is asked at each token in one pass over the text."""
    first = answer("tokens", *job.run, "--cast", ALL_BF16, "--tokens", "4", "--floor", "never")["texts"][0]
    ids = first["reference"]["ids"]
    assert ids == outside.generated(job.made, 4)[-len(ids) :]
    same = [own == other for own, other in zip(ids, first["candidate_ids"], strict=True)]
    assert [kind == "identical" for kind in first["kinds"]] == same
    return "transformers"


COMMANDS: dict[str, Way] = {
    "inspect": inspect,
    "memory": memory,
    "weights": weights,
    "weights --against": weights_against,
    "check": check,
    "drift": drift,
    "drift of an execution": drift_of_an_execution,
    "drift --metric": drift_metric,
    "sweep --metric": sweep_metric,
    "search --metric": search_metric,
    "flow": flow,
    "scan": scan,
    "export": export,
    "export .pth": export_file,
    "verify": verify,
    "verify theirs": verify_theirs,
    "load back": load_back,
    "drift --against": drift_against,
    "report": report,
    "recipe lint": recipe_lint,
    "recipe convert": recipe_convert,
    "tokens": tokens,
}
_OF_FORMS = re.compile("tokens|memory|.* --metric|export .pth|report|recipe .*")
SCHEME_WAYS: dict[str, Way] = {
    **{"inspect": inspect, "tree": tree},
    **{name: way for name, way in COMMANDS.items() if not _OF_FORMS.fullmatch(name)},
    "generate": generate,
}
"""The ways to use each scheme of quantized weights."""


# -- the same for a module that is in memory -----------------------------------------------------------------------------


def _live_drift(job: Job) -> str:
    session = job.session()
    session.cast("*", "bfloat16")
    output = session.drift().output
    assert session.undo()
    check_drift(job.made, {"output": dataclasses.asdict(output)})
    assert all(tensor.dtype == torch.float32 for tensor in job.made.runs.parameters())
    return "plain torch"


def _live_inspect(job: Job) -> str:
    session = job.session()
    session.cast("*", "bfloat16")
    memory = session.memory()
    session.undo()
    assert memory.stored_bytes == job.made.stored_bytes()
    assert memory.planned_bytes == job.made.planned_bytes(BF16)
    return "module.state_dict()"


def _live_flow(job: Job) -> str:
    session = job.session()
    layer = outside.first_linear(job.made)
    _, elements = outside.raises_in(job.made, layer)
    session.cast(layer, "bfloat16")
    (row,) = [row for row in session.flow() if row.module == layer and row.torch_raises]
    session.undo()
    assert row.elements == elements
    return "plain torch raises there"


def _live_scan(job: Job) -> str:
    found = job.session().scan(("int8",), draws=64)
    return _check_scan(job.made, {row.name: row.score for row in found.weights}, found.unit)


def _live_exported(job: Job, name: str) -> Path:
    session = job.session()
    session.cast("*", "bfloat16")
    session.export(job.work / name)
    session.undo()
    return job.work / name


def _live_export(job: Job) -> str:
    check_export(job.made, _live_exported(job, "out"))
    return "safetensors.torch.load_file"


def _live_export_file(job: Job) -> str:
    check_values(job.made, torch.load(_live_exported(job, "out.pth"), weights_only=True))
    return "torch.load"


def _live_load_back(job: Job) -> str:
    return _check_loaded(job.made, de.load_pretrained(job.work / "out", module=own_net()))


LIVE: dict[str, Way] = {
    "inspect": _live_inspect,
    "drift": _live_drift,
    "flow": _live_flow,
    "scan": _live_scan,
    "export": _live_export,
    "export .pth": _live_export_file,
    "load back": _live_load_back,
}
