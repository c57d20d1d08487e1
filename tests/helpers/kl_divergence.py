"""An independent hand: the statistics of `llama-perplexity --kl-divergence`, from transformers, numpy and scipy alone.

    python tests/helpers/kl_divergence.py MODEL_FOLDER TEXT_FILE DTYPE [--logits FILE.npz]

Runs the model in float32 and in DTYPE as `from_pretrained(dtype=...)` loads it, over the text cut into sequences of at most
512 tokens, and prints one JSON object. `--logits` also saves what the figures were made from. Nothing of dtype_engine is used.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
from scipy import special, stats

PERCENTILES = {"p999": 99.9, "p99": 99, "p95": 95, "p90": 90, "p10": 10, "p5": 5, "p1": 1, "p01": 0.1}


def logits_of(folder: Path, text: str, dtype: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logits [positions, vocabulary] and token ids [positions] of every sequence."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    ids = tokenizer(text)["input_ids"]
    longest = min(512, model.config.max_position_embeddings)
    sequences = [ids[start : start + longest] for start in range(0, len(ids), longest)]
    found = []
    with torch.no_grad():
        for sequence in sequences:
            logits = model(torch.tensor([sequence]), use_cache=False).logits[0]
            found.append(logits.double().numpy())
    return found, [np.array(sequence) for sequence in sequences]


def statistics(reference: list[np.ndarray], candidate: list[np.ndarray], tokens: list[np.ndarray]) -> dict[str, float]:
    """All of llama.cpp's figures, by the names of `drift --json`."""
    kl, same, log_p, log_q = [], [], [], []
    for r, c, ids in zip(reference, candidate, tokens, strict=True):
        p, q = special.log_softmax(r, -1), special.log_softmax(c, -1)
        kl.append(special.rel_entr(np.exp(p), np.exp(q)).sum(-1))
        same.append(r.argmax(-1) == c.argmax(-1))
        rows = np.arange(len(ids) - 1)
        log_p.append(p[rows, ids[1:]])
        log_q.append(q[rows, ids[1:]])
    kls, tops = np.concatenate(kl), np.concatenate(same)
    nll, nll_q = -np.concatenate(log_p), -np.concatenate(log_q)
    dp = np.exp(-nll_q) - np.exp(-nll)
    n = len(nll)
    ppl, ppl_q = math.exp(nll.mean()), math.exp(nll_q.mean())
    ppl_se, ppl_q_se = ppl * stats.sem(nll), ppl_q * stats.sem(nll_q)
    correlation = stats.pearsonr(nll, nll_q).statistic
    top = tops.mean()
    rms = math.sqrt((dp**2).mean())
    figures = {
        "positions": len(kls), "scored_tokens": n,
        "perplexity_candidate": ppl_q, "perplexity_candidate_se": ppl_q_se,
        "perplexity_reference": ppl, "perplexity_reference_se": ppl_se,
        "perplexity_correlation": correlation,
        "log_ratio": nll_q.mean() - nll.mean(), "log_ratio_se": stats.sem(nll_q - nll),
        "perplexity_ratio": ppl_q / ppl, "perplexity_ratio_se": ppl_q / ppl * stats.sem(nll_q - nll),
        "perplexity_difference": ppl_q - ppl,
        "perplexity_difference_se": math.sqrt(ppl_q_se**2 + ppl_se**2 - 2 * correlation * ppl_q_se * ppl_se),
        "kl_mean": kls.mean(), "kl_mean_se": stats.sem(kls),
        "kl_max": kls.max(), "kl_median": np.median(kls), "kl_min": kls.min(),
        "dp_mean": dp.mean(), "dp_mean_se": stats.sem(dp),
        "dp_max": dp.max(), "dp_median": np.median(dp), "dp_min": dp.min(),
        "dp_rms": rms, "dp_rms_se": stats.sem(dp**2) / (2 * rms),
        "top1_agreement": top, "top1_agreement_se": math.sqrt(top * (1 - top) / (len(tops) - 1)),
    }  # fmt: skip
    for name, q in PERCENTILES.items():
        figures[f"kl_{name}"] = np.percentile(kls, q)
    for name, q in {**PERCENTILES, "p75": 75, "p25": 25}.items():
        figures[f"dp_{name}"] = np.percentile(dp, q)
    return {name: float(value) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("--logits", type=Path)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    reference, tokens = logits_of(options.folder, text, "float32")
    candidate, _ = logits_of(options.folder, text, options.dtype)
    if options.logits:
        np.savez(
            options.logits,
            reference=np.concatenate(reference),
            candidate=np.concatenate(candidate),
            tokens=np.concatenate(tokens),
        )
    print(json.dumps(statistics(reference, candidate, tokens), indent=2))


if __name__ == "__main__":
    main()
