"""What is told of reached code: each block that ran, with its statements."""

from __future__ import annotations

import ast
from typing import Any

from tests.reached import blocks

PROGRAM = '''
def sign(x):
    """Say which side of nothing."""
    side = 0
    if x:
        side = 1
        return side if x > 0 else -side
    for _ in ():
        side = 2
    return side
'''


def test_a_block_that_runs_is_marked() -> None:
    tree = ast.parse(PROGRAM)
    counted = dict(blocks(ast.parse(PROGRAM)))
    assert counted == {4: 2, 6: 2, 8: 1, 9: 1, 10: 1}
    assert dict(blocks(tree, mark=True)) == counted
    reached = bytearray(12)
    names: dict[str, Any] = {"__reached__": reached}
    exec(compile(tree, "program", "exec"), names)
    assert not any(reached)
    assert names["sign"](0) == 0
    assert [line for line, seen in enumerate(reached) if seen] == [4, 8, 10]
    assert names["sign"](-3) == -1
    assert [line for line, seen in enumerate(reached) if seen] == [4, 6, 8, 10]
    assert names["sign"].__doc__ == "Say which side of nothing."
