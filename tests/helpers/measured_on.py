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
        "test_live.py::test_undo_restores_the_same_storage", "test_live.py::test_casts_never_overwrite_the_stored_values",
        "test_reference.py::test_widening_weights_in_shared_memory_gives_bitwise_equal_references",
        "test_coded_weights.py::test_pass_holds_at_most_two_decoded_layers",
        "test_session.py::test_undo_of_a_whole_model_cast_frees",
    ),
    "its model makes tensors on the CPU in the middle of a pass": (
        "test_overflow_underflow.py::test_a_report_has_them", "test_overflow_underflow.py::test_the_suggested_rules",
        "test_overflow_underflow.py::test_recipe_files_keep", "test_overflow_underflow.py::test_a_search_tells",
        "test_overflow_underflow.py::test_drift_tells_it_in_text", "test_drift.py::test_a_planted_nan",
        "test_hidden_calls.py::test_drift_through_calls_hidden_from_torch_function_equals_plain_torch[WrapsItsWeight]",
        "test_hidden_calls.py::test_the_reference_of_hidden_weights",
        "test_hidden_calls.py::test_what_torch_refuses_is_asked_again", "test_measured_weights.py::test_weights_that_",
        "test_measured_weights.py::test_the_score_of_a_weight_without_a_gradient", "test_nonfinite.py::test_a_remedy_makes",
        "test_measured_weights.py::test_many_weights_without_a_gradient", "test_side_effects.py::test_a_pass_leaves_nothing",
        "test_side_effects.py::test_what_a_model_", "test_plain_torch.py::test_candidate_in_mixed_dtypes_equals_plain_torch[writes]",
        "test_modules.py::test_what_a_longer_input_changes", "test_modules.py::test_the_module_that_gives_the_main_output",
        "test_two_models.py::test_the_drift_of_a_model_from_another",
    ),
    "it compares to the last digits with what computes on the CPU": (
        "test_blip.py::test_drift_of_the_logits", "test_blip.py::test_float32_under_autocast",
        "test_kl_divergence.py::test_every_statistic", "test_activations.py::test_a_model_is_what_compressed_tensors",
        "test_activations.py::test_every_way_to_write", "test_cache_scales.py::test_compressed_tensors_reads",
        "test_class_dimensions.py::test_segmentation", "test_kept_positions.py::test_padding_is_excluded_from_every_figure",
        "test_kept_positions.py::test_a_distribution_over", "test_kept_positions.py::test_the_decoder_has",
        "test_plain_torch.py::test_the_head_of_a_padded", "test_verify.py::test_a_python_source",
        "test_attribution.py::test_a_weight_is_a_cause_however", "test_attribution.py::test_the_bias_of_a_router",
        "test_nonfinite.py::test_what_a_model_clamps", "test_noise_floor.py::test_the_floor_is_that",
        "test_reference.py::test_with_gradients_every_weight", "test_routing.py::test_one_narrowed",
        "test_routing.py::test_exchanging_takes", "test_candidate.py::test_a_missing_kernel_names",
        "test_turned_weights.py::test_it_opens_and", "test_constructed_buffers.py::test_buffers_that_loading",
        "test_constructed_buffers.py::test_the_constructor_makes",
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
    "test_drift.py::test_the_golden", "test_nonfinite.py::test_the_remedy_leaves", "test_companions.py::test_layer_norms_of_exact",
)  # fmt: skip
"""The beginnings of the names of tests whose figures depend on where a fused kernel rounds, and on which dtypes it refuses."""
_kept: list[Any] = []
"""What has to live as long as the process."""
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
        """What a test widens comes to the CPU if the device lacks float64."""
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
    """Skip what only the CPU can run."""
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
        if DEVICE == "fake" and name.startswith("test_live.py::test_a_cast_keeps_every_tensor_object"):
            reason = "torch makes new objects for a module that it moves to the fake accelerator"
        if DEVICE == "fake" and name.startswith(FEWER_FUSED):
            reason = "the fake accelerator runs fewer fused kernels, and so rounds at other places"
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"only on the CPU: {reason}"))


def refused(error: BaseException) -> str | None:
    """Why a test that ended with this error can't run on the device. None if that is no reason, as on the CPU."""
    found = (reason for pattern, reason in REFUSED.items() if re.search(pattern, str(error)))
    return next(found, None) if DEVICE != "cpu" else None
