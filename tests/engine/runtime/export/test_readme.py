"""What the README of an export says: each fact is tried with the loaders that are installed, and no name is taken for Markdown."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.exporting import export_checkpoint
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.weight_sets import NAMED_WEIGHTS, NO_WEIGHTS
from dtype_engine.core import dtypes
from dtype_engine.recipe.loader_facts import Outcome, loader_facts
from dtype_engine.recipe.schemes import layout
from dtype_engine.runtime.export.plan import of_checkpoint
from dtype_engine.runtime.export.readme import loading_text

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": False}
IDS = torch.arange(2, 12)[None]
READ = [name for name in dtypes.BY_NAME if name in dtypes.STORED_FORMATS and layout(name)]


def exported(source: Path, out: Path, *casts: str) -> str:
    """Write an export. Returns its README."""
    export_checkpoint(open_checkpoint(source), "model", Recipe(tuple(map(Rule.parse, casts))), out)
    return (out / "README.md").read_text()


def loaded(out: Path, dequantize: bool) -> nn.Module:
    import transformers

    given = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(out, **given)
    return model


@torch.no_grad()
def outcome(out: Path, dequantize: bool, wide: str) -> set[Outcome]:
    """Load the export with transformers. Returns all outcomes that describe the result."""
    try:
        theirs = loaded(out, dequantize)
    except RuntimeError:
        return {Outcome.FAILS_TO_LOAD}
    ours = de.load_pretrained(out)
    try:
        logits = theirs(IDS).logits
    except RuntimeError as error:
        return {Outcome.FAILS_TO_RUN} if "BFloat16" in str(error) else set()
    if torch.equal(logits, ours(IDS).logits):
        return {Outcome.SAME}
    state, found = theirs.state_dict(), {Outcome.LAST_BITS, Outcome.BFLOAT16}
    for name, tensor in ours.state_dict().items():
        # A value times a rounded scale is off by one rounding of each.
        off = (state[name].double() - tensor.double()).abs()
        step = {"float64": 2.0**-22, "float16": 2.0**-10}.get(wide, 2.0**-7)
        if not bool((off <= step * tensor.double().abs() + 1e-7).all()):
            found.discard(Outcome.LAST_BITS)
        if not bool((off <= 2.0**-8 * tensor.double().abs()).all()):
            found.discard(Outcome.BFLOAT16)
    return found


CASES = [
    *((dtype, wide) for dtype in ("float8_e4m3fn", "mxfp8", "nvfp4", "int4@g32") for wide in dtypes.COMPUTE_DTYPES[1:]),
    *((dtype, "float32") for dtype in ("int8@tensor", "fp8@128x128", "mxfp4:rceil", "int4@g128a", "int8@g128")),
    ("float8_e4m3fn@tensor", "float64"),
    ("int4@g128a", "bfloat16"),
    ("mxfp4", "float16"),
]


@pytest.mark.parametrize(("dtype", "wide"), CASES)
def test_exported_linear_layers_load_as_the_readme_says(
    dtype: str, wide: str, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", "0.20")
    out = tmp_path / "out"
    readme = exported(make_llama(dtype=wide, **WIDE), out, f"type:Linear={dtype}", "lm_head=stored")
    (row,) = [line for line in readme.splitlines() if line.startswith("| linear layers in ")]
    facts = loader_facts(dtype, expert=False)
    said = [facts.outcome(wide, dequantize) for dequantize in (False, True)]
    assert [part.strip() for part in row.strip("|").split("|")[1:]] == [each.format(wide=wide) for each in said]
    for dequantize, expected in zip((False, True), said, strict=True):
        assert expected in outcome(out, dequantize, wide), (dequantize, expected)
    fails = said[0] in (Outcome.FAILS_TO_LOAD, Outcome.FAILS_TO_RUN)
    recipe = Recipe((Rule("type:Linear", dtype), Rule("lm_head", "stored")))
    text = loading_text(of_checkpoint(open_checkpoint(tmp_path / "llama"), "model", recipe))
    assert (f"Weights in {dtype} give an error there without dequantize=True." in text) == fails
    assert f"load_pretrained keeps these dtypes, but weights with scales become {wide}." in text


MIXED = [
    ("*.mlp=int8 *.o_proj=fp8 *.q_proj=fp8@tensor", "float32", Outcome.SAME, Outcome.SAME),
    ("*.mlp=mxfp8 *.o_proj=fp8", "float32", Outcome.FAILS_TO_RUN, Outcome.TAKEN_FOR_ONE_FORMAT),
    ("*.mlp=int8 *.o_proj=int4@g32", "float32", Outcome.SAME, Outcome.TAKEN_FOR_ONE_FORMAT),
    ("*.mlp=mxfp4 *.o_proj=mxfp4:rceil", "bfloat16", Outcome.SAME, Outcome.SAME),
    ("*.mlp=nvfp4 *.o_proj=int4@g32", "bfloat16", Outcome.SAME, Outcome.TAKEN_FOR_ONE_FORMAT),
]


@pytest.mark.parametrize(("casts", "wide", "plain", "dequantized"), MIXED)
def test_several_formats_in_one_export_load_as_the_readme_says(
    casts: str, wide: str, plain: Outcome, dequantized: Outcome, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """With `dequantize=True` transformers decodes all linear layers by the scheme of one of them, mostly without an error."""
    pytest.importorskip("compressed_tensors", "0.20")
    out = tmp_path / "out"
    readme = exported(make_llama(dtype=wide, **WIDE), out, *casts.split())
    rows = [line for line in readme.splitlines() if line.startswith("| linear layers in ")]
    assert len(rows) == len(casts.split())
    assert any(plain.format(wide=wide) in row for row in rows)
    assert all(row.endswith(f"| {dequantized} |") for row in rows)
    assert outcome(out, False, wide) == {plain}
    found = outcome(out, True, wide)
    assert found == ({Outcome.SAME} if dequantized is Outcome.SAME else found - {Outcome.SAME})


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "mxfp4", "int4@g32"])
@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
def test_exported_experts_load_as_the_readme_says(dtype: str, wide: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", "0.20")
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=64, num_attention_heads=4, num_key_value_heads=2, num_experts=3, num_experts_per_tok=2, head_dim=32,
        moe_intermediate_size=128, **WIDE,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(getattr(torch, wide))
    model.save_pretrained(tmp_path / "source")
    out = tmp_path / "out"
    readme = exported(tmp_path / "source", out, f"*.experts={dtype}")
    said = loader_facts(dtype, expert=True).outcome(wide, False)
    assert f"| experts in {dtype} | {said} | {said} |" in readme
    ours = de.load_pretrained(out)
    for dequantize in (False, True):
        theirs = loaded(out, dequantize)
        name = "model.layers.0.mlp.experts.down_proj"
        read, expected = theirs.get_parameter(name).detach(), ours.get_parameter(name).detach()
        if said is Outcome.SAME:
            assert torch.equal(read, expected)
            assert torch.equal(theirs(IDS).logits, ours(IDS).logits)
        else:
            assert read.dtype == torch.bfloat16
            assert bool(((read.float() - expected.float()).abs() <= 2.0**-8 * expected.float().abs()).all())
            assert not torch.equal(theirs(IDS).logits, ours(IDS).logits)


def test_transformers_loads_the_deepseek_layout_with_the_exported_values(
    make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", "0.20")
    pytest.importorskip("accelerate")
    if torch.cuda.is_available():
        pytest.importorskip("kernels")  # transformers multiplies these weights by its kernels where it finds CUDA
    for wide in ("float32", "bfloat16"):
        out = tmp_path / wide
        readme = exported(make_llama(name=f"s{wide}", dtype=wide, **WIDE), out, "*.mlp=fp8@128x128:ue8m0")
        assert f"on a CPU as values in {wide}" in readme
        assert outcome(out, False, wide) == {Outcome.SAME}


def test_readme_texts_on_loading_exist_for_every_format_that_transformers_reads() -> None:
    for dtype in READ:
        for expert in (False, True):
            assert isinstance(loader_facts(dtype, expert).outcome("float32", True), Outcome)


@pytest.mark.parametrize(
    ("casts", "said"),
    [
        ([], "gives the same: all weights are in float32"),
        (["*.mlp=bf16"], "silently brings a checkpoint of several dtypes into one: float32"),
        (["*=f16"], "gives the same: all weights are in float16"),
    ],
)
def test_exports_without_scales_load_as_the_readme_says(
    casts: list[str], said: str, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    assert said in exported(make_llama(), tmp_path / "out", *casts)
    theirs, ours = loaded(tmp_path / "out", False).state_dict(), de.load_pretrained(tmp_path / "out").state_dict()
    wide = said.rpartition(" ")[2]
    assert {str(tensor.dtype) for tensor in theirs.values()} == {f"torch.{wide}"}
    assert all(torch.equal(theirs[name].double(), ours[name].double()) for name in ours)


@torch.no_grad()
def test_readme_of_an_export_counts_tensors_that_transformers_keeps_in_float32(tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(vocab_size=32, d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    for dtype, count in (("f16", 2), ("bf16", 0)):
        report = export_checkpoint(
            open_checkpoint(tmp_path / "source"), "t5", Recipe((Rule.parse(f"*={dtype}"),)), tmp_path / dtype
        )
        loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / dtype)
        assert sum(weight.dtype == torch.float32 for weight in loaded.parameters()) == count
        assert any("in float32, first" in notice for notice in report.notices) == (count > 0)
        said = f"computes {count} tensors in float32" in (tmp_path / dtype / "README.md").read_text()
        assert said == (count > 0)


def test_readme_names_a_cast_buffer_that_is_not_written(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    readme = exported(make_llama(), tmp_path / "out", "*.inv_freq=bf16")
    assert "Not written: 1 tensor that a rule casts, first model.rotary" in readme
    assert not any("inv_freq" in name for name in load_file(tmp_path / "out" / "model.safetensors"))


NORM = "model.norm.weight"


@torch.no_grad()
def test_transformers_refuses_exports_with_scales_that_only_dtype_engine_reads(
    make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    import transformers

    out = tmp_path / "out"
    readme = exported(make_llama(), out, "*.q_proj=fp8e5", "model.norm=fp8")
    assert "can't load it: 3 weights, first `model.layers.0.self_attn.q_proj.weight`, are stored with scales" in readme
    assert f"names a file that does not exist, `{NO_WEIGHTS}`, and `from_pretrained` raises an error" in readme
    with pytest.raises(FileNotFoundError, match=NO_WEIGHTS):
        transformers.AutoModelForCausalLM.from_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    assert config.pop(NAMED_WEIGHTS) == NO_WEIGHTS
    (out / "config.json").write_text(json.dumps(config))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert info["missing_keys"] == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)} | {NORM}
    assert bool((theirs.get_parameter(NORM) == 1).all())
    assert not torch.equal(theirs(IDS).logits, de.load_pretrained(out)(IDS).logits)


def test_transformers_refuses_an_export_without_a_config(tmp_path: Path) -> None:
    save_file({"x.weight": torch.ones(4, 4)}, tmp_path / "x.safetensors", {"format": "pt"})
    readme = exported(tmp_path / "x.safetensors", tmp_path / "out", "*=f16")
    assert "There is no `config.json`, so `from_pretrained` of transformers can't load it" in readme
    with pytest.raises(ValueError, match="Unrecognized model"):
        loaded(tmp_path / "out", False)


@pytest.mark.parametrize(
    ("dtype", "package"), [("float8_e4m3fn", "compressed_tensors"), ("fp8@128x128:ue8m0", "accelerate")]
)
def test_loading_an_export_requires_the_package_that_the_readme_names(
    dtype: str, package: str, make_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"accelerate": "finegrained_fp8", "compressed_tensors": "compressed_tensors"}[package]
    quantizer = importlib.import_module(f"transformers.quantizers.quantizer_{module}")
    monkeypatch.setattr(quantizer, f"is_{package}_available", lambda *version: False)
    out = tmp_path / "out"
    readme = exported(make_llama(**WIDE), out, f"*.mlp={dtype}")
    name = package.replace("_", "-")
    assert f"needs the {name} package" in readme or f"where the {name} package is installed" in readme
    with pytest.raises(ImportError, match=f"(?i){name}"):
        loaded(out, False)


@torch.no_grad()
def test_transformers_quantizes_activations_of_an_export_unless_weights_are_dequantized(
    make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", "0.20")
    source, logits = open_checkpoint(make_llama(**WIDE)), {}
    for name, given in (("weights", "none"), ("both", "weights")):
        options = de.Options(settings=de.RunSettings(quantize_activations=given))
        export_checkpoint(source, "model", Recipe((Rule("*.mlp", "float8_e4m3fn"),)), tmp_path / name, options=options)
        said = "Activations are quantized as its `config.json` says" in (tmp_path / name / "README.md").read_text()
        assert said == (name == "both")
        for dequantize in (False, True):
            logits[name, dequantize] = loaded(tmp_path / name, dequantize)(IDS).logits
    assert torch.equal(logits["both", True], logits["weights", True])
    assert not torch.equal(logits["both", False], logits["weights", False])


@torch.no_grad()
def test_already_quantized_weights_load_from_an_export_as_from_the_source(
    make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """An export of this program without the metadata is a checkpoint of compressed-tensors like any other."""
    pytest.importorskip("compressed_tensors", "0.20")
    before, out = tmp_path / "before", tmp_path / "out"
    exported(make_llama(**WIDE), before, "*.mlp=int8")
    save_file(load_file(before / "model.safetensors"), before / "model.safetensors", {"format": "pt"})
    readme = exported(before, out)
    assert "Its weights are quantized by compressed-tensors already, as they were in the source" in readme
    expected = loaded(before, False)(IDS).logits
    assert torch.equal(loaded(out, False)(IDS).logits, expected)
    assert torch.equal(de.load_pretrained(out)(IDS).logits, expected)


def test_load_pretrained_gives_the_dtypes_that_the_readme_says(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    readme = exported(make_llama(dtype="bfloat16", **WIDE), out, "*norm=f32", "*.mlp=fp8", "*.o_proj=f16")
    assert "every weight in the dtype of the table, except those with scales (float8_e4m3fn)" in readme
    assert "so these become values in float32" in readme
    wanted = {"norm": "float32", "mlp": "float32", "o_proj": "float16"}
    for name, tensor in de.load_pretrained(out).state_dict().items():
        of_name = next((dtype for part, dtype in wanted.items() if part in name), "bfloat16")
        assert str(tensor.dtype) == f"torch.{of_name}", name
    stored = {name: tensor.dtype for name, tensor in de.open(str(out)).tree.tensors.items()}
    assert {dtype for name, dtype in stored.items() if ".mlp." in name} == {"float8_e4m3fn"}


HOSTILE = "b<script>alert(1)</script>`|[x](http://e)*![i](j)\u202e\n# h http://e.example www.e.example"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append(tag)


def rendered(markdown: str) -> Iterator[str]:
    """The HTML tags of a README as CommonMark has it, with HTML or without, and with bare links, as GitHub has it."""
    from markdown_it import MarkdownIt

    tags = Tags()
    for html in (True, False):
        for bare_links in ((), ("linkify",)):
            parser = MarkdownIt("commonmark", {"html": html, "linkify": bool(bare_links)})
            tags.feed(parser.enable(["table", *bare_links]).render(markdown))
    return iter(tags.found)


def test_model_and_tensor_names_are_escaped_in_the_readme_of_an_export(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({f"{HOSTILE}.weight": torch.full((4, 4), 1e30)}, source / "model.safetensors", {"format": "pt"})
    out = tmp_path / "a<b>`c www.e.example"
    export_checkpoint(open_checkpoint(source), HOSTILE, Recipe((Rule("*", "float16"),)), out)
    text = (out / "README.md").read_text()
    assert "16 values became infinite" in text
    assert set(rendered(text)) <= {
        "h1",
        "h2",
        "p",
        "ul",
        "li",
        "code",
        "pre",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    other = tmp_path / "other"
    export_checkpoint(open_checkpoint(source), HOSTILE, Recipe((Rule("*", "float8_e5m2"),)), other)
    assert not {"script", "a", "img", "em"} & set(rendered((other / "README.md").read_text()))


def test_base_model_of_an_adapter_is_escaped_in_the_readme_of_an_export(tmp_path: Path) -> None:
    source = tmp_path / "adapter"
    source.mkdir()
    save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 4)}, source / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": HOSTILE, "r": 2, "target_modules": ["q"]}
    (source / "adapter_config.json").write_text(json.dumps(config))
    export_checkpoint(open_checkpoint(source), "adapter", Recipe((Rule("*", "bfloat16"),)), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert re.search(r"made for \(``.*script.*``\)", text)
    assert not {"script", "a", "img", "em"} & set(rendered(text))


@pytest.mark.parametrize("name", [HOSTILE, "```", "`", "A`B", "Net\n```\n<script>", "N" * 200])
def test_class_names_and_quantization_methods_are_escaped_in_the_readme(name: str, tmp_path: Path) -> None:
    component, quantised = tmp_path / "component", tmp_path / "quantized"
    component.mkdir()
    save_file({"b.weight": torch.ones(4, 4)}, component / "diffusion_pytorch_model.safetensors")
    (component / "config.json").write_text(json.dumps({"_class_name": name}))
    quantised.mkdir()
    parts = {
        "a.qweight": torch.ones(4, 4, dtype=torch.int32),
        "a.qzeros": torch.ones(4, 4, dtype=torch.int32),
        "a.scales": torch.ones(4, 4),
        "b.weight": torch.ones(4, 4),
    }
    save_file(parts, quantised / "model.safetensors", {"format": "pt"})
    config = {"model_type": name, "architectures": [name], "quantization_config": {"quant_method": name, "bits": 4}}
    (quantised / "config.json").write_text(json.dumps(config))
    for source in (component, quantised):
        export_checkpoint(
            open_checkpoint(source), name, Recipe((Rule("b.*", "bfloat16"),)), tmp_path / f"{source.name} out"
        )
        text = (tmp_path / f"{source.name} out" / "README.md").read_text()
        assert not {"script", "a", "img", "em"} & set(rendered(text)), text


def test_readme_of_a_gptq_export_does_not_call_its_weights_float32(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{layer}.qweight": torch.zeros(4, 48, dtype=torch.int32),
        f"{layer}.qzeros": torch.zeros(1, 6, dtype=torch.int32),
        f"{layer}.scales": torch.ones(1, 48, dtype=torch.float16),
        "model.embed_tokens.weight": torch.zeros(64, 32),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = loading_text(of_checkpoint(open_checkpoint(tmp_path), "x", Recipe()))
    assert "already" in text
    assert "gptq" in text.lower()
    assert "casts all of it" not in text
