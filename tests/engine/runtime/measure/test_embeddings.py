"""The recall at 10 of models with one vector per input against plain transformers and numpy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.engine.runtime.model.test_same_plan import answer
from tests.helpers import checkpoint_folders
from tests.helpers.measured_on import placed

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.numerics.compare import neighbors

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
LARGE = {"initializer_range": 0.4}
INPUTS = 30
Vector = Callable[[torch.Tensor], torch.Tensor]
MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL, **LARGE)),
    "qwen": lambda: transformers.Qwen2Model(
        transformers.Qwen2Config(**SMALL, **LARGE, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "t5 encoder": lambda: transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=300, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, initializer_factor=3.0
        )
    ),
    "clip text": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**SMALL, eos_token_id=299)),
}
POOLED: dict[str, Vector] = {
    "cls_token": lambda rows: rows[0],
    "mean_tokens": lambda rows: rows.mean(0),
    "lasttoken": lambda rows: rows[-1],
    "max_tokens": lambda rows: rows.max(0).values,
    "weightedmean_tokens": lambda rows: (
        sum(rows[at] * (at + 1) for at in range(len(rows))) / sum(range(1, len(rows) + 1))
    ),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(0) / len(rows) ** 0.5,
}


def made(name: str, folder: Path, inputs: int = INPUTS) -> Path:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(folder / "model")
    some = torch.Generator().manual_seed(1)
    rows = {}
    for number in range(inputs):
        length = 5 + number % 7
        rows[f"{number:03}.input_ids"] = torch.randint(2, 290, (1, length), generator=some)
        rows[f"{number:03}.attention_mask"] = torch.ones(1, length, dtype=torch.int64)
    save_file(rows, folder / "inputs.safetensors")
    return folder


def with_pooling(folder: Path, *names: str, others: Iterable[str] = ()) -> Path:
    """Write what sentence-transformers writes beside a model."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *((f"2_{each}", each) for each in others)]
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds)
    ]
    (folder / "model" / "modules.json").write_text(json.dumps(listed))
    (folder / "model" / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{name}": name in names for name in ("cls_token", "mean_tokens", *names)}
    config = {"word_embedding_dimension": 32, **flags, "include_prompt": True}
    (folder / "model" / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def drift(folder: Path, dtype: str = "float8_e4m3fn", **options: Any) -> de.DriftReport:
    session = opened(folder, **options)
    session.cast("*", dtype)
    return session.drift()


def opened(folder: Path, **options: Any) -> de.Session:
    return de.open(str(folder / "model"), options=de.Options(tensors=folder / "inputs.safetensors", **options))


def hidden(name: str, folder: Path, dtype: torch.dtype, model: Any = None) -> list[torch.Tensor]:
    """The last hidden states of plain transformers for each input, without padding, with all parameters in a dtype."""
    model = model or type(MODELS[name]()).from_pretrained(folder / "model", dtype=torch.float32)
    model = placed(model.eval())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    given = load_file(folder / "inputs.safetensors")
    rows = []
    with torch.no_grad():
        for key in sorted(each for each in given if each.endswith("input_ids")):
            mask = placed(given[key.replace("input_ids", "attention_mask")])
            states = model(input_ids=placed(given[key]), attention_mask=mask).last_hidden_state
            rows += [state[kept == 1].float().cpu() for state, kept in zip(states, mask, strict=True)]
    return rows


def nearest(vectors: list[torch.Tensor]) -> list[set[int]]:
    """The ten nearest other inputs of each input, by brute force."""
    matrix = np.stack([each.double().numpy() for each in vectors])
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    return [
        set(
            sorted((other for other in range(len(matrix)) if other != at), key=lambda other: -(row @ matrix[other]))[
                :10
            ]
        )
        for at, row in enumerate(matrix)
    ]


def brute(reference: list[torch.Tensor], candidate: list[torch.Tensor]) -> tuple[float, float]:
    """(recall at 10, its standard error over inputs)."""
    shares = [len(one & other) / 10 for one, other in zip(nearest(reference), nearest(candidate), strict=True)]
    return float(np.mean(shares)), float(np.std(shares, ddof=1) / len(shares) ** 0.5)


def said(report: de.DriftReport) -> str:
    (notice,) = (each for each in report.notices if each.startswith("recall@10"))
    return notice


@pytest.mark.parametrize(
    ("name", "pooling", "words"),
    [
        ("bert", "mean_tokens", "mean over tokens"), ("bert", "cls_token", "first token"),
        ("bert", "max_tokens", "maximum over tokens"), ("bert", "mean_sqrt_len_tokens", "sum over tokens / √tokens"),
        ("qwen", "lasttoken", "last token"), ("qwen", "weightedmean_tokens", "mean weighted by position"),
        ("t5 encoder", "mean_tokens", "mean over tokens"),
    ],
)  # fmt: skip
def test_recall_equals_that_of_plain_transformers_and_numpy(
    name: str, pooling: str, words: str, tmp_path: Path
) -> None:
    folder = with_pooling(made(name, tmp_path), pooling, others=["Normalize"])
    report = drift(folder, "bfloat16")
    pool = POOLED[pooling]
    sides = ([pool(rows) for rows in hidden(name, folder, dtype)] for dtype in (torch.float32, torch.bfloat16))
    recall, error = brute(*sides)
    assert report.output.recall_at_10 == pytest.approx(recall, abs=1e-12)
    assert report.output.recall_at_10_se == pytest.approx(error, abs=1e-12)
    assert 0.8 < recall < 1
    assert said(report) == (
        f"recall@10 compares one vector per input, {words} (1_Pooling/config.json), among 30 inputs: by chance it is 34 %"
    )


@pytest.mark.parametrize(
    ("name", "pooling", "words"),
    [("bert", "mean_tokens", "mean over tokens"), ("clip text", "lasttoken", "last token")],
)
def test_pooling_without_modules_json_is_said(name: str, pooling: str, words: str, tmp_path: Path) -> None:
    folder = made(name, tmp_path)
    report = drift(folder, "bfloat16")
    pool = POOLED[pooling]
    sides = ([pool(rows) for rows in hidden(name, folder, dtype)] for dtype in (torch.float32, torch.bfloat16))
    assert report.output.recall_at_10 == pytest.approx(brute(*sides)[0], abs=1e-12)
    assert f"{words} (there is no modules.json)" in said(report)


def test_last_token_of_clip_is_what_its_own_pooler_takes(tmp_path: Path) -> None:
    made("clip text", tmp_path)
    model = transformers.CLIPTextModel.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = torch.tensor([[5, 6, 7, 299]])
    with torch.no_grad():
        output = model(input_ids=ids)
    assert torch.equal(output.pooler_output[0], output.last_hidden_state[0, -1])


@pytest.mark.parametrize(("activation", "function"), [("Identity", torch.clone), ("Tanh", torch.tanh)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_after_the_pooling_are_in_the_vectors(
    activation: str, function: Vector, bias: bool, tmp_path: Path
) -> None:
    folder = with_pooling(made("bert", tmp_path), "mean_tokens", others=["Dense", "Normalize"])
    torch.manual_seed(3)
    linear = torch.nn.Linear(32, 6, bias=bias)
    inner = folder / "model" / "2_Dense"
    inner.mkdir()
    save_file(
        {f"linear.{name}": value.detach() for name, value in linear.named_parameters()}, inner / "model.safetensors"
    )
    config = {"in_features": 32, "out_features": 6, "bias": bias}
    kind = f"torch.nn.modules.activation.{activation}"
    (inner / "config.json").write_text(json.dumps(config | {"activation_function": kind}))
    report = drift(folder, "bfloat16")
    with torch.no_grad():
        sides = [
            [function(linear(rows.mean(0))) for rows in hidden("bert", folder, dtype)]
            for dtype in (torch.float32, torch.bfloat16)
        ]
    assert report.output.recall_at_10 == pytest.approx(brute(*sides)[0], abs=1e-12)
    assert "mean over tokens, then 1 linear layer (1_Pooling/config.json)" in said(report)
    opened(folder).export(tmp_path / "exported")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "exported" / "2_Dense" / name).read_bytes() == (inner / name).read_bytes()
    (inner / "config.json").write_text(json.dumps(config | {"activation_function": "my.Activation"}))
    assert "2_Dense has the activation Activation, which is not computed here" in said(drift(folder))
    (inner / "config.json").write_text(json.dumps(config | {"activation_function": kind}))
    save_file({"linear.weight": torch.zeros(3)}, inner / "model.safetensors")
    assert "has no linear.weight [outputs, inputs]" in said(drift(folder))
    save_file({"linear.weight": torch.zeros(3, 31)}, inner / "model.safetensors")
    with pytest.raises(UserError, match="takes vectors of 31 numbers, and they have 32"):
        drift(folder)
    (inner / "model.safetensors").write_bytes(b"no tensors")
    assert "2_Dense/model.safetensors is no safetensors file" in said(drift(folder))


def test_concatenated_poolings_are_compared_as_one_vector(tmp_path: Path) -> None:
    folder = with_pooling(made("bert", tmp_path), "cls_token", "mean_tokens")
    report = drift(folder, "bfloat16")
    sides = [
        [torch.cat([rows[0], rows.mean(0)]) for rows in hidden("bert", folder, dtype)]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert report.output.recall_at_10 == pytest.approx(brute(*sides)[0], abs=1e-12)
    assert "first token and mean over tokens" in said(report)


@pytest.mark.parametrize("pooling", ["mean_tokens", "lasttoken"])
@pytest.mark.parametrize("left", [False, True])
def test_padding_in_a_batch_does_not_count(pooling: str, left: bool, tmp_path: Path) -> None:
    name = "bert" if pooling == "mean_tokens" else "qwen"
    folder = with_pooling(made(name, tmp_path), pooling)
    rows = load_file(folder / "inputs.safetensors")
    joined = {}
    for kind in ("input_ids", "attention_mask"):
        each = [rows[key][0] for key in sorted(rows) if key.endswith(kind)]
        fill = [(11 - len(row), 0) if left else (0, 11 - len(row)) for row in each]
        joined[kind] = torch.stack([torch.nn.functional.pad(row, pair) for row, pair in zip(each, fill, strict=True)])
    save_file({key: value.contiguous() for key, value in joined.items()}, folder / "inputs.safetensors")
    report = drift(folder, "bfloat16")
    pool = POOLED[pooling]
    sides = ([pool(each) for each in hidden(name, folder, dtype)] for dtype in (torch.float32, torch.bfloat16))
    assert report.output.recall_at_10 == pytest.approx(brute(*sides)[0], abs=1e-12)
    assert report.sequences.left_out == sum(11 - 5 - number % 7 for number in range(INPUTS))


def test_executing_in_batches_leaves_the_vectors_alone(tmp_path: Path) -> None:
    folder = with_pooling(made("bert", tmp_path), "mean_tokens")
    alone = drift(folder).output.recall_at_10
    execution = de.Execution(batch=4)
    settings = de.RunSettings(execution=execution, reference_execution=execution)
    assert drift(folder, settings=settings).output.recall_at_10 == pytest.approx(alone, abs=0.02)


def test_model_that_is_not_cast_has_a_recall_of_exactly_one(tmp_path: Path) -> None:
    folder = with_pooling(made("bert", tmp_path), "mean_tokens")
    output = opened(folder).drift().output
    assert (output.recall_at_10, output.recall_at_10_se) == (1.0, 0.0)


def test_folder_of_an_embedding_model_is_opened_without_its_head(tmp_path: Path) -> None:
    folder = made("qwen", tmp_path)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SMALL, **LARGE, num_key_value_heads=2, tie_word_embeddings=True)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    headed = opened(folder)
    assert type(headed.model.module) is transformers.Qwen2ForCausalLM
    assert headed.drift().output.recall_at_10 is None
    report = drift(with_pooling(folder, "lasttoken"), "bfloat16")
    assert any("opened as Qwen2Model, not as Qwen2ForCausalLM" in notice for notice in report.notices)
    sides = []
    for dtype in (torch.float32, torch.bfloat16):
        plain = transformers.AutoModel.from_pretrained(folder / "model", dtype=torch.float32)
        sides.append([rows[-1] for rows in hidden("qwen", folder, dtype, plain)])
    assert report.output.recall_at_10 == pytest.approx(brute(*sides)[0], abs=1e-12)


@pytest.mark.parametrize("kind", [transformers.T5ForConditionalGeneration, transformers.T5Model])
def test_decoder_has_no_vectors(kind: Any, tmp_path: Path) -> None:
    folder = made("bert", tmp_path)
    config = transformers.T5Config(vocab_size=300, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    kind(config).save_pretrained(folder / "model")
    rows = load_file(folder / "inputs.safetensors")
    more = {key.replace("input_ids", "decoder_input_ids"): rows[key].clone() for key in rows if "input_ids" in key}
    save_file(rows | more, folder / "inputs.safetensors")
    report = drift(folder)
    assert not any("recall" in notice for notice in report.notices)
    report = drift(with_pooling(folder, "mean_tokens"))
    assert report.output.recall_at_10 is None
    assert "and the output is that of a decoder" in said(report)


def test_reason_why_there_is_no_recall_is_said(tmp_path: Path) -> None:
    folder = with_pooling(made("bert", tmp_path, inputs=11), "mean_tokens")
    report = drift(folder)
    assert report.output.recall_at_10 is None
    assert "it needs 12 inputs or more, better some hundred, and this run has 11" in said(report)
    with_pooling(folder, "mean_tokens", others=["LSTM"])
    assert "modules.json has LSTM, which is not computed here" in said(drift(folder))
    with_pooling(folder, "median_tokens")
    assert "modules.json has median_tokens, which is not computed here" in said(drift(folder))
    with_pooling(folder)
    assert "modules.json has no pooling" in said(drift(folder))
    modules = folder / "model" / "modules.json"
    listed = json.loads(modules.read_text())
    listed[1]["path"] = "../1_Pooling"
    for text, words in (
        ("{", "is not valid JSON"), ("{}", "is not a list of modules"), ("[1]", "is not a list of modules"),
        (json.dumps(listed), "'../1_Pooling' is not the name of a folder in this folder"),
    ):  # fmt: skip
        modules.write_text(text)
        assert words in said(drift(folder))
    listed[1]["path"] = "2_Pooling"
    modules.write_text(json.dumps(listed))
    assert "2_Pooling/config.json: No such file or directory" in said(drift(folder))
    (folder / "model" / "2_Pooling").symlink_to(tmp_path)
    assert "2_Pooling is a link out of its folder" in said(drift(folder))


def test_model_of_another_output_has_no_recall_and_no_notice(tmp_path: Path) -> None:
    report = de.open().drift()
    assert report.output.recall_at_10 is None
    assert not any("recall" in notice for notice in report.notices)


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_recall_of_vectors_that_are_not_finite_is_nan_and_meets_no_limit(side: str, tmp_path: Path) -> None:
    vectors = {
        each: torch.randn(20, 8, generator=torch.Generator().manual_seed(0)) for each in ("reference", "candidate")
    }
    vectors[side][3, 2] = torch.inf
    assert neighbors.recall(**vectors).isnan().all()


def test_duplicates_of_an_input_are_equally_near() -> None:
    distinct = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    vectors = distinct.repeat(
        4, 1
    )  # whichever three duplicates come first, and whichever of the next are among the ten
    noise = 1e-8 * torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    assert bool((neighbors.recall(vectors, vectors + noise) == 1).all())


def test_inputs_in_another_order_have_the_same_recall() -> None:
    some = torch.Generator().manual_seed(0)
    reference = torch.randn(600, 16, generator=some)
    candidate = reference + 0.3 * torch.randn(600, 16, generator=some)
    order = torch.randperm(600, generator=some)
    shares = neighbors.recall(reference, candidate)
    assert 0.3 < float(shares.mean()) < 0.9
    assert torch.equal(neighbors.recall(reference[order], candidate[order]), shares[order])
    assert float(shares.mean()) == pytest.approx(brute(list(reference), list(candidate))[0], abs=1e-12)


def test_recall_of_random_vectors_is_what_is_said_to_be_by_chance() -> None:
    some = torch.Generator().manual_seed(0)
    share = float(neighbors.recall(torch.randn(400, 64, generator=some), torch.randn(400, 64, generator=some)).mean())
    assert share == pytest.approx(neighbors.by_chance(400), abs=0.01)


def test_only_the_first_inputs_are_compared_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "MOST", 20)
    monkeypatch.setattr("dtype_engine.runtime.measure.embeddings.MOST", 20)
    folder = with_pooling(made("bert", tmp_path), "mean_tokens")
    report = drift(folder, "bfloat16")
    sides = ([rows.mean(0) for rows in hidden("bert", folder, dtype)][:20] for dtype in (torch.float32, torch.bfloat16))
    assert report.output.recall_at_10 == pytest.approx(brute(*sides)[0], abs=1e-12)
    assert "among the first 20 inputs" in said(report)


def test_measurement_that_is_continued_has_the_recall_of_a_whole_one(tmp_path: Path) -> None:
    folder, saved = with_pooling(made("bert", tmp_path), "mean_tokens"), tmp_path / "saved.json"
    whole = drift(folder)
    session = opened(folder)
    session.cast("*", "float8_e4m3fn")
    seen: list[float | None] = []

    def stop(totals: Any) -> None:
        seen.append(totals.partial().output.recall_at_10)
        if len(seen) == 13:
            raise Cancelled

    with pytest.raises(Cancelled):
        session.drift(MeasurementListener(on_sequence=stop), save=saved)
    assert seen == [None] * 13  # it is computed once, at the end
    again = opened(folder)
    again.cast("*", "float8_e4m3fn")
    report = again.drift(save=saved)
    assert report.output == whole.output
    assert report.output.recall_at_10 is not None


@pytest.mark.parametrize("change", ["widths differ", "another width", "half a vector", "no vector"])
def test_saved_vectors_that_somebody_changed_are_refused(change: str, tmp_path: Path) -> None:
    folder, saved = with_pooling(made("bert", tmp_path), "mean_tokens"), tmp_path / "saved.json"

    def stop(totals: Any) -> None:
        if len(totals.numbers) == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        opened(folder).drift(MeasurementListener(on_sequence=stop), save=saved)
    content = json.loads(saved.read_text())
    vectors = [sequence["vectors"] for sequence in content["totals"]["sequences"]]
    for each in vectors[:1] if change == "widths differ" else vectors:
        each["width"] = 33 if change == "half a vector" else 16
        if change == "no vector":
            each.update(reference="", candidate="")
    saved.write_text(json.dumps(content))
    with pytest.raises(UserError, match="saved drift") as refused:
        opened(folder).drift(save=saved)
    assert "remove it or give another file" in str(refused.value)


def test_export_keeps_the_pooling(tmp_path: Path) -> None:
    folder = with_pooling(made("bert", tmp_path), "cls_token")
    session = opened(folder)
    session.cast("*", "bfloat16")
    whole = session.drift().output
    session.export(tmp_path / "exported")
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (folder / "model" / name).read_bytes()
    options = de.Options(tensors=folder / "inputs.safetensors", reference=str(folder / "model"))
    report = de.open(str(tmp_path / "exported"), options=options).drift()
    assert "first token (1_Pooling/config.json)" in said(report)
    assert report.output.recall_at_10 == whole.recall_at_10


def test_drift_and_sweep_show_the_recall_and_limits_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_pooling(made("bert", tmp_path), "mean_tokens")
    given = (str(folder / "model"), "--inputs", str(folder / "inputs.safetensors"))
    cast = ("drift", *given, "--cast", "*=bf16")
    assert run(cli, "dtype-engine", [*cast, "--min", "recall_at_10=50%"]) == 0
    out = capsys.readouterr().out
    assert "\nrecall@10  9" in out
    assert "of each input's 10 nearest others\n" in out
    assert "pass       recall@10 9" in out
    assert run(cli, "dtype-engine", [*cast, "--min", "recall_at_10=100%"]) == 1
    assert "under the limit, 100 %" in capsys.readouterr().out
    output = answer(capsys, *cast, "--json")["output"]
    assert 0.8 < output["recall_at_10"] < 1
    assert output["recall_at_10_se"] > 0
    (tmp_path / "half").write_text('version: 1\nrules:\n  - {pattern: "*", dtype: bf16}\n')
    assert run(cli, "dtype-engine", ["sweep", given[0], str(tmp_path / "half"), *given[1:]]) == 0
    table = capsys.readouterr().out.splitlines()
    (head,) = (line for line in table if "recall@10" in line)
    (half,) = (line for line in table if "half" in line and "%" in line)
    assert half[: len(head)].rstrip().endswith(f"{100 * output['recall_at_10']:.2f} %")


def test_search_takes_a_limit_on_the_recall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_pooling(made("bert", tmp_path), "mean_tokens")
    checkpoint_folders.tokenizer().save_pretrained(folder / "model")
    letters = np.random.default_rng(0).choice(list(checkpoint_folders.LETTERS), (2, 24, 6))
    for name, texts in zip(("inputs", "held_out"), letters, strict=True):
        lines = (json.dumps({"text": " ".join(words)}) for words in texts)
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    found = answer(
        capsys, "search", str(folder / "model"), "--text", str(folder / "inputs.jsonl"), "--held-out",
        str(folder / "held_out.jsonl"), "--verify", "3", "--dtypes", "fp8,bf16", "--draws", "1", "--min",
        "recall_at_10=95%", "--json",
    )  # fmt: skip
    recalls = {each["planned_bytes"]: each["output"]["recall_at_10"] for each in found["candidates"]}
    assert found["output"]["recall_at_10"] >= 0.95
    assert found["planned_bytes"] == min(size for size, recall in recalls.items() if recall >= 0.95)
