"""The rules' oracle as tests use it: `fxdp.rules.proof` with short names.

check(aten.mm.default, T("B", 3), T(3, 4))  ->  {"S(0), R -> S(0)", "P(sum), R -> P(sum)", ...}
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from fxdp.errors import RuleError
from fxdp.ir.types.placements import Replicate
from fxdp.rules.proof.case import SPLITS, Case, placements_of, spelled
from fxdp.rules.proof.samples import Sample as T
from fxdp.rules.registry import Alternative
from fxdp.torch_compat import OpOverload


def shown(value: object) -> str:
    """A parameter in the name of a test: the same in every process, so sets in order."""
    text = sorted(map(str, value)) if isinstance(value, (set, frozenset)) else value
    return str(text)[:60]


def listed(text: str) -> frozenset[str]:
    """Alternatives as `check` answers them, from `"S(0), R -> S(0); P -> P"`."""
    return frozenset(re.sub(r"P(?!\()", "P(sum)", a.strip()) for a in text.split(";") if a.strip())


def case(target: OpOverload, *args: Any, **kwargs: Any) -> Case:
    """A `Case` from an op's arguments; strings in lists are sizes. `splits`, `random`, `law`: of the case."""
    options = {name: kwargs.pop(name) for name in ("splits", "random", "law") if name in kwargs}
    return Case(target, args, kwargs, **options)


def check(target: OpOverload, *args: Any, **kwargs: Any) -> frozenset[str]:
    """Verify all alternatives of the op's rule for these arguments; return how they are spelled."""
    return frozenset(map(spelled, case(target, *args, **kwargs).verified()))


def missing(target: OpOverload, *args: Any, **kwargs: Any) -> list[str]:
    """Exact alternatives that the rule does not return, by brute force: a hint for rule authors only."""
    made = case(target, *args, **kwargs)
    have = {spelled(a) for a in made.alternatives()}
    inputs = itertools.product(*(placements_of(t.shape) for t in made.tensors))
    outputs = [[None] if t is None else list(placements_of(t.shape)) for t in made.outputs]
    found = []
    for ins, outs in itertools.product(list(inputs), list(itertools.product(*outputs))):
        alternative = Alternative(ins, outs)
        if spelled(alternative) in have or all(isinstance(p, Replicate) for p in ins):
            continue
        try:
            made.verify(alternative)
        except RuleError:
            continue
        found.append(spelled(alternative))
    return found


__all__ = [
    "SPLITS",
    "Case",
    "RuleError",
    "T",
    "case",
    "check",
    "listed",
    "missing",
    "placements_of",
    "shown",
    "spelled",
]
