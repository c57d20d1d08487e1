"""The device on which the tests measure: what `DTYPE_TUI_TEST_DEVICE` names, which is the CPU if it is not set.

`fake` is the accelerator of `fake_accelerator.py`, and `fake+float64` the same with float64, as CUDA has it. With `+digits`, the
last digits of its products and quotients are not those of the CPU, as on every real device. Every other name is a device of torch.
A test takes the device by `Options`, whose default it becomes here, and a live module that a test opens is moved to it. What a test
compares with plain torch goes through `placed`. A test marked `cpu_only` is left out on every other device.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from typing import Any, TypeVar

import pytest

from dtype_engine import Options

WANTED = os.environ.get("DTYPE_TUI_TEST_DEVICE", "cpu")
DEVICE = WANTED.partition("+")[0]
CPU_ONLY = {
    "it looks into the memory of the process": (
        "test_live.py::test_undo_restores_the_same_storage",
        "test_live.py::test_casts_never_overwrite_the_stored_values",
        "test_reference.py::test_widening_weights_in_shared_memory_gives_bitwise_equal_references",
        "test_coded_weights.py::test_pass_holds_at_most_two_decoded_layers",
        "test_session.py::test_undo_of_a_whole_model_cast_frees",
    ),
    "its model makes tensors on the CPU in the middle of a pass": (
        "test_overflow_underflow.py::test_lost_values_of_each_tensor_are_counted_only_once",
        "test_overflow_underflow.py::test_suggested_rules_cast_only_the_tensors_that_lose_values",
        "test_overflow_underflow.py::test_recipe_file_keeps_the_counts_of_lost_values",
        "test_overflow_underflow.py::test_search_reports_lost_values_of_its_recipe",
        "test_overflow_underflow.py::test_drift_command_prints_lost_values_and_tries_suggested_rules",
        "test_drift.py::test_planted_nan_is_counted_in_the_module_where_it_arises",
        "test_hidden_calls.py::test_drift_through_calls_hidden_from_torch_function_equals_plain_torch[WrapsItsWeight]",
        "test_hidden_calls.py::test_reference_of_weights_in_hidden_calls_is_in_float32",
        "test_hidden_calls.py::test_dtypes_that_torch_refuses_are_tried_again_inside_vmap",
        "test_measured_weights.py::test_scan_needs_one_pass_for_all_unused_weights",
        "test_measured_weights.py::test_scan_finds_weights_with_effect_among_many_without",
        "test_measured_weights.py::test_score_of_a_weight_without_a_gradient_equals_plain_torch",
        "test_nonfinite.py::test_remedy_restores_the_values_that_are_finite_in_the_reference",
        "test_measured_weights.py::test_scan_refuses_too_many_weights_without_gradient_by_name",
        "test_side_effects.py::test_state_of_a_model_does_not_carry_over_to_the_next_pass",
        "test_side_effects.py::test_tensors_derived_from_weights_follow_the_cast",
        "test_side_effects.py::test_tensors_that_a_model_caches_in_globals_are_recomputed_in_each_pass",
        "test_side_effects.py::test_inputs_that_a_model_overwrites_are_unchanged_after_the_pass",
        "test_side_effects.py::test_random_numbers_are_the_same_in_reference_and_candidate",
        "test_plain_torch.py::test_candidate_in_mixed_dtypes_equals_plain_torch[writes]",
        "test_modules.py::test_buffers_that_grow_with_a_longer_input_are_restored",
        "test_modules.py::test_module_whose_output_is_the_model_output_only_in_the_reference_is_compared",
    ),
    "it compares to the last digits with what computes on the CPU": (
        "test_blip.py::test_logit_drift_of_blip_equals_that_of_plain_transformers",
        "test_kl_divergence.py::test_llama_cpp_statistics_equal_those_of_an_independent_script",
        "test_activations.py::test_logits_with_quantized_activations_equal_those_of_compressed_tensors",
        "test_activations.py::test_activations_of_every_kind_of_matrix_product_are_quantized",
        "test_cache_scales.py::test_compressed_tensors_rounds_kv_caches_as_measured",
        "test_class_dimensions.py::test_segmentation_has_a_distribution_at_every_pixel",
        "test_kept_positions.py::test_padding_is_excluded_from_every_figure",
        "test_kept_positions.py::test_padded_positions_are_left_out_of_distributions_over_positions",
        "test_kept_positions.py::test_decoder_positions_are_kept_by_the_decoder_mask",
        "test_plain_torch.py::test_drift_of_a_cast_head_ignores_padded_rows_of_the_encoder",
        "test_verify.py::test_verify_checks_an_export_of_user_code_with_its_drift",
        "test_attribution.py::test_drift_caused_by_a_weight_is_found_for_every_way_to_use_it",
        "test_attribution.py::test_router_bias_is_the_only_cause_and_casting_it_to_float32_removes_the_drift",
        "test_nonfinite.py::test_overflow_hidden_by_clamping_is_diagnosed_and_fixed",
        "test_noise_floor.py::test_noise_floor_equals_reordered_reference_runs",
        "test_reference.py::test_widened_weights_do_not_share_memory_if_gradients_are_needed",
        "test_routing.py::test_cast_of_a_single_weight_in_a_scan_equals_the_candidate",
        "test_routing.py::test_operation_with_one_of_two_weights_cast_runs_in_the_wider_dtype",
        "test_routing.py::test_swap_of_top_k_takes_the_next_best_expert_for_selected_tokens_only",
        "test_candidate.py::test_missing_kernel_error_names_module_operation_dtype_and_device",
        "test_turned_weights.py::test_experts_transposed_while_loading_give_the_logits_of_transformers",
        "test_constructed_buffers.py::test_buffers_filled_while_loading_are_not_replaced_by_the_constructor",
        "test_constructed_buffers.py::test_buffers_missing_in_the_files_are_filled_by_the_constructor",
    ),
}  # fmt: skip
"""Why tests are left out on another device, with the beginnings of their names. A test that is marked says it itself."""
REFUSED = {
    r"in float64, which \S+ does not have|can't be cast to float64, which": "it lacks float64, and says so",
    r"Tried to use AMP with the `fake` backend": "the fake accelerator has no autocast",
    r"Cannot set version_counter for inference tensor": "the fake accelerator has no inference mode",
    r"Cannot access storage of SparseTensorImpl|from the 'Sparsefake' backend": "the fake accelerator has no sparse tensors",
}
"""Why a test that ends with such an error on an accelerator can't run there."""
FEWER_FUSED = (
    "test_drift.py::test_drift_figures_equal_plain_torch_and_are_close_to_the_tutorials",
    "test_nonfinite.py::test_remedy_casts_only_the_blocks_that_overflow_reaches",
    "test_companions.py::test_scan_scores_a_lossless_cast_of_norms_by_its_effect_on_activations",
)  # fmt: skip
"""The beginnings of the names of tests whose figures depend on where a fused kernel rounds, and on which dtypes it refuses."""
_kept: list[Any] = []
"""Objects that must live as long as the process."""
T = TypeVar("T")


def use() -> None:
    """Make the device the one of every session that names none."""
    initialize: Any = Options.__init__
    initialize.__defaults__ = (DEVICE, *initialize.__defaults__[1:])
    if DEVICE == "cpu":
        return
    import torch
    from torch import nn

    from dtype_engine.runtime.device import has_float64
    from dtype_engine.runtime.session import opening

    if DEVICE == "fake":
        from tests.helpers import fake_accelerator

        _kept.append(fake_accelerator.register())
        if "+float64" in WANTED:
            fake_accelerator.device.lacks -= {torch.float64, torch.complex128}
        fake_accelerator.device.own_digits = "+digits" in WANTED
    torch.backends.cudnn.allow_tf32 = False  # for what the tests compute by plain torch
    open_session, lacks_float64 = opening.open_session, not has_float64(torch.device(DEVICE))

    def moved(model: Any = None, *given: Any, **named: Any) -> Any:
        if isinstance(model, nn.Module) and not any(tensor.is_meta for tensor in model.parameters()):
            if lacks_float64 and any(tensor.dtype == torch.float64 for tensor in model.parameters()):
                pytest.skip("only on another device: its model is in float64")
            _moved(model)
        return open_session(model, *given, **named)

    opening.open_session = moved
    call, equal = nn.Module.__call__, torch.equal

    def called(module: Any, *given: Any, **named: Any) -> Any:
        """What a test calls by itself gets its inputs on the device of its weights; the engine gives its own."""
        # Under a mode, asking for a device would count as a use of the weight.
        if not torch.overrides._len_torch_function_stack():
            weight = next(module.parameters(), None)
            if weight is not None and weight.device.type == DEVICE:
                given, named = placed((given, named))
        return call(module, *given, **named)

    def equal_anywhere(one: torch.Tensor, other: torch.Tensor) -> bool:
        by_test = "/tests/" in sys._getframe(1).f_code.co_filename
        return equal(one.cpu(), other.cpu()) if by_test and one.device != other.device else equal(one, other)

    double = torch.Tensor.double

    def double_anywhere(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        """Convert to float64. If a test asks for it, the tensor is moved to the CPU, since the device lacks float64."""
        by_test = "/tests/" in sys._getframe(1).f_code.co_filename
        return double(tensor.cpu() if by_test else tensor, *given, **named)

    nn.Module.__call__, torch.equal = called, equal_anywhere  # type: ignore[method-assign]
    if lacks_float64:
        torch.Tensor.double = double_anywhere  # type: ignore[method-assign, assignment]


def _moved(module: Any) -> Any:
    """Move a module to the device in place. Weights that it shares stay shared."""
    from dtype_engine.runtime.model.live import _move

    _move(module, partial(module.to, DEVICE), {})
    return module


def placed(values: T) -> T:
    """Modules, tensors and what holds them, on the device. A module is moved in place."""
    if DEVICE == "cpu":
        return values
    import torch
    from torch.nn.utils.rnn import PackedSequence
    from torch.utils._pytree import tree_map_only

    found: T = tree_map_only(
        (torch.Tensor, torch.nn.Module, PackedSequence),  # a packed sequence leaves its lengths on the CPU
        lambda each: _moved(each) if isinstance(each, torch.nn.Module) else each.to(DEVICE),
        values,
        is_leaf=lambda each: isinstance(each, PackedSequence),
    )
    return found


def leave_out(items: list[pytest.Item]) -> None:
    """Skip tests that only the CPU can run."""
    for item in items:
        if DEVICE == "cpu":
            return
        marker = item.get_closest_marker("cpu_only")
        name = item.nodeid.rpartition("/")[2]
        reason = (
            marker.args[0] if marker else next((why for why, names in CPU_ONLY.items() if name.startswith(names)), "")
        )
        if DEVICE == "fake" and "autocast" in name:
            reason = "the fake accelerator has no autocast"
        if DEVICE == "fake" and name.startswith("test_live.py::test_cast_keeps_tensor_objects_and_ties"):
            reason = "torch makes new objects for a module that it moves to the fake accelerator"
        if DEVICE == "fake" and name.startswith(FEWER_FUSED):
            reason = "the fake accelerator runs fewer fused kernels, and so rounds at other places"
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"only on the CPU: {reason}"))


def refused(error: BaseException) -> str | None:
    """Why a test that ended with this error can't run on the device. None if that is no reason, as on the CPU."""
    found = (reason for pattern, reason in REFUSED.items() if re.search(pattern, str(error)))
    return next(found, None) if DEVICE != "cpu" else None
