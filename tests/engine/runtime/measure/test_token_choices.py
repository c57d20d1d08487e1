"""What a candidate would choose in texts of the reference: choices, severities and ties are those of plain transformers."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.helpers import architectures, checkpoint_folders
from torch import nn

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.results.token_choices import EDGES, TextChoices, TokenReport
from dtype_engine.runtime.inputs.default_prompts import DEFAULT_PROMPTS

TOKENS = 12
SENTENCE = "the quick brown fox jumps over lazy dogs while seven wizards make big toxic brew for evil queen jack"
WORDS = SENTENCE.split()


def rounded(weight: torch.Tensor, recipe: str) -> torch.Tensor:
    """The values of a weight in a format, in float32, by plain torch."""
    if recipe in ("bfloat16", "float16"):
        return weight.to(getattr(torch, recipe)).float()
    if recipe == "fp8":
        scale = weight.abs().amax(1, keepdim=True) / 448
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale
    if recipe == "int8":
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        return (weight / scale).round() * scale
    groups = weight.reshape(len(weight), -1, 32)  # int4@g32
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
    return ((groups / scale).round().clamp(-8, 7) * scale).reshape(weight.shape)


def cast(module: Any, recipe: str, names: str = "_proj.weight") -> Any:
    """A copy whose weights with this end of their names are in a format."""
    other = copy.deepcopy(module)
    for name, weight in other.named_parameters():
        if name.endswith(names):
            weight.data = rounded(weight.data, recipe)
    return other


def decisive(module: Any, factor: float = 4.0) -> Any:
    """The module with larger weights: with those of its initialisation, all tokens are about as likely."""
    for parameter in module.parameters():
        parameter.data *= factor
    return module.eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=architectures.VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return decisive(transformers.LlamaForCausalLM(config))


@pytest.fixture
def saved(llama: Any, tmp_path: Path) -> Callable[..., Path]:
    """A function that writes the Llama with a tokenizer, which may have a chat template, and with generation settings."""

    def save(chat: bool = False, module: Any = None, **settings: Any) -> Path:
        module = copy.deepcopy(llama) if module is None else module
        for name, value in settings.items():
            setattr(module.generation_config, name, value)
        module.save_pretrained(tmp_path / "model")
        more = {"chat_template": checkpoint_folders.CHAT} if chat else {}
        checkpoint_folders.tokenizer(**more).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


def opened(folder: Path, rules: dict[str, str], **options: Any) -> de.Session:
    session = de.open(str(folder), options=de.Options(device="cpu", **options))
    for pattern, dtype in rules.items():
        session.cast(pattern, dtype)
    return session


def log_p(module: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    """The log-probabilities of plain transformers in a pass over a whole sequence: float64 [positions, classes]."""
    with torch.no_grad():
        return module(ids, **more).logits[0].double().log_softmax(-1)


def assert_choices(text: TextChoices, reference: torch.Tensor, candidate: torch.Tensor, margin: float | None) -> None:
    """reference, candidate: the log-probabilities at the positions that predict the text."""
    assert len(text.kinds) == len(reference)
    for index, (own, other) in enumerate(zip(text.reference.ids, text.candidate_ids, strict=True)):
        assert other == int(candidate[index].argmax())
        severity = float(reference[index].max() - reference[index, other])
        assert text.severities[index] == pytest.approx(severity if own != other else 0.0, abs=1e-9)
        expected = "identical" if own == other else "tie" if margin is not None and severity <= margin else "different"
        assert text.kinds[index] == expected


@pytest.mark.parametrize("chat", [True, False])
def test_choices_after_the_default_prompts_are_those_of_plain_transformers(
    chat: bool, llama: Any, saved: Callable[..., Path]
) -> None:
    session = opened(saved(chat), {"*_proj": "int4@g32"})
    report = session.token_choices(TOKENS)
    assert report.inputs.endswith("through the chat template") is chat
    tokenizer = transformers.AutoTokenizer.from_pretrained(session.model.folder)
    candidate = cast(llama, "int4@g32")
    for prompt, text in zip(DEFAULT_PROMPTS, report.texts, strict=True):
        given = f"{prompt} so " if chat else prompt
        ids = tokenizer(given, add_special_tokens=not chat, return_tensors="pt")["input_ids"]
        whole = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        assert list(text.reference.ids) == whole[0, ids.shape[1] :].tolist()
        scores = [log_p(module, whole[:, :-1])[ids.shape[1] - 1 :] for module in (llama, candidate)]
        assert_choices(text, *scores, report.margin)
        assert text.reference.text == tokenizer.decode(whole[0, ids.shape[1] :])
    assert report.counts["different"] > 2
    assert report.counts["identical"] > 2


def written_by(module: Any, given: dict[str, Any]) -> torch.Tensor:
    """All tokens of the decoder that greedy decoding of plain transformers returns, int64 [1, tokens]."""
    found: torch.Tensor = module.generate(**{name: value.clone() for name, value in given.items()},
                                          max_new_tokens=6, do_sample=False, num_beams=1)  # fmt: skip
    return found


@pytest.mark.parametrize("name", ["t5", "bart", "blip", "llava", "mamba", "qwen3_next", "gpt2", "deepseek_v3"])
def test_choices_of_other_architectures_are_those_of_plain_transformers(name: str) -> None:
    module, inputs = architectures.make(name)
    decisive(module, 2.0)
    if name == "t5":
        module.generation_config.decoder_start_token_id = 0
    given = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    plain, other, whole = copy.deepcopy(module), copy.deepcopy(module), written_by(module, given)
    session = de.open(module, inputs=inputs)
    for key, part in other.named_modules():
        if isinstance(part, nn.Linear) and not key.endswith("head"):
            part.weight.data = rounded(part.weight.data, "int8")
            session.cast(f"{key}.weight", "int8")
    (text,) = session.token_choices(6).texts
    assert list(text.reference.ids) == whole[0, -len(text.reference.ids) :].tolist()
    row = whole[:, :-1]
    if name in ("t5", "bart"):
        more = {"decoder_input_ids": row}
    else:
        given = {key: value for key, value in given.items() if key != "attention_mask"}
        more = {"input_ids": row}
    scores = [log_p_of(each, given | more)[-len(text.kinds) :] for each in (plain, other)]
    assert_choices(text, *scores, session.token_choices(6).margin)


def log_p_of(module: Any, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return module(**given).logits[0].double().log_softmax(-1)


RECIPES = ("fp8", "int8", "int4@g32", "bfloat16", "float16")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_first_token_that_differs_is_that_of_free_decoding(
    recipe: str, llama: Any, saved: Callable[..., Path], tmp_path: Path
) -> None:
    """In float32, so that a pass over the whole text chooses as decoding does. 20 prompts of up to 19 words."""
    folder, candidate = saved(), cast(llama, recipe)
    prompts = (*(" ".join(WORDS[:count]) for count in range(1, 20)), "jack fox")
    if recipe.endswith(
        "float16"
    ):  # the program would compute in 16 bits, so the rounded weights are another checkpoint
        shutil.copytree(folder, tmp_path / "rounded")
        candidate.save_pretrained(tmp_path / "rounded")
        session = opened(tmp_path / "rounded", {}, prompts=prompts, reference=str(folder))
    else:
        session = opened(folder, {"*_proj": recipe}, prompts=prompts)
    report = session.token_choices(TOKENS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    firsts = []
    for prompt, text in zip(prompts, report.texts, strict=True):
        given = tokenizer(prompt, return_tensors="pt")
        ids, mask = given["input_ids"], given["attention_mask"]
        free = [
            module.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)[
                0, ids.shape[1] :
            ].tolist()
            for module in (llama, candidate)
        ]
        assert list(text.reference.ids) == free[0]
        expected = next((at for at, (own, other) in enumerate(zip(*free, strict=True)) if own != other), None)
        found = next((at for at, kind in enumerate(text.kinds) if kind != "identical"), None)
        assert found == expected
        if found is not None:
            assert text.candidate_ids[found] == free[1][found]
        firsts.append(found)
    assert recipe == "float16" or any(first is not None for first in firsts)


def text_of(severities: list[float], margin: float) -> TextChoices:
    from dtype_engine.results.runs import Written

    count = len(severities)
    kinds = tuple("identical" if each < 0 else "tie" if each <= margin else "different" for each in severities)
    words = tuple("abcdefghijkl"[:count])
    return TextChoices(
        "p", Written(tuple(range(count)), words, 1.0),
        tuple(at if each < 0 else at + 50 for at, each in enumerate(severities)), tuple(map(str.upper, words)),
        tuple(max(0.0, each) for each in severities), kinds,  # type: ignore[arg-type]
    )  # fmt: skip


def test_histogram_counts_each_token_that_differs_once() -> None:
    first, second = text_of([-1, 0.01, 0.01], 0.02), text_of([-1, -1, 0.05, 0.09, 0.1, 0.3, 1.0, 2.0, math.inf], 0.02)
    report = TokenReport("m", "cpu", (), "i", (first, second), 0.02)
    assert report.histogram == (2, 2, 1, 1, 0, 1, 2)
    assert len(report.histogram) == len(EDGES) + 1
    assert sum(report.histogram) == report.counts["tie"] + report.counts["different"] == report.tokens - 3
    assert report.largest_severity == math.inf
    difference = report.first_difference
    assert difference is not None
    assert dataclasses.astuple(difference) == (1, 2, 2, "c", 52, "C", 0.05), (
        "the ties of the first text are passed over"
    )
    assert TokenReport("m", "cpu", (), "i", (text_of([-1], 1),), None).largest_severity is None


class Noisy(transformers.LlamaForCausalLM):
    """A Llama whose other attention implementation moves the logits of two tokens against each other by 0.3 nats."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if self.config._attn_implementation == "eager":
            first = output.logits.topk(2, -1).indices[..., :1]
            output.logits = output.logits.scatter_add(-1, first, torch.full_like(first, 0.3, dtype=output.logits.dtype))
        return output


def test_ties_are_up_to_the_margin_of_the_measured_floor(llama: Any) -> None:
    module = Noisy(llama.config).eval()
    module.load_state_dict(llama.state_dict())
    module.config._attn_implementation = "sdpa"
    ids = torch.arange(5, 25)[None]
    session = de.open(module, inputs={"input_ids": ids}, options=de.Options(device="cpu"))
    session.cast("*_proj", "int4@g32")
    report = session.token_choices(60)
    assert report.margin == pytest.approx(0.3, abs=1e-4)
    assert report.margin_from == "the reference with eager attention, batch of two"
    (text,) = report.texts
    of_ties = [each for each, kind in zip(text.severities, text.kinds, strict=True) if kind == "tie"]
    of_others = [each for each, kind in zip(text.severities, text.kinds, strict=True) if kind == "different"]
    assert of_ties
    assert of_others
    assert max(of_ties) <= 0.3001 < min(of_others)


def test_without_a_floor_no_token_is_a_tie(saved: Callable[..., Path]) -> None:
    session = opened(saved(), {"*_proj": "int8"}, floor="never", prompts=("fox",))
    report = session.token_choices(TOKENS)
    assert (report.margin, report.floor, report.counts["tie"]) == (None, None, 0)
    same = opened(saved(), {}, prompts=("fox",)).token_choices(TOKENS)
    assert same.counts == {"identical": TOKENS, "tie": 0, "different": 0}
    assert same.floor is None, "no token differs, so nothing can be a tie"
    assert opened(saved(), {}, prompts=("fox",), floor="always").token_choices(TOKENS).floor is not None


def test_margin_is_the_largest_change_of_the_lead_under_another_attention_and_batch(
    saved: Callable[..., Path],
) -> None:
    session = opened(saved(), {"*": "bfloat16"}, prompts=("quick brown fox", "lazy dogs"), floor="always")
    report = session.token_choices(TOKENS)
    assert report.candidate_floor is not None
    assert report.floor is not None
    assert report.margin == max(report.candidate_floor.margin or 0, report.floor.margin or 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(session.model.folder)
    found, positions = [], 0
    for prompt, text in zip(("quick brown fox", "lazy dogs"), report.texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        row = torch.cat([ids, torch.tensor([text.reference.ids[:-1]])], 1)
        logits, positions = [], positions + row.shape[1]
        for attention, times in (("sdpa", 1), ("eager", 1), ("sdpa", 2)):
            module = transformers.AutoModelForCausalLM.from_pretrained(
                session.model.folder, dtype=torch.bfloat16, attn_implementation=attention
            )
            with torch.no_grad():
                logits.append(module(row.repeat(times, 1)).logits[0].double())
        top = logits[0].topk(2, -1).indices
        leads = [each.gather(-1, top)[:, 0] - each.gather(-1, top)[:, 1] for each in logits]
        found += [float((other - leads[0]).abs().max()) for other in leads[1:]]
    assert report.candidate_floor.margin == pytest.approx(max(found), abs=1e-9)
    assert report.candidate_floor.positions == positions


def test_text_ends_with_the_end_token_which_is_classed_too(llama: Any, saved: Callable[..., Path]) -> None:
    ids = transformers.AutoTokenizer.from_pretrained(saved())("fox", return_tensors="pt")["input_ids"]
    plain = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)[0]
    written = plain[ids.shape[1] :].tolist()
    end = next(token for token in written if token != written[0])
    (text,) = opened(saved(eos_token_id=end), {"*_proj": "int8"}, prompts=("fox",)).token_choices(TOKENS).texts
    assert list(text.reference.ids) == written[: written.index(end) + 1]
    assert len(text.kinds) == len(text.reference.ids) < TOKENS
    candidate = log_p(cast(llama, "int8"), plain[None, : ids.shape[1] + written.index(end)])
    assert text.candidate_ids[-1] == int(candidate[-1].argmax())


def test_generation_settings_change_the_choices_of_both(llama: Any, saved: Callable[..., Path]) -> None:
    """A penalty for repetition: both choose as plain `generate` does with these settings."""
    session = opened(saved(repetition_penalty=1.5), {"*_proj": "int8"}, prompts=tuple(WORDS[:8]))
    report = session.token_choices(TOKENS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(session.model.folder)
    without = 0
    for prompt, text in zip(WORDS[:8], report.texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        free = [
            module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                repetition_penalty=penalty,
            )[0, ids.shape[1] :].tolist()
            for module, penalty in ((llama, 1.5), (cast(llama, "int8"), 1.5), (llama, 1.0))
        ]
        assert list(text.reference.ids) == free[0]
        without += free[0] != free[2]
        expected = next((at for at, (own, other) in enumerate(zip(*free[:2], strict=True)) if own != other), None)
        assert expected == next((at for at, kind in enumerate(text.kinds) if kind != "identical"), None)
    assert without, "the penalty has an effect"
    assert "that the model's generation settings change (RepetitionPenaltyLogitsProcessor)" in report.notices[0]


def test_padded_prompts_in_one_batch_are_continued_one_by_one(llama: Any) -> None:
    rows = [torch.randint(5, 60, (length,), generator=torch.Generator().manual_seed(length)) for length in (9, 4, 6)]
    padded = torch.stack([torch.cat([row.new_zeros(9 - len(row)), row]) for row in rows])
    together = {"input_ids": padded, "attention_mask": (padded > 0).long()}
    alone = [{"input_ids": row[None]} for row in rows]
    found = []
    for inputs in (together, alone):
        session = de.open(copy.deepcopy(llama), inputs=inputs, options=de.Options(device="cpu"))
        session.cast("*_proj", "int8")
        texts = session.token_choices(TOKENS).texts
        found.append([(text.prompt, text.reference.ids, text.candidate_ids, text.severities) for text in texts])
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_candidate_without_numbers_differs_at_each_token(saved: Callable[..., Path], llama: Any) -> None:
    module = copy.deepcopy(llama)
    module.model.layers[1].mlp.down_proj.weight.data *= 1e6  # infinite in float16
    report = opened(saved(module=module), {"*.down_proj": "float16"}, prompts=("fox",)).token_choices(TOKENS)
    (text,) = report.texts
    assert set(text.candidate_ids) == {-1}
    assert set(text.kinds) == {"different"}
    assert set(text.severities) == {math.inf}
    assert report.histogram[-1] == TOKENS
    assert any("12 tokens the candidate's logits have NaN" in notice for notice in report.notices)


def test_execution_of_the_candidate_is_that_of_its_settings(llama: Any, saved: Callable[..., Path]) -> None:
    """Token by token and in a padded batch: in float32 the choices are the same, and the way of execution is really taken."""
    texts = []
    for execution in (de.Execution(), de.Execution(decode=True), de.Execution(batch=2, padding="left")):
        settings = de.RunSettings(execution=execution)
        session = opened(saved(), {"*_proj": "int8"}, prompts=("fox", "quick brown fox"), settings=settings)
        texts.append(session.token_choices(TOKENS).texts)
    choices = [[text.candidate_ids for text in each] for each in texts]
    assert choices[0] == choices[1] == choices[2]
    severities = [[text.severities for text in each] for each in texts]
    assert severities[0] == severities[1] == severities[2], "they are the reference's"


def refusals(tmp_path: Path, llama: Any) -> Iterator[tuple[Any, dict[str, Any], str]]:
    ids = {"input_ids": torch.arange(5, 15)[None]}
    yield copy.deepcopy(llama), ids | {"position_ids": torch.arange(10)[None]}, "leave position_ids out of the inputs"
    yield architectures.make("bert")[0], ids, "a BertForMaskedLM does not generate text"
    long = {"input_ids": torch.full((1, 1020), 7)}
    yield copy.deepcopy(llama), long, "a prompt of 1,020 tokens and 12 more are too long for .*: it has 1024 positions"
    guided = copy.deepcopy(llama)
    guided.generation_config.guidance_scale = 1.5
    yield guided, ids, "guidance_scale in the model's generation settings runs it twice for each token"
    twice = {"pixel_values": architectures.picture().repeat(2, 1, 1, 1)}
    yield architectures.make("blip")[0], twice, "a batch has 2 prompts: give one prompt in each batch"


@pytest.mark.parametrize("case", range(5))
def test_what_has_no_choices_is_refused_in_a_sentence(case: int, tmp_path: Path, llama: Any) -> None:
    module, inputs, words = list(refusals(tmp_path, llama))[case]
    session = de.open(module, inputs=inputs, options=de.Options(device="cpu"))
    with pytest.raises(de.UserError, match=words):
        session.token_choices(TOKENS)


def test_file_of_outputs_does_not_stand_for_a_model(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved()
    file = opened(folder, {}, prompts=("fox",)).save_logits(tmp_path / "logits.safetensors", "reference")
    with pytest.raises(de.UserError, match="runs both models: leave the file of outputs out"):
        opened(folder, {}, reference_logits=str(file)).token_choices(TOKENS)


def test_writing_stops_when_cancelled(saved: Callable[..., Path]) -> None:
    session, steps = opened(saved(), {"*_proj": "int8"}), []
    with pytest.raises(de.Cancelled):
        session.token_choices(TOKENS, lambda *step: steps.append(step), lambda: len(steps) > 3)
    assert {what for what, _, _ in steps} == {"writing the reference's texts"}
    assert session.drift().output.kl_mean


def test_command_prints_counts_and_marks_tokens(saved: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tokens", str(saved()), "--cast", "*_proj=int8", "--prompt", "fox", "--tokens", "12", "--device", "cpu"]
    assert run(cli, "dtype-engine", command) == 0
    shown = capsys.readouterr().out
    assert run(cli, "dtype-engine", [*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (text,) = found["texts"]
    assert sum(found["counts"].values()) == found["tokens"] == len(text["kinds"]) == 12
    assert found["counts"]["different"] == text["kinds"].count("different") == shown.count("⟦") > 0
    assert sum(found["histogram"]) == 12 - found["counts"]["identical"]
    first = found["first_difference"]
    at = text["kinds"].index("different")
    assert (first["prompt"], first["token"], first["severity"]) == (0, at, text["severities"][at])
    assert f"prompt 1, token {at + 1}: " in shown
    assert run(cli, "dtype-engine", ["tokens", str(saved()), "--tokens", "1025", "--device", "cpu"]) == 2
    assert "texts of 1025 tokens are too long" in capsys.readouterr().err


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_module_without_generate_is_refused() -> None:
    with pytest.raises(de.NoForward, match="a Plain does not generate text"):
        de.open(Plain(), inputs=(torch.ones(2),)).token_choices(2)
