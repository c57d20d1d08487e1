"""What plain `from_pretrained` of transformers does with an export: it gives the drift that was measured, or it raises, or this
program refuses to write the export. It never loads anything else without an error.

DTYPE_TUI_WIDE=1 tries every format with every scope and model, and `python -m tests.engine.runtime.export.test_plain_transformers`
prints the table.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint.weight_sets import NO_WEIGHTS
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError

pytestmark = pytest.mark.cpu_only("transformers loads onto the CPU")

IDS = torch.randint(2, 128, (2, 24), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
MODELS = ("untied", "tied", "experts", "tied experts", "bfloat16", "bfloat16 experts")
LINEARS = "type:Linear={} lm_head=stored model.embed_tokens=stored *.gate=stored"
SCOPES = {
    "linear layers": LINEARS,
    "embeddings": "model.embed_tokens={}",
    "norms": "*norm={}",
    "everything": "*={}",
    "q and v": "*.q_proj={} *.v_proj=int8",
    "caches": "*.q_proj={} *.kv_cache=fp8@tensor",
}
OF_EXPERTS = {
    "experts": "*.experts={}",
    "gate and up": "*.experts.gate_up_proj={}",
    "experts of a layer": "model.layers.0.*.experts={}",
    "experts and attention": "*.experts={} *.self_attn=int8",
    "two formats": "*.experts={} *.experts.down_proj=fp8",
    "attention": "*.self_attn={}",
    "attention, and gate and up in fp8": "*.self_attn={} *.experts.gate_up_proj=fp8",
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Every (model, scope, format)."""
    for model in MODELS:
        scopes = SCOPES | (OF_EXPERTS if "experts" in model else {})
        yield from (
            (model, scope, dtype) for scope in scopes for dtype in (*dtypes.COMPUTE_DTYPES, *dtypes.STORED_FORMATS)
        )


CHOSEN = [
    ("untied", "linear layers", "int8"), ("untied", "linear layers", "float8_e5m2"), ("untied", "linear layers", "mxfp8"),
    ("untied", "linear layers", "int4@g128a"), ("untied", "embeddings", "int8"), ("untied", "norms", "float8_e4m3fn"),
    ("untied", "q and v", "int4@g32"), ("untied", "caches", "float8_e4m3fn"), ("untied", "everything", "mxfp6_e2m3"),
    ("tied", "embeddings", "int8"), ("tied", "embeddings", "bfloat16"), ("tied", "everything", "float16"),
    ("bfloat16", "linear layers", "nvfp4"), ("bfloat16", "linear layers", "fp8@128x128:ue8m0"),
    ("experts", "experts", "nvfp4"), ("experts", "experts", "float8_e4m3fn"), ("experts", "gate and up", "int4@g32"),
    ("experts", "gate and up", "int8@g128"), ("experts", "gate and up", "float8_e4m3fn"),
    ("experts", "experts of a layer", "float8_e4m3fn"), ("experts", "experts of a layer", "mxfp4"),
    ("experts", "experts and attention", "mxfp4"), ("experts", "two formats", "float8_e4m3fn@tensor"),
    ("experts", "two formats", "int4@g32"), ("experts", "attention", "int8"), ("experts", "attention", "fp8@128x128"),
    ("experts", "attention, and gate and up in fp8", "int4@g32"), ("tied experts", "everything", "int8"),
]  # fmt: skip


@cache
def saved(model: str, folder: Path) -> Path:
    """A small model whose casts all move the logits, saved by transformers."""
    torch.manual_seed(0)
    tied = model.startswith("tied")
    of_model: Any
    if "experts" in model:
        config: Any = transformers.Qwen3MoeConfig(
            moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=tied, **SIZES
        )
        of_model = transformers.Qwen3MoeForCausalLM(config)
    else:
        of_model = transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=tied, **SIZES))
    with torch.no_grad():
        for parameter in of_model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1 + 0.1 * torch.rand_like(parameter))
    of_model.to(torch.bfloat16 if "bfloat16" in model else torch.float32).save_pretrained(folder / model)
    return folder / model


@torch.no_grad()
def log_probabilities(folder: Path, **given: Any) -> torch.Tensor:
    """The log-probabilities of plain transformers in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **given)
    return torch.cat([model(row[None]).logits.double().log_softmax(-1) for row in IDS])


def attempt(model: str, scope: str, dtype: str, folder: Path) -> tuple[str, float, float]:
    """Export and load by plain transformers. Returns ("refused", "raises" or "loads", the KL that was measured, that of plain
    transformers), the KL in nats per position against the model as stored in float32 arithmetic.
    """
    source, out = saved(model, folder), folder / "out"
    casts = (SCOPES | OF_EXPERTS)[scope].format(dtype).split()
    inputs = [{"input_ids": row[None]} for row in IDS]
    session = de.open(str(source), options=de.Options(device="cpu"), inputs=inputs)
    tied = model.startswith("tied")
    casts = [cast for cast in casts if _matches(session, cast, tied)]
    session.use_recipe(Recipe(tuple(map(Rule.parse, casts))))
    measured = session.drift().output.kl_mean
    if scope == "caches" and not rounds_caches(session):
        weights_alone = [cast for cast in casts if "kv_cache" not in cast]
        session.use_recipe(Recipe(tuple(map(Rule.parse, weights_alone))))
        measured = session.drift().output.kl_mean
        session.use_recipe(Recipe(tuple(map(Rule.parse, casts))))
    assert measured is not None
    try:
        session.export(out, force=True)
    except UserError:
        return "refused", measured, float("nan")
    readme = (out / "README.md").read_text()
    said = "Plain `from_pretrained` of transformers can't load it" in readme or "does not read it" in readme
    if said:
        with pytest.raises((FileNotFoundError, ImportError), match=f"{NO_WEIGHTS}|requires accelerate"):
            log_probabilities(out)
        return "raises", measured, float("nan")
    try:
        found = log_probabilities(out)
    except (RuntimeError, AttributeError, ImportError, ValueError):
        return "raises", measured, float("nan")
    stored = log_probabilities(source, dtype=torch.float32)
    return "loads", measured, float((stored.exp() * (stored - found)).sum(-1).mean())


def rounds_caches(session: de.Session) -> bool:
    """Whether compressed-tensors finds the KV caches of the installed transformers: 0.20.1 does not those of 5.24."""
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.initialize")
    found: bool = lifecycle.is_cached_attention_module(session.model.module.get_submodule("model.layers.0.self_attn"))
    return found


def _matches(session: de.Session, cast: str, tied: bool) -> bool:
    pattern = cast.rpartition("=")[0]
    if pattern == "lm_head" and tied:
        return False
    return pattern != "*.gate" or any(name.endswith(".gate") for name in session.tree.modules)


def allowed_difference(model: str, measured: float) -> float:
    """How far the KL of plain transformers may be from the measured one: it computes everything in the dtype of config.json, while
    it was measured in the dtypes of the recipe. The KL of a weight at random is over 0.03 here.
    """
    return 0.15 * measured + (2e-3 if "bfloat16" in model else 5e-5)


@pytest.mark.parametrize(("model", "scope", "dtype"), rows() if os.environ.get("DTYPE_TUI_WIDE") else CHOSEN)
def test_export_loaded_by_transformers_has_the_measured_drift_or_loading_raises(
    model: str, scope: str, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("compressed_tensors", "0.20")
    outcome, measured, plain = attempt(model, scope, dtype, tmp_path_factory.getbasetemp())
    if outcome == "loads":
        assert abs(plain - measured) <= allowed_difference(model, measured)


def print_table() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("| model | what is cast | format | plain `from_pretrained` | KL measured | KL of plain transformers |")
        print("|---|---|---|---|---|---|")
        for row in rows():
            outcome, measured, plain = attempt(*row, Path(folder))
            wrong = outcome == "loads" and abs(plain - measured) > allowed_difference(row[0], measured)
            print(f"| {' | '.join(row)} | {'WRONG' if wrong else outcome} | {measured:.2e} | {plain:.2e} |", flush=True)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print_table()
    sys.exit()
