"""Train the built-in demo model: a small Llama that has read the Python standard library.

    python engine/train_demo.py --out engine/dtype_engine/demo [--device cuda] [--steps 6000]

Text: the `.py` files of the running interpreter's standard library (Python Software Foundation
License), tests and third-party packages left out. One file in twenty is held out, chosen by a hash of
its name, so the loss that is printed at the end is on text that neither the tokenizer nor the model has seen.
Writes `config.json`, `generation_config.json`, `model.safetensors` (float32), `tokenizer.json`,
`tokenizer_config.json` and `training.json` (what was read, for how long, and the losses reached).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024
SEQUENCE = 256
LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3", "ensurepip"}
END_OF_TEXT = "<|endoftext|>"


def read_library(root: Path) -> tuple[list[str], list[str]]:
    """Read the standard library's source files. Returns (training texts, held-out texts), one string per file."""
    training: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT & set(relative.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) < 200:
            continue
        digest = hashlib.sha256(relative.as_posix().encode()).digest()
        (held_out if digest[0] % 20 == 0 else training).append(text)
    return training, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def as_tokens(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """Return all texts as token ids in one int64 tensor [tokens], with an end-of-text token after each text."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += encoding.ids
        ids.append(end)
    return torch.tensor(ids)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: torch.Tensor, device: str) -> float:
    """Return the mean cross-entropy in nats per token over consecutive windows of `tokens`."""
    total, count = 0.0, 0
    for start in range(0, len(tokens) - SEQUENCE, SEQUENCE * 64):
        chunk = tokens[start : start + SEQUENCE * 64]
        batch = chunk[: len(chunk) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE).to(device)
        if not len(batch):
            continue
        loss = model(input_ids=batch, labels=batch).loss
        total += loss.item() * len(batch)
        count += len(batch)
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=16, help=f"sequences of {SEQUENCE} tokens a step")
    parser.add_argument("--minutes", type=float, default=45.0, help="end after so long, the schedule fitted to it")
    options = parser.parse_args()

    torch.manual_seed(0)
    training_texts, held_out_texts = read_library(options.source)
    tokenizer = train_tokenizer(training_texts)
    training, held_out = as_tokens(tokenizer, training_texts), as_tokens(tokenizer, held_out_texts)
    print(
        f"{len(training_texts)} files, {len(training):,} tokens; held out {len(held_out_texts)} files, {len(held_out):,} tokens"
    )

    end = tokenizer.token_to_id(END_OF_TEXT)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(options.device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1.0, betas=(0.9, 0.98)
    )
    on_device = training.to(options.device)
    started = time.monotonic()
    progress = 0.0
    steps_done = 0
    tail: list[float] = []
    while progress < 1.0:
        elapsed = (time.monotonic() - started) / (options.minutes * 60)
        progress = max(steps_done / options.steps, elapsed)
        warm_up = min(1.0, (progress + 1e-4) / 0.03)
        rate = 4e-3 * warm_up * (0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))) + 1e-5
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(0, len(on_device) - SEQUENCE, (options.batch, 1), device=options.device)
        batch = on_device[starts + torch.arange(SEQUENCE, device=options.device)]
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps_done += 1
        if steps_done % 200 == 0:
            tail = [*tail, loss.item()][-5:]
            print(f"step {steps_done}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)

    model.eval()
    loss = held_out_loss(model, held_out, options.device)
    print(f"held out: {loss:.4f} nats per token, perplexity {math.exp(loss):.2f}")
    characters = sum(len(text) for text in held_out_texts)
    options.out.mkdir(parents=True, exist_ok=True)
    model.cpu().save_pretrained(options.out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=1024,
    ).save_pretrained(options.out)
    (options.out / "training.json").write_text(
        json.dumps(
            {
                "text": f"standard library of CPython {platform.python_version()}, .py files without tests",
                "license": "Python Software Foundation License",
                "files": len(training_texts), "tokens": len(training),
                "held_out_files": len(held_out_texts), "held_out_tokens": len(held_out),
                "steps": steps_done, "tokens_seen": steps_done * options.batch * SEQUENCE,
                "training_loss_nats_per_token": round(sum(tail) / len(tail), 4) if tail else None,
                "held_out_loss_nats_per_token": round(loss, 4),
                "held_out_perplexity": round(math.exp(loss), 3),
                "held_out_bits_per_character": round(loss * len(held_out) / math.log(2) / characters, 4),
            },
            indent=2,
        )
        + "\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
