"""Calibrated scales of KV caches: whose values they are computed from. Plain transformers computes them, and rounds by them, with a
cache that is written here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import dtype_engine as de
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.measure.activation_ranges import input_ranges
from dtype_engine.runtime.passes.model_behavior import ModelBehavior

IDS = torch.arange(48).reshape(2, 24) * 7 % 63 + 1
LARGEST = 448
Amax = dict[tuple[int, int], torch.Tensor]
"""The largest |value| of each head, by (layer, 0 for keys or 1 for values)."""


class PlainCache(transformers.DynamicCache):  # type: ignore[misc]
    """A cache that notes the largest |value| of each head in `found` and, if it is given such values, rounds to fp8 with scales of
    them. kept: the tokens that count. only: the layers and parts that are rounded; None: all.
    """

    def __init__(
        self,
        by_head: bool = False,
        amax: Amax | None = None,
        kept: torch.Tensor | None = None,
        only: set[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__()
        self.by_head, self.amax, self.kept, self.only = by_head, amax, kept, only
        self.found: Amax = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any, **more: Any
    ) -> Any:
        new = []
        for part, states in enumerate((key_states, value_states)):
            values = states.float()
            counted = values if self.kept is None else values * self.kept[:, None, :, None]
            self.found[layer_idx, part] = counted.abs().amax((0, 2, 3))
            if self.amax is not None and (self.only is None or (layer_idx, part) in self.only):
                amax = self.amax[layer_idx, part]
                scale = (amax[:, None, None] if self.by_head else amax.max()) / LARGEST
                values = (values / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
            new.append(values.to(states.dtype))
        return super().update(*new, layer_idx, *rest, **more)


def logits(model: Any, cache: Any, ids: torch.Tensor = IDS, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model(ids, past_key_values=cache, use_cache=True, **more)
    return output.logits.double()


def calibrated(model: Any, ids: torch.Tensor = IDS) -> Amax:
    cache = PlainCache()
    logits(model, cache, ids)
    return cache.found


def kl(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    p, q = (torch.log_softmax(each, -1) for each in (reference, candidate))
    return float((p.exp() * (p - q)).sum(-1).mean())


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of two models that compute the same function. The second has 16 times as large values, and a sixteenth of the
    keys.
    """
    folder = tmp_path_factory.mktemp("twins")
    model = llama()
    model.save_pretrained(folder / "one")
    for layer in model.model.layers:
        for name, factor in (("v_proj", 16), ("o_proj", 1 / 16), ("k_proj", 1 / 16), ("q_proj", 16)):
            getattr(layer.self_attn, name).weight.mul_(factor)
    model.save_pretrained(folder / "other")
    return folder / "one", folder / "other"


def loaded(folder: Path, dtype: str = "auto") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def opened(twins: tuple[Path, Path]) -> de.Session:
    one, other = twins
    return de.open(str(other), options=de.Options(reference=str(one)), inputs={"input_ids": IDS})


@pytest.mark.parametrize("form", ["fp8@tensor", "fp8@head"])
def test_drift_from_another_checkpoint_uses_kv_cache_scales_of_the_candidate(
    twins: tuple[Path, Path], form: str
) -> None:
    one, other = map(loaded, twins)
    by_head = form == "fp8@head"
    reference = logits(one, PlainCache())
    expected = kl(reference, logits(other, PlainCache(by_head, calibrated(other))))
    of_the_reference = kl(reference, logits(other, PlainCache(by_head, calibrated(one))))
    session = opened(twins)
    session.cast("*.kv_cache", form)
    assert session.drift().output.kl_mean == pytest.approx(expected, rel=1e-4)
    assert of_the_reference > 10 * expected


def test_exported_kv_cache_scales_are_those_of_the_exported_model(twins: tuple[Path, Path], tmp_path: Path) -> None:
    session = opened(twins)
    session.cast("*.kv_cache", "fp8@tensor")
    session.export(tmp_path / "export")
    tensors = load_file(tmp_path / "export/model.safetensors")
    found = calibrated(loaded(twins[1]))
    for (layer, part), amax in found.items():
        name = f"model.layers.{layer}.self_attn.{'kv'[part]}_scale"
        assert float(tensors[name]) == pytest.approx(float(amax.max()) / LARGEST, rel=1e-5)


def test_kv_cache_scales_are_calibrated_again_for_new_rules_and_inputs(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, others = twins[0], IDS.flip(1)[:, :9]
    save_file({"input_ids": others.contiguous()}, tmp_path / "others.safetensors")
    session = de.open(str(folder), inputs={"input_ids": IDS})
    narrow = loaded(folder, "bfloat16")

    def assert_scales(amax: Amax) -> None:
        session.drift()
        session.export(tmp_path / "export", force=True)
        tensors = load_file(tmp_path / "export/model.safetensors")
        for (layer, part), largest in amax.items():
            scale = tensors[f"model.layers.{layer}.self_attn.{'kv'[part]}_scale"]
            assert float(scale) == pytest.approx(float(largest.max()) / LARGEST, rel=1e-5)

    session.cast("*.kv_cache", "fp8@tensor")
    assert_scales(calibrated(loaded(folder)))
    session.cast("*", "bf16")
    assert_scales(calibrated(narrow))
    session.use_inputs(de.Options(tensors=tmp_path / "others.safetensors"))
    assert_scales(calibrated(narrow, ids=others))
    session.undo()
    assert_scales(calibrated(loaded(folder), ids=others))
    assert calibrated(narrow)[0, 1].max() != calibrated(loaded(folder))[0, 1].max()


def test_causes_with_another_checkpoint_use_kv_cache_scales_of_the_reference(
    twins: tuple[Path, Path],
) -> None:
    """A cause is the drift of the reference after one of its parts was replaced by the candidate's."""
    one = loaded(twins[0])
    session = opened(twins)
    session.cast("*.kv_cache", "fp8@tensor")
    causes = {cause.name: cause.drift for cause in session.causes().causes}
    reference, amax = logits(one, PlainCache()), calibrated(one)
    for layer in range(2):
        for part, letter in enumerate("kv"):
            expected = kl(reference, logits(one, PlainCache(amax=amax, only={(layer, part)})))
            assert causes[f"model.layers.{layer}.self_attn.kv_cache.{letter}"] == pytest.approx(expected, rel=1e-3)


def test_scan_with_another_checkpoint_uses_kv_cache_scales_of_the_candidate(twins: tuple[Path, Path]) -> None:
    """The twins differ by powers of two, so that the candidate's cache with the candidate's scales has the same errors."""
    one, other = map(loaded, twins)
    session = opened(twins)
    scores = session.scan(["kv:fp8@tensor"], draws=200).scores()
    reference, amax = logits(one, PlainCache()), calibrated(other)
    for layer in range(2):
        for part, letter in enumerate("kv"):
            expected = kl(reference, logits(other, PlainCache(amax=amax, only={(layer, part)})))
            score = scores[f"model.layers.{layer}.self_attn.kv_cache.{letter}", "kv:float8_e4m3fn@tensor"]
            assert score == pytest.approx(expected, rel=0.35)


def with_large_padding() -> tuple[Any, torch.Tensor]:
    """Return a model in which token 0, the padding, has large keys and values, and a mask that excludes padding."""
    model = llama()
    table = model.model.embed_tokens.weight
    table[:, 3] = 0
    table[0] = 0
    table[0, 3] = 1
    for layer in model.model.layers:
        layer.input_layernorm.weight[3] = 8
    mask = torch.ones_like(IDS)
    mask[1, :9] = 0
    return model, mask


@pytest.mark.parametrize("form", ["fp8@tensor", "fp8@head"])
def test_padding_does_not_affect_kv_cache_scales(form: str) -> None:
    model, mask = with_large_padding()
    ids, by_head, kept = IDS * mask, form == "fp8@head", mask.bool()
    reference = logits(model, PlainCache(), ids, attention_mask=mask)[kept]

    def expected(counted: torch.Tensor | None) -> float:
        calibration = PlainCache(kept=counted)
        logits(model, calibration, ids, attention_mask=mask)
        return kl(reference, logits(model, PlainCache(by_head, calibration.found), ids, attention_mask=mask)[kept])

    session = de.open(model, inputs={"input_ids": ids, "attention_mask": mask})
    session.cast("*.kv_cache", form)
    assert session.drift().output.kl_mean == pytest.approx(expected(kept), rel=1e-4)
    assert expected(None) != pytest.approx(expected(kept), rel=0.05)


def test_encoder_and_decoder_padding_does_not_affect_kv_cache_scales() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    model: Any = transformers.T5ForConditionalGeneration(config).eval().requires_grad_(False)
    table = model.shared.weight
    table[:, 3] = 0
    table[0] = 0
    table[0, 3] = 1
    for name, norm in model.named_modules():
        if name.endswith("layer_norm"):
            norm.weight[3] = 8
    encoder, decoder = torch.ones(2, 24, dtype=torch.int64), torch.ones(2, 10, dtype=torch.int64)
    encoder[1, 11:], decoder[0, 6:] = 0, 0
    given = {
        "attention_mask": encoder, "decoder_input_ids": IDS[:, :10] * decoder, "decoder_attention_mask": decoder,
    }  # fmt: skip

    def run(own: PlainCache, cross: PlainCache) -> torch.Tensor:
        return logits(model, transformers.EncoderDecoderCache(own, cross), IDS * encoder, **given)[decoder.bool()]

    def expected(of_own: torch.Tensor | None, of_cross: torch.Tensor | None) -> float:
        own, cross = PlainCache(kept=of_own), PlainCache(kept=of_cross)
        reference = run(own, cross)
        return kl(reference, run(PlainCache(amax=own.found), PlainCache(amax=cross.found)))

    session = de.open(model, inputs={"input_ids": IDS * encoder, **given})
    session.cast("*.kv_cache", "fp8@tensor")
    right = expected(decoder.bool(), encoder.bool())
    assert session.drift().output.kl_mean == pytest.approx(right, rel=1e-4)
    for other in (expected(None, encoder.bool()), expected(decoder.bool(), None)):
        assert other != pytest.approx(right, rel=1e-3)


def test_padding_does_not_affect_calibrated_ranges_of_activations() -> None:
    """NVFP4's static input scales are computed from these ranges."""
    model, mask = with_large_padding()
    session = de.open(model, inputs={"input_ids": IDS * mask, "attention_mask": mask})
    names = ["model.layers.0.self_attn.v_proj.weight", "lm_head.weight"]
    found = input_ranges(session.model, session.need_inputs(), RunSettings(), names, lambda: False, ModelBehavior())
    for name in names:
        seen: list[torch.Tensor] = []
        layer = model.get_submodule(name.removesuffix(".weight"))
        with layer.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0])):
            logits(model, PlainCache(), IDS * mask, attention_mask=mask)
        assert found[name] == pytest.approx(float(seen[0][mask.bool()].abs().max()), rel=1e-5)
        assert (float(seen[0].abs().max()) > 1.05 * found[name]) == ("self_attn" in name)
