"""Measures a model that is larger than the memory it may take, and compares the figures with those of a run in memory.

`python -m tests.benchmarks.over_memory FOLDER [GiB] [JOB ...]` writes a random bfloat16 Llama of so many GiB (default 6) to FOLDER,
unless it is there, and prints a line for each job. With `--fp8`, its linear layers are in float8 with a scale for each block of
128 x 128 values, as in DeepSeek's checkpoints.

A run may take 2 GiB, with Python and torch. As root on a system that has control groups of memory (cgroup v1), it runs in such a
group: the limit then holds for anonymous memory and for the files' pages in the system's cache together, as in a container.
Elsewhere, RLIMIT_DATA limits the private address space of the process. The pages of the model are dropped from the system's cache
before each run, and what is read is counted by /proc/self/io.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMIT = 2 << 30
LENGTHS = (5, 9, 3, 16, 12, 8, 4, 6)
HIDDEN, WIDTH, KEYS, VOCABULARY, BLOCK = 2048, 8192, 512, 32000, 128
JOBS: dict[str, tuple[str, ...]] = {
    "drift *=bf16": ("*=bfloat16",),
    "drift mixed fp8": ("*.mlp=float8_e4m3fn", "*.self_attn=bfloat16", "*norm*=float32", "lm_head=float16"),
}


def write(folder: Path, gib: float, fp8: bool) -> None:
    """Write the model, tensor by tensor, so that this takes little memory."""
    import torch
    from transformers import LlamaConfig

    layers = round((gib * (1 << 30) - 4 * VOCABULARY * HIDDEN) / (60.8e6 if fp8 else 121.6e6))
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    if fp8:
        config.quantization_config = {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
    config.save_pretrained(folder)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        sizes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN),
            "self_attn.v_proj": (KEYS, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (WIDTH, HIDDEN),
            "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH), "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in sizes.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    stored: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if fp8 and name.startswith("model.layers") and len(shape) > 1:
            stored[name] = "F8_E4M3", torch.float8_e4m3fn, shape
            scales = (shape[0] // BLOCK, shape[1] // BLOCK)
            stored[f"{name}_scale_inv"] = "F32", torch.float32, scales
        else:
            stored[name] = "BF16", torch.bfloat16, shape
    header, at = dict[str, Any](), 0
    for name, (written_as, dtype, shape) in stored.items():
        end = at + dtype.itemsize * torch.Size(shape).numel()
        header[name], at = {"dtype": written_as, "shape": list(shape), "data_offsets": [at, end]}, end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    drawn = (0.02 * torch.randn(1 << 25, generator=torch.Generator().manual_seed(0))).bfloat16()
    with open(folder / "part", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, (name, (_, dtype, shape)) in enumerate(stored.items()):
            count = torch.Size(shape).numel()
            values = drawn.roll(number * 7919).repeat(-(-count // len(drawn)))[:count]
            if len(shape) == 1:
                values = torch.ones(shape)
            elif dtype == torch.float8_e4m3fn:
                values = 1000 * values  # standard deviation 20; the scales are 1 / 1000, give or take a fifth
            elif name.endswith("_scale_inv"):
                values = (1 + 10 * values) / 1000
            file.write(values.to(dtype).view(torch.uint8).numpy().tobytes())
        os.fsync(file.fileno())
    (folder / "part").rename(folder / "model.safetensors")


def _counted(key: str) -> int:
    lines = Path("/proc/self/io" if key == "read_bytes" else "/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def drop(folder: Path) -> None:
    """Drop the pages of the model's files from the system's cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measured(folder: Path, job: str, limited: bool) -> dict[str, Any]:
    """Run a job in this process. Returns its figures, the seconds, and the bytes that were read."""
    import torch

    import dtype_engine as de
    from dtype_engine.core.system_memory import total_memory

    # Without a control group the program can't know the limit. Half of it is for Python and torch, and for activations.
    size = folder.joinpath("model.safetensors").stat().st_size
    limits = {"cpu": min(LIMIT // 2, size // 2)} if limited and total_memory() > LIMIT else {}
    generator = torch.Generator().manual_seed(1)
    inputs = [{"input_ids": torch.randint(0, VOCABULARY, (1, length), generator=generator)} for length in LENGTHS]
    session = de.open(
        str(folder),
        options=de.Options(device="cpu", over_memory=limited, max_memory=limits, reference_bytes=0),
        inputs=inputs,
    )
    drop(folder)
    began, read, processor = time.perf_counter(), _counted("read_bytes"), time.process_time()
    if job.startswith("drift"):
        session.apply(de.Recipe.of(map(de.Rule.parse, JOBS[job])))
        report = session.drift()
        shown: list[Any] = [str(report.output), [str(module) for module in report.modules], str(report.lost)]
    elif job == "scan":
        scores = session.scan(["bfloat16", "float8_e4m3fn", "int8"], draws=1).scores()
        shown = sorted((str(key), value) for key, value in scores.items())
    else:
        target = folder.parent / f"{folder.name}-export-{limited}"
        session.apply(de.Recipe.of(map(de.Rule.parse, JOBS["drift mixed fp8"])))
        session.export(target, force=True)
        shown = []
    found = {
        "shown": shown,
        "seconds": time.perf_counter() - began,
        "processor": time.process_time() - processor,
        "read": _counted("read_bytes") - read,
        "stored": session.tree.stored_bytes,
        "data": _counted("VmData") << 10,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    if job == "export":
        for file in sorted(target.glob("*.safetensors")):
            with file.open("rb") as opened:
                shown.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return found


@contextlib.contextmanager
def memory_limit() -> Iterator[Callable[[], None]]:
    """Yield a function that limits the process that calls it to `LIMIT` bytes of memory."""
    group = Path(f"/sys/fs/cgroup/memory/over-memory-{os.getpid()}")
    if not os.access(group.parent, os.W_OK):
        yield lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
        return
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        group.rmdir()


def _child(folder: Path, job: str, limited: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.over_memory", str(folder), "--job", job, str(int(limited))]
    with memory_limit() as limit:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=limit if limited else None, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _times(found: dict[str, Any]) -> str:
    return f"{found['seconds']:.0f} s (processor {found['processor']:.0f} s, peak {found['peak'] / 2**30:.2f} GiB)"


def main() -> None:
    if "--job" in sys.argv:
        with contextlib.redirect_stdout(sys.stderr):
            found = measured(Path(sys.argv[1]), sys.argv[3], sys.argv[4] == "1")
        print(json.dumps(found))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("gib", type=float, nargs="?", default=6)
    parser.add_argument("jobs", nargs="*", metavar="job")
    parser.add_argument("--fp8", action="store_true")
    given = parser.parse_intermixed_args()
    folder = given.folder
    if not (folder / "model.safetensors").exists():
        write(folder, given.gib, given.fp8)
    for job in given.jobs or [*JOBS, "scan", "export"]:
        over = _child(folder, job, True)
        read = over["read"] / over["stored"]
        print(f"{job:18s} over memory {_times(over)}, read {read:.2f} x the model", end="; ", flush=True)
        inside = _child(folder, job, False)
        same = "identical" if inside["shown"] == over["shown"] else "DIFFERENT"
        print(f"in memory {_times(inside)}; {same}", flush=True)


if __name__ == "__main__":
    main()
