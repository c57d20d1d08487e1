"""Small language models that are trained for a minute on Python's standard library."""

from __future__ import annotations

import random
import shutil
import sysconfig
from pathlib import Path
from typing import Any

BATCH, TOKENS = 16, 128


def train(model: Any, steps: int) -> Any:
    """Train a model with the demo's vocabulary of 1,024 in float32. Returns held-out text, [tokens] int64."""
    import torch
    from tokenizers import Tokenizer

    from dtype_engine.checkpoint.source import DEMO
    from train_demo import as_tokens, read_library

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    training, held_out = read_library(Path(sysconfig.get_paths()["stdlib"]))
    random.Random(0).shuffle(training)
    tokens = as_tokens(tokenizer, training[:150])
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - TOKENS, (BATCH,), generator=generator).tolist()
        ids = torch.stack([tokens[start : start + TOKENS] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    return as_tokens(tokenizer, held_out)


def save_with_tokenizer(model: Any, folder: Path) -> Path:
    """The model as a checkpoint, with the demo's tokenizer beside it."""
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Copy the demo's tokenizer."""
    from dtype_engine.checkpoint.source import DEMO

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
