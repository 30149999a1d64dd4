"""Python values that change from call to call: numbers become inputs, what is not read does not count."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxdp
from fxdp.errors import AgreementError
from fxdp.module.guards.values import RecompileLog, Values, digest_of, liftable
from tests.exactness.cases import in_fours
from tests.exactness.models import part
from tests.rank_pool import RankPool

X = torch.randn(4, 8)


class Net(nn.Module):
    """A linear layer, and a body that is given it and the call's values."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(8, 8), body
        self.temperature = 1.0

    def forward(self, x: Tensor, *values: Any, **named: Any) -> Any:
        return self.body(self.fc(x), *values, **named)


def compare(compiled: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    results = []
    for run in (compiled, model):
        found = run(*args, **kwargs)
        for loss in found if isinstance(found, tuple) else (found,):
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            results.append((loss.detach(), *gradients))
    half = len(results) // 2
    torch.testing.assert_close(results[:half], results[half:], rtol=0, atol=0, equal_nan=True)


def programs(model: nn.Module, calls: list[tuple[Any, ...]], **options: Any) -> int:
    """How many programs the calls took; each result is one device's, to the bit."""
    compiled = fxdp.compile(model, backend="eager", **options)
    for values in calls:
        compare(compiled, model, X, *values)
    return int(compiled._programs.compiled)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "factor": lambda y, b: (b * y).sum(),
    "kl": lambda y, b: F.mse_loss(y, torch.zeros_like(y)) + b * y.exp().mean(),
    "temperature": lambda y, b: F.cross_entropy(y / b, torch.zeros(y.shape[0], dtype=torch.long)),
    "chain": lambda y, b: (y * ((b * 0.1) * 3 + (1 - b) / 7)).sum(),
    "both_ways": lambda y, b: ((b + y) * (b - y) / (b / (2 + y * y))).sum(),
    "differences": lambda y, b: (torch.sub(y, y.cos() * b) - b).sum() - b,
    "where": lambda y, b: torch.where(y > 0, y * b, y).sum(),
    "no_promotion": lambda y, b: (y.bfloat16() * b).sum().float() + (y.sum() * b),
}


@pytest.mark.parametrize("names", in_fours(ARITHMETIC), ids=" ".join)
@pytest.mark.parametrize("values", [(0.25, 0.3, 1.7, 0.3, 1e-8), (3, 7, 5, 1000, 3)], ids=["float", "int"])
def test_numbers_in_arithmetic_are_inputs_from_their_second_value(
    names: tuple[str, ...], values: Any
) -> None:
    def body(y: Tensor, b: float) -> tuple[Tensor, ...]:
        return tuple(ARITHMETIC[name](y, b) for name in names)

    assert programs(Net(body), [(value,) for value in values]) == 2


@pytest.mark.parametrize("name", ["chain", "both_ways"])
def test_floats_are_computed_in_the_code_s_order(name: str) -> None:
    model = Net(ARITHMETIC[name]).double()
    compiled = fxdp.compile(model, backend="eager")
    x = X.double()
    for value in torch.rand(40).double().tolist():
        assert compiled(x, value).item() == model(x, value).item()


def test_an_attribute_that_is_set_each_step(caplog: pytest.LogCaptureFixture) -> None:
    class Attribute(nn.Linear):
        temperature = 1.0

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return (super().forward(x) / self.temperature).softmax(-1).square().sum()

    model = Attribute(8, 8)
    compiled = fxdp.compile(model, backend="eager")
    for temperature in (1.5, 0.5, 0.25, 1.0, 3.0):
        model.temperature = temperature
        compare(compiled, model, X)
    assert compiled._programs.compiled == 2
    assert not [r for r in caplog.records if r.name == "fxdp"]
    assert model.temperature == 3.0


def test_several_at_once_in_one_structure() -> None:
    model = Net(lambda y, batch, k: (y * batch["beta"] + k / 1000).sum() * batch["w"][1])
    calls = [({"beta": 0.1 * i, "w": (1, 2.0 + i), "epoch": i}, i) for i in range(1, 5)]
    assert programs(model, calls) == 2


DECIDES: dict[str, Callable[..., Any]] = {
    "branch": lambda y, k: y.sum() * (2 if k > 2 else 1),
    "int": lambda y, k: y.sum() * int(k),
    "shape": lambda y, k: y[:, : int(k)].sum(),
    "view": lambda y, k: y.new_ones(k, 2).sum() * y.sum(),
    "loop": lambda y, k: sum((y * i for i in range(k)), y).sum(),
    "table": lambda y, k: y.sum() * [0.0, 0.1, 0.1, 0.1, 0.4, 0.5][k],
    "dict": lambda y, k: y.sum() * {1: 0.1, 2: 0.1, 3: 0.3}.get(k, 0.0),
    "math": lambda y, k: y.sum() * math.exp(-k),
    "min": lambda y, k: y.sum() * min(1.0, k / 3),
    "text": lambda y, k: y.sum() * float(f"{k}5"),
    "power": lambda y, k: y.abs().pow(k).sum(),
    "class": lambda y, k: y.sum() * (0.5 if isinstance(k, int) else k),
    "returned": lambda y, k: (y * k).sum() + torch.tensor(k * 2.0),
}


@pytest.mark.parametrize("name", DECIDES)
def test_what_the_code_decides_on_is_a_constant(name: str) -> None:
    """Right for each value, whatever that costs; a class or a constant tensor tells no error, either."""
    assert programs(Net(DECIDES[name]), [(k,) for k in (1, 2, 4, 1)]) >= 2


def test_one_that_decides_leaves_the_others_inputs(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(lambda y, beta, step: y.sum() * (beta if step < 3 else 2 * beta))
    compiled = fxdp.compile(model, backend="eager")
    for step in range(1, 4):
        compare(compiled, model, X, 0.1 * step, step)
    for i in range(5):
        compare(compiled, model, X, 0.7 * i, 2)
    assert compiled._programs.compiled == 3
    assert "values[1] (2) has another value than before" in caplog.text
    assert "values[0]" not in caplog.text


def test_what_compiles_anew_says_so_at_the_second_and_the_fifth_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net(lambda y, config: y.sum() * int(config["step"]))
    compiled = fxdp.compile(model, backend="eager")
    lines = []
    for step in range(1, 8):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fxdp"):
            compiled(X, {"step": step})
        lines.append([record.getMessage() for record in caplog.records])
    assert [len(line) for line in lines] == [0, 1, 0, 0, 1, 0, 0]
    assert lines[1][0].startswith("values[0]['step'] (2) has another value than before, which compiles")
    assert "5 values of values[0]['step'] (5)" in lines[4][0]
    assert "as a tensor" in lines[4][0]


def test_strings_that_nobody_reads_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(lambda y, batch: (y * batch["scale"]).sum())
    compiled = fxdp.compile(model, backend="eager")
    for names, split in (["a"], "train"), ([], "train"), (["b", "c"], "test"):
        compare(compiled, model, X, {"scale": 2.0, "names": names, "split": split})
    assert compiled._programs.compiled == 1
    assert not [r for r in caplog.records if r.name == "fxdp"]


def _caught(y: Tensor, mode: str) -> Tensor:
    try:
        return y.sum() * {"one": 1, "two": 2}[mode]
    except Exception:
        return y.sum() * 0


@pytest.mark.parametrize(
    "body",
    [
        lambda y, mode: y.sum() * (1 if mode == "one" else 2),
        lambda y, mode: getattr(y, {"one": "sum", "two": "mean"}[mode])(),
        lambda y, mode: y.sum() * len(f"{mode}{mode}" + "!" * (mode > "p")),
        lambda y, mode: y.sum() * len("".join([mode, mode[:1]])) * (1 + mode.count("w")),
        _caught,
    ],
)
def test_strings_that_are_read_decide(body: Callable[..., Any]) -> None:
    assert programs(Net(body), [("one",), ("two",), ("one",)]) == 2


def test_a_string_that_is_returned_is_the_caller_s() -> None:
    model = Net(lambda y, name: {"loss": y.sum(), "name": name})
    compiled = fxdp.compile(model, backend="eager")
    assert [compiled(X, name)["name"] for name in ("a", "b", "a")] == ["a", "b", "a"]


def test_a_number_that_is_returned_is_the_caller_s() -> None:
    model = Net(lambda y, k, b: {"loss": y.sum() * b, "k": k, "b": b})
    compiled = fxdp.compile(model, backend="eager")
    found = [compiled(X, k, k / 2) for k in (1, 2, 3)]
    assert [(one["k"], one["b"]) for one in found] == [(1, 0.5), (2, 1.0), (3, 1.5)]


@pytest.mark.parametrize("value", [math.inf, -0.0, 2**53 + 1, -(2**63), 1e-320])
def test_unusual_numbers(value: float) -> None:
    first = type(value)(2)
    programs(Net(lambda y, b: (y.double() * b).abs().clamp(max=1e300).sum()), [(first,), (value,), (first,)])


def test_whole_numbers_may_be_negative() -> None:
    def body(y: Tensor, k: int) -> Tensor:
        return (y * abs(k)).sum() + y.mean() * max(k, 0) + y.std() * min(k, 0) + y.min() * (k // 2 + k % 3)

    assert programs(Net(body), [(2,), (3,), (-3,), (0,)]) <= 3


def test_modes_have_inputs_of_their_own() -> None:
    def body(y: Tensor, b: float) -> Tensor:
        return y.sum() * b if torch.is_grad_enabled() else y.sum() * (b if b > 0.5 else 1)

    model = Net(body)
    compiled = fxdp.compile(model, backend="eager")
    for b in (0.1, 0.4, 0.7, 0.2):
        compare(compiled, model, X, b)
        with torch.no_grad():
            torch.testing.assert_close(compiled(X, b), model(X, b))
    assert compiled._programs.compiled == 2 + 4


def test_sizes_change_along() -> None:
    model = Net(lambda y, b: (y * b).sum(-1).mean())
    compiled = fxdp.compile(model, backend="eager")
    for i, (rows, length) in enumerate([(4, 3), (4, 3), (2, 3), (2, 5), (7, 6), (1, 2)]):
        compare(compiled, model, torch.randn(rows, length, 8), 0.1 * i)
    assert compiled._programs.compiled <= 4


@pytest.mark.parametrize(
    "options", [{"pipeline": {"microbatches": 2}}, {"pipeline": {"stages": 2, "microbatches": 2}}], ids=str
)
def test_numbers_of_programs_in_parts(options: dict[str, Any]) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, b: float) -> Tensor:
            return (self.last((self.first(x) * b).tanh()) * b).square().mean()

    model = Deep().double()
    compiled = fxdp.compile(model, backend="eager", **options)
    x = X.double()
    for b in (0.5, 0.7, 0.9):
        model.zero_grad()
        loss, expected = compiled(x, b), model(x, b)
        loss.backward()
        own = [p.grad for p in model.parameters()]
        torch.testing.assert_close(loss.detach(), expected.detach())
        torch.testing.assert_close(own, list(torch.autograd.grad(expected, list(model.parameters()))))
    assert compiled._programs.compiled == 2


def test_inductor_takes_numbers() -> None:
    """Also those of which the code makes others, and a softmax's temperature, on whose sign it decides."""

    def body(y: Tensor, b: float, k: int) -> Tensor:
        return ((y / b).softmax(-1) * y).sum() * (1 - 0.5 * b) + y.square().sum() * (k / 1000)

    model = Net(body)
    compiled = fxdp.compile(model)
    for b, k in ((0.5, 1), (0.7, 2), (3.0, 0), (-1.0, 5)):
        results = []
        for run in (compiled, model):
            loss = run(X, b, k)
            results.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
        torch.testing.assert_close(*results)
    assert compiled._programs.compiled == 2


def _on_ranks(uneven: bool) -> list[float]:
    torch.manual_seed(0)
    model = Net(lambda y, batch, b: (y * b).square().mean()).double()
    compiled = fxdp.compile(model, backend="eager", communication={"uneven": uneven})
    rank, errors = dist.get_rank(), []
    split = [3, 1] if uneven else [2, 2]
    for i in range(3):
        x = torch.randn(4, 8, dtype=torch.float64)
        names = {"names": [f"{rank}{n}" for n in range(split[rank])], "file": f"{rank}.txt"}
        mine = part(x, split, rank)
        loss, expected = compiled(mine, names, 0.5 + i), model(x, names, 0.5 + i)
        errors.append(abs(float(loss.detach()) - float(expected.detach())))
    assert compiled._programs.compiled == 2
    with pytest.raises(AgreementError, match=r"values\[1\] float 9\.\d"):
        compiled(mine, names, 9.0 + rank / 10)
    return errors


@pytest.mark.parametrize("uneven", [True, False])
def test_ranks_agree_on_numbers_and_have_strings_of_their_own(ranks: RankPool, uneven: bool) -> None:
    for errors in ranks.run(2, _on_ranks, uneven):
        assert max(errors) <= 1e-12


def _apart_from_the_start() -> None:
    model = Net(lambda y, b: (y * b).sum())
    with pytest.raises(AgreementError, match=r"values\[0\] float"):
        fxdp.compile(model, backend="eager")(X, 0.5 + dist.get_rank())
    mode = Net(lambda y, mode: y.sum() * len(mode))
    with pytest.raises(AgreementError, match=r"values\[0\] str"):
        fxdp.compile(mode, backend="eager")(X, f"mode {dist.get_rank()}")


def test_ranks_that_differ_in_what_decides(ranks: RankPool) -> None:
    ranks.run(2, _apart_from_the_start)


def test_liftable_are_numbers_of_one_type() -> None:
    own = {"a": ("float", 0.5), "b": ("int", 2), "c": ("float", 2.0), "d": ("bool", True), "e": ("int", 3)}
    other = {**own, "a": ("float", 0.25), "b": ("float", 1.0), "d": ("bool", False), "e": ("int", 4)}
    assert liftable(own, other, Values()) == {"a", "e"}
    assert liftable(own, other, Values(deciding={"a"}, dynamic_inputs={"e"})) == set()


def test_digests_tell_numbers_apart() -> None:
    rows = [0.1, 0.2, 1, 1.0, -0.0, 0.0, math.inf, 2**70]
    found = {digest_of([("a", value)]) for value in rows}
    assert len(found) == len(rows)
    assert digest_of([("a", math.nan)]) == digest_of([("a", float("nan"))])


def test_nothing_is_told_of_a_choice_of_two(caplog: pytest.LogCaptureFixture) -> None:
    RecompileLog().compiled({"causal": ("bool", True)}, [{"causal": ("bool", False)}])
    assert not [r for r in caplog.records if r.name == "fxdp"]
