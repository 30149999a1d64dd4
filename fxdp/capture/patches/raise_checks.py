"""Checks of data in the user's Python code, which become results of the program.

    if labels.max() >= self.vocab_size:     the program returns `labels.max() >= vocab_size` of the
        raise ValueError(...)               global batch; where it is true, the call raises

A statement that does nothing but raise (an `assert`, an `if` whose body ends in `raise`) has one way on, and
so has a branch on whether values are finite (`if not torch.isfinite(x).all(): x = clamp(x)`), while they are.
Capture takes it, and each step makes sure that it was right. Of branches with two ways on those on a flag of
the batch (`flags.py`) have a program for each way; others are refused elsewhere.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fxdp import torch_compat
from fxdp.capture.captured import Otherwise
from fxdp.capture.locations import is_user_file, location_of_call, location_of_frame
from fxdp.capture.patches.flags import Selections, found_places, is_flag, likely, rows_at
from fxdp.capture.patches.random_numbers import integer_part
from fxdp.capture.patches.unbacked_hints import HintedNumber, UnbackedHints
from fxdp.ir.metadata import Location
from fxdp.torch_compat import Patch, around, calling_frame

_UNKNOWN = (torch_compat.GuardOnDataDependentSymNode, torch_compat.DataDependentOutputException)


class AskedChecks:
    """What one run of the model's code asked of its data in such statements, and at branches on flags.

    `branches` are those that it goes at the first of these branches, at others the likely one; None: at none.
    """

    def __init__(self, branches: tuple[bool, ...] | None = (), told: Sequence[HintedNumber] = ()) -> None:
        self._branches = branches
        self.told = UnbackedHints(told)
        self.has_branches = branches is not None
        self.tensors: list[Tensor] = []
        self.answers: list[tuple[bool, Otherwise, Location]] = []
        """What the tensor must be, what the code does if it is not, where it asks."""
        self._askers: list[Any] = []
        """By what in the code it is asked, which a loop passes several times; of a branch itself."""

    def answer(self, tensor: Tensor, frame: FrameType) -> bool | None:
        """The answer that does not raise, noted together with the question; None elsewhere."""
        found = _one_way(frame) if tensor.numel() == 1 else None
        if found is None:
            return None
        passes, raises = found
        self._note(tensor, (passes, "raises" if raises else "not finite", location_of_frame(frame)))
        if raises:
            self._askers[-1] = (frame.f_code, frame.f_lasti, tensor.device)
        return passes

    def way(self, flag: Tensor, read: Callable[[Tensor], Any], frame: FrameType) -> bool:
        """The way that the code goes on a flag, which is noted; what is known while tracing is as it is."""
        try:
            return bool(read(flag))
        except _UNKNOWN:
            if self._branches is None or not is_user_file(frame.f_code.co_filename):
                raise
        taken, location = self._taken(), location_of_frame(frame)
        way = self._branches[len(taken)] if len(taken) < len(self._branches) else self._guess(flag, location)
        self._note(flag, (way, "branches", location))
        return way

    def _guess(self, flag: Tensor, location: Location) -> bool:
        """The likely way; one that is not, where a flag of a full tensor went so at this line before."""
        if likely(flag):
            return True
        before = (
            passes for passes, otherwise, at in self.answers if otherwise == "branches" and at == location
        )
        return any(before)

    def _taken(self) -> tuple[bool, ...]:
        return tuple(passes for passes, otherwise, _ in self.answers if otherwise == "branches")

    def other_guess(self) -> tuple[bool, ...] | None:
        """The ways up to here, but the last one the other way; None where that was no guess."""
        taken = self._taken()
        return (*taken[:-1], not taken[-1]) if len(taken) > len(self._branches or ()) else None

    def settle(self) -> None:
        """At the end of the run: what it was told must be right."""
        for location, right in self.told.checks():
            self._note(right, (True, "other number", location))
        self._join()

    def _join(self) -> None:
        """Of what raises in any turn of a loop there is one answer, where the last turn asks."""
        iterations: dict[Any, list[int]] = {}
        for place, asker in enumerate(self._askers):
            iterations.setdefault(asker, []).append(place)
        for places in filter(lambda places: len(places) > 1, iterations.values()):
            every = torch.stack([self.tensors[place] for place in places])
            passes = self.answers[places[-1]][0]
            self.tensors[places[-1]] = every.all() if passes else every.any()
        last = sorted(places[-1] for places in iterations.values())
        self.tensors, self.answers = [self.tensors[i] for i in last], [self.answers[i] for i in last]

    def must(self, tensor: Tensor, location: Location) -> None:
        """Make sure at each step that a value is true, as `torch._assert_async` does."""
        self._note(tensor, (True, "raises", location))

    def _note(self, tensor: Tensor, answer: tuple[bool, Otherwise, Location]) -> None:
        # a bool of its own: the tensor itself may be written later, or be a view
        self.tensors.append((tensor != 0).reshape(()).detach())
        self.answers.append(answer)
        self._askers.append(len(self._askers))


def checks(asked: AskedChecks) -> tuple[Patch, ...]:
    """While the user's code runs, answer the questions of statements that only raise, and of flags."""
    read = Tensor.__bool__  # torch's own: what is below is not installed yet
    selections = Selections()

    def truth(plain: Callable[[Tensor], bool], self: Tensor) -> bool:
        frame = calling_frame()
        answer = asked.answer(self, frame)
        if answer is not None:
            return answer
        return asked.way(self, plain, frame) if is_flag(self) else plain(self)

    def item(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        frame = calling_frame()
        if self.numel() == 1 and _one_way(frame) is not None:
            return self.reshape(())  # a number that is compared in the statement: compare the tensor
        if is_flag(self):
            return asked.way(self, plain, frame)
        told = asked.told.value(self, location_of_frame(frame))
        return integer_part(self, plain(self)) if told is None else told

    def number(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        told = asked.told.value(self, location_of_frame(calling_frame()))
        return plain(self) if told is None else told

    def selected(plain: Any) -> Any:
        return _AskedOfSelections(plain, selections, lambda flag, frame: asked.way(flag, read, frame))

    def rows(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        places = found_places(self) if asked.has_branches else None
        if places is None:
            return plain(self)
        return rows_at(places, lambda flag, frame: asked.way(flag, read, frame))

    def asserted(plain: Callable[..., None], tensor: Tensor, *message: str) -> None:
        asked.must(tensor, location_of_call())

    replacements = {"__bool__": truth, "item": item, "__iter__": rows}
    replacements |= dict.fromkeys(("__int__", "__index__", "tolist"), number)
    patches = (Patch(Tensor, name, around(made)) for name, made in replacements.items())
    traced = (Patch(kind, "tolist", around(number)) for kind in torch_compat.TRACED)  # with one of their own
    raising = Patch(torch, "_assert_async", around(asserted))  # torch.distributions calls it since 2.15
    return (*patches, *traced, raising, Patch(torch.SymBool, "__bool__", selected), *selections.patches())


class _AskedOfSelections:
    """The truth of a size, or which way the code goes where that asks whether a mask selects any.

    No function around torch's own: torch looks which line asks, and would find ours.
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
    """What the value that a frame asks for must be for its statement to go the one way, and whether the code
    raises if it is not; None elsewhere."""
    return _conditions(frame.f_code.co_filename).get(frame.f_lineno)


def _nodes(file: str) -> list[ast.AST]:
    # The source, for a frame says no more than its line, and bytecode is another in each Python. Code without
    # source has no such statements, and is refused where it asks.
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return []


@lru_cache(maxsize=1024)
def _conditions(file: str) -> dict[int, tuple[bool, bool]]:
    """By line, the conditions with one way on: which truth of a tensor takes it, and if the other raises.

    Those whose statement only raises, and those that ask whether values are finite.
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
        beside = node.body[0].lineno in _lines(node.test)  # `if a: b` in one line: which of both asks?
        if not beside and (passes := _says_finite(node.test)) is not None:
            finite |= dict.fromkeys(_lines(node.test), (passes, False))
    return finite | raising


def _raises(statement: ast.stmt) -> bool:
    """Whether a statement raises: `raise`, `assert False`, `torch._assert(False, ...)`."""
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
