"""The user's own tensors run without a KV cache, so that outputs before the first changed layer are reused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers import architectures
from tests.helpers.transformers_caches import cache_argument
from transformers import DynamicCache

import dtype_engine as de
from dtype_engine import Recipe, Rule


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5", "qwen3_next", "mamba"])
def test_drift_without_kv_cache_equals_that_of_plain_torch_with_cache(name: str) -> None:
    module, inputs = architectures.make(name)
    inputs = {key: value for key, value in inputs.items() if key != "use_cache"}
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        before, after = module(**inputs).logits, other(**inputs).logits
    session = de.open(module, inputs=inputs)
    session.cast("*", "bfloat16")
    found = session.drift().output
    assert found.max_abs == pytest.approx(float((after.float() - before).abs().max()), rel=1e-3)
    assert session.inputs_reading is not None
    assert any("use_cache" in line for line in session.inputs_reading.made_of)


def test_cast_of_a_late_layer_reuses_outputs_of_earlier_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = architectures.make("llama")
    session = de.open(module, inputs={"input_ids": architectures.tokens()})
    session.drift()
    first, called = module.get_submodule("model.layers.0.self_attn"), list[bool]()
    original = type(first).forward

    def forward(attention: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(attention is first)
        return original(attention, *args, **kwargs)

    monkeypatch.setattr(type(first), "forward", forward)
    session.apply(Recipe((Rule("model.layers.1", "bfloat16"),)))
    session.drift()
    assert called == [False]


@pytest.mark.parametrize("told", [True, False])
def test_use_cache_argument_of_the_user_is_kept(told: bool) -> None:
    session = de.open(architectures.make("llama")[0], inputs={"input_ids": architectures.tokens(), "use_cache": told})
    assert session.inputs is not None
    assert session.inputs.batches[0].kwargs["use_cache"] is told
    assert not any("use_cache" in line for line in session.inputs.made_of)


def test_use_cache_is_not_disabled_if_the_user_gives_a_kv_cache() -> None:
    """The argument has the name that the installed transformers gives it."""
    module, _ = architectures.make("llama")
    cache = {cache_argument(module): DynamicCache(config=module.config)}
    session = de.open(module, inputs={"input_ids": architectures.tokens(), **cache})
    assert session.inputs is not None
    assert "use_cache" not in session.inputs.batches[0].kwargs


def test_tensor_files_and_example_inputs_run_without_cache(
    make_llama: Callable[..., Path], tmp_path: Path, monkeypatch: Any
) -> None:
    save_file({"input_ids": torch.arange(3, 9)[None]}, tmp_path / "x.safetensors")
    session = de.open(str(make_llama()), options=de.Options(tensors=tmp_path / "x.safetensors"))
    (tmp_path / "net.py").write_text(
        "import torch\nfrom tests.helpers import architectures\n"
        "def Net():\n    return architectures.make('llama')[0]\n"
        "def example_inputs():\n    return {'input_ids': torch.arange(3, 9)[None]}\n"
    )
    other = de.open(f"{tmp_path}/net.py:Net")
    for each in (session, other):
        assert each.inputs is not None
        assert each.inputs.batches[0].kwargs["use_cache"] is False
