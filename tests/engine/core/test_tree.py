from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtype_engine.core.errors import UserError
from dtype_engine.core.tree import (
    MOST_MODULES,
    MOST_PARTS,
    TensorInfo,
    Tree,
    ancestors,
    from_tensors,
    is_number,
    numbered_parts,
)

NAME = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "w"]), min_size=1, max_size=4).map(
    lambda parts: ".".join(parts) + ".t"
)


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[TensorInfo]:
    names = draw(st.lists(NAME, min_size=1, max_size=12, unique=True))
    tensors = []
    while names:
        own, count = names.pop(), draw(st.integers(0, min(2, len(names) - 1))) if len(names) > 1 else 0
        aliases = tuple(names.pop() for _ in range(count))
        kind = draw(st.sampled_from(["parameter", "buffer", "non-persistent buffer"]))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64"]))
        tensors.append(TensorInfo(own, (draw(st.integers(0, 9)),), dtype, kind, aliases))
    return tensors


@given(tensor_lists())
def test_totals_of_a_module_count_each_saved_tensor_once(tensors: list[TensorInfo]) -> None:
    tree = Tree(tensors)
    totals = tree.totals()
    for module in tree.modules:
        below = [
            tensor
            for tensor in tensors
            if tensor.persistent and any(module in ancestors(name) for name in tensor.names)
        ]
        own = [tensor for tensor in below if module in ancestors(tensor.name)]
        assert sum(totals[module].elements.values()) == sum(tensor.numel for tensor in own)
        assert totals[module].total_bytes == sum(tensor.nbytes for tensor in own)
        assert sum(totals[module].tied.values()) == sum(tensor.nbytes for tensor in below if tensor not in own)
        assert totals[module].parameters == sum(
            tensor.numel for tensor in tensors if tensor.kind == "parameter" and module in ancestors(tensor.name)
        )
        assert {tensor.name for tensor in tree.below(module) if tensor.persistent} == {tensor.name for tensor in below}


@given(tensor_lists())
def test_tensor_is_found_by_each_of_its_tied_names(tensors: list[TensorInfo]) -> None:
    tree = Tree(tensors)
    for tensor in tensors:
        for name in tensor.names:
            assert tree.canonical(name) is tensor
    assert tree.canonical("nothing") is None


def test_numbered_modules_are_in_numeric_order() -> None:
    tree = from_tensors(
        TensorInfo(f"layers.{number}.weight", (1,), "float32") for number in sorted(map(str, range(12)))
    )
    assert list(tree.modules["layers"].children) == [str(number) for number in range(12)]


def test_dtypes_of_a_module_are_given_as_shares_of_its_bytes() -> None:
    tree = Tree([TensorInfo("a.x", (3,), "float32"), TensorInfo("a.y", (2,), "bfloat16")])
    assert tree.totals()[""].mix() == [("float32", 0.75), ("bfloat16", 0.25)]
    assert tree.totals({"a.x": "bfloat16"})[""].mix() == [("bfloat16", 1.0)]


@pytest.mark.parametrize(
    ("part", "counts"),
    [("0", True), ("17", True), ("", False), ("-1", False), ("3b", False), ("²", False), ("*", False)],
)
def test_only_plain_decimal_digits_count_as_layer_numbers(part: str, counts: bool) -> None:
    assert is_number(part) is counts


def test_layer_and_expert_numbers_are_found_in_names() -> None:
    assert numbered_parts("model.layers.3.mlp.experts.12.w1") == [2, 5]
    assert numbered_parts("0.weight") == [0]
    assert numbered_parts("lm_head") == numbered_parts("") == []


def test_name_with_too_many_parts_has_only_the_root_as_ancestor() -> None:
    """The names of all parents together would take 180 GB."""
    assert list(ancestors("a." * 600_000)) == [""]
    longest = ".".join(["a"] * MOST_PARTS) + ".weight"
    assert len(list(ancestors(longest))) == MOST_PARTS + 1


@pytest.mark.slow
def test_depth_and_number_of_modules_of_a_tree_are_limited() -> None:
    """A file of 9 MB without any values could have four million modules: each name has 199 parts more than the name before."""
    deep = [".".join(["a"] * (199 * times)) + ".weight" for times in (1, 2)]
    from_tensors([TensorInfo(deep[0], (1,), "float32")])
    with pytest.raises(UserError, match="over 200 parts"):
        from_tensors([TensorInfo(name, (1,), "float32") for name in deep])
    below = ".x" * (MOST_PARTS - 2)
    many = [
        TensorInfo(f"a{number}{below}.weight", (0,), "float32") for number in range(MOST_MODULES // MOST_PARTS + 50)
    ]
    with pytest.raises(UserError, match="over 500,000 modules"):
        from_tensors(many)
