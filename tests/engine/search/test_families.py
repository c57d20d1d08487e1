"""Formats by runtime: what a search for one finds is what that runtime takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import LLAMA_DTYPES
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.serving import lint_serving
from dtype_engine.recipe.targets import Context
from dtype_engine.search.families import FAMILIES, Loadable, require_loadable
from dtype_engine.search.pareto import Constraints


def test_formats_listed_for_each_runtime_are_castable() -> None:
    for family in FAMILIES.values():
        assert all(name in dtypes.CASTABLE_DTYPES for name in family.dtypes)


IDS = torch.arange(3, 19)[None]


def open_on_cpu(source: Path) -> de.Session:
    return de.open(str(source), options=de.Options(device="cpu"), inputs={"input_ids": IDS})


def llama_session(make_llama: Callable[..., Path], **config: Any) -> de.Session:
    return open_on_cpu(make_llama(hidden_size=128, **config))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vllm", "sglang"])
def test_search_uses_only_formats_of_the_runtime(family: str, make_llama: Callable[..., Path]) -> None:
    session = llama_session(make_llama, dtype="bfloat16", intermediate_size=200, num_hidden_layers=2)
    session.scan(FAMILIES[family].dtypes, draws=2)
    front = session.front(Constraints(formats=family))
    seen = set()
    smallest = front.points[0].bytes
    for share in (0.0, 0.2, 0.5, 0.8):
        budget = smallest + int(share * (session.tree.stored_bytes - smallest))
        found = front.solve(budget)
        planned = Recipe(tuple(Rule(name, dtype) for name, dtype in found.dtypes.items()))
        context = Context(session.tree, make_plan(session.tree, planned), "llama", activations="weights")
        reading = lint_serving(context, family)  # type: ignore[arg-type]
        assert [finding for finding in reading.findings if finding.effect != "slower"] == []
        seen |= set(found.dtypes.values())
    assert seen & set(dtypes.STORAGE_DTYPES)


def test_budget_of_a_gguf_file_counts_vectors_in_float32(make_llama: Callable[..., Path]) -> None:
    session = llama_session(make_llama, dtype="bfloat16", intermediate_size=128, num_hidden_layers=2)
    session.scan(["q8_0"], draws=1)
    counted = [tensor for tensor in session.tree.tensors.values() if tensor.counted]
    planned = sum(tensor.numel * 34 // 32 if len(tensor.shape) > 1 else tensor.numel * 4 for tensor in counted)
    assert session.front(Constraints(formats="llama.cpp")).points[0].bytes == planned
    caches = 2 * 2 * 100 * session.model.module.config.num_key_value_heads * session.model.module.config.head_dim * 2
    found = session.search(budget=planned + caches, constraints=Constraints(formats="llama.cpp", context=100))
    assert (found.planned_bytes, found.cache_bytes) == (planned + caches, caches)
    assert make_plan(session.tree, found.recipe).planned_bytes < planned, "a running model holds vectors as stored"
    with pytest.raises(UserError, match="the smallest is"):
        session.search(budget=planned - 1, constraints=Constraints(formats="llama.cpp"))


def save_experts(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=2, num_experts=4,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def log_probabilities(folder: Path) -> torch.Tensor:
    """What plain transformers computes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found: torch.Tensor = model(IDS).logits.double().log_softmax(-1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "scanned"),
    [
        (False, ()),
        (True, ()),
        (False, ("int8", "int4@g32", "bfloat16")),
        (True, ("float8_e4m3fn", "int4@g32", "mxfp4")),
    ],
)
def test_transformers_loads_exports_of_the_default_pareto_front_as_measured(
    experts: bool, scanned: tuple[str, ...], make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", "0.20")
    source = save_experts(tmp_path / "experts") if experts else make_llama(hidden_size=128, tie_word_embeddings=True)
    session = open_on_cpu(source)
    session.scan(scanned, draws=2)
    front = session.front()
    assert front.formats == "transformers"
    stored = log_probabilities(source)
    seen = set()
    for step in range(4):
        found = front.solution_at(step * (len(front.points) - 1) // 3)
        seen |= set(found.dtypes.values())
        session.apply(Recipe(tuple(Rule(name, dtype) for name, dtype in found.dtypes.items())))
        measured = session.drift().output.kl_mean
        assert measured is not None
        report = session.export(tmp_path / "out", force=True)
        assert not any("only dtype-engine reads" in notice for notice in report.notices)
        plain = log_probabilities(tmp_path / "out")
        assert float((stored.exp() * (stored - plain)).sum(-1).mean()) == pytest.approx(measured, rel=0.2, abs=5e-5)
    assert seen & set(dtypes.STORAGE_DTYPES)


def test_packed_experts_share_a_format_if_transformers_cannot_load_several(tmp_path: Path) -> None:
    session = open_on_cpu(save_experts(tmp_path / "experts"))
    packed = {name for name in session.tree.tensors if ".experts." in name}
    assert set(Loadable(session.tree, "transformers", ("int4@g32", "bfloat16")).alike) == packed
    assert Loadable(session.tree, "transformers", ("float8_e4m3fn", "bfloat16")).alike == ()
    assert Loadable(session.tree, "vllm", ("int4@g128",)).alike == ()
    assert set(Loadable(session.tree, "transformers", ("int4@g32:gptq", "bfloat16")).alike) == packed


def test_program_loads_a_format_in_any_rounding(make_llama: Callable[..., Path]) -> None:
    tree = llama_session(make_llama, intermediate_size=256).tree
    norm, layer = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    for family in FAMILIES:
        for dtype in ("int4@g128", "int4@g32", "int4@g128a", "float8_e4m3fn", "int8", "nvfp4", "mxfp4", "int8@g128"):
            for name in (norm, layer):
                loadable = Loadable(tree, family, (dtype,))
                rounded = Loadable(tree, family, (f"{dtype}:gptq",))
                assert rounded.refusal(name, f"{dtype}:gptq") == loadable.refusal(name, dtype), (family, dtype)
    assert Loadable(tree, "vllm", ()).refusal(layer, "int4@g128:gptq") is None
    require_loadable(tree, "vllm", ("int4@g128:gptq", "nvfp4:imatrix"))


def test_search_gives_tied_embeddings_a_format_with_scales_only_if_formats_are_own(
    make_llama: Callable[..., Path],
) -> None:
    session = llama_session(make_llama, tie_word_embeddings=True, num_hidden_layers=1)
    session.scan(("int8",), draws=1)
    tied = "model.embed_tokens.weight"
    assert session.front().solution_at(0).dtypes[tied] == "float32"
    assert session.front(Constraints(formats="own")).solution_at(0).dtypes[tied] == "int8"
    assert session.front(Constraints(formats="own")).points[0].bytes < session.front().points[0].bytes
    with pytest.raises(
        UserError, match=r"\*\.embed_tokens=i8: transformers loads no such weight, .*: a tied weight can't have scales"
    ):
        session.front(Constraints(only=(("*.embed_tokens", ("int8",)),)))


QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_dtype_that_the_runtime_loads_for_no_weight_is_refused(make_llama: Callable[..., Path]) -> None:
    tree = llama_session(make_llama, num_hidden_layers=1).tree
    with pytest.raises(
        UserError, match=r"fp8e5: transformers loads no such weight, first .*: no checkpoint layout has fp8e5"
    ):
        require_loadable(tree, "transformers", ("bfloat16", "float8_e5m2"))
    with pytest.raises(UserError, match=r"f16: vllm loads no such weight, first .*: it is not among bf16, fp8"):
        require_loadable(tree, "vllm", ("float16",))
    assert "an error in the forward pass" in str(Loadable(tree, "transformers", ()).refusal(QUERY, "nvfp4"))
    require_loadable(tree, "own", dtypes.CASTABLE_DTYPES)


def test_search_for_a_module_of_user_code_uses_all_formats_of_dtype_engine() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    session = de.open(net, inputs=(torch.ones(2, 16),))
    session.scan(("float8_e5m2",), draws=1)
    front = session.front()
    assert front.formats == "own"
    assert set(front.solution_at(0).dtypes.values()) >= {"float8_e5m2"}


def test_weights_with_rows_that_no_block_divides_get_formats_without_blocks(make_llama: Callable[..., Path]) -> None:
    session = llama_session(make_llama, dtype="bfloat16", intermediate_size=200, num_hidden_layers=1)
    loadable = Loadable(session.tree, "vllm", FAMILIES["vllm"].dtypes)
    down, embedding = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"
    fits = [dtype for dtype in FAMILIES["vllm"].dtypes if loadable.refusal(down, dtype) is None]
    assert fits == ["bfloat16", "float8_e4m3fn", "fp8@128x128"]
    assert [dtype for dtype in FAMILIES["vllm"].dtypes if loadable.refusal(embedding, dtype) is None] == ["bfloat16"]
    assert loadable.groups == ("*.{q_proj,k_proj,v_proj}", "*.{gate_proj,up_proj}")
    assert Loadable(session.tree, "llama.cpp", ("float16",)).groups == ()


def test_llama_cpp_loads_its_own_types_where_llama_quantize_makes_them() -> None:
    tree = Tree(
        [
            TensorInfo("model.layers.0.mlp.up_proj.weight", (64, 512), "bfloat16"),
            TensorInfo("model.layers.0.mlp.down_proj.weight", (64, 96), "bfloat16"),
            TensorInfo("model.norm.weight", (512,), "bfloat16"),
        ],
        {"": "LlamaForCausalLM", "model.layers.0.mlp.up_proj": "Linear", "model.layers.0.mlp.down_proj": "Linear"},
    )
    wide, odd, norm = tree.tensors
    loadable = Loadable(tree, "llama.cpp", LLAMA_DTYPES)
    for dtype in ("q4_k", "q4_k:imatrix", "iq2_xxs:imatrix", "q8_0"):
        assert loadable.refusal(wide, dtype) is None
        assert loadable.refusal(norm, dtype) == "llama-quantize would make it float32"
    assert loadable.refusal(odd, "q4_k:imatrix") == "llama-quantize would make it q5_0"
    assert loadable.refusal(odd, "q8_0") is None
    assert "q8_0" not in FAMILIES["llama.cpp"].dtypes, "a scan of the usual dtypes needs no further package"
    for family in ("transformers", "vllm", "sglang"):
        assert Loadable(tree, family, ["q8_0"]).refusal(wide, "q8_0") is not None
    assert "recipe convert --to llama.cpp" in str(Loadable(tree, "transformers", ["q8_0"]).refusal(wide, "q8_0"))
