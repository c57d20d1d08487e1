"""Measures how well a model finds the right documents for queries: an embedding model among all documents of a file, and a
reranker among the documents of each query.

A line of the file is an object with `query`, `positive` and, if there are any, `negative`: a text or a list of texts, as the
reranking tasks of MTEB and sentence-transformers have them. With rank 1 for the best document, and R the positive ones:

    recall@10    |R ∩ top 10| / |R|, for embedding models
    ndcg@10      Σ 1 / log2(1 + rank) over R ∩ top 10, divided by the largest possible sum
    mrr@10       1 / rank of the first of R in the top 10, else 0

Each is the mean over queries. Of documents with equal scores, those that are not positive come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dtype_engine.checkpoint.embedding_modules import longest_text, prompts
from dtype_engine.core.errors import UserError
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.text import printable
from dtype_engine.runtime.inputs import Batch, Inputs, tokenizer_of
from dtype_engine.runtime.inputs.limited import try_tokenizer
from dtype_engine.runtime.inputs.preprocessing import no_tokenizer, parameters, running
from dtype_engine.runtime.inputs.text import (
    TOKENS_PER_SEQUENCE,
    TextSample,
    json_lines,
    keeps_cache,
    position_count,
    refuse_long,
)
from dtype_engine.runtime.measure.embeddings import Embedding
from dtype_engine.runtime.measure.paired import Examples
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.outputs import main_output

Vectors = np.ndarray[Any, np.dtype[np.float64]]
_TOP = 10
_OF_DOCUMENTS = ("document", "passage", "corpus")
"""The names of the prompt for documents that sentence-transformers looks for, in this order."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query, and the documents of its line in the file."""

    text: str
    positive: tuple[str, ...]
    negative: tuple[str, ...]
    where: str


def queries_function(path: Path, limits: InputLimits) -> Callable[[LiveModel, Inputs], Mapping[str, Examples]]:
    """Return a function that measures a live model on the queries in a file, and returns its metrics by name, such as
    `pairs/ndcg@10` for `pairs.jsonl`. Raises UserError for an invalid file.
    """
    queries = read_queries(path, limits)

    def run(model: LiveModel, _: Inputs) -> Mapping[str, Examples]:
        reader = _Reader.of(model, queries, limits)
        embedding = reader.embedding(queries[0].text)
        rows = _searched(reader, embedding, queries) if embedding is not None else _reranked(reader, queries)
        return {f"{path.stem}/{name}": Examples([row[name] for row in rows]) for name in rows[0]}

    return run


def read_queries(path: Path, limits: InputLimits) -> list[Query]:
    """Return the queries in a JSON Lines file. Raises UserError for a file or a line that can't be used."""
    queries = []
    for where, entry in json_lines(path, limits):
        entry = entry if isinstance(entry, dict) else {}
        query, positive, negative = (_texts(entry.get(key, [])) for key in ("query", "positive", "negative"))
        if query is None or positive is None or negative is None or len(query) != 1 or not positive:
            raise UserError(
                f"{where}: needs a text in 'query', one or more in 'positive' and, if there are any, more in 'negative'"
            )
        if both := set(positive) & set(negative):
            raise UserError(f"{where}: {printable(min(both), 60)!r} is in 'positive' and in 'negative'")
        queries.append(Query(query[0], positive, negative, where))
    return queries


def _texts(value: Any) -> tuple[str, ...] | None:
    """Return a text, or each text of a list once; None if the value is neither, or a text is empty."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(each, str) and each.strip() for each in listed):
        return None
    return tuple(dict.fromkeys(listed))


def ranked(scores: Sequence[float], positive: Sequence[bool]) -> dict[str, float]:
    """Return the metrics of one query, by name. They are NaN if a score is. scores: of each document, the best is the largest.
    positive: whether each document is a positive one.
    """
    if any(map(math.isnan, scores)):
        return dict.fromkeys(("recall@10", "ndcg@10", "mrr@10"), math.nan)
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], positive[at]))
    ranks = [rank for rank, at in enumerate(order[:_TOP], 1) if positive[at]]
    count = sum(positive)
    best = sum(1 / math.log2(1 + rank) for rank in range(1, min(count, _TOP) + 1))
    return {
        "recall@10": len(ranks) / count,
        "ndcg@10": sum(1 / math.log2(1 + rank) for rank in ranks) / best,
        "mrr@10": 1 / ranks[0] if ranks else 0.0,
    }


@dataclass(frozen=True, slots=True)
class _Reader:
    """Runs a model on one text, or on a pair of texts."""

    model: LiveModel
    tokenizer: Any
    longest: int
    """The number of tokens to which a text is cut."""
    prompts: Mapping[str, str]

    @classmethod
    def of(cls, model: LiveModel, queries: Sequence[Query], limits: InputLimits) -> _Reader:
        tokenizer = tokenizer_of(model)
        if tokenizer is None:
            raise UserError(f"queries need a tokenizer, and {model.title} {no_tokenizer(model)}")
        texts = [(text, each.where) for each in queries for text in (each.text, *each.positive, *each.negative)]
        refuse_long([TextSample(text, where=where) for text, where in texts], [text for text, _ in texts], limits)
        try_tokenizer(model.title, tokenizer, [text for text, _ in texts], limits)
        longest = min(position_count(model), TOKENS_PER_SEQUENCE)
        if model.folder is None:
            return cls(model, tokenizer, longest, {})
        return cls(model, tokenizer, min(longest, longest_text(model.folder) or longest), prompts(model.folder))

    def output(self, *texts: str) -> tuple[str, torch.Tensor, Batch]:
        """Return (name of the main output, the output, the inputs) for a text or a pair of texts."""
        with running(f"the tokenizer of {self.model.title} can't encode {printable(texts[-1], 40)!r}"):
            ids = self.tokenizer(*texts, truncation=True, max_length=self.longest, return_tensors="pt")
        taken = parameters(self.model.module)
        kwargs: dict[str, Any] = {name: value.to(self.model.device) for name, value in ids.items() if name in taken}
        batch = Batch(kwargs=kwargs | ({"use_cache": False} if keeps_cache(self.model) else {}))
        return *main_output(batch.run(self.model.module)), batch

    def embedding(self, text: str) -> Embedding | None:
        """Return how the model makes vectors, or None if it is a reranker, which gives a pair of texts one score. Raises UserError
        if it is neither. text: one of the texts.
        """
        name, output, batch = self.output(text)
        if name == "logits" and output.shape == (1, 1):
            return None
        embedding = Embedding.of(self.model, name, output.ndim, batch)
        if embedding is None or embedding.why_not:
            why = embedding.why_not if embedding is not None else f"({name}, {tuple(output.shape)})"
            raise UserError(
                f"queries need a model with one vector for each text, or with one score for each pair of texts; the output of "
                f"{self.model.title} is neither: {why}"
            )
        return embedding

    def vectors(self, embedding: Embedding, texts: Sequence[str], prompt: str) -> Vectors:
        """Return the vectors of texts, divided by their norms, float64 [texts, width]. prompt: goes before each text."""
        # NumPy does not follow torch's autocast, under which the candidate may run.
        rows = [embedding.vectors(self.output(prompt + text)[1], None).numpy()[0] for text in texts]
        vectors: Vectors = np.stack(rows).astype(np.float64)
        norms: Vectors = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return np.divide(vectors, norms)


def _searched(reader: _Reader, embedding: Embedding, queries: Sequence[Query]) -> list[dict[str, float]]:
    """Return the metrics of each query, by its cosine with all documents of the file."""
    documents = list(dict.fromkeys(text for query in queries for text in (*query.positive, *query.negative)))
    prompt = next((reader.prompts[name] for name in _OF_DOCUMENTS if name in reader.prompts), "")
    of_documents = reader.vectors(embedding, documents, prompt)
    of_queries = reader.vectors(embedding, [query.text for query in queries], reader.prompts.get("query", ""))
    cosines = of_queries @ of_documents.T
    return [
        ranked(row.tolist(), [document in set(query.positive) for document in documents])
        for row, query in zip(cosines, queries, strict=True)
    ]


def _reranked(reader: _Reader, queries: Sequence[Query]) -> list[dict[str, float]]:
    """Return the metrics of each query, by the scores of the documents of its line."""
    rows = []
    for query in queries:
        documents = (*query.positive, *query.negative)
        if not query.negative:
            raise UserError(
                f"{query.where}: a reranker needs documents in 'negative', too: all in 'positive' are right"
            )
        scores = [float(reader.output(query.text, document)[1]) for document in documents]
        metrics = ranked(scores, [document in query.positive for document in documents])
        del metrics["recall@10"]  # with ten documents or fewer it is 1, whatever the model does
        rows.append(metrics)
    return rows
