"""What a small model shows on the CPU and on the fake accelerator, as JSON.

`python -m tests.helpers.on_accelerator FOLDER DEVICE...` writes the model to FOLDER, and shows what is picked for each DEVICE.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.helpers import fake_accelerator

import dtype_engine as de
from dtype_engine.runtime.building import module_sources
from dtype_engine.runtime.device import pick_device

DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "int8", "nvfp4", "int4@g32")


def _told(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except de.UserError as error:
        return str(error)


def shown(folder: Path, device: str) -> dict[str, Any]:
    """Figures and errors of a model on a device."""
    options = de.Options(device=device, sequence_length=16, sequences=2)
    session = de.open(str(folder), options=options)
    found: dict[str, Any] = {"device": str(session.model.device), "drift": {}}

    def drift() -> list[Any]:
        report = session.drift()
        figures = [report.output.sqnr_db, report.output.kl_mean, report.output.perplexity_reference]
        modules = [each.sqnr_db for each in report.modules]
        return [1e3 if each in (math.inf, None) else each for each in (*figures, *modules)]

    for dtype in DTYPES:
        session.cast("*.mlp", dtype)
        found["drift"][dtype] = _told(drift)
        found["lost"] = len(session.lost_values())
        if dtype == "int8":
            found["causes"] = [cause.drift for cause in session.causes().causes]
            found["flow"] = len(session.flow())
            found["text"] = list(session.generate(4)[0].candidate.ids)
            found["rows"] = len(session.speed(repeats=1).rows)
        session.undo()
    found["exact"] = session.drift().output.sqnr_db == math.inf
    for way in ("estimated", "exact"):
        report = session.scan(["int8"], draws=4 if way == "estimated" else None, exact=way == "exact")
        found[way] = list(report.scores().values())
    found["float64"] = str(_told(lambda: session.cast("*.mlp", "float64")))
    found["against"] = []
    for reference in (str(folder / "twin"), "stored"):
        session = de.open(
            str(folder), options=de.Options(device=device, sequence_length=16, sequences=2, reference=reference)
        )
        session.cast("*.up_proj", "int8")
        found["against"] += [session.drift().output.sqnr_db, *(cause.drift for cause in session.causes().causes)]
        found["against"] += [weight.sqnr_db for weight in session.weight_differences()]
    memory = session.memory()
    found["memory"] = [memory.resident_bytes, memory.device_allocated_bytes, memory.device_peak_bytes]
    return found


def over_memory(folder: Path) -> list[Any]:
    """Figures of a model on the accelerator with all of its memory, and with a quarter of what the weights take."""
    module_sources.SMALLEST = 1
    found = []
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for limits in ({}, {fake_accelerator.NAME: stored // 4}):
        options = de.Options(device=fake_accelerator.NAME, max_memory=limits, sequence_length=16, sequences=3)
        session = de.open(str(folder), options=options)
        session.apply(de.Recipe.of(map(de.Rule.parse, ("*=int8", "*.mlp=float16", "*norm*=float32"))))
        report = session.drift()
        blocks = session.model.memory.blocks if session.model.memory.limited else ()
        found.append([len(blocks) > 1, str(report.output), [str(module) for module in report.modules]])
    return found


def on_two(folder: Path) -> dict[str, Any]:
    """Figures of a model on one accelerator and distributed over two, and what is said if the second is too small."""
    device, name = fake_accelerator.device, fake_accelerator.NAME
    device.count = 2
    by_file = folder / "map.json"
    by_file.write_text(json.dumps({"": 1, "model.embed_tokens": f"{name}:0", "model.norm": 0}))
    found: dict[str, Any] = {}
    limits = {f"{name}:0": 10_000, f"{name}:1": 1 << 20}
    for way, wanted in (("one", ""), ("auto", "auto"), ("file", str(by_file))):
        options = de.Options(device=name, device_map=wanted, sequence_length=16, sequences=2)
        options = dataclasses.replace(options, max_memory=limits if way == "auto" else {})
        session = de.open(str(folder), options=options)
        session.apply(de.Recipe.of(map(de.Rule.parse, ("*=bfloat16", "*.mlp=float8_e4m3fn"))))
        report = session.drift()
        session.undo()
        session.cast("*.mlp", "int8")
        figures = [str(report.output), str(report.modules), str(session.drift().output), str(session.causes().causes)]
        figures.append(session.generate(4)[0].candidate.ids)
        found[way] = [sorted(each for each, size in report.memory.resident_by_device if size), figures]
    del session, report
    gc.collect()
    device.limits = {1: device.allocated_on[1] + 20_000}
    options = de.Options(device=name, device_map="auto", max_memory=limits)
    found["full"] = _told(lambda: str(de.open(str(folder), options=options)))
    device.limits, device.count = {}, 1
    options = de.Options(
        device=name, device_map="auto", max_memory={f"{name}:0": 10_000}, sequence_length=16, sequences=2
    )
    found["scan"] = list(de.open(str(folder), options=options).scan(["int8"], draws=4).scores().values())
    return found


def main() -> None:
    import transformers

    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    model.bfloat16().save_pretrained(folder / "twin")
    library = fake_accelerator.register()  # torch's engine of backward passes counts the devices when it first runs
    found: dict[str, Any] = {device: shown(folder, device) for device in (fake_accelerator.NAME, "cpu")}
    found["picked"] = {name: _told(lambda name=name: str(pick_device(name))) for name in sys.argv[2:]}  # type: ignore[misc]
    session = de.open(str(folder), options=de.Options(device=fake_accelerator.NAME, sequence_length=32, sequences=1))
    found["over"] = over_memory(folder / "twin")
    found["two"] = on_two(folder)
    fake_accelerator.device.limit = fake_accelerator.device.allocated + 2000
    found["full"] = _told(session.drift)
    fake_accelerator.device.limit = None
    net = folder / "net.py"
    net.write_text(
        "import torch\n\n\ndef Net():\n    return torch.nn.Linear(2, 2, dtype=torch.float64)\n\n\n"
        "def example_inputs():\n    return (torch.ones(1, 2),)\n"
    )
    found["wide"] = _told(lambda: de.open(f"{net}:Net", options=de.Options(device=fake_accelerator.NAME)))
    print(json.dumps(found))
    del library


if __name__ == "__main__":
    main()
