"""Checks of data in the user's Python code, which become results of the program.

    if labels.max() >= self.vocab_size:     the program returns `labels.max() >= vocab_size` of the
        raise ValueError(...)               global batch; where it is true, the call raises

A statement that does nothing but raise (an `assert`, an `if` whose body ends in `raise`) has one way on, and
so has a branch on whether values are finite (`if not torch.isfinite(x).all(): x = clamp(x)`), while they are.
Capture takes it, and each step makes sure that it was right. Branches with two ways on are refused elsewhere.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any

from torch import Tensor

from fxdp.capture.patches.patch import Patch, around, calling_frame
from fxdp.capture.sites import site_of_frame
from fxdp.ir.notes import Site


class Asked:
    """What one run of the model's code asked of its data in such statements."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.answers: list[tuple[bool, bool, Site]] = []
        """What the tensor must be, whether the code raises if it is not, and where it asks."""

    def answer(self, tensor: Tensor, frame: FrameType) -> bool | None:
        """The answer that does not raise, noted together with the question; None elsewhere."""
        passes = _passes(frame) if tensor.numel() == 1 else None
        if passes is None:
            return None
        file, line = frame.f_code.co_filename, frame.f_lineno
        # a bool of its own: the tensor itself may be written later, or be a view
        self.tensors.append((tensor != 0).reshape(()).detach())
        self.answers.append((passes, line in _guards(file), site_of_frame(frame)))
        return passes


def checks(asked: Asked) -> tuple[Patch, ...]:
    """While the user's code runs, answer the questions of statements that only raise."""

    def truth(plain: Callable[[Tensor], bool], self: Tensor) -> bool:
        answer = asked.answer(self, calling_frame())
        return plain(self) if answer is None else answer

    def item(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        if self.numel() != 1 or _passes(calling_frame()) is None:
            return plain(self)
        return self.reshape(())  # a number that is compared in the statement: compare the tensor

    return Patch(Tensor, "__bool__", around(truth)), Patch(Tensor, "item", around(item))


def _passes(frame: FrameType) -> bool | None:
    """What the value that a frame asks for must be for its statement to go the one way; None elsewhere."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    raising = _guards(file).get(line)
    return _finite(file).get(line) if raising is None else raising


def _nodes(file: str) -> list[ast.AST]:
    # The source, for a frame says no more than its line, and bytecode is another in each Python. Code without
    # source has no such statements, and is refused where it asks.
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return []


@lru_cache(maxsize=1024)
def _guards(file: str) -> dict[int, bool]:
    """The lines of conditions whose statement only raises, and which truth of a tensor there does not."""
    found: dict[int, bool] = {}
    for node in _nodes(file):
        if isinstance(node, ast.Assert):
            passes = _truth(node.test, True)
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            passes = _truth(node.test, False)
        else:
            continue
        if passes is not None:
            found |= dict.fromkeys(_lines(node.test), passes)
    return found


@lru_cache(maxsize=1024)
def _finite(file: str) -> dict[int, bool]:
    """The lines that branch on whether values are finite, and which truth of a tensor there says so."""
    found: dict[int, bool] = {}
    for node in _nodes(file):
        if isinstance(node, ast.If) and node.body[0].lineno not in _lines(node.test):
            passes = _says_finite(node.test)
            if passes is not None:
                found |= dict.fromkeys(_lines(node.test), passes)
    return found


def _lines(test: ast.expr) -> range:
    return range(test.lineno, (test.end_lineno or test.lineno) + 1)


def _says_finite(test: ast.expr) -> bool | None:
    """What the tensors in a condition are for finite values; None where it asks for something else.

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
    """The name of a function and its first operand, of `f(x)`, `torch.f(x)`, `x.f()` and `x.f().item()`."""
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
    """What the tensors in a condition must be for it to be `wanted`; None if they must differ.

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
    """Whether a part of a condition asks no tensor for its value: a name, attribute, dtype or `is None`."""
    if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
        return _is_plain(part.operand)
    if isinstance(part, ast.Compare):
        of_dtype = isinstance(part.left, ast.Attribute) and part.left.attr == "dtype"
        return of_dtype or all(isinstance(op, (ast.Is, ast.IsNot)) for op in part.ops)
    return isinstance(part, (ast.Name, ast.Attribute, ast.Constant))
