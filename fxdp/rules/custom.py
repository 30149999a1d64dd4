"""Registration of rules for user ops: `fxdp.register_rule`.

There are three forms, from the shortest to the most general:

    fxdp.register_rule(op, pointwise=True)
    fxdp.register_rule(op, labels="n_, _ -> n_")
    @fxdp.register_rule(op)
    def rule(op): yield op.alternative({0: S(0)}, S(0))

An op without a rule is still correct: its operands are gathered and the op runs replicated on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from fxdp.errors import InputError
from fxdp.rules.dims import argument_or_none, operand_or_none
from fxdp.rules.families.pointwise import aligned
from fxdp.rules.labels import by_labels, filled, linear
from fxdp.rules.registry import Alternative, Kind, Op, Operand, Rule, overloads, registry
from fxdp.torch_compat import OpOverload, OpOverloadPacket, overload_of

_FAMILY = "user"


@overload
def register_rule(*ops: Any) -> Callable[[Rule], Rule]: ...
@overload
def register_rule(*ops: Any, labels: str, linear_in: Sequence[str] = ...) -> None: ...
@overload
def register_rule(*ops: Any, pointwise: bool, linear_in: Sequence[str] = ...) -> None: ...
def register_rule(
    *ops: Any, labels: str = "", pointwise: bool = False, linear_in: Sequence[str] = ()
) -> Callable[[Rule], Rule] | None:
    """Register how your ops act on the batch, so that each rank runs them on its part.

    Ops are functional overloads (`torch.ops.mylib.f.default`), packets (all functional overloads), or results
    of `torch.library.custom_op`. A backward is a separate op, with its own rule.

    Parameters
    ----------
    labels : a string per tensor argument `-> ` a string per result, one character per dim; `_` is a dim that
        must be full, `...` any number of full dims. For every letter this promises: a result with the
        letter depends, at index i, only on the operands' slices at i; a result without the letter is the
        *sum* of these terms over i.

            "n_, _ -> n_"               rows of x by a full weight
            "n_, n_, _ -> n_, _"        its backward: the weight's gradient sums over rows
            "bmk, bkn -> bmn"           bmm
            "n..., ... -> n..."         the first dim counts samples
    pointwise : every element of the results depends on the aligned elements of the operands only.
    linear_in : names of arguments in which the op is linear, with all remaining ones fixed: there a sum of
        terms may pass unreduced. A backward is linear in its incoming gradients.

    Without labels and pointwise, returns a decorator for a rule: a pure function `Op -> iterable of
    Alternative` that yields all exact ways to run the op on parts; "all full" is always one. `fxdp.rules` has
    the classes for a rule; `fxdp.check_rule` proves any rule.

    Raises
    ------
    InputError : not an op; an op that writes its arguments; an op that has a rule; labels that do not fit.
    """
    targets = [_checked(op) for op in ops]
    if not targets:
        raise InputError("register_rule: got no op, expected one such as torch.ops.mylib.f.default")
    if not isinstance(labels, str) or not isinstance(pointwise, bool):
        raise InputError(
            f"register_rule: got labels={labels!r} and pointwise={pointwise!r}, expected text such as "
            '"n_, _ -> n_", or pointwise=True'
        )
    if isinstance(linear_in, str):
        raise InputError(f"register_rule: linear_in={linear_in!r} is one text, expected names in a list")
    if labels and pointwise:
        raise InputError("register_rule: got labels and pointwise, expected one of them")
    if pointwise:
        _add(_pointwise(linear_in), targets, linear_in)
    elif labels:
        inputs, results = _parsed(labels, targets)
        _add(_labelled(inputs, results, linear_in), targets, linear_in, _kind(inputs, results))
    elif linear_in:
        raise InputError(
            "register_rule: linear_in goes with labels or pointwise; a rule of yours yields P itself"
        )
    else:
        return _decorator(targets)
    return None


def _decorator(targets: Sequence[OpOverload | OpOverloadPacket]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        if not callable(rule):
            raise InputError(f"register_rule: got {rule!r} as a rule, expected a function of the op")
        registry.add(rule, _FAMILY, *targets)
        return rule

    return register


def _add(
    rule: Rule,
    targets: Sequence[OpOverload | OpOverloadPacket],
    linear_in: Sequence[str],
    kind: Kind = "batched",
) -> None:
    for target in overloads(targets):
        names = [argument.name for argument in target._schema.arguments]
        unknown = [name for name in linear_in if name not in names]
        if unknown:
            raise InputError(f"register_rule: {target} has no argument {unknown}, expected some of {names}")
    registry.add(rule, _FAMILY, *targets, kind=kind)


def _checked(op: Any) -> OpOverload | OpOverloadPacket:
    target = overload_of(op)
    if not isinstance(target, (OpOverload, OpOverloadPacket)):
        raise InputError(
            f"register_rule: got {op!r}, expected an op such as torch.ops.mylib.f.default, or what "
            "torch.library.custom_op returned. A Python function is traced through and needs no rule"
        )
    if isinstance(target, OpOverload) and target._schema.is_mutable:
        raise InputError(
            f"register_rule: {target} writes its arguments; capture replaces it by a functional op. "
            "Register a rule for that one"
        )
    return target


def _pointwise(linear_in: Sequence[str]) -> Rule:
    def pointwise(op: Op) -> Iterator[Alternative]:
        yield from aligned(op)
        yield from _sums(op, linear_in)

    return pointwise


def _labelled(inputs: Sequence[str], results: Sequence[str], linear_in: Sequence[str]) -> Rule:
    def labelled(op: Op) -> Iterator[Alternative]:
        operands = [operand_or_none(op.arg(name)) for name in _tensor_arguments(op.target)]
        shapes = [
            *(None if o is None else o.shape for o in operands),
            *(None if t is None else t.shape for t in op.outputs),
        ]
        texts = zip(shapes, (*inputs, *results), strict=True)
        if all(shape is None or len(filled(text, len(shape))) == len(shape) for shape, text in texts):
            yield from by_labels(op, zip(operands, inputs, strict=True), results)
            yield from _sums(op, linear_in)  # otherwise an operand has a rank that the labels do not describe

    return labelled


def _sums(op: Op, linear_in: Sequence[str]) -> Iterator[Alternative]:
    named = (argument_or_none(op, name) for name in linear_in)
    yield from linear(op, *([o] for o in named if isinstance(o, Operand)))


def _tensor_arguments(target: OpOverload) -> list[str]:
    return [a.name for a in target._schema.arguments if "Tensor" in str(a.type)]


def _parsed(labels: str, targets: Sequence[OpOverload | OpOverloadPacket]) -> tuple[list[str], list[str]]:
    """Return the labels of the tensor arguments and of the results; raise with all faults at once."""
    left, arrow, right = labels.partition("->")
    inputs, results = ([text.strip() for text in side.split(",")] for side in (left, right))
    faults = [] if arrow else ["there is no '->'"]
    for text in (*inputs, *results):
        rest = text.replace("...", "", 1).replace("_", "")
        if not (rest.isalpha() or rest == "") or len(set(rest)) != len(rest):
            faults.append(
                f"{text!r} is not one letter or '_' per dim, no letter twice, with at most one '...'"
            )
    unknown = sorted({c for text in results for c in text if c.isalpha()} - {c for t in inputs for c in t})
    if unknown:
        faults.append(f"the results have {unknown}, which no operand has")
    for target in overloads(targets):
        faults += _misfits(target, inputs, results)
    if faults:
        raise InputError(f"register_rule, labels {labels!r}: {'; '.join(faults)}")
    return inputs, results


def _misfits(target: OpOverload, inputs: Sequence[str], results: Sequence[str]) -> list[str]:
    faults = []
    names = _tensor_arguments(target)
    lists = [a.name for a in target._schema.arguments if a.name in names and "List" in str(a.type)]
    if lists:
        faults.append(f"{target} takes lists of tensors ({lists}): write a rule as a function")
    if len(names) != len(inputs):
        faults.append(f"{target} has {len(names)} tensor arguments {names}, got labels for {len(inputs)}")
    returns = len(target._schema.returns)
    if returns != len(results):
        faults.append(f"{target} has {returns} results, got labels for {len(results)}")
    return faults


def _kind(inputs: Sequence[str], results: Sequence[str]) -> Kind:
    # a label that no result has is summed over
    used = {c for text in inputs for c in text if c.isalpha()}
    return "contracted" if any(used - set(text) for text in results) else "batched"
