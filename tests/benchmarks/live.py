"""The first figure of a measurement, what all of it costs, and how far figures over some sequences are from those over all."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rows import Row, median_of_ratios

if TYPE_CHECKING:
    from dtype_engine import Recipe
    from dtype_engine.results.drift import Extent, OutputDrift

ROUNDS = 3
_BY_HAND = """
import json, sys, time
began = time.perf_counter()
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval()
opened = time.perf_counter()
from dtype_engine.runtime.inputs.default_prompts import DEFAULT_PROMPTS
prompts = sorted((tokenizer(prompt, return_tensors="pt").input_ids for prompt in DEFAULT_PROMPTS), key=lambda ids: ids.shape[1])
def passes(prompts):
    begun = time.perf_counter()
    with torch.no_grad():
        for ids in prompts:
            model(ids)
    return time.perf_counter() - begun
def both(prompts):
    candidate = passes(prompts)
    dtype = model.dtype
    model.float()
    reference = passes(prompts)
    model.to(dtype)
    return candidate + reference
print(json.dumps({"opened": opened - began, "short": both(prompts[:1]), "all": both(prompts)}))
"""
_OURS = """
import json, sys, time
began = time.perf_counter()
import dtype_engine as de
from dtype_engine.runtime.measure.listener import MeasurementListener
session = de.open(sys.argv[1])
figures = []
session.drift(MeasurementListener(on_sequence=lambda totals: figures.append((totals.output, time.perf_counter() - began))))
print(json.dumps({"first": figures[0][1], "all": figures[-1][1]}))
"""


def half_billion(folder: Path) -> Path:
    """A Llama of 0.5 B parameters in bfloat16 with a vocabulary of 150,000, and the demo's tokenizer."""
    import torch
    import transformers

    from .training import save_with_tokenizer

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=150_000, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1.0) if "norm" in name else parameter.data.normal_(0, 0.02, generator=generator)
    model.tie_weights()
    return save_with_tokenizer(model, folder)


def live(folder: Path) -> Iterator[Row]:
    """The demo and a model of 0.5 B parameters: minutes, so each row is told as soon as it is there."""
    from dtype_engine.checkpoint.source import DEMO

    large = half_billion(folder.parent / "half")
    for name, model in (("demo", DEMO), ("0.5 B", large)):
        hand, ours = [], []
        for _ in range(ROUNDS):
            hand.append(_told(_BY_HAND, model))
            ours.append(_told(_OURS, model))
        begun = statistics.median(
            our["first"] / (by_hand["opened"] + by_hand["short"]) for our, by_hand in zip(ours, hand, strict=True)
        )
        yield Row(f"{name}: start to first figure / imports, load and a short pass of each", begun, "x", 1.25)
        yield from _after_a_cast(name, model)
        if model is large:
            yield from _command(name, model, hand)
            yield from _beside_plain_passes(name, model)


def _after_a_cast(name: str, model: Path) -> list[Row]:
    """From a cast to the first figure, and to all of them; and a cast at 3/4 of the depth, both in the default budget."""
    import dtype_engine as de
    from dtype_engine import Recipe, Rule
    from dtype_engine.runtime.measure.listener import MeasurementListener

    session = de.open(str(model))
    layers = max(int(part) for each in session.tree.modules if (part := each.rpartition("layers.")[2]).isdigit()) + 1
    cast_at = layers * 3 // 4
    session.drift()
    first, late = [], []
    for number in range(2 * ROUNDS):
        dtype = ("float32", "float16")[number % 2]
        told: list[float] = []
        started = time.perf_counter()
        session.apply(Recipe((Rule("*", dtype),)))
        session.drift(
            MeasurementListener(on_sequence=lambda totals: told.append((totals.output, time.perf_counter())[1]))  # noqa: B023
        )
        whole = time.perf_counter() - started
        first.append((told[0] - started) / whole)
        started = time.perf_counter()
        session.apply(Recipe((Rule("*", dtype), Rule(f"*.layers.{cast_at}", "bfloat16"))))
        session.drift()
        late.append((time.perf_counter() - started) / whole)
    rows = [
        Row(f"{name}: from a cast to the first figure / to all of them", statistics.median(first[1:]), "x", 0.20),
        Row(f"{name}: measuring after a cast at 3/4 of the depth / in full", statistics.median(late), "x", 0.5),
    ]
    if name != "demo":  # whose passes are so short that what is ours alone shows
        share = statistics.median(late) / _rest(session, cast_at)
        rows.append(Row(f"{name}: the same / the share of a plain pass from there on", share, "x", 1.1))
    return rows


def _beside_plain_passes(name: str, model: Path) -> Iterator[Row]:
    """Measuring a candidate that is all in one dtype, beside its plain passes: with 150,000 words most of what is ours is comparing
    their logits.
    """
    import dtype_engine as de

    for row in beside_plain_passes(de.open(str(model)), 4 * ROUNDS):
        row.what = f"{name}: {row.what}"
        yield row


def beside_plain_passes(session: Any, pairs: int) -> Iterator[Row]:
    """Measuring a candidate that is all in one dtype beside plain passes in it, so many times in turns."""
    import torch

    from dtype_engine import Recipe, Rule
    from dtype_engine.runtime.measure.drift import DriftMeter

    def plain() -> None:
        with torch.no_grad():
            for batch in session.inputs.batches:
                session.model.module(*batch.args, **batch.kwargs)

    for dtype in ("float32", "bfloat16", "float16"):
        session.apply(Recipe((Rule("*", dtype),)))
        meter = DriftMeter(session.model, session.inputs)
        meter.measure()
        ratio = median_of_ratios(meter.measure, plain, pairs)
        yield Row(f"measuring drift, all in {dtype} / a plain forward pass", ratio, "x", 1.30)


def _rest(session: Any, layer: int) -> float:
    """Return the share of plain passes in float32 and float16 that is spent from `layer` on, which is what runs again after a cast
    of it. With a vocabulary of 150,000 the head alone is a quarter of a model of 0.5 B.
    """
    import torch

    from dtype_engine import Recipe, Rule

    model, batches = session.model.module, session.inputs.batches
    begun: list[float] = []
    hook = model.model.layers[layer].register_forward_pre_hook(lambda *_: begun.append(time.perf_counter()))
    shares = []
    for dtype in ("float32", "float16"):
        session.apply(Recipe((Rule("*", dtype),)))
        whole = rest = 0.0
        for batch in batches:
            with torch.no_grad():
                started = time.perf_counter()
                model(*batch.args, **batch.kwargs)
            ended = time.perf_counter()
            whole, rest = whole + ended - started, rest + ended - begun[-1]
        shares.append(rest / whole)
    hook.remove()
    return statistics.mean(shares)


def _command(name: str, model: Path, hand: list[dict[str, float]]) -> list[Row]:
    """The whole command with the candidate in bfloat16, as by hand, and the memory of its process at its peak."""
    ratios, peaks = [], []
    for by_hand in hand:
        started = time.perf_counter()
        told = subprocess.run(
            [str(Path(sys.executable).parent / "dtype-engine"), "drift", str(model), "--cast", "*=bf16", "--json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        ratios.append((time.perf_counter() - started) / (by_hand["opened"] + by_hand["all"]))
        memory = json.loads(told.stdout)["memory"]
        peaks.append((memory["peak_rss_bytes"] - memory["resident_bytes"]) / 2**30)
    return [
        Row(
            f"{name}: dtype-engine drift / imports, load, reference and candidate", statistics.median(ratios), "x", 1.3
        ),
        Row(f"{name}: peak memory of it beyond the weights", statistics.median(peaks), "GiB", 1.5),
    ]


def _told(script: str, model: Path) -> dict[str, float]:
    run = subprocess.run([sys.executable, "-c", script, str(model)], capture_output=True, text=True, check=True)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def errors(folder: Path) -> list[Row]:
    """100 recipes on the demo, 30 on a GPT-2 that is trained here; prompts, and one long text in sequences of 128 tokens."""
    import dtype_engine as de
    from dtype_engine.checkpoint.source import DEMO

    text = folder.parent / "text.txt"
    text.write_text(Path(shutil.__file__).read_text(encoding="utf-8")[:16_000], encoding="utf-8")
    long = de.Options(texts=(text,), sequence_length=128)
    gpt = gpt2(folder.parent / "gpt2")
    rows = []
    for name, model, count in (("demo", DEMO, 100), ("GPT-2", gpt, 30)):
        for of, options in (("6 prompts", de.Options()), ("a long text", long)):
            rows += _covered(f"{name}, {of}, {count} recipes", de.open(str(model), options=options), count)
    return rows


def _covered(name: str, session: Any, count: int) -> list[Row]:
    from dtype_engine.runtime.measure.listener import MeasurementListener

    chooser = random.Random(7)
    first, half, stopped = [], [], []
    while len(first) < count:
        session.apply(random_recipe(session, chooser))
        found: list[tuple[OutputDrift, Extent]] = []
        session.drift(MeasurementListener(on_sequence=lambda totals: found.append((totals.output, totals.extent))))  # noqa: B023
        whole = _figure(found[-1][0])
        if whole < 1e-12:
            continue  # rounding
        first.append(_within_two_errors(*found[0], whole))
        half.append(_within_two_errors(*found[len(found) // 2 - 1], whole))
        enough = next(output for output, extent in found if extent.is_within(0.05))
        stopped.append(abs(_figure(enough) - whole) <= 0.1 * whole)
    return [
        Row(f"{name}: all within two errors of the first figures", 100 * statistics.mean(first), "%", least=85),
        Row(f"{name}: all within two errors of those half-way", 100 * statistics.mean(half), "%", least=90),
        Row(f"{name}: --precision 5% ends within 10 % of all", 100 * statistics.mean(stopped), "%", least=90),
    ]


def _within_two_errors(output: OutputDrift, extent: Extent, whole: float) -> bool:
    figure, error = _figure(output), extent.kl_error
    return error is not None and abs(figure - whole) <= 2 * error * abs(figure)


def _figure(output: OutputDrift) -> float:
    assert output.kl_mean is not None
    return output.kl_mean


def random_recipe(session: Any, chooser: random.Random) -> Recipe:
    """All weights, all linears, some modules, one weight, or a dtype for every weight."""
    from dtype_engine import Recipe, Rule

    dtypes = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
    names = [name for name, tensor in session.tree.tensors.items() if tensor.castable and tensor.persistent]
    modules = sorted({name.rpartition(".")[0] for name in names})
    kind = chooser.choice(("all", "linears", "modules", "modules", "one", "each"))
    if kind == "all":
        return Recipe((Rule("*", chooser.choice(dtypes)),))
    if kind == "linears":
        return Recipe((Rule("re:.*(proj|c_attn|c_fc).*", chooser.choice(dtypes)),))
    if kind == "modules":
        chosen = chooser.sample(modules, chooser.randint(1, 4))
        return Recipe(tuple(Rule(module, chooser.choice(dtypes)) for module in chosen))
    if kind == "one":
        return Recipe((Rule(chooser.choice(names), chooser.choice(dtypes)),))
    return Recipe(tuple(Rule(name, chooser.choice(("float32", *dtypes))) for name in names))


def gpt2(folder: Path, steps: int = 250) -> Path:
    """A GPT-2 of 0.6 M parameters, trained for a minute on Python's standard library, with the demo's tokenizer."""
    import torch
    import transformers

    from .training import save_with_tokenizer, train

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=1024, n_embd=96, n_layer=4, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    train(model, steps)
    return save_with_tokenizer(model, folder)
