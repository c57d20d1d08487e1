"""Padding does not count: figures against plain torch over the positions that the masks keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dtype_engine as de
from dtype_engine.results.drift import DriftReport
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.passes.kept_positions import AttendedPositions, KeptPositions

ALL = MeasurementListener(all_modules=lambda: True)


def gemma(layers: int = 6) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(23)
    config = Gemma3TextConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
        vocab_size=256, sliding_window=4, pad_token_id=0,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def padded(side: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 256, (2, 16), generator=draw)
    mask = torch.ones(2, 16, dtype=torch.int64)
    where = slice(0, 6) if side == "left" else slice(10, 16)
    ids[1, where], mask[1, where] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def cast(model: Any, dtype: torch.dtype) -> Any:
    """A copy with its parameters in a dtype. Buffers that are in no file, such as rotary frequencies, stay."""
    narrow = copy.deepcopy(model)
    for parameter in narrow.parameters():
        parameter.data = parameter.data.to(dtype)
    return narrow


def outputs_of(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the output of every module that returns a tensor. The key of the logits is ""."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor):
                found[name] = first.detach().double()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    with torch.no_grad():
        found[""] = model(**given).logits.double()
    for handle in handles:
        handle.remove()
    return found


def figures(reference: torch.Tensor, candidate: torch.Tensor, kept: torch.Tensor) -> dict[str, float]:
    r, c = reference[kept], candidate[kept]
    p, q = r.log_softmax(-1), c.log_softmax(-1)
    return {
        "kl_mean": float((p.exp() * (p - q)).sum(-1).mean()),
        "mean_abs": float((c - r).abs().mean()),
        "sqnr_db": float(20 * (r.norm() / (c - r).norm()).log10()),
        "cosine": float(r.flatten() @ c.flatten() / r.norm() / c.norm()),
        "elements": r.numel(),
    }


def check_modules(
    report: DriftReport,
    reference: dict[str, torch.Tensor],
    candidate: dict[str, torch.Tensor],
    kept: dict[str, torch.Tensor],
) -> None:
    """The figures of modules are those over the positions `kept`, which are keyed by name."""
    by_name = {each.name: each.sqnr_db for each in report.modules}
    for name, positions in kept.items():
        expected = figures(reference[name], candidate[name], positions)["sqnr_db"]
        assert by_name[name] == pytest.approx(expected, abs=1e-6), name


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_excluded_from_every_figure(side: str) -> None:
    model, given = gemma(), padded(side)
    kept = given["attention_mask"].bool()
    reference, candidate = outputs_of(model, given), outputs_of(cast(model, torch.float16), given)
    session = de.open(model, inputs=given)
    session.cast("*", "float16")
    report = session.drift(ALL)
    assert (report.output.positions, report.sequences.positions, report.sequences.left_out) == (26, 26, 6)
    assert report.inputs_run.endswith("; 6 padding positions left out")
    for name, value in figures(reference[""], candidate[""], kept).items():
        assert getattr(report.output, name) == pytest.approx(value, rel=1e-6), name
    names = ("model.layers.0.mlp.down_proj", "model.layers.3.self_attn.o_proj", "model.layers.5", "model.norm")
    check_modules(report, reference, candidate, dict.fromkeys(names, kept))


def test_estimated_and_exact_scans_exclude_padding() -> None:
    session = de.open(gemma(1), inputs=padded("right"))
    estimated = session.scan(["float8_e4m3fn"], draws=32).scores()
    exact = session.scan(["float8_e4m3fn"], exact=True).scores()
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        key = name, "float8_e4m3fn"
        assert estimated[key] == pytest.approx(exact[key], rel=0.5), name


def test_token_ids_at_padded_positions_do_not_affect_any_figure(tmp_path: Path) -> None:
    """Compared are the drift, the first cause, and the positions of the floor."""
    given = padded("right")
    other = {**given, "input_ids": torch.where(given["attention_mask"] == 0, 77, given["input_ids"])}
    found = []
    for number, inputs in enumerate((given, other)):
        save_file(inputs, tmp_path / f"{number}.safetensors")
        session = de.open(gemma(2), inputs=inputs)
        session.cast("*", "bfloat16")
        output = session.drift().output
        found.append((output.kl_mean, output.max_abs, session.causes().causes[0].drift, session.floor().positions))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][3] == 26


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(2)
    config = T5Config(
        d_model=32,
        d_ff=64,
        d_kv=16,
        num_heads=2,
        num_layers=2,
        vocab_size=64,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
    return T5ForConditionalGeneration(config).eval()


def test_decoder_positions_are_kept_by_the_decoder_mask() -> None:
    """Both parts have six positions here: the mask of one is not that of the other."""
    draw = torch.Generator().manual_seed(4)
    ids, labels = (torch.randint(2, 64, (2, 6), generator=draw) for _ in range(2))
    mask = torch.ones_like(ids)
    mask[0, 4:], labels[1, 3:] = 0, -100
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    model = t5()
    reference, candidate = outputs_of(model, given), outputs_of(cast(model, torch.bfloat16), given)
    session = de.open(model, inputs=given)
    session.cast("*", "bfloat16")
    report = session.drift(ALL)
    decoder = labels != -100
    assert (report.sequences.positions, report.sequences.left_out) == (9, 3)
    assert report.output.kl_mean == pytest.approx(figures(reference[""], candidate[""], decoder)["kl_mean"], rel=1e-6)
    kept = {
        "encoder.block.1.layer.1.DenseReluDense.wo": mask.bool(),
        "decoder.block.1.layer.2.DenseReluDense.wo": decoder,
        "decoder.block.0.layer.1.EncDecAttention.k": mask.bool(),
        "decoder.block.0.layer.1.EncDecAttention.q": decoder,
        "lm_head": decoder,
    }
    check_modules(report, reference, candidate, kept)


def test_padded_positions_are_left_out_of_distributions_over_positions() -> None:
    from transformers import BertConfig, BertForQuestionAnswering

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForQuestionAnswering(BertConfig(vocab_size=64, **sizes)).eval()
    given = {"input_ids": torch.randint(1, 64, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    given["attention_mask"][1, 5:] = 0
    with torch.no_grad():
        r = model(**given).start_logits.double()
        c = cast(model, torch.bfloat16)(**given).start_logits.double()
    session = de.open(model, inputs=given)
    session.cast("*", "bfloat16")
    report = session.drift()
    rows = [(r[0], c[0]), (r[1, :5], c[1, :5])]
    each = [float((p.softmax(0) * (p.log_softmax(0) - q.log_softmax(0))).sum()) for p, q in rows]
    assert report.output.kl_mean == pytest.approx(sum(each) / 2, rel=1e-6)
    assert report.output.mean_abs == pytest.approx(
        float(torch.cat([(c - r)[0], (c - r)[1, :5]]).abs().mean()), rel=1e-6
    )
    assert (report.output.elements, report.sequences.left_out) == (14, 4)


class Tagger(nn.Module):
    """Makes its mask in its forward, and gives it to torch's attention."""

    def __init__(self, batch_first: bool = True, transposes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(50, 16)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first), 2)
        self.head = nn.Linear(16, 5)
        self.transposes = transposes

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.emb(input_ids)
        x = self.enc(x.transpose(0, 1) if self.transposes else x, src_key_padding_mask=self.padding(input_ids))
        return {"logits": self.head(x.transpose(0, 1) if self.transposes else x)}

    def padding(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        return input_ids == 0 if self.enc.layers[0].self_attn.batch_first or self.transposes else (input_ids == 0).T


class Ignorant(Tagger):
    """Uses no mask."""

    def padding(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        return None


class AddsMinusInfinity(Tagger):
    def padding(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros(input_ids.shape, device=input_ids.device).masked_fill(input_ids == 0, -torch.inf)


class TwoMasks(Tagger):
    """Gives the mask to one of its two layers only."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        first, second = self.enc.layers
        return {"logits": self.head(second(first(self.emb(input_ids), src_key_padding_mask=input_ids == 0)))}


def padded_ids() -> torch.Tensor:
    ids = torch.randint(1, 50, (3, 8), generator=torch.Generator().manual_seed(1))
    ids[1, 5:] = ids[2, 3:] = 0
    return ids


@pytest.mark.parametrize(
    ("make", "ids", "counted"),
    [
        (Tagger, padded_ids(), 16),
        (partial(Tagger, batch_first=False, transposes=True), padded_ids(), 16),
        (partial(Tagger, batch_first=False), padded_ids().T, 16),
        (AddsMinusInfinity, padded_ids(), 16),
        (Ignorant, padded_ids(), 24),
        (TwoMasks, padded_ids(), 24),
        (Tagger, padded_ids().clamp(min=1), 24),
    ],
    ids=["batch first", "transposes", "time first", "-inf", "no mask", "two masks", "no padding"],
)
def test_positions_masked_only_inside_attention_are_left_out(
    make: Callable[[], Tagger], ids: torch.Tensor, counted: int
) -> None:
    model, rounded = make().eval(), make().eval()
    weight = rounded.head.weight.data
    scale = weight.abs().amax(1, keepdim=True) / 127
    rounded.head.weight.data = (weight / scale).round() * scale
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            r, c = (each(ids)["logits"].double() for each in (model, rounded))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    kept = ids != 0 if counted == 16 else ids >= 0
    session = de.open(make().eval(), inputs={"input_ids": ids})
    session.cast("head.weight", "int8")
    report = session.drift(ALL)
    expected = figures(r, c, kept)
    if make is Tagger and counted == 16:
        assert expected["kl_mean"] == pytest.approx(1.454e-6, rel=1e-3)
    assert (report.output.positions, report.sequences.left_out) == (counted, 24 - counted)
    drift = pytest.approx(expected["kl_mean"], rel=1e-4)
    assert report.output.kl_mean == drift
    assert {module.name: module.sqnr_db for module in report.modules}["head"] == pytest.approx(
        expected["sqnr_db"], abs=1e-3
    )
    assert session.causes().causes[0].drift == drift
    assert session.floor().positions == counted
    assert session.scan(["int8"], exact=True).scores()["head.weight", "int8"] == drift


class Named(nn.Module):
    """Takes a mask by position."""

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return ids


def test_masks_without_padding_are_ignored() -> None:
    ids, full = torch.zeros(2, 4), torch.ones(2, 4)
    device = torch.device("cpu")
    for mask in (None, full, full.bool(), torch.zeros(2, 4), torch.full((2, 4), -1e9), torch.ones(2, 1, 4, 4)):
        assert KeptPositions.of(Named(), Batch((ids, mask)), device, AttendedPositions()) is None
    part = full.clone()
    part[0, 0] = 0
    found = KeptPositions.of(Named(), Batch((ids, part)), device, AttendedPositions())
    assert found is not None
    assert found.of_module("", 0, torch.zeros(2, 4, 3)) is found.encoder
    flat = found.of_module("", 0, torch.zeros(8, 3))
    assert flat is not None
    assert flat.tolist() == part.bool().flatten().tolist()
    for shape in ((2, 5, 3), (2, 4), (7, 3), (8,)):
        assert found.of_module("", 0, torch.zeros(shape)) is None
