"""Held-out text may be what the reference itself answers: tokens and KL divergence are those of plain transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tests.helpers import architectures, checkpoint_folders

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.cancellation import CancelToken
from dtype_engine.runtime.inputs.default_prompts import DEFAULT_PROMPTS

TOKENS = 6


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[bool], Path]:
    """A function that writes a small Llama, with or without a chat template."""

    def save(chat: bool) -> Path:
        folder, module = tmp_path / f"chat{chat}", architectures.make("llama")[0]
        for parameter in module.parameters():
            parameter.data *= 4  # otherwise all tokens are about as likely, and no cast changes that
        module.save_pretrained(folder)
        checkpoint_folders.tokenizer(**({"chat_template": checkpoint_folders.CHAT} if chat else {})).save_pretrained(
            folder
        )
        return folder

    return save


def answered(folder: Path, model: transformers.PreTrainedModel, chat: bool) -> list[tuple[int, torch.Tensor]]:
    """Return, for each prompt, its number of tokens, and the prompt with plain transformers' answer: token ids [1, positions]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in DEFAULT_PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        if chat:
            talk = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
            given = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        ids, mask = given["input_ids"], given["attention_mask"]
        whole = model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        found.append((ids.shape[1], whole))
    return found


def plain_kl(model: transformers.PreTrainedModel, sequences: list[torch.Tensor]) -> float:
    """Return the mean KL divergence over all positions if the MLPs are in int8 with a scale for each output channel."""
    candidate = copy.deepcopy(model)
    for name, weight in candidate.named_parameters():
        if ".mlp." in name:
            scale = weight.detach().abs().amax(1, keepdim=True) / 127
            weight.data = (weight.detach() / scale).round() * scale
    found = []
    with torch.no_grad():
        for ids in sequences:
            reference, other = (each(ids).logits[0].double().log_softmax(-1) for each in (model, candidate))
            found.append((reference.exp() * (reference - other)).sum(-1))
    return torch.cat(found).mean().item()


@pytest.mark.parametrize("chat", [True, False])
def test_tokens_and_kl_are_those_of_plain_transformers(chat: bool, saved: Callable[[bool], Path]) -> None:
    folder = saved(chat)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = answered(folder, plain, chat)
    session = de.open(str(folder), options=de.Options(device="cpu", prompts=("horse",)))
    session.cast("*.mlp", "int8")
    steps = list[tuple[int, int]]()
    inputs = session.own_answers(TOKENS, lambda done, total: steps.append((done, total)))
    for batch, (_, ids) in zip(inputs.batches, expected, strict=True):
        assert batch.kwargs["input_ids"].tolist() == ids.tolist()
    assert steps == sorted(steps)
    assert steps[0] == (1, TOKENS * len(DEFAULT_PROMPTS))
    whole = sum(ids.shape[1] for _, ids in expected)
    answers = whole - sum(length for length, _ in expected)
    about = "the model's own answers to 6 default prompts" + (" through its chat template" if chat else "")
    assert inputs.description == f"{about}, {answers} tokens, {whole:,} with the prompts"
    found = session.held_out(inputs)
    assert found.nearest is None
    assert found.extent.positions == whole
    assert found.output.kl_mean == pytest.approx(plain_kl(plain, [ids for _, ids in expected]), rel=1e-4)


def test_writing_answers_stops_and_what_has_none_is_refused(saved: Callable[[bool], Path], tmp_path: Path) -> None:
    session, token = de.open(str(saved(False)), options=de.Options(device="cpu", prompts=("horse",))), CancelToken()
    with pytest.raises(de.Cancelled):
        session.own_answers(TOKENS, lambda done, total: token.cancel(), token)
    with pytest.raises(
        de.UserError, match=r"answers of 512 tokens are too long: a prompt and its answer have 512 tokens"
    ):
        session.own_answers(512)
    with pytest.raises(de.NoForward, match="a BertForMaskedLM does not generate text"):
        de.open(str(checkpoint_folders.save("bert", tmp_path / "bert"))).own_answers()
    with pytest.raises(de.NoForward, match=r"does not continue a text, so it has no answers to measure: name a file"):
        de.open(str(checkpoint_folders.save("t5", tmp_path / "t5"))).own_answers()
    bare = checkpoint_folders.save("llama", tmp_path / "bare", processed=False)
    with pytest.raises(de.UserError, match="has no tokenizer, so it can't answer prompts: name a file of tensors"):
        de.open(str(bare)).own_answers()


def test_command_drift_measures_on_the_answers(
    saved: Callable[[bool], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(False)
    arguments = ["drift", str(folder), "--cast", "*.mlp=int8:gptq", "--prompt", "horse", "--held-out-answers"]
    assert run(cli, "dtype-engine", [*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["held_out"]
    assert found["inputs"].startswith("the model's own answers to 6 default prompts, ")
    assert found["output"]["kl_mean"] > found["nearest"]["kl_mean"] > 0
    assert found["lost"], "the rounding is fitted to one word"
    assert run(cli, "dtype-engine", [*arguments, "--held-out", str(folder / "config.json")]) == 2
    assert "--held-out-answers and --held-out exclude each other" in capsys.readouterr().err
