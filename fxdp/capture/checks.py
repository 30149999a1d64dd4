"""Checks of data in the user's Python code, which become results of the program.

    if labels.max() >= self.vocab_size:     the program returns `labels.max() >= vocab_size` of the
        raise ValueError(...)               global batch; where it is true, the call raises

A statement that does nothing but raise (an `assert`, an `if` whose body ends in `raise`) has one way on.
Capture takes it, and each step makes sure that it was right. Branches with two ways on are refused elsewhere.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from fxdp.annotations import Site


class Asked:
    """What one run of the model's code asked of its data in such statements."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.answers: list[tuple[bool, Site]] = []

    def answer(self, tensor: torch.Tensor, frame: FrameType) -> bool | None:
        """The answer that does not raise, noted together with the question; None elsewhere."""
        passes = _passes(frame) if tensor.numel() == 1 else None
        if passes is None:
            return None
        file, line = frame.f_code.co_filename, frame.f_lineno
        self.tensors.append((tensor != 0).reshape(()).detach())
        self.answers.append((passes, Site(file, line, linecache.getline(file, line).strip())))
        return passes


@contextlib.contextmanager
def noting_checks(asked: Asked) -> Iterator[None]:
    """While the user's code runs, answer the questions of statements that only raise."""
    truth, item = torch.Tensor.__bool__, torch.Tensor.item

    def noted_truth(self: torch.Tensor) -> bool:
        answer = asked.answer(self, sys._getframe(1))
        return truth(self) if answer is None else answer

    def noted_item(self: torch.Tensor) -> Any:
        frame = sys._getframe(1)
        if self.numel() != 1 or _passes(frame) is None:
            return item(self)
        return self.reshape(())  # a number that is compared in the statement: compare the tensor

    with _method("__bool__", noted_truth), _method("item", noted_item):
        yield


@contextlib.contextmanager
def _method(name: str, value: Any) -> Iterator[None]:
    """Shadow a method that `torch.Tensor` inherits."""
    own = vars(torch.Tensor).get(name)
    setattr(torch.Tensor, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, own)


def _passes(frame: FrameType) -> bool | None:
    """What the value that a frame asks for must be for its statement not to raise; None elsewhere."""
    return _guards(frame.f_code.co_filename).get(frame.f_lineno)


@lru_cache(maxsize=1024)
def _guards(file: str) -> dict[int, bool]:
    """The lines of conditions whose statement only raises, and which truth of a tensor there does not."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found: dict[int, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            passes = _truth(node.test, True)
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            passes = _truth(node.test, False)
        else:
            continue
        if passes is not None:
            lines = range(node.test.lineno, (node.test.end_lineno or node.test.lineno) + 1)
            found |= dict.fromkeys(lines, passes)
    return found


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
    """Whether a part of a condition asks no tensor for its value: a name, an attribute, `is None`."""
    if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
        return _is_plain(part.operand)
    if isinstance(part, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in part.ops)
    return isinstance(part, (ast.Name, ast.Attribute, ast.Constant))
