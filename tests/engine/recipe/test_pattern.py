from __future__ import annotations

import contextlib
import itertools
import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtype_engine.core.errors import PatternError, TooSlow
from dtype_engine.core.regexes import time_limit
from dtype_engine.recipe import compile_pattern, generalisations

PARTS = st.sampled_from(
    ["model", "layers", "0", "1", "10", "11", "mlp", "gate", "gate_proj", "up_proj", "weight", "a[0]"]
)
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)
GLOBS = st.text(alphabet="abm.l*?[]!-01", min_size=1, max_size=12)


def fnmatches(name: str, glob: str) -> bool:
    """As `fnmatch`, except that the dot of a leading `*.` may be missing from the name."""
    return fnmatchcase(f".{name}" if re.match(r"\*+\.", glob) else name, glob)


@given(GLOBS, st.text(alphabet="abm.l01-]", max_size=10))
@example("*.lm", "lm")
@example("**.l?", "lm")
@example("*.*a*b", "ab")
def test_globs_without_braces_match_like_fnmatch(glob: str, name: str) -> None:
    assert compile_pattern(glob).matches(name) == fnmatches(name, glob.strip())


@given(NAMES, NAMES)
def test_leading_star_dot_matches_any_or_no_parent(name: str, module: str) -> None:
    pattern = compile_pattern(f"*.{generalisations(name)[0]}")
    assert pattern.matches(name)
    assert pattern.matches(f"{module}.{name}")
    assert not pattern.matches(f"x{name}")
    assert pattern.matches_exactly(name)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_ranges_in_patterns_match_only_their_numbers(first: int, last: int, number: int) -> None:
    pattern = compile_pattern(f"layers.{{{first}..{last}}}.mlp")
    assert pattern.matches(f"layers.{number}.mlp") == (min(first, last) <= number <= max(first, last))


@given(
    st.lists(
        st.lists(st.sampled_from(["q", "k", "v", "*", "gate", "1"]), min_size=1, max_size=3), min_size=1, max_size=3
    ),
    NAMES,
)
def test_choices_in_braces_match_the_union_of_their_expansions(groups: list[list[str]], name: str) -> None:
    text = "_".join("{" + ",".join(group) + "}" for group in groups)
    expanded = ["_".join(parts) for parts in itertools.product(*groups)]
    assert compile_pattern(text).matches(name) == any(fnmatchcase(name, glob) for glob in expanded)


def test_patterns_support_nested_braces_and_ranges_with_leading_zeros() -> None:
    assert compile_pattern("*.{q,{k,v}_proj}").matches("a.v_proj")
    assert compile_pattern("block{00..12}").matches("block07")
    assert not compile_pattern("block{00..12}").matches("block7")


@given(NAMES, NAMES)
def test_literal_name_matches_itself_and_its_children_only(name: str, other: str) -> None:
    pattern = compile_pattern(generalisations(name)[0])
    assert pattern.selects(other) == (other == name or other.startswith(name + "."))


@pytest.mark.parametrize(
    ("pattern", "taken", "left"),
    [
        ("model.layers.1", "model.layers.1.mlp.weight", "model.layers.10.mlp.weight"),
        ("*.mlp.gate", "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate_proj.weight"),
        ("*.kv_proj", "a.kv_proj.weight", "a.qkv_proj.weight"),
        (r"re:.*mlp\.gate", "layers.1.mlp.gate.weight", "layers.1.mlp.gate_proj.weight"),
    ],
)
def test_pattern_does_not_match_similar_names(pattern: str, taken: str, left: str) -> None:
    assert compile_pattern(pattern).selects(taken)
    assert not compile_pattern(pattern).selects(left)


@given(NAMES)
def test_every_generalized_pattern_matches_the_original_name(name: str) -> None:
    for pattern in generalisations(name):
        assert compile_pattern(pattern).selects(name), pattern


def test_generalized_patterns_are_listed_from_narrow_to_wide() -> None:
    assert generalisations("model.layers.3.mlp", "LlamaMLP") == [
        "model.layers.3.mlp",
        "model.layers.*.mlp",
        "*.mlp",
        "type:LlamaMLP",
    ]
    assert generalisations("") == ["*"]


def test_class_patterns_match_whole_names_or_globs() -> None:
    assert compile_pattern("type:Linear").matches_class("Linear")
    assert not compile_pattern("type:Linear").matches_class("Linear8bit")
    assert compile_pattern("type:*Norm").matches_class("LlamaRMSNorm") is True
    assert not compile_pattern("type:Linear").matches("Linear")
    assert not compile_pattern("*").matches_class("Linear")


def test_only_patterns_specific_to_a_buffer_match_it_exactly() -> None:
    buffer = "model.rotary_emb.inv_freq"
    for pattern in ("*.inv_freq", buffer, "*inv*", "re:.*freq", "model.rotary_emb.{inv_freq,other}"):
        assert compile_pattern(pattern).matches_exactly(buffer), pattern
    for pattern in ("*", "model.*", "model.rotary_emb", "model.rotary_emb.*", "*.rotary_emb.?*", "re:.*"):
        assert not compile_pattern(pattern).matches_exactly(buffer), pattern


@pytest.mark.parametrize(
    ("text", "position"),
    [("a.{b", 2), ("a}.b", 1), ("", 0), ("re:", 0), ("re:a(", 5), ("{1..999999999}", 0), ("{" * 30 + "}" * 30, 20)],
)
def test_error_in_a_pattern_gives_the_position_of_the_error(text: str, position: int) -> None:
    with pytest.raises(PatternError) as caught:
        compile_pattern(text)
    assert caught.value.position == position
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@given(st.text(max_size=30))
def test_any_text_compiles_as_a_pattern_or_raises_pattern_error(text: str) -> None:
    with contextlib.suppress(PatternError):
        compile_pattern(text).selects("model.layers.1.mlp")


STARRED = st.lists(st.sampled_from(["*", "*", "?", "a", "b", ".", "{a,bb}", "{b,a*}", "[ab]", "{9..11}"]), max_size=6)


@given(STARRED.map("".join), st.text(alphabet="ab.190", max_size=12))
def test_globs_with_choices_match_like_their_expansions(glob: str, name: str) -> None:
    choices = [["a", "bb"] if part == "{a,bb}" else ["b", "a*"] if part == "{b,a*}" else ["9", "10", "11"]
               if part == "{9..11}" else [part] for part in re.findall(r"\{[^}]*\}|\[[^]]*\]|.", glob)]  # fmt: skip
    if glob:
        expanded = ["".join(parts) for parts in itertools.product(*choices)]
        assert compile_pattern(glob).matches(name) == any(fnmatches(name, one) for one in expanded)


@given(st.integers(-1200, 1200), st.integers(-1200, 1200), st.booleans(), st.integers(-1300, 1300))
def test_ranges_with_leading_zeros_or_signs_match_their_numbers(
    first: int, last: int, padded: bool, number: int
) -> None:
    ends = [f"{end:05d}" if padded else str(end) for end in (first, last)]
    matches = compile_pattern(f"x{{{ends[0]}..{ends[1]}}}").matches
    written = f"x{number:05d}" if padded else f"x{number}"
    assert matches(written) == (min(first, last) <= number <= max(first, last))
    assert not matches(f"x0{written[1:]}")


# Each of these needs more than the age of the universe with `re`, or all the memory, for names that are not long at all.
BOMBS = ["re:(.*)*(.*)*Z", "re:(a|a)*b", "re:(?:.?){300}(?:.?){300}Z", "re:(.*?)*?(.*?)*?(.*?)*?Z", "re:" + ".*" * 20 + "Z",
         "re:(?=(.*)*(.*)*Z).", r"re:(.*)\1(.*)\2(.*)\3(.*)\4Z", "re:(.+)+" * 3 + "Z", "*{a,bb}" * 20 + "Z", "{a,aa}" * 60,
         "*a*a*a*a*a*a*a*a*a*a*a*a*b", "{1,11,111}" * 40, "re:" + "a?" * 100 + "a" * 100]  # fmt: skip


@pytest.mark.parametrize("text", BOMBS)
def test_pattern_matching_time_is_limited(text: str) -> None:
    """A hang would exceed the time limit of the test."""
    names = ["a" * 2000, "1" * 500, "ab." * 300 + "Z!", "model.layers.3.mlp.gate_proj.weight.abcZ!"]
    with contextlib.suppress(TooSlow), time_limit(0.1):
        for name in names:
            compile_pattern(text).matches(name)


def test_too_slow_pattern_is_named_in_the_error() -> None:
    slow = "re:(.*?)*?(.*?)*?(.*?)*?Z"
    with pytest.raises(TooSlow, match=re.escape(f"{slow!r} takes too long to match")), time_limit(0.05):
        compile_pattern(slow).matches("aZ!" * 40)


def test_globs_with_many_stars_match_quickly() -> None:
    many = "*a*a*a*a*a*a*a*a*a*a*b"
    assert not compile_pattern(many).matches("a" * 100_000)
    assert compile_pattern(many).matches("a" * 100_000 + "b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{0.." + "9" * 5000 + "}", "too many digits"),
        ("re:" + "(" * 400, "nested too deep"),
        ("re:" + "((((" * 5000, "too long"),
        ("re:a{99999999999}", "repeats more than 1000 times"),
        ("re:((?:a?){1000}){1000}", "repeats too often"),
        ("re:[z-a]", "bad character range"),
        ("a" * 200_001, "too long"),
    ],
)
def test_too_large_pattern_is_refused(text: str, says: str) -> None:
    with pytest.raises(PatternError, match=says) as caught:
        compile_pattern(text)
    assert len(str(caught.value)) < 500


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{0..100000}{0..100000}{0..100000}", ",".join(["{0..99999}"] * 300)])
def test_patterns_with_many_large_ranges_compile_and_match(text: str) -> None:
    assert compile_pattern(text).matches(re.sub(r"\{0\.\.(\d+)\}", r"\1", text))
    assert not compile_pattern(text).matches("x")
