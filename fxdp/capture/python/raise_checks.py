"""Checks of data in the user's Python code, which become results of the program.

    if labels.max() >= self.vocab_size:     the program returns `labels.max() >= vocab_size` of the
        raise ValueError(...)               global batch; if true, the call raises

A statement that only raises (an `assert`, an `if` with a body that ends in `raise`) has one normal branch. So
has a branch on finite values (`if not torch.isfinite(x).all(): x = clamp(x)`), as long as values are finite.
Capture takes this branch, and each step verifies the decision. A branch on a flag of the batch (`flags.py`)
has a program for each decision; all other branches on data are refused elsewhere. The normal branch is
read from the source:

    assert mask.any()                               True is normal, and the opposite raises
    if not torch.isfinite(x).all(): x = clamp(x)    finite values are normal
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fxdp import torch_compat
from fxdp.capture.locations import is_user_file, location_of_frame
from fxdp.capture.patches.asked_checks import AskedChecks
from fxdp.capture.python.flags import Selections, found_places, is_flag, likely, rows_at
from fxdp.capture.python.unit_draws import integer_part
from fxdp.torch_compat import Patch, around, calling_frame


def checks(asked: AskedChecks) -> tuple[Patch, ...]:
    """Return patches that answer checks and flags while the user's code runs."""
    read = Tensor.__bool__  # torch's own: the patches below are not installed yet
    selections = Selections()

    def way(flag: Tensor, read: Callable[[Tensor], Any], frame: FrameType) -> bool:
        return asked.way(flag, read, frame, likely(flag))

    def truth(plain: Callable[[Tensor], bool], self: Tensor) -> bool:
        frame = calling_frame()
        found = _one_way(frame) if self.numel() == 1 else None
        if found is not None:
            return asked.answer(self, *found, frame)
        return way(self, plain, frame) if is_flag(self) else plain(self)

    def item(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        frame = calling_frame()
        if self.numel() == 1 and _one_way(frame) is not None:
            return self.reshape(())  # a number compared in the statement: compare the tensor instead
        if is_flag(self):
            return way(self, plain, frame)
        told = asked.told.value(self, location_of_frame(frame))
        return integer_part(self, plain(self)) if told is None else told

    def number(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        told = asked.told.value(self, location_of_frame(calling_frame()))
        return plain(self) if told is None else told

    def selected(plain: Any) -> Any:
        return _AskedOfSelections(plain, selections, lambda flag, frame: way(flag, read, frame))

    def rows(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        places = found_places(self) if asked.has_branches else None
        if places is None:
            return plain(self)
        return rows_at(places, lambda flag, frame: way(flag, read, frame))

    replacements = {"__bool__": truth, "item": item, "__iter__": rows}
    replacements |= dict.fromkeys(("__int__", "__index__", "tolist"), number)
    patches = (Patch(Tensor, name, around(made)) for name, made in replacements.items())
    traced = (Patch(kind, "tolist", around(number)) for kind in torch_compat.TRACED)  # with one of their own
    return (*patches, *traced, Patch(torch.SymBool, "__bool__", selected), *selections.patches())


class _AskedOfSelections:
    """Descriptor for the truth of sizes; decides on flags if a condition checks whether a mask selects any.

    A descriptor instead of a wrapping function, because torch looks up the calling line, and would find ours.
    """

    def __init__(self, plain: Any, selections: Selections, way: Callable[[Tensor, FrameType], bool]) -> None:
        self._plain, self._selections, self._way = plain, selections, way

    def __get__(self, asked: torch.SymBool | None, owner: type | None = None) -> Any:
        if asked is None or not self._selections.knows(asked):
            return self._plain.__get__(asked, owner)
        return partial(self._answer, asked)

    def _answer(self, asked: torch.SymBool) -> bool:
        frame = sys._getframe(1)
        if not is_user_file(frame.f_code.co_filename):
            return bool(self._plain(asked))
        flag, answer = self._selections.any_of(asked)
        return self._way(flag, frame) == answer


def _one_way(frame: FrameType) -> tuple[bool, bool] | None:
    """Return the value of a tensor for the normal branch at a frame's line, and whether the opposite raises.

    None if the line has no statement with a single normal branch.
    """
    return _conditions(frame.f_code.co_filename).get(frame.f_lineno)


def _nodes(file: str) -> list[ast.AST]:
    # Parse the source, since a frame only has a line number, and bytecode differs between Python versions.
    # Code without source has no such statements, and is refused where it reads data.
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return []


@lru_cache(maxsize=1024)
def _conditions(file: str) -> dict[int, tuple[bool, bool]]:
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
