"""The oracle itself: right programs pass, wrong ones are told by node."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Input, Output
from fxdp.ir.tensor_difference import difference
from fxdp.ir.types.placements import P, R, S
from fxdp.options import Options
from fxdp.oracle.lockstep import LockStep
from fxdp.oracle.verified_capture import capture_for
from tests import lockstep
from tests.graphs import Sketch
from tests.mutations import Mutant, with_each_dim_swapped, with_each_size_flipped, without_each_reduction

aten = torch.ops.aten
SPLIT = (5, 2, 0, 1)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ---- by hand ---------------------------------------------------------------------------------------------


def _sum(wrong: bool = False) -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f64[B, 2]", S(0))
    total = g.call(aten.sum.dim_IntList, x, [0], type="f64[2]", at=R if wrong else P, reads=(S(0),))
    gm = g.returns({Output(0): total}, (R if wrong else P,))
    return gm


def test_terms_are_added_up() -> None:
    x = torch.randn(8, 2)
    runner = LockStep(_sum(), _sum(), SPLIT)
    found = runner.run({Input(0, "x"): x})
    assert runner.faults == []
    torch.testing.assert_close(found[Output(0)], x.sum(0))


def test_what_the_program_does_without_is_computed_all_the_same() -> None:
    """`abs(-x)` is `abs(x)`: a pass may know that, and drop the node that nobody reads any more."""

    def program(negates: bool) -> fx.GraphModule:
        g = Sketch()
        value = x = g.add(Input(0, "x"), "f64[B, 2]", S(0))
        if negates:
            value = g.call(aten.neg.default, x, type="f64[B, 2]", at=S(0), reads=(S(0),))
        size = g.call(aten.abs.default, value, type="f64[B, 2]", at=S(0), reads=(S(0),), name="size")
        return g.returns({Output(0): size}, (S(0),))

    x = torch.randn(8, 2)
    runner = LockStep(program(negates=False), program(negates=True), SPLIT)
    assert torch.equal(runner.run({Input(0, "x"): x})[Output(0)], x.abs())
    assert runner.faults == []


def test_the_first_wrong_node_is_named() -> None:
    runner = LockStep(_sum(wrong=True), _sum(), SPLIT)
    assert runner.run({Input(0, "x"): torch.randn(8, 2)}) == {}
    (fault,) = runner.faults
    assert fault.node == "sum_dim_int_list"
    assert "aten.sum.dim_IntList(%x, [0])" in str(fault)
    assert "differs from one device" in fault.what


def test_a_wrong_shape_names_the_rank() -> None:
    gm = _sum()
    meta(next(n for n in gm.graph.nodes if n.op == "call_function")).placement = S(0)
    meta(next(n for n in gm.graph.nodes if n.op == "call_function")).type = meta(
        next(iter(gm.graph.nodes))
    ).type
    runner = LockStep(gm, _sum(), SPLIT)
    runner.run({Input(0, "x"): torch.randn(8, 2)})
    assert runner.faults[0].what == "rank 0 has shape (2,), expected (5, 2)"


def test_an_op_that_fails_is_a_fault() -> None:
    gm = _sum()
    next(n for n in gm.graph.nodes if n.op == "call_function").update_arg(1, [7])
    runner = LockStep(gm, _sum(), SPLIT)
    assert runner.run({Input(0, "x"): torch.randn(8, 2)}) == {}
    assert "cannot run" in runner.faults[0].what


class Shifted(nn.Module):
    """A softmax by hand: the gradient of the maximum is zero but for rounding, and is divided by a count."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return (y - y.max()).softmax(-1).square().sum()


class Attended(nn.Module):
    """A softmax over each node's edges: the zero gradient of a maximum is handed back to the edges."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(3, 1), nn.Linear(3, 2)

    def forward(self, x: Tensor, node: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        largest = torch.full((4,), float("-inf"), dtype=x.dtype).index_reduce(0, node, scores, "amax")
        weights = (scores - largest[node]).exp()
        total = torch.zeros(4, dtype=x.dtype).index_add(0, node, weights)
        weights = weights / total[node]
        found = torch.zeros(4, 2, dtype=x.dtype).index_add(0, node, weights[:, None] * self.value(x))
        return found.square().sum()


def test_rounding_errors_of_what_cancelled_may_be_taken_from() -> None:
    torch.manual_seed(1)
    args = torch.randn(12, 3), torch.randint(4, (12,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls index_reduce() beta
        lockstep.check(Attended(), args, splits=((8, 4), (8, 3, 0, 1), (3, 3, 3, 3)))


def test_rounding_errors_of_what_cancelled_may_be_divided() -> None:
    lockstep.check(Shifted(), (torch.randn(8, 3),), splits=((4, 4), (5, 2), (3, 3, 2)))


@pytest.mark.parametrize("op", [aten.gt.Scalar, aten.eq.Scalar])
@pytest.mark.parametrize(("apart", "is_tie"), [(1e-15, True), (1e-3, False)])
def test_rounding_may_decide_a_comparison(op: Any, apart: float, is_tie: bool) -> None:
    """Then the ranks go on with one device's answer, so that what comes after is compared."""

    def program(threshold: float) -> fx.GraphModule:
        g = Sketch()
        x = g.add(Input(0, "x"), "f64[B, 2]", S(0))
        above = g.call(op, x, threshold, name="above", type="b8[B, 2]", at=S(0))
        chosen = g.call(aten.where.ScalarOther, above, x, 0.0, type="f64[B, 2]", at=S(0))
        return g.returns({Output(0): chosen}, (S(0),))

    x = torch.ones(8, 2)
    runner = LockStep(program(1.0 - apart), program(1.0), SPLIT)
    found = runner.run({Input(0, "x"): x})
    assert [node.name for node in runner.ties] == ["above"] * is_tie
    assert [fault.node for fault in runner.faults] == ["above"] * (not is_tie)
    if is_tie:
        torch.testing.assert_close(found[Output(0)], torch.where(op(x, 1.0), x, 0.0))


def test_a_second_run_forgets_the_first() -> None:
    runner = LockStep(_sum(wrong=True), _sum(), SPLIT)
    for _ in range(2):
        runner.run({Input(0, "x"): torch.randn(8, 2)})
        assert len(runner.faults) == 1


@pytest.mark.parametrize(
    ("a", "b", "floor", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.0, 0.25),
        ([0.0, 0.1], [0.0, 0.0], 0.0, 0.1),
        ([0.0, 0.1], [0.0, 0.0], 10.0, 0.01),
        ([float("nan"), 1.0], [float("nan"), 1.0], 0.0, 0.0),
        ([float("nan"), 1.0], [0.0, 1.0], 0.0, float("inf")),
        ([float("inf"), 1.0], [float("inf"), 2.0], 0.0, 0.5),
        ([], [], 0.0, 0.0),
        ([1.0], [1.0, 1.0], 0.0, float("inf")),
    ],
)
def test_difference(a: list[float], b: list[float], floor: float, error: float) -> None:
    assert difference(torch.tensor(a), torch.tensor(b), floor) == pytest.approx(error)


def test_infinities_of_other_sign_differ() -> None:
    inf = float("inf")
    assert difference(torch.tensor([inf]), torch.tensor([-inf])) == inf


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_halves() -> None:
    assert difference(torch.tensor([1 + 1j]).chalf(), torch.tensor([1 + 1j]).chalf()) == 0.0


def test_integers_are_equal_or_not() -> None:
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0.0
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")


# ---- mutations -------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Cross entropy over the tokens that are not ignored: the count of all ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embed(tokens)))
        return F.cross_entropy(logits.view(-1, 11), labels.view(-1), ignore_index=0)


class Experts(nn.Module):
    """Two experts and the loss that balances them: a product of means over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.gate(x).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), 2).double()
        y = sum(chosen[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return (y * y).mean(), 2 * (chosen.mean(0) * weights.mean(0)).sum()


class Pairs(nn.Module):
    """Every sample against every other, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(y), dim=-1).t()
        target = torch.arange(x.shape[0])
        return F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)


class Views(nn.Module):
    """Two views of the batch along one dim, sequence first, and an unbiased variance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        both = self.linear(torch.cat([x, x.flip(1)]))
        rows = both.view(2, -1, 4).transpose(1, 2).reshape(-1, x.shape[0])
        return rows.var(dim=1).mean() + rows.cumsum(1).mean()


class Sequence(nn.Module):
    """A causal mask, positions, and slices of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        scores = self.mix(x) @ x.transpose(1, 2)
        mask = torch.ones(5, 5).tril().bool().expand(x.shape[0], 5, 5)
        y = scores.masked_fill(~mask, -1e9).softmax(-1) @ x
        last = y[torch.arange(x.shape[0]), tokens.argmax(-1)]
        return (last * last).sum() / x.shape[0] + y[:, 1:].mean()


@dataclass
class Model:
    build: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


def _tokens(high: int) -> Tensor:
    return torch.randint(0, high, (8, 5), generator=torch.Generator().manual_seed(1))


MODELS = {
    "mlp": Model(
        _mlp, lambda: (torch.randn(8, 3),), {"target": torch.ones(8, 2).double()}, {"loss_fn": F.mse_loss}
    ),
    "masked": Model(Masked, lambda: (_tokens(11), _tokens(4))),
    "experts": Model(Experts, lambda: (torch.randn(8, 4),)),
    "pairs": Model(Pairs, lambda: (torch.randn(8, 3), torch.randn(8, 3))),
    "views": Model(Views, lambda: (torch.randn(8, 3),)),
    "sequence": Model(Sequence, lambda: (_tokens(7),)),
}


class Oracle:
    """One model, its program and what one device computes."""

    def __init__(self, model: Model) -> None:
        module, self.args, self.kwargs = model.build(), model.args(), model.kwargs
        options = Options(communication={"bucket_cap_mb": 1e-4}, **model.options)
        found = capture_for(module, self.args, self.kwargs, options)
        self.local, self.subject = lockstep.subject(module, found, len(SPLIT), options)

    def passes(self, gm: fx.GraphModule) -> bool:
        allowed = {node.name: 1e-9 for node in gm.graph.nodes}
        mutant = replace(self.subject, local=gm, tolerances=allowed)
        return mutant.run(self.args, self.kwargs, SPLIT, seed=0).ok


def _mutants(gm: fx.GraphModule) -> Iterator[Mutant]:
    yield from without_each_reduction(gm)
    yield from with_each_size_flipped(gm)
    yield from with_each_dim_swapped(gm)


@pytest.mark.parametrize(
    ("name", "total", "missed"),
    [
        ("mlp", 12, []),
        ("masked", 19, []),
        ("experts", 14, []),
        ("pairs", 16, []),
        ("views", 16, []),
        ("sequence", 31, []),
    ],
)
def test_mutations_are_caught(name: str, total: int, missed: list[str]) -> None:
    """Every one of them; `missed` would list those that are accepted."""
    oracle = Oracle(MODELS[name])
    assert oracle.passes(oracle.local.gm)
    mutants = list(_mutants(oracle.local.gm))
    assert ([m.what for m in mutants if oracle.passes(m.gm)], len(mutants)) == (missed, total)
