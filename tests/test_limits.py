from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import limits

_TESTS = Path(__file__).resolve().parent
_WAITS = {"wait", "result", "join", "settimeout"}
_MEANT = 0.5
"""Limits up to this many seconds are there to be hit."""


def test_processes_inherit_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from tests import limits; print(limits.SLOWNESS, limits.HANG_S, limits.scaled(0.123))"
    for slowness, said in (("2.5", "2.5 750.0 0.31"), ("1.0", "1.0 300.0 0.12")):
        monkeypatch.setenv("TESTS_SLOWNESS", slowness)
        command = [sys.executable, "-c", program]
        assert subprocess.check_output(command, text=True, cwd=_TESTS.parent).split() == said.split()


def test_the_speed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.01, 0.0, 0.18, 0.0, 100.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert [limits.measured() for _ in range(3)] == [1.0, pytest.approx(3.0), 20.0]


def test_a_test_has_the_limit_of_this_machine(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption("timeout") >= limits.TEST_S


def _seconds(call: ast.Call) -> list[ast.expr]:
    """What a call has for a limit in seconds."""
    found = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return [*found, *call.args[:1]] if name in _WAITS else found


def _written_out(source: str) -> list[int]:
    """The lines of a source with a limit that does not scale."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    limits_of = [one for call in calls for one in _seconds(call) if isinstance(one, ast.Constant)]
    return [one.lineno for one in limits_of if isinstance(one.value, int | float) and one.value > _MEANT]


def test_all_limits_scale() -> None:
    assert _written_out("ranks.run(2, f, timeout=60)\na.wait(10)\na.join(HANG_S)\na.join(0.1)") == [1, 2]
    found = {path.name: _written_out(path.read_text()) for path in _TESTS.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}
