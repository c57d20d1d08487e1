"""Mixtures of experts for the scan: a small Mixtral, trained for a minute on Python's standard library, and three of the zoo
whose routers are decided.

Right after its initialisation a router's scores are nearly tied, which would be unfair; after some hundred steps they are as
far apart as in a trained model (standard deviation 0.4 to 0.7), and tokens still change experts: in the Mixtral 9 tenths of the
drift of most weights are tokens sent elsewhere. Which these are is chance, of 32 768 tokens some 10 in bfloat16 and int8, 2 in
float16, 200 in float8_e5m2, so the truth itself is another on other text, and it is text that the scan needs to agree with it.
Spearman of the truth on one half of the text and on the other, and of the scan and the truth on all of it:

    tokens   all dtypes     bfloat16       float16        e4m3fn         e5m2           int8           int8@tensor
     1 024   0.804  0.866   0.352  0.593   0.820  0.841   0.839  0.925   0.880  0.952   0.584  0.633   0.409  0.487
     4 096   0.880  0.933   0.601  0.799   0.868  0.688   0.849  0.961   0.933  0.967   0.611  0.813   0.645  0.790
    16 384   0.913  0.960   0.733  0.880   0.430  0.494   0.977  0.986   0.991  0.993   0.831  0.912   0.893  0.942
    32 768   0.939  0.979   0.738  0.945   0.634  0.668   0.972  0.991   0.996  0.996   0.871  0.953   0.928  0.963

(4 draws for each sequence of 128 tokens.)
"""

from __future__ import annotations

from typing import Any

from .training import TOKENS, train

STEPS, SEQUENCES = 300, 128
AT_ONCE = 8
DECIDED = ("mixtral", "qwen3_moe", "deepseek_v3")


def trained_session() -> Any:
    """A session on the Mixtral, with `SEQUENCES` of `TOKENS` tokens of held-out text. The demo's tokenizer."""
    import torch
    import transformers

    import dtype_engine as de

    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=512,
            router_aux_loss_coef=0.01, output_router_logits=True, tie_word_embeddings=False, sliding_window=None,
        )
    )  # fmt: skip
    others = train(model, STEPS)
    model.config.output_router_logits = False
    apart = len(others) // SEQUENCES
    return de.open(model, inputs=[{"input_ids": others[None, at * apart :][:, :TOKENS]} for at in range(SEQUENCES)])


def halves(session: Any) -> list[Any]:
    """The same model on every other sequence, and on those between; some sequences at once, which is quicker."""
    import torch

    import dtype_engine as de
    from dtype_engine import Recipe

    session.apply(Recipe())
    ids = torch.cat([batch.kwargs["input_ids"] for batch in session.inputs.batches])
    return [
        de.open(session.model.module, inputs=[{"input_ids": rows} for rows in ids[start::2].split(AT_ONCE)])
        for start in (0, 1)
    ]


def decided_session(name: str) -> Any:
    """A session on a model of the zoo whose routers are decided, with 16 sequences of 64 tokens."""
    from tests.helpers import architectures

    import dtype_engine as de

    module, ids, margin = architectures.decided(name, 16, 64)
    print(f"        {name}: no token's k-th score is nearer than {margin:.3f} to the next", flush=True)
    return de.open(module, inputs=[{"input_ids": row[None]} for row in ids])
