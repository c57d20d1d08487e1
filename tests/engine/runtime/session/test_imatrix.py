"""The imatrix that a session writes for llama-quantize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.formats import llama_blocks

IDS = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(5))


def read(content: bytes, folder: Path) -> gguf.GGUFReader:
    path = folder / "imatrix.gguf"
    path.write_bytes(content)
    return gguf.GGUFReader(path)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    np.savez(tmp_path / "ids.npz", input_ids=IDS.numpy())
    return tmp_path / "ids.npz"


def squares_by_hooks(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the sum of x² over all inputs of each linear layer, by plain torch."""
    sums: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def add(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            flat = args[0].detach().double().reshape(-1, args[0].shape[-1])
            sums[name] = sums.get(name, 0) + flat.square().sum(0)

        return add

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(name))
    model(IDS)
    return sums


def test_imatrix_has_the_sums_of_squares_that_plain_torch_finds(
    make_llama: Callable[..., Path], inputs: Path, tmp_path: Path
) -> None:
    folder = make_llama(tie_word_embeddings=False)
    file = read(de.open(str(folder), options=de.Options(tensors=inputs)).imatrix(), tmp_path)
    fields = {name: field.contents() for name, field in file.fields.items()}
    assert fields["general.type"] == "imatrix"
    assert fields["imatrix.chunk_count"] == 1
    assert fields["imatrix.chunk_size"] == 40
    assert len(fields["imatrix.datasets"]) == 1
    tensors = {tensor.name: tensor.data for tensor in file.tensors}
    sums = squares_by_hooks(transformers.AutoModelForCausalLM.from_pretrained(folder))
    names = {"self_attn.q_proj": "attn_q", "self_attn.o_proj": "attn_output", "mlp.down_proj": "ffn_down"}
    for layer in range(2):
        for module, part in names.items():
            own = tensors[f"blk.{layer}.{part}.weight.in_sum2"]
            wanted = sums[f"model.layers.{layer}.{module}"].numpy()
            np.testing.assert_allclose(own.reshape(-1), wanted, rtol=1e-4)
            assert tensors[f"blk.{layer}.{part}.weight.counts"].reshape(-1) == [80]
    assert "output.weight.in_sum2" in tensors
    assert "token_embd.weight.in_sum2" not in tensors, "no matrix product uses it"
    assert len(tensors) == 2 * (2 * 7 + 1)


def test_cast_rounds_by_the_numbers_of_the_file(make_llama: Callable[..., Path], inputs: Path, tmp_path: Path) -> None:
    folder = make_llama(hidden_size=64, intermediate_size=256, head_dim=32)
    session = de.open(str(folder), options=de.Options(tensors=inputs))
    tensors = {tensor.name: tensor.data for tensor in read(session.imatrix(), tmp_path).tensors}
    session.cast("*.down_proj", "q3_k:imatrix")
    weight = session.model.weights["model.layers.1.mlp.down_proj.weight"]
    name = "blk.1.ffn_down.weight"
    importance = torch.from_numpy(tensors[f"{name}.in_sum2"].reshape(-1) / tensors[f"{name}.counts"].reshape(-1))
    assert torch.equal(weight.tensor, llama_blocks.rounded(weight.stored.read(), "q3_k:imatrix", importance))
    assert not torch.equal(weight.tensor, llama_blocks.rounded(weight.stored.read(), "q3_k"))
    assert session.plan.planned_bytes < session.plan.stored_bytes
    session.cast("*.down_proj", "stored")
    assert weight.scale is None


def test_experts_have_counts_of_their_own(tmp_path: Path, inputs: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_experts=6, num_experts_per_tok=2, head_dim=16,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    session = de.open(str(tmp_path / "moe"), options=de.Options(tensors=inputs))
    tensors = {tensor.name: tensor.data for tensor in read(session.imatrix(), tmp_path).tensors}
    for part in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        counts = tensors[f"blk.0.{part}.weight.counts"]
        assert counts.reshape(-1).shape == (6,)
        assert counts.sum() == 2 * 80, "each token is sent to two experts"
    assert tensors["blk.0.ffn_gate_exps.weight.in_sum2"].shape == (6, 32)
    assert np.array_equal(
        tensors["blk.0.ffn_gate_exps.weight.in_sum2"], tensors["blk.0.ffn_up_exps.weight.in_sum2"]
    )  # fmt: skip


def test_command_writes_lines_and_imatrix(
    make_llama: Callable[..., Path], inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    recipe, lines, imatrix = tmp_path / "r.yaml", tmp_path / "types.txt", tmp_path / "x.gguf"
    recipe.write_text('version: 1\nrules:\n  - {pattern: "*_proj", dtype: "q4_0:imatrix"}\n')
    convert = ["recipe", "convert", str(recipe), "--model", str(folder), "--inputs", str(inputs)]
    assert run(cli, "dtype-engine", [*convert, "--to", "llama.cpp", "-o", str(lines), "--imatrix", str(imatrix)]) == 0
    assert r"^blk\.[0-9]+\.(attn_k|attn_output|attn_q|attn_v|ffn_gate|ffn_up)\.weight$=q4_0" in lines.read_text()
    assert "give llama-quantize --imatrix" in capsys.readouterr().err
    assert "blk.0.attn_q.weight.in_sum2" in {tensor.name for tensor in gguf.GGUFReader(imatrix).tensors}
    assert run(cli, "dtype-engine", [*convert, "--to", "llama.cpp", "--imatrix", str(imatrix)]) == 2
    assert "--force" in capsys.readouterr().err
    assert run(cli, "dtype-engine", [*convert, "--to", "torchao", "--imatrix", str(tmp_path / "y.gguf")]) == 2
    assert "--imatrix goes with --to llama.cpp" in capsys.readouterr().err


def test_model_without_names_in_gguf_has_no_imatrix() -> None:
    session = de.open(torch.nn.Sequential(torch.nn.Linear(8, 8)), inputs=(torch.ones(1, 8),))
    with pytest.raises(UserError, match="GGUF names depend on the architecture"):
        session.imatrix()
