"""What a search could reach otherwise: in another program, with no more bytes, or with a format that was not scanned."""

from __future__ import annotations

from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import tensor_bytes
from dtype_engine.search.advice import far_better, format_that_fits, main_change, most_saved, other_fronts
from dtype_engine.search.pareto import Constraints, make_front

NAMES = ("embed.weight", "a.weight", "b.weight")
TREE = Tree(
    [TensorInfo(name, (128, 128), "bfloat16") for name in NAMES],
    {"": "Model", "embed": "Embedding", "a": "Linear", "b": "Linear"},
)
SCORES = {
    (name, dtype): score for name in NAMES for dtype, score in (("bfloat16", 1e-4), ("float16", 1e-6), ("int8", 1e-3))
}
OURS = Constraints(formats="transformers")


def test_program_that_saves_most_bytes_at_no_more_drift_is_named() -> None:
    front = make_front(TREE, SCORES, OURS)
    smallest = front.points[0]
    assert most_saved(other_fronts(TREE, SCORES, OURS), smallest.bytes, smallest.predicted) is None
    saved = tensor_bytes(TREE.tensors["embed.weight"], "bfloat16") - tensor_bytes(TREE.tensors["embed.weight"], "int8")
    assert most_saved(other_fronts(TREE, SCORES, OURS), smallest.bytes, 1.0) == ("own", saved)


def test_float16_is_far_better_than_a_checkpoint_stored_in_bfloat16_at_the_same_bytes() -> None:
    front = make_front(TREE, SCORES, OURS)
    at = far_better(front, TREE.stored_bytes, 3e-4)
    assert at is not None
    assert front.points[at].bytes == TREE.stored_bytes
    stored = dict.fromkeys(NAMES, "bfloat16")
    assert main_change(TREE, stored, front.solution_at(at).dtypes) == ("bfloat16", "float16")
    assert far_better(front, TREE.stored_bytes, 4e-6) is None


def test_widest_format_that_fits_a_budget_is_named() -> None:
    smallest = make_front(TREE, SCORES, OURS).points[0].bytes
    assert format_that_fits(TREE, SCORES, OURS, smallest * 3 // 4) == "int4@g128"
    assert format_that_fits(TREE, SCORES, OURS, 100) is None


def test_format_that_was_scanned_in_another_rounding_is_not_named() -> None:
    own = Constraints()
    budget = make_front(TREE, SCORES, own).points[0].bytes * 3 // 4
    assert format_that_fits(TREE, SCORES, own, budget) == "int4@g128"
    rounded = SCORES | {("a.weight", "int4@g128:gptq"): 1e-2}
    assert format_that_fits(TREE, rounded, own, budget) == "mxfp4"
