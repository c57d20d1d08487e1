"""The statistics of layers' inputs are those of what hooks of plain torch see."""

from __future__ import annotations

from collections import defaultdict

import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import dtype_engine as de
from dtype_engine.core.cancellation import never
from dtype_engine.runtime.numerics.roundings import WeightStatistics

PROMPTS = ("one short prompt, and what follows it", "another one")


def collected(session: de.Session, dtype: str, *weights: str) -> dict[str, WeightStatistics]:
    """Return the statistics that casting these weights to `dtype` needs, from one pass over the session's inputs."""
    assert session.calibration is not None
    groups = list(session.calibration.collect(dict.fromkeys(weights, dtype), lambda: None, never))
    assert len(groups) == 1
    return groups[0]


def seen_by_hooks(session: de.Session, module: str) -> torch.Tensor:
    """Return the inputs of a module in float32: [tokens, channels]."""
    found = list[torch.Tensor]()
    of_module = session.model.module.float().get_submodule(module)
    with of_module.register_forward_pre_hook(lambda _, args: found.append(args[0].flatten(0, -2))), torch.no_grad():
        for batch in session.need_inputs().batches:
            session.model.module(*batch.args, **batch.kwargs)
    return torch.cat(found)


def test_products_are_those_of_the_inputs() -> None:
    session = de.open(options=de.Options(device="cpu", prompts=PROMPTS))
    names = [f"model.layers.0.{each}" for each in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")]
    found = collected(session, "int4@g32:gptq", *(f"{name}.weight" for name in names))
    for name in names:
        inputs, statistics = seen_by_hooks(session, name), found[f"{name}.weight"]
        given = statistics.parts[None]
        assert statistics.across == 1
        assert given.tokens == len(inputs)
        assert given.products is not None
        torch.testing.assert_close(given.products, inputs.T @ inputs / len(inputs))
        torch.testing.assert_close(given.squares, inputs.square().mean(0))


def test_scales_by_squares_need_no_products() -> None:
    session = de.open(options=de.Options(device="cpu", prompts=PROMPTS))
    name = "model.layers.1.mlp.up_proj.weight"
    assert collected(session, "nvfp4:imatrix", name)[name].parts[None].products is None


def test_weights_of_gpt2_have_their_channels_in_rows() -> None:
    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=99, n_positions=64)).eval()
    session = de.open(module, inputs={"input_ids": torch.arange(24)[None]})
    found = collected(session, "int4@g32:gptq", "transformer.h.0.mlp.c_fc.weight")["transformer.h.0.mlp.c_fc.weight"]
    inputs, given = seen_by_hooks(session, "transformer.h.0.mlp.c_fc"), found.parts[None]
    assert found.across == 0
    assert given.products is not None
    torch.testing.assert_close(given.products, inputs.T @ inputs / len(inputs))


def test_each_expert_has_the_tokens_that_it_gets() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    module = MixtralForCausalLM(config).eval()
    ids = torch.randint(0, 99, (1, 60))
    session = de.open(module, inputs={"input_ids": ids})
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = collected(session, "int4@g32:gptq", name)[name]
    routed = defaultdict[int, list[torch.Tensor]](list)

    def see(_: object, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        hidden, chosen, _ = args
        for token, experts in zip(
            hidden.flatten(0, -2), chosen.view(len(hidden.flatten(0, -2)), -1).tolist(), strict=True
        ):
            for expert in experts:
                routed[expert].append(token)

    with (
        session.model.module.get_submodule("model.layers.0.mlp.experts").register_forward_pre_hook(see),
        torch.no_grad(),
    ):
        session.model.module(input_ids=ids)
    assert {number: given.tokens for number, given in found.parts.items()} == {
        number: len(tokens) for number, tokens in routed.items()
    }
    for number, tokens in routed.items():
        inputs, given = torch.stack(tokens), found.parts[number]
        assert given.products is not None
        torch.testing.assert_close(given.products, inputs.T @ inputs / len(inputs), rtol=1e-4, atol=1e-5)
