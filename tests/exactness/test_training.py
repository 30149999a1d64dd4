"""The plain training loop over gloo ranks: optimizer, accumulation, modes, sizes, state, traffic."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

import fxdp
from fxdp.ir.ops import collectives
from fxdp.ir.tensor_difference import difference
from tests.captures import captured_once
from tests.exactness.models import (
    BY_HAND,
    Mlp,
    Tokens,
    counterpart_of,
    gradient_errors,
    know_by_hand,
    known,
    loss_of,
    one_seed,
    part,
    step_both,
    token_batch,
)  # fmt: skip
from tests.rank_pool import RankPool


@pytest.fixture(scope="module", autouse=True)
def _knowing(ranks: RankPool) -> None:
    """Ranks that have captured the models by hand before."""
    ranks.prepare(know_by_hand)


def _cut(full: tuple[Tensor, ...], split: list[int]) -> tuple[Tensor, ...]:
    return tuple(part(t, split, dist.get_rank()) for t in full)


@contextlib.contextmanager
def counting() -> Iterator[CommDebugMode]:
    """Counts collectives; its module hooks warn, which is no concern of ours."""
    with warnings.catch_warnings(), CommDebugMode() as debug:
        warnings.simplefilter("ignore")
        yield debug


def _parameter_error(model: nn.Module, twin: nn.Module) -> float:
    pairs = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    return max(difference(a, b) for a, b in pairs)


# ---- three steps of a loop ----


def _train(name: str, split: list[int]) -> float:
    torch.set_default_dtype(torch.float64)
    model = BY_HAND[name][0]()
    twin = counterpart_of(model)
    with known(name):
        compiled = fxdp.compile(model, backend="eager")
        optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-3) for m in (compiled, twin)]
        for step in range(3):
            torch.manual_seed(step)
            full = BY_HAND[name][1](sum(split))
            norms = []
            inputs = (_cut(full, split), full)
            for net, optimizer, given in zip((compiled, twin), optimizers, inputs, strict=True):
                loss_of(net(*given)).backward()
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
            assert difference(norms[0], norms[1]) <= 1e-12
        return _parameter_error(model, twin)


def test_three_steps_of_adamw_with_clipping(ranks: RankPool) -> None:
    for world, split in {2: [4, 1], 4: [2, 0, 1, 2]}.items():
        assert max(ranks.run(world, _train, "tokens", split)) <= 1e-9
        assert max(ranks.run(world, _train, "mlp", split)) <= 1e-9


# ---- accumulation ----


def _accumulate(splits: list[list[int]]) -> list[float]:
    """Micro-batches of different sizes; the user divides as on one device."""
    torch.set_default_dtype(torch.float64)
    model = Tokens()
    twin = counterpart_of(model)
    with known("tokens"):
        compiled = fxdp.compile(model, backend="eager")
        for number, split in enumerate(splits):
            with one_seed():
                torch.manual_seed(number)
                full = token_batch(sum(split))
            (compiled(*_cut(full, split)) / len(splits)).backward()
            (twin(*full) / len(splits)).backward()
        errors = gradient_errors(model, twin)
        assert compiled._programs.compiled <= 2
        return errors


def test_accumulation_of_uneven_micro_batches(ranks: RankPool) -> None:
    four = [[2, 2], [1, 3], [5, 0], [3, 3]]
    for splits in (four[:2], four):
        for errors in ranks.run(2, _accumulate, splits):
            assert max(errors) <= 1e-9


def _several_losses_before_backward(split: list[int]) -> list[float]:
    """Two forwards, then one backward through both."""
    torch.set_default_dtype(torch.float64)
    model = Mlp()
    twin = counterpart_of(model)
    with known("mlp"):
        compiled = fxdp.compile(model, backend="eager")
        batches = [BY_HAND["mlp"][1](sum(split)) for _ in range(2)]
        sum(loss_of(compiled(*_cut(full, split))) for full in batches).backward()  # type: ignore[union-attr]
        sum(loss_of(twin(*full)) for full in batches).backward()  # type: ignore[union-attr]
        return [*gradient_errors(model, twin), _parameter_error(model, twin)]


def test_two_forwards_before_one_backward(ranks: RankPool) -> None:
    for errors in ranks.run(2, _several_losses_before_backward, [4, 1]):
        assert max(errors) <= 1e-9


# ---- modes and sizes ----


class Moody(nn.Module):
    """BatchNorm and dropout, which differ between modes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.norm(self.fc(x))
        return {"loss": y.square().mean() + y.tanh().sum(), "out": self.drop(y), "training": self.training}


def _switch_all(splits: list[list[int]]) -> list[float]:
    with captured_once():
        return [error for split in splits for error in _switch(split)]


def _switch(split: list[int]) -> list[float]:
    torch.set_default_dtype(torch.float64)
    model = Moody()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, backend="eager")
    errors = []

    def step(train: bool, grad: bool) -> None:
        full = torch.randn(sum(split), 6)
        mine = part(full, split, dist.get_rank())
        out, expected = compiled(mine), twin(full)
        assert out["training"] == train
        assert out["loss"].requires_grad == grad
        errors.append(difference(out["loss"].detach(), expected["loss"].detach()))
        if not train:
            expected_part = part(expected["out"], split, dist.get_rank())
            errors.append(difference(out["out"].detach(), expected_part.detach()))
        errors.append(_parameter_error(model, twin))
        if grad:
            compiled.zero_grad()
            twin.zero_grad()
            out["loss"].backward()
            expected["loss"].backward()
            errors.extend(gradient_errors(model, twin))

    for _ in range(2):
        compiled.train()
        twin.train()
        assert model.training
        step(True, True)
        compiled.eval()
        twin.eval()
        step(False, True)
        with torch.no_grad():
            step(False, False)
        with torch.inference_mode():
            step(False, False)
    compiled.train()
    twin.train()
    with torch.no_grad():
        step(True, False)
    assert compiled._programs.compiled <= 4, "train, eval, eval without gradients, train without gradients"
    return errors


def test_train_eval_no_grad_inference(ranks: RankPool) -> None:
    for errors in ranks.run(2, _switch_all, [[3, 3], [4, 1]]):
        assert max(errors) <= 1e-9


def _many_sizes(batches: list[list[int]], lengths: list[int]) -> tuple[float, int]:
    torch.set_default_dtype(torch.float64)
    model = Tokens()
    twin = counterpart_of(model)
    with known("tokens"):
        compiled = fxdp.compile(model, backend="eager")
        worst = 0.0
        for split, length in zip(batches, lengths, strict=True):
            with one_seed():
                full = token_batch(sum(split), length)
            compiled.zero_grad()
            twin.zero_grad()
            loss, expected = compiled(*_cut(full, split)), twin(*full)
            loss.backward()
            expected.backward()
            worst = max(worst, difference(loss.detach(), expected.detach()), *gradient_errors(model, twin))
        return worst, compiled._programs.compiled


def test_two_compilations_serve_all_batch_sizes(ranks: RankPool) -> None:
    batches = [[2, 2], [3, 1], [0, 4], [1, 0], [5, 5], [1, 1], [2, 2], [7, 8]]
    for worst, compiled in ranks.run(2, _many_sizes, batches, [6] * 8):
        assert worst <= 1e-9
        assert compiled <= 2


def test_two_compilations_serve_32_lengths(ranks: RankPool) -> None:
    lengths = [6, *range(2, 33)]
    batches = [[2, 2], [3, 1], [1, 0], [2, 2]] * 8
    for worst, compiled in ranks.run(2, _many_sizes, batches, lengths):
        assert worst <= 1e-9
        assert compiled <= 2


class Sometimes(nn.Module):
    """A parameter that is used only on some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, deep: bool) -> Tensor:
        y = self.always(x)
        return (self.rarely(y) if deep else y).square().mean()


def _sometimes(split: list[int]) -> list[float]:
    torch.set_default_dtype(torch.float64)
    model = Sometimes()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, backend="eager")
    errors = []
    for deep in (False, True, False):
        compiled.zero_grad()
        twin.zero_grad()
        full = torch.randn(sum(split), 6)
        compiled(part(full, split, dist.get_rank()), deep).backward()
        twin(full, deep).backward()
        errors += gradient_errors(model, twin)
    model.always.requires_grad_(False)
    twin.always.requires_grad_(False)
    compiled.zero_grad()
    twin.zero_grad()
    compiled(part(full, split, dist.get_rank()), True).backward()
    twin(full, True).backward()
    return errors + gradient_errors(model, twin)


def test_parameters_used_on_some_steps_and_frozen_later(ranks: RankPool) -> None:
    for errors in ranks.run(2, _sometimes, [3, 1]):
        assert max(errors) <= 1e-9


# ---- losses outside, one rank, state ----


def _loss_outside(split: list[int]) -> tuple[list[float], list[str]]:
    """DDP's average: the mean over ranks of the ranks' own losses."""
    torch.set_default_dtype(torch.float64)
    model = nn.Linear(6, 5)
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, backend="eager")
    x, y = torch.randn(sum(split), 6), torch.randint(0, 5, (sum(split),))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxdp").addHandler(handler)
    rank = dist.get_rank()
    for _ in range(2):
        compiled.zero_grad()
        F.cross_entropy(compiled(part(x, split, rank)), part(y, split, rank)).backward()
    logging.getLogger("fxdp").removeHandler(handler)
    parts = [F.cross_entropy(twin(part(x, split, r)), part(y, split, r)) for r in range(len(split))]
    (sum(parts) / len(split)).backward()  # type: ignore[union-attr]
    return gradient_errors(model, twin), records


def test_loss_outside_is_averaged_over_ranks_as_ddp_does(ranks: RankPool) -> None:
    for split in ([3, 3], [4, 1]):
        for errors, records in ranks.run(2, _loss_outside, split):
            assert max(errors) <= 1e-9
            assert sum("averaged over ranks" in text for text in records) == 1, "said once"
            assert sum("mean of the ranks' means" in text for text in records) == (split == [4, 1])


def _one_rank() -> list[str]:
    """No collective at all, bit-equal at two sizes, two programs of the same kind.

    tests/exactness/test_zoo_gloo.py has a transformer and a ResNet on one rank.
    """
    torch.set_default_dtype(torch.float64)
    functions = {f for name, f in vars(collectives).items() if name.startswith(("start", "finish"))}
    found = []
    for name in ("mlp", "two_tower", "lstm", "dlrm"):
        build, inputs, dims = BY_HAND[name]
        model = build()
        twin = counterpart_of(model)
        compiled = fxdp.compile(model, batch_dims=dims, backend="eager")
        for size in (4, 5):
            full = inputs(size)
            assert step_both(compiled, twin, (full, {}), dims, [size], 0) == 0.0
        with counting() as debug:
            loss_of(compiled(*full)).backward()
        assert debug.get_total_counts() == 0
        assert compiled.plan.communication == ()
        found += [str(n.target) for n in compiled.program.graph.nodes if n.target in functions]
        found += [str(n.target) for n in compiled.program.graph.nodes if "c10d" in str(n.target)]
    return found


def test_one_rank_is_eager_bit_for_bit(ranks: RankPool) -> None:
    assert ranks.run(1, _one_rank) == [[]]


def _state() -> None:
    torch.set_default_dtype(torch.float64)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Mlp()
    keys = list(model.state_dict())
    with known("mlp"):
        compiled = fxdp.compile(model, backend="eager")
        x, y = BY_HAND["mlp"][1](3)
        compiled(x, y)
        assert list(compiled.state_dict()) == keys
        assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert compiled.net[0].weight is model.net[0].weight
        own = copy.deepcopy(model.state_dict())
        others: list[Any] = [None, None]
        dist.all_gather_object(others, own)
        for name, value in others[0].items():
            torch.testing.assert_close(value, others[1][name], rtol=1e-12, atol=0), "rank 0's values"
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        changed = loss_of(compiled(x, y))
        compiled.load_state_dict(own)
        again = loss_of(compiled(x, y))
        assert not torch.equal(changed, again)
        twin_compiled = fxdp.compile(twin, backend="eager")
        assert torch.equal(loss_of(twin_compiled(x, y)), again)
        assert sum(p.numel() for p in compiled.parameters()) == sum(p.numel() for p in model.parameters())


def test_state_is_the_models(ranks: RankPool) -> None:
    ranks.run(2, _state)


def _copied() -> None:
    torch.set_default_dtype(torch.float64)
    with known("mlp"):
        compiled = fxdp.compile(Mlp(), backend="eager")
        x, y = BY_HAND["mlp"][1](3)
        loss = loss_of(compiled(x, y))
        twin = copy.deepcopy(compiled)
        assert twin.net[0].weight is not compiled.net[0].weight
        with torch.no_grad():
            compiled.net[0].weight.mul_(3.0)
        assert torch.equal(loss_of(twin(x, y)), loss)
        assert not torch.equal(loss_of(compiled(x, y)), loss)
        loss_of(twin(x, y)).backward()
        assert twin.net[0].weight.grad is not None
        assert compiled.net[0].weight.grad is None


def test_a_copy_is_a_model_of_its_own(ranks: RankPool) -> None:
    ranks.run(2, _copied)


def _converted() -> None:
    model = Mlp()
    compiled = fxdp.compile(model, backend="eager")
    x, y = BY_HAND["mlp"][1](3)
    assert loss_of(compiled(x, y)).dtype == torch.float32
    compiled.double()
    loss = loss_of(compiled(x.double(), y))
    loss.backward()
    assert loss.dtype == torch.float64
    assert model.net[0].weight.grad is not None


def test_conversion_after_the_first_call(ranks: RankPool) -> None:
    ranks.run(2, _converted)


# ---- traffic ----


class Wide(nn.Module):
    """Parameters of two dtypes, one of them tied, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 30)
        self.a, self.b = nn.Linear(30, 70), nn.Linear(70, 30)
        self.frozen = nn.Linear(30, 30).requires_grad_(False)
        self.low = nn.Linear(30, 40).to(torch.float32)
        self.head = nn.Linear(30, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.frozen(self.b(self.a(self.embed(ids)).relu()))
        low = self.low(hidden.float()).square().mean()
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten()) + low


def _all_traffic(cases: list[tuple[float, list[int]]]) -> None:
    with captured_once():
        for bucket_mb, split in cases:
            _traffic(bucket_mb, split)


def _traffic(bucket_mb: float, split: list[int]) -> None:
    torch.set_default_dtype(torch.float64)
    model = Wide()
    compiled = fxdp.compile(model, backend="eager", communication={"bucket_cap_mb": bucket_mb})
    ids = torch.randint(0, 50, (sum(split), 4))
    mine = part(ids, split, dist.get_rank())
    compiled(mine).backward()
    with counting() as debug:
        compiled(mine).backward()
    plan = compiled.plan
    by_dtype: dict[torch.dtype, int] = {}
    for p in model.parameters():
        if p.requires_grad:
            by_dtype[p.dtype] = by_dtype.get(p.dtype, 0) + p.numel() * p.element_size()
    gradients = [row for row in plan.communication if row.gradient]
    others = [row for row in plan.communication if not row.gradient]
    assert plan.gradient_bytes == sum(by_dtype.values())
    assert len(gradients) == sum(math.ceil(n / (bucket_mb * 2**20)) for n in by_dtype.values())
    assert sum(row.bytes for row in others) <= 24, others
    assert debug.get_total_counts() == sum(row.count for row in plan.communication)


def test_traffic_is_the_closed_form_and_what_runs(ranks: RankPool) -> None:
    """Gradients: the bytes of the trainable parameters, `ceil(bytes / bucket)` all-reduces per dtype."""
    cases = [(25.0, [3, 3]), (2**-8, [3, 3]), (2**-10, [3, 3]), (2**-8, [5, 1])]
    ranks.run(2, _all_traffic, cases)
