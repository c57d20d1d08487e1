"""Every number and list in a saved scan, drift, comparison or session is read and used, or refused in a sentence with the file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.hostile.fuzz_saved import FORMS
from tests.helpers.mutations import places, replaced_at

from dtype_engine.core.errors import UserError
from dtype_engine.runtime.measure import saved_differences
from dtype_engine.runtime.scan import saved as saved_scan
from dtype_engine.runtime.session import saved_drift

VALUES: tuple[Any, ...] = (
    0,
    -1,
    1,
    2**31,
    2**64,
    10**400,
    1.5,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    True,
    "8",
    None,
    [],
    {},
)
"""What each number and each list is replaced by."""


@pytest.mark.parametrize("form", FORMS)
def test_each_number_of_a_saved_file_is_used_or_refused_by_file_name(form: str, tmp_path: Path) -> None:
    make, use = FORMS[form]
    sound = json.loads(make(tmp_path))
    path = tmp_path / "case.json"
    path.write_text(json.dumps(sound))
    use(path)
    failures = []
    for place in places(sound, lists=True):
        for value in VALUES:
            path.write_text(json.dumps(replaced_at(sound, place, value)))
            try:
                use(path)
            except UserError as error:
                if str(path) not in str(error) or not str(error).isprintable():
                    failures.append(f"{place} {str(value)[:20]}: {error}")
            except Exception as error:
                failures.append(f"{place} {str(value)[:20]}: {type(error).__name__}: {error}")
    assert failures == [], "\n".join(failures)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (saved_scan.ScanFile, "scan"),
        (saved_drift.SavedDrift, "drift"),
        (saved_differences.ComparisonFile, "comparison"),
    ],
)
def test_sample_of_a_saved_file_has_every_numeric_field_of_its_type(kind: type, form: str, tmp_path: Path) -> None:
    """A new field of a record is tried as well, because the sample must have it."""
    samples = [json.loads(make(tmp_path)) for name, (make, _) in FORMS.items() if name.endswith(form)]
    held = {
        tuple(key for key in place if isinstance(key, str))
        for sample in samples
        for place in places(sample, lists=True)
    }
    names = {place[-1] for place in held if place}
    for name in _numeric_fields(msgspec.inspect.type_info(kind)):
        assert name in names, name


def _numeric_fields(kind: Any, name: str = "", depth: int = 8) -> Iterator[str]:
    """Yield the names of the fields of a type, and of the types in it, that hold numbers."""
    inspect = msgspec.inspect
    if isinstance(kind, (inspect.IntType, inspect.FloatType)) and name:
        yield name
    inner: list[tuple[str, Any]] = []
    if isinstance(kind, (inspect.StructType, inspect.DataclassType)):
        inner = [(field.encode_name, field.type) for field in kind.fields]
    elif isinstance(kind, inspect.UnionType):
        inner = [(name, each) for each in kind.types]
    elif isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        inner = [(name, kind.item_type)]
    elif isinstance(kind, inspect.TupleType):
        inner = [(name, each) for each in kind.item_types]
    elif isinstance(kind, inspect.DictType):
        inner = [("", kind.value_type)]
    for inner_name, each in inner if depth else ():
        yield from _numeric_fields(each, inner_name, depth - 1)
