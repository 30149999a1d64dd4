"""Tests that one process runs for seconds, and whose subject a quicker one has, too: `slow.txt` lists them.

Two hundred of six thousand tests took half of the time. CI runs the others; `.ci/slow` runs these, before a
release and after work on what they are about. Each group of the list says what keeps watch meanwhile.
"""

from __future__ import annotations

from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")


def slow_tests() -> frozenset[str]:
    """Return the node ids in the list, from the repository's root: `tests/test_file.py::test[parameters]`.

    A line without parameters stands for the test with all of its parameters.
    """
    lines = (line.partition("#")[0].strip() for line in LIST.read_text().splitlines())
    return frozenset(f"tests/{line}" for line in lines if line)


def is_slow(node_id: str, listed: frozenset[str]) -> bool:
    """Return whether the list has a test, or all of its parameters."""
    node_id = node_id.partition("@")[0]  # pytest-xdist writes a test's group behind it
    return node_id in listed or node_id.partition("[")[0] in listed
