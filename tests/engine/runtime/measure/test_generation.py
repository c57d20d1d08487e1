"""Greedy text of both sides, against transformers' own `generate` on models cast by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import architectures

import dtype_engine as de
from dtype_engine.core.errors import Cancelled, NoForward
from dtype_engine.results.runs import Generation, Written
from dtype_engine.runtime.measure.generation import pieces


def test_generation_equals_that_of_plain_transformers() -> None:
    session = de.open()
    session.cast("*", "bfloat16")
    (text,) = session.generate(12)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dtype_engine.checkpoint.source import DEMO
    from dtype_engine.runtime.inputs.default_prompts import DEFAULT_PROMPTS

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = tokenizer(DEFAULT_PROMPTS[0], return_tensors="pt")["input_ids"][:, :32]
    for dtype, written in ((torch.float32, text.reference), (torch.bfloat16, text.candidate)):
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype).eval()
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0, 32:]
        assert list(written.ids) == expected.tolist()
        assert written.text == tokenizer.decode(expected)


def test_generation_by_a_model_in_mixed_dtypes_keeps_the_whole_prompt() -> None:
    prompt = "def read(path):\n" * 20
    session = de.open(None, options=de.Options(prompts=(prompt, "import os")))
    session.cast("*.mlp", "float16")
    session.cast("*.q_proj", "fp8@tensor")
    told: list[tuple[str, int, int]] = []
    texts = session.generate(6, lambda *step: told.append(step))
    assert [text.prompt.replace("<s>", "") for text in texts] == [prompt, "import os"]
    assert all(len(text.candidate.ids) == 6 for text in texts)
    assert {told[0], told[-1]} == {("reference", 1, 24), ("candidate", 24, 24)}, "of both texts of both prompts"
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_prompt_is_continued_token_by_token_as_by_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dtype_engine.checkpoint.source import DEMO

    session = de.open()
    session.cast("*", "bfloat16")
    inputs = session.inputs
    grown: list[Generation] = []
    (text,) = session.generate(6, prompt="def add(a, b):", on_text=lambda read: grown.append(read()))
    assert session.inputs is inputs
    ids = AutoTokenizer.from_pretrained(DEMO)("def add(a, b):", return_tensors="pt")["input_ids"]
    for dtype, written in ((torch.float32, text.reference), (torch.bfloat16, text.candidate)):
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype).eval()
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert list(written.ids) == expected[0, ids.shape[1] :].tolist()
    assert [(len(part.reference.ids), len(part.candidate.ids)) for part in grown] == [
        *((count, 0) for count in range(1, 7)),
        *((6, count) for count in range(1, 7)),
    ]
    assert not any(part.finished for part in grown)
    assert grown[-1].reference.text == text.reference.text
    assert grown[-1].candidate.text == text.candidate.text


def test_warnings_about_lengths_in_the_generation_config_are_not_shown(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    from dtype_engine.checkpoint.source import DEMO

    folder = Path(shutil.copytree(DEMO, tmp_path / "demo"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"min_new_tokens": 1e9}))
    session = de.open(str(folder))
    with pytest.raises(de.UserError, match="`min_length` has to be a non-negative integer"):
        session.generate(3)
    assert not [each for each in recwarn if "Unfeasible" in str(each.message)]


@pytest.mark.parametrize("name", ["blip", "t5", "mamba", "qwen3_moe", "llama"])
def test_text_is_generated_by_every_test_architecture_that_can_generate(name: str) -> None:
    module, inputs = architectures.make(name)
    session = de.open(module, inputs=inputs)
    exact = session.generate(4)[0]
    assert not exact.differs
    session.apply(architectures.random_recipe(session, architectures.PALETTES["all computed"], 1))
    (text,) = session.generate(4)
    assert len(text.candidate.ids) >= 1
    assert text.reference.ids == exact.reference.ids


def test_caption_of_the_synthetic_picture_equals_that_of_transformers(tmp_path: Path) -> None:
    module, _ = architectures.make("blip")
    module.save_pretrained(tmp_path / "blip")
    session = de.open(str(tmp_path / "blip"))
    session.cast("vision_model", "bfloat16")
    (text,) = session.generate(5)
    assert text.prompt == "a picture"
    pixels = session.inputs.batches[0].kwargs["pixel_values"]  # type: ignore[union-attr]
    with torch.no_grad():
        expected = module.generate(pixels, max_new_tokens=5, do_sample=False, num_beams=1)[0].tolist()  # type: ignore[operator]
    assert list(text.reference.ids) == expected[-len(text.reference.ids) :]


def test_generation_is_refused_for_a_model_that_cannot_generate(tinynet: Any) -> None:
    with pytest.raises(NoForward, match="TinyNet does not generate text"):
        tinynet.generate(4)


def test_more_tokens_than_the_model_has_positions_are_refused(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama()))
    known = session.model.module.config.max_position_embeddings
    with pytest.raises(
        de.UserError, match=rf"texts of {known + 1} tokens are too long for .*: it has {known} positions"
    ):
        session.generate(known + 1)
    session.model.module.config.max_position_embeddings = 10**9
    with pytest.raises(de.UserError, match="a text to generate has 1,000,001 tokens, more than the limit of 1,000,000"):
        session.generate(1_000_001)


def test_cancelled_generation_stops_within_one_token(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama()))
    written: list[int] = []
    with pytest.raises(Cancelled):
        session.generate(50, lambda which, done, most: written.append(done), lambda: len(written) >= 3)
    assert max(written) <= 4
    assert session.drift().output.max_abs == 0


def test_tokens_before_the_first_difference_of_two_texts_are_counted() -> None:
    def written(*ids: int) -> Written:
        return Written(ids, tuple(map(str, ids)), 1.0)

    assert Generation("", written(1, 2, 3), written(1, 2, 4)).same_tokens == 2
    assert Generation("", written(1, 2), written(1, 2, 4)).same_tokens == 2
    assert Generation("", written(1, 2), written(1, 2, 4)).differs
    assert not Generation("", written(1, 2), written(1, 2)).differs


def test_tokens_with_incomplete_utf_8_characters_are_decoded_with_the_next_tokens() -> None:
    class Bytes:
        def decode(self, ids: list[int], **rest: Any) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    text = "aé😀z"
    found = pieces(Bytes(), list(text.encode()))
    assert "".join(found) == text
    assert found == ("a", "", "é", "", "", "", "😀", "z")
