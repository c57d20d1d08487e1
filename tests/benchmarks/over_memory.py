"""Measures a model that is larger than the memory it may take, and compares the figures with those of a run in memory.

`python -m tests.benchmarks.over_memory FOLDER [GiB]` writes a random bfloat16 Llama of so many GiB (default 6) to FOLDER, unless it
is there, and prints a line for each job. The memory of a run is limited by RLIMIT_DATA to 2 GiB for the whole process, with Python
and torch. The pages of the model are dropped from the system's cache before each run, and what is read is counted by
/proc/self/io.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 2 << 30
LENGTHS = (5, 9, 3, 16, 12, 8, 4, 6)
HIDDEN, WIDTH, KEYS, VOCABULARY = 2048, 8192, 512, 32000
JOBS: dict[str, tuple[str, ...]] = {
    "drift *=bf16": ("*=bfloat16",),
    "drift mixed fp8": ("*.mlp=float8_e4m3fn", "*.self_attn=bfloat16", "*norm*=float32", "lm_head=float16"),
}


def write(folder: Path, gib: float) -> None:
    """Write the model, block by block, so that this takes little memory."""
    import torch
    from transformers import LlamaConfig

    layers = round((gib * (1 << 30) - 4 * VOCABULARY * HIDDEN) / 121.6e6)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
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
    header, at = dict[str, Any](), 0
    for name, shape in shapes.items():
        end = at + 2 * torch.Size(shape).numel()
        header[name], at = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}, end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    drawn = (0.02 * torch.randn(1 << 25, generator=torch.Generator().manual_seed(0))).bfloat16()
    with open(folder / "part", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, shape in enumerate(shapes.values()):
            count = torch.Size(shape).numel()
            repeated = drawn.roll(number * 7919).repeat(-(-count // len(drawn)))[:count]
            values = repeated if len(shape) > 1 else torch.ones(shape).bfloat16()
            file.write(values.view(torch.int16).numpy().tobytes())
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

    # The half of the limit is for Python and torch, and for activations.
    limits = {"cpu": min(LIMIT // 2, folder.joinpath("model.safetensors").stat().st_size // 2)} if limited else {}
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


def _child(folder: Path, job: str, limited: bool) -> dict[str, Any]:
    limit = (lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))) if limited else None
    command = [sys.executable, "-m", "tests.benchmarks.over_memory", str(folder), "--job", job, str(int(limited))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=limit, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    if "--job" in sys.argv:
        with contextlib.redirect_stdout(sys.stderr):
            found = measured(folder, sys.argv[3], sys.argv[4] == "1")
        print(json.dumps(found))
        return
    jobs = sys.argv[3:] or [*JOBS, "scan", "export"]
    if not (folder / "model.safetensors").exists():
        write(folder, float(sys.argv[2]) if len(sys.argv) > 2 else 6)
    for job in jobs:
        inside, over = _child(folder, job, False), _child(folder, job, True)
        same = "identical" if inside["shown"] == over["shown"] else "DIFFERENT"
        print(
            f"{job:18s} {same}; in memory {inside['seconds']:.0f} s (processor {inside['processor']:.0f} s); over memory "
            f"{over['seconds']:.0f} s (processor {over['processor']:.0f} s), read {over['read'] / over['stored']:.2f} x the model",
            flush=True,
        )


if __name__ == "__main__":
    main()
