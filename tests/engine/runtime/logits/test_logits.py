"""Drift from and to the outputs in a file: exact for a file of this program, and as documented for those of other runtimes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.helpers.exporting import engine

import dtype_engine as de
from dtype_engine.results.drift import OutputDrift
from dtype_engine.runtime.numerics.compare.merged import merged_figures

VOCABULARY, BOS = 131, 1
TOKENS = torch.randint(2, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))
OF_VALUES = ("mean_abs", "max_abs", "rel_l2", "sqnr_db", "cosine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=BOS, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("logits")
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    inputs = {f"{number}.input_ids": TOKENS[number % 3, number:][None].clone() for number in range(11)}
    save_file(inputs, folder / "inputs.safetensors")
    return folder


def cast(session: de.Session) -> de.Session:
    session.cast("*.mlp", "int4@g32")
    session.cast("*.self_attn", "bfloat16")
    return session


def opened(folder: Path, **options: Any) -> de.Session:
    return de.open(str(folder / "model"), options=de.Options(**options))


def log_probs(folder: Path, tokens: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
    """Of plain transformers, with noise on the logits: float32 [sequences, positions, classes]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        logits = model(tokens).logits
    return (logits + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).log_softmax(-1)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def write_kld(path: Path, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Write llama.cpp's file, as its perplexity.cpp documents the layout. Returns the log-probabilities that it holds."""
    chunks, length, classes = logits.shape
    held = []
    with path.open("wb") as file:
        file.write(b"_logits_" + struct.pack("<3i", length, classes, chunks) + tokens.int().numpy().tobytes())
        for row in logits[:, length // 2 : length - 1].reshape(-1, classes):
            least = torch.maximum(row.min(), row.max() - 16)
            scale = (row.max() - least) / 65535
            codes = ((row - least).clamp(min=0) / scale).round()
            log_prob = least - row.logsumexp(-1)
            file.write(struct.pack("<2f", scale, log_prob) + codes.to(torch.uint16).numpy().tobytes())
            file.write(b"\0\0" * (classes % 2))
            held.append(scale * codes + log_prob)
    return torch.stack(held)


def write_jsonl(path: Path, tokens: torch.Tensor, logs: torch.Tensor, k: int, in_choices: bool = False) -> None:
    lines = []
    for ids, rows in zip(tokens.tolist(), logs, strict=True):
        found: list[dict[str, Any] | None] = [None]
        for token, row in zip(ids[1:], rows, strict=False):
            order = row.argsort(descending=True).tolist()
            kept = dict.fromkeys([*order[:k], token])
            found.append({str(i): {"logprob": float(row[i]), "rank": order.index(i) + 1} for i in kept})
        line = {"prompt_token_ids": ids, "prompt_logprobs": found}
        lines.append(json.dumps({"id": "x", "choices": [line]} if in_choices else line))
    path.write_text("\n".join(lines))


def test_saved_outputs_stand_for_the_run_that_made_them(folder: Path, tmp_path: Path) -> None:
    session = cast(opened(folder, tensors=folder / "inputs.safetensors"))
    expected = session.drift()
    files = {run: session.save_logits(tmp_path / run, run) for run in ("reference", "candidate")}
    assert load_file(files["reference"])["logits.09"].shape == (3, VOCABULARY)
    from_file = cast(opened(folder, reference_logits=files["reference"])).drift()
    to_file = opened(folder, against_logits=files["candidate"]).drift()
    for found in (from_file, to_file):
        assert found.output == expected.output
        assert found.output.kl_mean
        assert (found.modules, found.sequences.done) == ((), 11)
    with pytest.raises(de.UserError, match="exists"):
        session.save_logits(files["reference"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_have_no_figures_of_values(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    given = log_probs(folder, TOKENS, noise=0.5).to(dtype)
    save_file({"input_ids": TOKENS, "log_probs": given}, tmp_path / "given")
    found = opened(folder, against_logits=tmp_path / "given").drift().output
    assert found.kl_mean == pytest.approx(float(divergence(log_probs(folder, TOKENS), given).mean()), rel=1e-5)
    assert [getattr(found, name) for name in OF_VALUES] == [None] * len(OF_VALUES)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_file_of_llama_cpp(folder: Path, tmp_path: Path, adds_bos: bool) -> None:
    tokens = TOKENS.clone()
    tokens[0, 0] = BOS if adds_bos else 2
    run_on = tokens.clone()
    run_on[:, 0] = BOS if adds_bos else run_on[:, 0]
    held = write_kld(tmp_path / "base.kld", tokens, log_probs(folder, run_on, noise=0.5))
    own = log_probs(folder, run_on)[:, 6:11].reshape(-1, VOCABULARY)
    against = opened(folder, against_logits=tmp_path / "base.kld").drift()
    assert against.output.kl_mean == pytest.approx(float(divergence(own, held).mean()), abs=1e-5)
    assert against.output.positions == against.output.scored_tokens == 15
    assert places(against.output) == {"5-8": 6, "9-16": 9}, "positions 7 to 11 of three chunks"
    of_next = held.log_softmax(-1).gather(1, tokens[:, 7:].reshape(-1, 1))
    assert against.output.perplexity_candidate == pytest.approx(math.exp(-float(of_next.mean())), rel=1e-5)
    from_file = opened(folder, reference_logits=tmp_path / "base.kld").drift()
    assert from_file.output.kl_mean == pytest.approx(float(divergence(held, own).mean()), abs=1e-5)
    assert from_file.reference == "outputs in base.kld"


def places(output: OutputDrift) -> dict[str, int]:
    """Return how many positions each group of places in the sequence has."""
    return {name: group.positions for name, group in output.groups["position"].items()}


def test_bounds_are_below_the_divergence_of_all_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    for case in range(100):
        size, k = 3 + 5 * (case % 20), 1 + case % 7
        p, q = (torch.randn(4, size, generator=generator, dtype=torch.float64) * (1 + case % 9) for _ in range(2))
        p, q, k = p.log_softmax(-1), q.log_softmax(-1), min(k, size)
        for known_is, known, whole in (("reference", p, q), ("candidate", q, p)):
            top = known.topk(k)
            positions = merged_figures(top.values, top.indices, whole.float(), None, known_is).positions
            assert positions is not None
            assert bool((positions.kl <= divergence(p, q) + 2e-6).all())
            assert positions.same_top.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()


@pytest.mark.parametrize(("option", "least"), [("against_logits", 0.5), ("reference_logits", 0.999)])
def test_what_llama_cpp_clips_does_not_count_as_likely(folder: Path, tmp_path: Path, option: str, least: float) -> None:
    tokens = TOKENS.clone()
    tokens[0, 0] = 2
    own = log_probs(folder, tokens)
    other = own + 0.2 * torch.randn(own.shape, generator=torch.Generator().manual_seed(3))
    other[..., 20:] -= 20 * (
        own[..., 20:] < own.amax(-1, keepdim=True) - 1
    )  # as many under the limit as in a large vocabulary
    write_kld(tmp_path / "base.kld", tokens, other)
    pair = (own, other) if option == "against_logits" else (other, own)
    expected = float(divergence(*(each[:, 6:11] for each in pair)).mean())
    found = opened(folder, **{option: tmp_path / "base.kld"}).drift().output
    assert found.kl_mean is not None
    assert least * expected < found.kl_mean <= expected + 1e-5


@pytest.mark.parametrize("in_choices", [True, False])
def test_likeliest_tokens_of_vllm(folder: Path, tmp_path: Path, in_choices: bool) -> None:
    noisy, own = log_probs(folder, TOKENS, noise=0.5), log_probs(folder, TOKENS)
    whole = float(divergence(own, noisy)[:, :-1].mean())
    save_file({"input_ids": TOKENS, "log_probs": noisy}, tmp_path / "all")
    last = []
    for k in (1, 20, VOCABULARY):
        write_jsonl(tmp_path / "top.jsonl", TOKENS, noisy, k, in_choices)
        session = opened(folder, against_logits=tmp_path / "top.jsonl")
        found = session.drift().output
        assert session.given_logits is not None
        assert session.given_logits.kl_is_lower_bound
        assert (found.positions, found.scored_tokens) == (33, 33)
        assert places(found) == {"1": 3, "2": 3, "3-4": 6, "5-8": 12, "9-16": 9}
        assert found.top1_agreement == float((own.argmax(-1) == noisy.argmax(-1))[:, :-1].double().mean())
        of_next = noisy[:, :-1].gather(2, TOKENS[:, 1:, None])
        assert found.perplexity_candidate == pytest.approx(math.exp(-float(of_next.mean())), rel=1e-5)
        last.append(found.kl_mean)
    assert 0 < last[0] < last[1] < last[2] == pytest.approx(whole, rel=1e-4)
    write_jsonl(tmp_path / "top.jsonl", TOKENS, noisy, 20)
    reference = opened(folder, reference_logits=tmp_path / "top.jsonl").drift()
    assert 0 < (reference.output.kl_mean or 0.0) < float(divergence(noisy, own)[:, :-1].mean())


def test_command_says_which_file_and_that_figures_are_bounds(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "top.jsonl", TOKENS, log_probs(folder, TOKENS, noise=0.5), 5)
    drift = ("drift", folder / "model", "--against-logits", tmp_path / "top.jsonl", "--sequences", "2")
    assert engine(*drift) == 0
    said = capsys.readouterr().out
    assert (
        "candidate from top.jsonl (vLLM: log-probabilities of the likeliest tokens alone, so the KL is at least" in said
    )
    assert "SQNR" not in said
    assert engine(*drift, "--json", "--max-kl", "1e-6") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["logits"]["kl_is_lower_bound"], found["logits"]["file"]) == (True, "top.jsonl")
    assert (found["output"]["sqnr_db"], found["modules"], found["sequences"]["total"]) == (None, [], 2)
    saved = ("--save-logits", "candidate", tmp_path / "saved")
    assert engine("drift", folder / "model", "--inputs", folder / "inputs.safetensors", *saved) == 0
    assert load_file(tmp_path / "saved")["input_ids.10"].tolist() == TOKENS[1, 10:].tolist()


def line(**changes: Any) -> bytes:
    logs = [None, {"3": {"logprob": -0.1, "rank": 1}}]
    return json.dumps({"prompt_token_ids": [2, 3], "prompt_logprobs": logs} | changes).encode()


def kld(length: int = 8, classes: int = VOCABULARY, chunks: int = 1, cut: int = 0) -> bytes:
    body = bytes(4 * length * chunks + 2 * chunks * (length - 1 - length // 2) * (4 + 2 * ((classes + 1) // 2)))
    return b"_logits_" + struct.pack("<3i", length, classes, chunks) + body[: len(body) - cut]


IDS = torch.tensor([[2, 3]])
FILES: dict[str, tuple[bytes | dict[str, torch.Tensor], str]] = {
    "wrong magic": (b"_Logits_" + bytes(100), "no file of outputs"),
    "empty": (b"", "no file of outputs"),
    "cut in the header": (kld()[:15], "cut short"),
    "cut in the values": (kld(cut=1), "cut short: it has 867 bytes, and its header describes 868"),
    "too long": (kld() + b"x", "damaged"),
    "no positions": (kld()[:8] + struct.pack("<3i", 2, 8, 1), "damaged"),
    "negative size": (kld()[:8] + struct.pack("<3i", 8, -5, 1), "damaged"),
    "huge size": (kld()[:8] + struct.pack("<3i", 2**31 - 1, 2**31 - 1, 2**31 - 1), "more than the limit"),
    "huge vocabulary": (kld()[:8] + struct.pack("<3i", 8, 2**31 - 1, 1) + bytes(32), "cut short"),
    "vocabulary of llama.cpp": (kld(classes=100), "100 values for each token, and the model's vocabulary has 131"),
    "vocabulary": ({"input_ids": IDS, "logits": torch.zeros(1, 2, 7)}, "another vocabulary"),
    "NaN": ({"input_ids": IDS, "logits": torch.full((1, 2, VOCABULARY), math.nan)}, "NaN or infinite"),
    "token": ({"input_ids": IDS + 200, "logits": torch.zeros(1, 2, VOCABULARY)}, "beyond the vocabulary"),
    "shape": ({"input_ids": IDS, "logits": torch.zeros(1, 3, VOCABULARY)}, "positions, classes"),
    "dtype": ({"input_ids": IDS, "logits": torch.zeros(1, 2, VOCABULARY).double()}, "is float64"),
    "both": ({"input_ids": IDS, "logits": torch.zeros(1, 2, 3), "log_probs": torch.zeros(1, 2, 3)}, "either"),
    "no ids": ({"logits.0": torch.zeros(2, VOCABULARY)}, "no input_ids"),
    "no logits": ({"input_ids.0": IDS[0], "input_ids.1": IDS[0] + 1, "logits.0": torch.zeros(2, 9)}, "no logits.1"),
    "header": ((10**8 + 1).to_bytes(8, "little") + b"{}", "over the limit"),
    "no JSON": (b"{" * 200_000, "line 1: it is no JSON"),
    "other JSON": (b'{"text": "a"}', "needs prompt_token_ids"),
    "lengths": (line(prompt_token_ids=[2, 3, 4]), "needs null and then"),
    "sum over 1": (line(prompt_logprobs=[None, {"3": {"logprob": 0.1}}]), "no log-probabilities"),
    "no top": (line(prompt_logprobs=[None, {"3": {"logprob": -3.0, "rank": 4}}]), "lacks the likeliest token"),
    "later token": (line(prompt_logprobs=[None, {"131": {"logprob": -0.1}}]), "it has token 131, beyond"),
    "huge id": (line(prompt_token_ids=[10**30, 3]), "vLLM|no vocabulary has"),
}


@pytest.mark.parametrize("name", FILES)
def test_file_that_does_not_fit_is_refused_in_a_sentence(folder: Path, tmp_path: Path, name: str) -> None:
    content, says = FILES[name]
    if isinstance(content, dict):
        save_file(content, tmp_path / "file")
    else:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(de.UserError, match=says):
        opened(folder, against_logits=tmp_path / "file").drift()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--against-logits", "F", "--reference-logits", "F"], "one of the two"),
        (["--against-logits", "F", "--prompt", "a"], "the tokens come from its file"),
        (["--against-logits", "F", "--cast", "*=bf16"], "no rules apply"),
        (["--against-logits", "F", "--candidate", "attention=eager"], "leave --candidate out"),
        (["--reference-logits", "F", "--reference", "stored"], "the file is the reference"),
        (["--reference-logits", "F", "--save", "x"], "leave --save out"),
        (["--reference-logits", "F", "--causes"], "leave --causes out"),
    ],
)
def test_options_that_a_file_of_outputs_excludes_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Sequence[str], says: str
) -> None:
    save_file({"input_ids": IDS, "logits": torch.zeros(1, 2, VOCABULARY)}, tmp_path / "file")
    given = [str(tmp_path / "file") if each == "F" else each for each in options]
    assert engine("drift", folder / "model", *given) == 2
    assert says in capsys.readouterr().err


def test_padded_inputs_are_not_saved(folder: Path, tmp_path: Path) -> None:
    mask = torch.ones_like(IDS)
    mask[0, 0] = 0
    save_file({"input_ids": IDS, "attention_mask": mask}, tmp_path / "padded.safetensors")
    session = opened(folder, tensors=tmp_path / "padded.safetensors")
    with pytest.raises(de.UserError, match="without padding"):
        session.save_logits(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
