"""Documents that models find for queries, against plain transformers and numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engine.runtime.measure.test_embeddings import SMALL, with_pooling
from tests.engine.runtime.model.test_same_plan import answer, refusal
from tests.helpers import checkpoint_folders
from tests.helpers.measured_on import placed

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import UserError
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.runtime.measure.queries_metric import ranked, read_queries

CONFIG = SMALL | {"initializer_range": 0.4}
MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**CONFIG)),
    "qwen": lambda: transformers.Qwen2Model(transformers.Qwen2Config(**CONFIG, num_key_value_heads=2)),
    "reranker": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**CONFIG, num_labels=1)),
}
Rows = list[dict[str, Any]]


def made(name: str, folder: Path) -> tuple[Path, Path, Rows]:
    """(folder of the model, file of queries, its lines). The documents share letters with their query."""
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(folder / "model")
    checkpoint_folders.tokenizer().save_pretrained(folder / "model")
    some, letters = np.random.default_rng(0), list(checkpoint_folders.LETTERS)
    rows: Rows = []
    for number in range(12):
        query = some.choice(letters, 8)
        near = [" ".join(some.permutation([*query[: 6 - at], *some.choice(letters, 1 + at)])) for at in range(2)]
        far = [" ".join(some.choice(letters, some.integers(4, 9))) for _ in range(12)]
        positive: Any = near[0] if number % 3 == 0 else near
        rows.append({"query": " ".join(query), "positive": positive, "negative": far})
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return folder / "model", file, rows


def plain(name: str, folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    model = placed(type(MODELS[name]()).from_pretrained(folder, dtype=torch.float32).eval())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def output(model: Any, tokenizer: Any, *texts: str, **how: Any) -> Any:
    with torch.no_grad():
        return model(**{key: placed(each) for key, each in tokenizer(*texts, return_tensors="pt", **how).items()})


def by_numpy(scores: Sequence[float], relevant: Sequence[bool]) -> tuple[float, float, float]:
    """(recall@10, nDCG@10, MRR@10)."""
    gains = np.array(relevant, dtype=float)[np.argsort(-np.array(scores), kind="stable")][:10]
    discounts = np.log2(np.arange(2, 12))[: len(gains)]
    ideal = np.sort(np.array(relevant, dtype=float))[::-1][:10]
    first = np.flatnonzero(gains)
    return (
        float(gains.sum() / sum(relevant)),
        float((gains / discounts).sum() / (ideal / np.log2(np.arange(2, 12))[: len(ideal)]).sum()),
        float(1 / (first[0] + 1)) if len(first) else 0.0,
    )


def positives(row: dict[str, Any]) -> list[str]:
    return [row["positive"]] if isinstance(row["positive"], str) else row["positive"]


def changes(folder: Path, file: Path, dtype: str = "bfloat16") -> dict[str, Any]:
    session = de.open(str(folder), options=de.Options(metrics=(f"queries:{file}",), prompts=("a b c",)))
    session.cast("*", dtype)
    return {change.name: change for change in session.drift().metrics}


def paired(sides: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    before, after = (np.array(side) for side in sides)
    return before.mean(), after.mean(), (after - before).std(ddof=1) / math.sqrt(len(before))


@pytest.mark.parametrize(("name", "pooling"), [("bert", "mean_tokens"), ("qwen", "lasttoken")])
def test_documents_that_an_embedding_model_finds_equal_those_of_plain_transformers(
    name: str, pooling: str, tmp_path: Path
) -> None:
    folder, file, rows = made(name, tmp_path)
    with_pooling(tmp_path, pooling)
    prompts = {"prompts": {"query": "q ", "passage": "d d "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    corpus = list(dict.fromkeys(text for row in rows for text in [*positives(row), *row["negative"]]))
    sides = []
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = plain(name, folder, dtype)

        def vector(text: str, model: Any = model, tokenizer: Any = tokenizer) -> np.ndarray[Any, Any]:
            states = output(model, tokenizer, text).last_hidden_state[0].float()
            pooled = (states.mean(0) if pooling == "mean_tokens" else states[-1]).double().cpu().numpy()
            return pooled / np.linalg.norm(pooled)

        documents = np.stack([vector(f"d d {text}") for text in corpus])
        scores = [documents @ vector(f"q {row['query']}") for row in rows]
        sides.append(
            [by_numpy(of, [text in positives(row) for text in corpus]) for of, row in zip(scores, rows, strict=True)]
        )
    measured = changes(folder, file)
    assert list(measured) == ["pairs/recall@10", "pairs/ndcg@10", "pairs/mrr@10"]
    for at, change in enumerate(measured.values()):
        before, after, error = paired([[row[at] for row in side] for side in sides])
        assert change.reference == pytest.approx(before, abs=1e-12)
        assert change.candidate == pytest.approx(after, abs=1e-12)
        assert change.error == pytest.approx(error, abs=1e-12)
        assert change.examples == 12
    assert 0 < measured["pairs/recall@10"].reference < 1


def test_ranks_of_a_reranker_equal_those_of_plain_transformers(tmp_path: Path) -> None:
    folder, file, rows = made("reranker", tmp_path)
    sides = []
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = plain("reranker", folder, dtype)
        side = []
        for row in rows:
            documents = [*row["negative"], *positives(row)]
            scores = [float(output(model, tokenizer, row["query"], each).logits) for each in documents]
            side.append(by_numpy(scores, [each in positives(row) for each in documents]))
        sides.append(side)
    measured = changes(folder, file)
    assert list(measured) == ["pairs/ndcg@10", "pairs/mrr@10"]
    for at, change in enumerate(measured.values(), start=1):
        before, after, error = paired([[row[at] for row in side] for side in sides])
        assert change.reference == pytest.approx(before, abs=1e-12)
        assert change.candidate == pytest.approx(after, abs=1e-12)
        assert change.error == pytest.approx(error, abs=1e-12)


def test_texts_are_cut_to_the_length_that_the_folder_says(tmp_path: Path) -> None:
    folder, file, rows = made("reranker", tmp_path)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    model, tokenizer = plain("reranker", folder, torch.float32)
    side = []
    for row in rows:
        documents = [*row["negative"], *positives(row)]
        cut = {"truncation": True, "max_length": 12}
        scores = [float(output(model, tokenizer, row["query"], each, **cut).logits) for each in documents]
        side.append(by_numpy(scores, [each in positives(row) for each in documents])[1])
    assert changes(folder, file)["pairs/ndcg@10"].reference == pytest.approx(np.mean(side), abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "positive", "expected"),
    [
        ([3, 2, 1], [True, False, False], (1, 1, 1)),
        ([1, 2, 3], [True, False, False], (1, 0.5, 1 / 3)),  # 1 / log2(4)
        ([1, 1, 1], [True, False, False], (1, 0.5, 1 / 3)),  # equal scores: the positive one comes last
        ([2, 1, 3], [True, True, False], (1, (1 / math.log2(3) + 0.5) / (1 + 1 / math.log2(3)), 0.5)),
        ([*range(11)], [True, *[False] * 10], (0, 0, 0)),
        ([*range(12)], [True] * 12, (10 / 12, 1, 1)),
        ([1, math.nan], [True, False], (math.nan,) * 3),
    ],
)
def test_metrics_of_one_query(scores: list[float], positive: list[bool], expected: tuple[float, ...]) -> None:
    assert tuple(ranked(scores, positive).values()) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n\n", "is empty"),
        ("\n\n{", "line 3: no valid JSON"),
        ("[1]", "line 1: needs a text in 'query'"),
        ('{"query": "a"}', "line 1: needs a text in 'query'"),
        ('{"query": "", "positive": "b"}', "line 1: needs a text in 'query'"),
        ('{"query": ["a", "b"], "positive": "b"}', "line 1: needs a text in 'query'"),
        ('{"query": "a", "positive": [1]}', "line 1: needs a text in 'query'"),
        ('{"query": "a", "positive": "b", "negative": null}', "line 1: needs a text in 'query'"),
        ('{"query": "a", "positive": "b", "negative": ["b"]}', "line 1: 'b' is in 'positive' and in 'negative'"),
    ],
)
def test_file_that_has_no_queries_is_refused_by_its_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(text)
    with pytest.raises(UserError, match=words):
        read_queries(tmp_path / "pairs.jsonl", InputLimits())


def test_models_and_files_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file, _ = made("reranker", tmp_path)
    command = ("drift", str(folder), "--cast", "*=bf16", "--prompt", "a b", "--eval")
    file.write_text('{"query": "a", "positive": "b"}')
    assert "line 1: a reranker needs documents in 'negative', too" in refusal(capsys, *command, f"queries:{file}")
    assert "No such file" in refusal(capsys, *command, f"queries:{tmp_path / 'other.jsonl'}")
    assert "write lm-eval:TASK" in refusal(capsys, *command, "queries:accuracy")
    error = refusal(capsys, "drift", "demo", "--cast", "*=bf16", "--sequences", "1", "--eval", f"queries:{file}")
    assert "queries need a model with one vector for each text, or with one score for each pair of texts" in error


def test_limits_take_the_metrics_of_queries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file, _ = made("bert", tmp_path)
    command = ("drift", str(folder), "--cast", "*=fp8", "--prompt", "a b", "--eval", f"queries:{file}")
    assert run(cli, "dtype-engine", [*command, "--min", "pairs/ndcg@10=-100%"]) == 0
    out = capsys.readouterr().out
    assert "\nmetric     pairs/ndcg@10 0." in out
    assert "\npass       change of pairs/ndcg@10" in out
    assert run(cli, "dtype-engine", [*command, "--min", "pairs/mrr@10=101%"]) == 1
    capsys.readouterr()
    swept = tmp_path / "half"
    swept.write_text('version: 1\nrules:\n  - {pattern: "*", dtype: bf16}\n')
    rows = answer(capsys, "sweep", str(folder), str(swept), "--prompt", "a b", "--eval", f"queries:{file}", "--json")
    assert {each["name"] for each in rows["rows"][-1]["metrics"]} == {
        f"pairs/{name}" for name in ("recall@10", "ndcg@10", "mrr@10")
    }
