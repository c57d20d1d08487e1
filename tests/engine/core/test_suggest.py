from __future__ import annotations

import time

from dtype_engine.core.suggest import nearest


def test_nearest_name_is_found_and_none_if_all_are_too_different() -> None:
    assert nearest("bflaot16", ["float16", "bfloat16", "int8"]) == "bfloat16"
    assert nearest("zzz", ["float16", "bfloat16"]) is None
    assert nearest("int", ["int8"], cutoff=0.9) is None
    assert nearest("a", []) is None


def test_nearest_name_of_very_long_words_is_found_quickly() -> None:
    before = time.process_time()
    assert nearest("x" * 10**6, ["x" * 10**6, "x"]) is None
    assert nearest("x" * 150, ["x" * 10**6, "x" * 149]) == "x" * 149
    assert time.process_time() - before < 1
