"""Faults seeded into every rule that splits anything: nearly all are caught, and which are not is known.

A fault replaces one placement of a right alternative: another dim, another block count, a partial result
claimed full, an entire one partial; and, for each sum over ranks, its average. Faults in operands are seeded
where the kernels check their operands' sizes: elsewhere a wrong operand is read beyond its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest
import torch

from fxdp.ir.ops import parts
from fxdp.ir.types.placements import Partial, Placement, R
from fxdp.rules.proof import samples
from fxdp.rules.registry import Alternative, registry
from fxdp.torch_compat import OpOverload
from tests.rules.harness import Case, RuleError, spelled
from tests.rules.test_every_rule import TARGETS, cases
from tests.rules.test_mutations import mutations

CHECKED_OPERANDS = frozenset({"pointwise", "view", "einsum", "reduction", "join"})
PER_OP = 3
SPLITS = ((0, 4, 1), (2, 3, 0))
BATCH = 5
SPLITTING = [t for t in TARGETS if registry[t].kind != "gathered"]


def first_split(target: OpOverload) -> tuple[Case, Alternative, list[Alternative]]:
    """A case of the op, one of its alternatives, and faults in that one."""
    choose = Random(str(target))
    for case in cases(target, 30):
        case.splits = SPLITS
        right = case.alternatives()
        if right:
            alternative = choose.choice(right)
            known = {spelled(a) for a in right}
            faults = [m for m in mutations(case, alternative) if spelled(m) not in known]
            if registry[target].family not in CHECKED_OPERANDS:
                faults = [m for m in faults if m.inputs == alternative.inputs]
            faults = [m for m in faults if differs(case, alternative, m)]
            return case, alternative, choose.sample(faults, min(PER_OP, len(faults)))
    raise AssertionError(f"{target}: no draw has an alternative")


def differs(case: Case, right: Alternative, fault: Alternative) -> bool:
    """Whether the values can tell: random, constant and empty results cannot, nor can a maximum of equals."""
    if case.random:
        return False
    _, expected = case.full(BATCH)
    changed = [
        i
        for i, (a, b) in enumerate(zip(right.outputs, fault.outputs, strict=True))
        if isinstance(expected[i], torch.Tensor) and (a != b or right.inputs != fault.inputs)
    ]
    if any(p in (Partial("max"), Partial("min")) for p in fault.outputs):
        return any(isinstance(p, Partial) for p in fault.inputs) or R not in fault.inputs
    return any(bool((expected[i] != expected[i].flatten()[:1]).any()) for i in changed)


def caught(case: Case, fault: Alternative) -> bool:
    try:
        case.verify(fault)
    except RuleError:
        return True
    return False


def test_nearly_all_faults_are_caught() -> None:
    outcomes: dict[str, bool] = {}
    for target in SPLITTING:
        case, _, faults = first_split(target)
        outcomes |= {f"{target}: {spelled(f)} of {case.tensors}": caught(case, f) for f in faults}
    survivors = [fault for fault, was_caught in outcomes.items() if not was_caught]
    assert len(outcomes) > 1500
    assert len(survivors) <= 0.02 * len(outcomes), f"{len(survivors)} of {len(outcomes)} survive: {survivors}"


def _average(values: Sequence[torch.Tensor], placement: Placement, sizes: Sequence[int]) -> torch.Tensor:
    full = parts.combine(values, placement, sizes)
    return full / len(values) if placement == Partial("sum") else full


def _sums(case: Case) -> Iterator[Alternative]:
    """Alternatives with a sum over ranks that an average would change."""
    _, expected = case.full(BATCH)
    for alternative in case.alternatives():
        for value, placement in zip(expected, alternative.outputs, strict=True):
            if placement == Partial("sum") and bool((value != 0).any()):
                yield alternative
                break


def test_an_average_is_never_taken_for_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "combine", _average)
    seen, survivors = 0, []
    for target in SPLITTING:
        for case in cases(target, 2):
            case.splits = SPLITS
            found = [] if case.random else list(_sums(case))[:2]
            seen += len(found)
            survivors += [f"{target}: {spelled(a)}" for a in found if not caught(case, a)]
    assert seen > 300
    assert survivors == []
