"""A mixture of experts that has learned something: a small Mixtral, trained for a minute on Python's standard library.

Right after its initialisation a router's scores are nearly tied, which would be unfair; after some hundred steps they are as
far apart as in a trained model (standard deviation 0.4 to 0.7), and tokens still change experts.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from pathlib import Path
from typing import Any

STEPS, BATCH, TOKENS, SEQUENCES = 300, 16, 128, 8


def trained_session() -> Any:
    """A session on it, with `SEQUENCES` of `TOKENS` tokens of held-out text. The demo's tokenizer."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    import dtype_engine as de

    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    from train_demo import as_tokens, read_library

    tokenizer = Tokenizer.from_file(str(Path(de.__file__).parent / "demo" / "tokenizer.json"))
    training, held_out = read_library(Path(sysconfig.get_paths()["stdlib"]))
    random.Random(0).shuffle(training)
    tokens, others = as_tokens(tokenizer, training[:150]), as_tokens(tokenizer, held_out[:6])
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=512,
            router_aux_loss_coef=0.01, output_router_logits=True, tie_word_embeddings=False, sliding_window=None,
        )
    ).train()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(0, len(tokens) - TOKENS, (BATCH,), generator=generator).tolist()
        ids = torch.stack([tokens[start : start + TOKENS] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"        trained a mixture of experts for {STEPS} steps to {loss.item():.2f} nats per token", flush=True)
    model.config.output_router_logits = False
    apart = len(others) // SEQUENCES
    return de.open(
        model.eval(), inputs=[{"input_ids": others[None, at * apart :][:, :TOKENS]} for at in range(SEQUENCES)]
    )


def halves(session: Any) -> list[Any]:
    """The same model on the first half of the sequences, and on the second."""
    import dtype_engine as de
    from dtype_engine import Recipe

    session.apply(Recipe())
    batches = [batch.kwargs for batch in session.inputs.batches]
    middle = len(batches) // 2
    return [de.open(session.model.module, inputs=part) for part in (batches[:middle], batches[middle:])]
