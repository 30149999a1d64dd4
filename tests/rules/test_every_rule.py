"""Every registered rule, on generated arguments: each alternative is what the op computes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from fxdp.ir.ops.library import aten
from fxdp.ir.types.placements import Partial, Shard
from fxdp.rules.registry import Alternative, Kind, registry
from fxdp.torch_compat import OpOverload, all_op_names
from tests.rules.harness import Case, shown
from tests.rules.samples import STAND_INS, all_samples
from tests.rules.samples.draw import Draw

SAMPLES = all_samples()
DRAWS, MOST_DRAWS = 3, 30
SPLITS = ((3, 1, 0, 2), (0, 4, 1), (1, 0, 3), (2, 3, 0), (5,), (0, 1, 1, 2), (1, 5))


def name(target: OpOverload) -> str:
    return str(target).removeprefix("aten.").removesuffix(".default")


def cases(target: OpOverload, draws: int) -> Iterator[Case]:
    """Random cases of an op; each is split twice, always with an empty part and a single sample."""
    for seed in range(draws):
        drawn = SAMPLES[name(target)](Draw(seed))
        splits = Random(seed).sample(SPLITS[:3], 1) + Random(seed).sample(SPLITS[3:], 1)
        options = {**drawn.options, "splits": splits, "placeholder_for": STAND_INS.get(name(target))}
        yield Case(target, drawn.args, dict(drawn.kwargs), **options)


def never_splits(target: OpOverload) -> bool:
    """Whether the rule answers nothing whatever it is asked, so that there is nothing to verify."""
    try:
        return not tuple(registry[target].rule(None))  # type: ignore[arg-type]
    except AttributeError:
        return False


TARGETS = [t for t in registry.targets() if name(t) in SAMPLES]


@pytest.mark.parametrize("target", TARGETS, ids=shown)
def test_every_alternative_is_exact(target: OpOverload) -> None:
    """And the declared kind is what the alternatives show, at the latest after a few more draws."""
    kinds: set[Kind] = set()
    for drawn, case in enumerate(cases(target, MOST_DRAWS)):
        if drawn >= DRAWS and strongest(kinds) == registry[target].kind:
            break
        for alternative in case.alternatives():
            case.verify(alternative)
            kinds.add(kind_of(alternative))
    assert registry[target].kind == strongest(kinds)


def kind_of(alternative: Alternative) -> Kind:
    free = None in alternative.inputs
    sharded = free or any(isinstance(p, Shard) for p in (*alternative.inputs, *alternative.outputs))
    summed = any(isinstance(p, Shard) for p in alternative.inputs)
    if summed and any(isinstance(p, Partial) for p in alternative.outputs):
        return "contracted"
    return "batched" if sharded else "gathered"


def strongest(kinds: set[Kind]) -> Kind:
    ranked: tuple[Kind, ...] = ("contracted", "batched")
    return next((k for k in ranked if k in kinds), "gathered")


def test_every_op_that_may_split_has_samples() -> None:
    without = [t for t in registry.targets() if name(t) not in SAMPLES]
    assert [str(t) for t in without if not never_splits(t)] == []
    assert {registry[t].kind for t in without} <= {"gathered"}


def test_core_aten_is_complete() -> None:
    """Every functional op that torch calls core has a rule, but the sizes, which no rule places."""
    core = []
    for qualified in all_op_names():
        namespace, _, rest = qualified.partition("::")
        base, _, overload = rest.partition(".")
        op = getattr(getattr(aten, base, None), overload or "default", None) if namespace == "aten" else None
        functional = op is not None and not op._schema.is_mutable and "out" not in overload
        if functional and torch.Tag.core in op.tags:
            core.append(op)
    assert len(core) > 150
    missing = [str(op) for op in core if registry.get(op) is None]
    assert [op for op in missing if not op.startswith("aten.sym_")] == []
