"""Conditions of statements with one normal branch, read from the source: checks that only raise.

assert mask.any()                               True is normal, and the opposite raises
if not torch.isfinite(x).all(): x = clamp(x)    finite values are normal
"""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from types import FrameType


def one_way(frame: FrameType) -> tuple[bool, bool] | None:
    """Return the value of a tensor for the normal branch at a frame's line, and whether the opposite raises.

    None if the line has no statement with a single normal branch.
    """
    return conditions(frame.f_code.co_filename).get(frame.f_lineno)


def _nodes(file: str) -> list[ast.AST]:
    # Parse the source, since a frame only has a line number, and bytecode differs between Python versions.
    # Code without source has no such statements, and is refused where it reads data.
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return []


@lru_cache(maxsize=1024)
def conditions(file: str) -> dict[int, tuple[bool, bool]]:
    """Return the conditions with one normal branch, by line.

    Each is the tensor's value in the normal branch, and whether the opposite raises. Included are conditions
    of statements that only raise, and conditions on finite values.
    """
    raising: dict[int, tuple[bool, bool]] = {}
    finite: dict[int, tuple[bool, bool]] = {}
    for node in _nodes(file):
        if isinstance(node, ast.Assert) and (passes := _truth(node.test, True)) is not None:
            raising |= dict.fromkeys(_lines(node.test), (passes, True))
        if not isinstance(node, ast.If):
            continue
        if _raises(node.body[-1]) and (passes := _truth(node.test, False)) is not None:
            raising |= dict.fromkeys(_lines(node.test), (passes, True))
        beside = node.body[0].lineno in _lines(node.test)  # both parts of `if a: b` may read
        if not beside and (passes := _says_finite(node.test)) is not None:
            finite |= dict.fromkeys(_lines(node.test), (passes, False))
    return finite | raising


def _raises(statement: ast.stmt) -> bool:
    """Return whether a statement raises: `raise`, `assert False`, `torch._assert(False, ...)`."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called, given = statement.value.func, statement.value.args
        named = isinstance(called, ast.Attribute) and called.attr == "_assert"
        return named and bool(given) and _is_false(given[0])
    asserted = isinstance(statement, ast.Assert) and _is_false(statement.test)
    return asserted or isinstance(statement, ast.Raise)


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _lines(test: ast.expr) -> range:
    return range(test.lineno, (test.end_lineno or test.lineno) + 1)


def _says_finite(test: ast.expr) -> bool | None:
    """Return the value of tensors in a condition if all values are finite; None for other conditions.

    not isfinite(x).all()                           -> True
    x.dtype == torch.float16 and isinf(x).any()     -> False
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _says_finite(test.operand)
    if isinstance(test, ast.BoolOp):
        parts = {_says_finite(part) for part in test.values if not _is_plain(part)}
        return parts.pop() if len(parts) == 1 else None
    reduction, of = _call(test)
    question, _ = _call(of)
    return _FINITE.get((reduction, question))


_FINITE = {("all", "isfinite"): True, ("any", "isinf"): False, ("any", "isnan"): False}


def _call(node: ast.expr | None) -> tuple[str, ast.expr | None]:
    """Return the function's name and first operand for `f(x)`, `torch.f(x)`, `x.f()` and `x.f().item()`."""
    if not isinstance(node, ast.Call):
        return "", None
    if isinstance(node.func, ast.Name):
        return node.func.id, node.args[0] if node.args else None
    if not isinstance(node.func, ast.Attribute):
        return "", None
    if node.func.attr == "item":
        return _call(node.func.value)
    return node.func.attr, node.args[0] if node.args else node.func.value


def _truth(test: ast.expr, wanted: bool) -> bool | None:
    """Return the value of tensors for which a condition is `wanted`; None if tensors must differ.

    not a, wanted False         -> True
    a or b, wanted False        -> False
    a or not b, wanted False    -> None
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        parts = {_truth(part, wanted) for part in test.values if not _is_plain(part)}
        return parts.pop() if len(parts) == 1 else None
    return wanted


def _is_plain(part: ast.expr) -> bool:
    """Return whether part of a condition reads no tensor: a name, attribute, dtype or `is None`."""
    if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
        return _is_plain(part.operand)
    if isinstance(part, ast.Compare):
        of_dtype = isinstance(part.left, ast.Attribute) and part.left.attr == "dtype"
        return of_dtype or all(isinstance(op, (ast.Is, ast.IsNot)) for op in part.ops)
    return isinstance(part, (ast.Name, ast.Attribute, ast.Constant))
