from __future__ import annotations

import contextlib
import itertools
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtype_engine.errors import PatternError
from dtype_engine.recipe import compile_pattern, generalisations

PARTS = st.sampled_from(
    ["model", "layers", "0", "1", "10", "11", "mlp", "gate", "gate_proj", "up_proj", "weight", "a[0]"]
)
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)
GLOBS = st.text(alphabet="abm.l*?[]!-01", min_size=1, max_size=12)


@given(GLOBS, st.text(alphabet="abm.l01-]", max_size=10))
def test_globs_without_braces_are_fnmatch(glob: str, name: str) -> None:
    assert compile_pattern(glob).matches(name) == fnmatchcase(name, glob.strip())


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_ranges_take_just_their_numbers(first: int, last: int, number: int) -> None:
    pattern = compile_pattern(f"layers.{{{first}..{last}}}.mlp")
    assert pattern.matches(f"layers.{number}.mlp") == (min(first, last) <= number <= max(first, last))


@given(
    st.lists(
        st.lists(st.sampled_from(["q", "k", "v", "*", "gate", "1"]), min_size=1, max_size=3), min_size=1, max_size=3
    ),
    NAMES,
)
def test_choices_are_the_union_of_their_expansions(groups: list[list[str]], name: str) -> None:
    text = "_".join("{" + ",".join(group) + "}" for group in groups)
    expanded = ["_".join(parts) for parts in itertools.product(*groups)]
    assert compile_pattern(text).matches(name) == any(fnmatchcase(name, glob) for glob in expanded)


def test_braces_nest_and_zeros_are_kept() -> None:
    assert compile_pattern("*.{q,{k,v}_proj}").matches("a.v_proj")
    assert compile_pattern("block{00..12}").matches("block07")
    assert not compile_pattern("block{00..12}").matches("block7")


@given(NAMES, NAMES)
def test_a_literal_name_takes_itself_and_what_is_below_it_and_nothing_else(name: str, other: str) -> None:
    pattern = compile_pattern(generalisations(name)[0])
    assert pattern.takes(other) == (other == name or other.startswith(name + "."))


@pytest.mark.parametrize(
    ("pattern", "taken", "left"),
    [
        ("model.layers.1", "model.layers.1.mlp.weight", "model.layers.10.mlp.weight"),
        ("*.mlp.gate", "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate_proj.weight"),
        ("*.kv_proj", "a.kv_proj.weight", "a.qkv_proj.weight"),
        (r"re:.*mlp\.gate", "layers.1.mlp.gate.weight", "layers.1.mlp.gate_proj.weight"),
    ],
)
def test_the_classic_confusions_do_not_happen(pattern: str, taken: str, left: str) -> None:
    assert compile_pattern(pattern).takes(taken)
    assert not compile_pattern(pattern).takes(left)


@given(NAMES)
def test_every_generalisation_takes_the_node_it_came_from(name: str) -> None:
    for pattern in generalisations(name):
        assert compile_pattern(pattern).takes(name), pattern


def test_generalisations_go_from_one_to_its_kind() -> None:
    assert generalisations("model.layers.3.mlp", "LlamaMLP") == [
        "model.layers.3.mlp",
        "model.layers.*.mlp",
        "*.mlp",
        "type:LlamaMLP",
    ]
    assert generalisations("") == ["*"]


def test_classes_are_matched_whole_or_by_glob() -> None:
    assert compile_pattern("type:Linear").matches_class("Linear")
    assert not compile_pattern("type:Linear").matches_class("Linear8bit")
    assert compile_pattern("type:*Norm").matches_class("LlamaRMSNorm") is True
    assert not compile_pattern("type:Linear").matches("Linear")
    assert not compile_pattern("*").matches_class("Linear")


def test_only_a_rule_that_means_it_singles_a_tensor_out() -> None:
    buffer = "model.rotary_emb.inv_freq"
    for pattern in ("*.inv_freq", buffer, "*inv*", "re:.*freq", "model.rotary_emb.{inv_freq,other}"):
        assert compile_pattern(pattern).singles_out(buffer), pattern
    for pattern in ("*", "model.*", "model.rotary_emb", "model.rotary_emb.*", "*.rotary_emb.?*", "re:.*"):
        assert not compile_pattern(pattern).singles_out(buffer), pattern


@pytest.mark.parametrize(
    ("text", "position"),
    [("a.{b", 2), ("a}.b", 1), ("", 0), ("re:", 0), ("re:a(", 4), ("{1..999999999}", 0), ("{" * 30 + "}" * 30, 20)],
)
def test_bad_patterns_say_where(text: str, position: int) -> None:
    with pytest.raises(PatternError) as caught:
        compile_pattern(text)
    assert caught.value.position == position
    assert "\n" not in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_a_pattern_or_a_pattern_error(text: str) -> None:
    with contextlib.suppress(PatternError):
        compile_pattern(text).takes("model.layers.1.mlp")
