"""Branches on flags of the batch: a program for each way that calls go, all of them one device's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from tests.rank_pool import RankPool


class Padded(nn.Module):
    """Leaves out the mask where nothing is padded, counts its calls, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.drop(self.fc(x))
        if not padding.any():
            return y.square().mean()
        if padding.all(1).any().item():
            y = y + 1
        return y.masked_fill(padding, 0.0).square().mean()


def _padding(kind: str, batch: int = 6) -> Tensor:
    found = torch.zeros(batch, 4, dtype=torch.bool)
    found[-1, : {"none": 0, "some": 2, "all": 4}[kind]] = True
    return found


KINDS = ("none", "some", "all", "some", "none", "none", "all")


@pytest.mark.parametrize("kind", ["none", "some", "all"])
def test_each_way_is_one_devices(kind: str) -> None:
    x = torch.randn(6, 4)
    for rng in ("sharded", "single-device"):
        report = fxdp.verify(Padded(), (x, _padding(kind)), splits=[[3, 2, 0, 1], [0, 0, 6, 0]], rng=rng)
        assert report.ok, str(report)


def test_a_split_of_fewer_samples_that_goes_another_way() -> None:
    with pytest.raises(fxdp.InputError, match=r"first 5 samples go another way.*\n.*if not padding.any"):
        fxdp.verify(Padded(), (torch.randn(6, 4), _padding("some")), splits=[[3, 2, 0, 0]])


def _steps(compiled: nn.Module, model: nn.Module, rank: int, world: int) -> list[tuple[float, float]]:
    found = []
    for step, kind in enumerate(KINDS):
        torch.manual_seed(step)
        x, padding = torch.randn(6, 4, dtype=torch.float64), _padding(kind)
        part = slice(0, 5) if rank == 0 and world > 1 else slice(5 if world > 1 else 0, 6)
        losses = []
        for module, where in ((compiled, part), (model, slice(None))):
            torch.manual_seed(step)
            module.zero_grad()
            loss = module(x[where], padding[where])
            loss.backward()
            losses.append(loss.item())
        found.append(tuple(losses))
        for own, wanted in zip(compiled.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(own.grad, wanted.grad, rtol=1e-9, atol=1e-12)
        for own, wanted in zip(compiled.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(own, wanted)
    return found


def _trained(backend: str) -> tuple[list[tuple[float, float]], int]:
    torch.manual_seed(0)
    model, twin = Padded().double(), Padded().double()
    twin.load_state_dict(model.state_dict())
    compiled = fxdp.compile(model, rng="single-device", backend=backend)
    losses = _steps(compiled, twin, dist.get_rank(), dist.get_world_size())
    return losses, compiled._programs.compiled


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_ranks_go_the_way_of_the_whole_batch(backend: str, ranks: RankPool) -> None:
    """Only the second rank has padding: both take the mask. What was begun the wrong way leaves nothing."""
    for losses, compiled in ranks.run(2, _trained, backend):
        for own, wanted in losses:
            assert own == pytest.approx(wanted, rel=1e-12)
        assert compiled == 3, "a program for each way, none twice"


def test_a_step_in_micro_batches_has_no_ways() -> None:
    with pytest.raises(
        fxdp.CaptureError, match=r"test_branch_specialization.py:\d+ `if not padding.any\(\):`"
    ):
        fxdp.plan(
            Padded(), (torch.randn(6, 4), _padding("some")), mesh={"dp": 2}, pipeline={"microbatches": 2}
        )


class Scaled(nn.Module):
    """Places far away are scaled by other factors: LongRoPE."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        length = torch.max(places) + 1
        factors = torch.arange(4.0) if length > 8 else torch.ones(4)
        if places.min() < 0:
            x = -x
        return (self.fc(x) * (places[..., None] * factors)).square().mean()


@pytest.mark.parametrize("places", [(0, 7), (2, 8), (-1, 3), (-3, 20)])
def test_an_extreme_beside_a_number(places: tuple[int, int]) -> None:
    given = torch.randint(0, 3, (6, 2))
    given[0, 0], given[-1, 1] = places
    report = fxdp.verify(Scaled(), (torch.randn(6, 2, 4), given), splits=[[3, 2, 0, 1], [0, 0, 6, 0]])
    assert report.ok, str(report)


class Dropped(nn.Module):
    """peft's adapters with a `module_dropout` of 0: they are left out where the number drawn is 0 itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if (not self.training) or (self.training and torch.rand(1) > 0.0):
            y = y + self.adapter(x)
        return y.square().mean()


def test_what_is_as_good_as_sure_is_taken_for_sure() -> None:
    model, x = Dropped(), torch.randn(6, 4)
    assert fxdp.verify(model, (x,), splits=[[3, 2, 0, 1]]).ok
    compiled = fxdp.compile(model, {"dp": 1}, backend="eager")
    torch.testing.assert_close(compiled(x), (model.fc(x) + model.adapter(x)).square().mean())
    assert compiled._programs.compiled == 1


class Mixture(nn.Module):
    """A mixture of experts, of whom those run that some token of the batch chose, here each twice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3, bias=False)
        self.router.weight = nn.Parameter(5 * torch.eye(3, 4))
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(4, 4) for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        weights, twice = torch.stack([weight, weight.square()], 1), torch.stack([chosen, chosen], 1)
        mask = nn.functional.one_hot(twice, 3).permute(2, 1, 0)
        made = torch.zeros_like(tokens)
        for i in mask.sum((-1, -2)).gt(0).nonzero(as_tuple=False):
            place, rows = torch.where(mask[int(i)])
            mixed = self.experts[f"expert_{i[0]}"](tokens[rows]) * weights[rows, place, None]
            made.index_add_(0, rows, mixed)
        return made.square().mean()


def _tokens(step: int, experts: tuple[int, ...]) -> Tensor:
    """Of six samples the first ones choose the first of these experts, the last ones the last."""
    made = 0.1 * torch.randn(6, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    for sample in range(6):
        made[sample, :, experts[sample * len(experts) // 6]] += 1
    return made


CHOSEN = ((0, 1, 2), (0, 2), (1,), (0, 2), (0, 1, 2))


def _mixed(backend: str, chosen: Sequence[tuple[int, ...]]) -> tuple[list[tuple[float, float]], int]:
    torch.manual_seed(0)
    model, twin = Mixture().double(), Mixture().double()
    twin.load_state_dict(model.state_dict())
    compiled = fxdp.compile(model, backend=backend)
    part, found = (slice(4, 6) if dist.get_rank() else slice(0, 4)), []
    for step, experts in enumerate(chosen):
        x, losses = _tokens(step, experts), []
        for module, where in ((compiled, part), (twin, slice(None))):
            module.zero_grad()
            losses.append(module(x[where]))
            losses[-1].backward()
        found.append((losses[0].item(), losses[1].item()))
        for own, wanted in zip(compiled.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.grad, wanted.grad, rtol=1e-9, atol=1e-12)
    return found, compiled._programs.compiled


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_experts_that_no_sample_of_the_batch_chose_do_not_run(backend: str, ranks: RankPool) -> None:
    """They get no gradient, not one of zeros, by which an optimizer would go on with its momentum."""
    chosen = CHOSEN if backend == "eager" else CHOSEN[:2]
    for losses, compiled in ranks.run(2, _mixed, backend, chosen):
        for own, wanted in losses:
            assert own == pytest.approx(wanted, rel=1e-12)
        assert compiled == len(set(chosen)), "a program for each set of experts, none twice"


@pytest.mark.parametrize("experts", [(0, 1, 2), (2,)])
def test_a_mixture_is_one_devices(experts: tuple[int, ...]) -> None:
    splits = [[3, 2, 0, 1], [0, 0, 6, 0]]
    assert fxdp.verify(Mixture().double(), (_tokens(0, experts),), splits=splits).ok


class Routed(Mixture):
    """What is dropped out decides which experts run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_way_is_that_of_the_numbers_drawn(seed: int) -> None:
    model, x = Routed().double(), _tokens(0, (0, 1, 2))[:2]
    assert fxdp.verify(model, (x,), splits=[[1, 1, 0, 0]], rng="single-device", seed=seed).ok


class Many(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sum((x[:, i].square().mean() for i in x.sum(0).gt(0).nonzero()), x.mean())


def test_a_loop_over_places_of_a_long_row_is_refused() -> None:
    with pytest.raises(fxdp.CaptureError, match="loops over the rows of a tensor"):
        fxdp.plan(Many(), (torch.randn(6, 64, requires_grad=True),), mesh={"dp": 2})


class Compared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean() if (x > 0).sum() > 3 else x.sum()


def test_what_is_no_flag_is_refused() -> None:
    with pytest.raises(fxdp.CaptureError, match="data-dependent control flow"):
        fxdp.plan(Compared(), (torch.randn(6, 4),), mesh={"dp": 2})


class Longcat(Mixture):
    """Asks whether a mask has selected any; one more place than experts, which no token chooses (DBRX)."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        mask = nn.functional.one_hot(chosen, 4).T
        made = torch.zeros_like(tokens)
        experts = list(self.experts.values())
        for (i,) in mask.sum(-1).gt(0).nonzero():
            (rows,) = torch.where(mask[i])
            if rows.numel() == 0:
                continue
            made.index_add_(0, rows, experts[int(i)](tokens[rows]) * weight[rows, None])
        return made.square().mean()


@pytest.mark.parametrize("experts", [(0, 1, 2), (0, 2)])
def test_a_place_at_which_the_code_fails_is_not_there(experts: tuple[int, ...]) -> None:
    assert fxdp.verify(Longcat().double(), (_tokens(0, experts),), splits=[[3, 2, 0, 1]]).ok


class Selected(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = mask.nonzero().squeeze(1)
        if rows.numel() == 0:
            return x.mean()
        return x[rows].square().sum()


@pytest.mark.parametrize("count", [0, 3])
def test_whether_a_mask_selects_any(count: int) -> None:
    assert fxdp.verify(Selected(), (torch.randn(6, 4), torch.arange(6) < count), splits=[[4, 2, 0, 0]]).ok


class Averaged(nn.Module):
    """I-BERT: each average begins with the first batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        for name in ("a", "b", "c"):
            self.register_buffer(name, torch.full((1,), 1e-5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        for name in ("a", "b", "c"):
            seen = getattr(self, name)
            if seen.max() < 1.1e-5 and seen.min() > -1.1e-5:
                setattr(self, name, seen + y.max().detach())
            else:
                setattr(self, name, 0.9 * seen + 0.1 * y.max().detach())
            y = y / getattr(self, name)
        return y.square().mean()


def test_averages_that_begin_with_the_first_batch() -> None:
    torch.manual_seed(0)
    model, twin = Averaged().double(), Averaged().double()
    twin.load_state_dict(model.state_dict())
    compiled = fxdp.compile(model, {"dp": 1}, backend="eager")
    for step in range(3):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(compiled(x), twin(x))
        for own, wanted in zip(compiled.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(own, wanted)
    assert compiled._programs.compiled <= 3, "all begin at the same step"
