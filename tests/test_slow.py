"""The list of slow tests names tests that there are."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.slow import is_slow, slow_tests

ROOT = Path(__file__).resolve().parent.parent


def test_each_line_is_a_test() -> None:
    listed = slow_tests()
    assert listed
    lost = []
    for line in sorted(listed):
        file, name = line.partition("[")[0].split("::")
        body = ast.parse((ROOT / file).read_text()).body if (ROOT / file).is_file() else []
        if name not in [each.name for each in body if isinstance(each, ast.FunctionDef)]:
            lost.append(line)
    assert lost == []


def test_a_test_is_listed_with_some_or_all_of_its_parameters() -> None:
    listed = frozenset({"tests/a.py::test_one[2]", "tests/a.py::test_all"})
    assert is_slow("tests/a.py::test_one[2]@ranks", listed)
    assert not is_slow("tests/a.py::test_one[20]", listed)
    assert is_slow("tests/a.py::test_all[3]", listed)
    assert is_slow("tests/a.py::test_all", listed)


def test_each_file_has_tests_that_are_not_listed() -> None:
    """What a file is about is tried by each commit."""
    listed = slow_tests()
    for file in {line.partition("::")[0] for line in listed}:
        names = [
            each.name
            for each in ast.parse((ROOT / file).read_text()).body
            if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
        ]
        assert [name for name in names if f"{file}::{name}" not in listed], f"all tests of {file} are slow"
