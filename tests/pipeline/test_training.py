"""The plain training loop over pipeline stages, beside one eager device: everything that a step may hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from fxdp.ir.tensor_difference import difference
from tests.captures import KNOWN, capture_ahead, captured_once
from tests.exactness.models import counterpart_of, gradient_errors, part, worst_error
from tests.rank_pool import RankPool


class Everything(nn.Module):
    """A tied head, a frozen layer with a low-rank one beside it, an unused parameter, a buffer that counts,
    inputs of all kinds that several stages read, and outputs of several stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.mix, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(
        self, ids: Tensor, labels: Tensor, *, keep: Tensor, table: Tensor, scale: Tensor,
        extra: Tensor | None = None, power: int = 1,
    ) -> dict[str, Any]:  # fmt: skip
        early = self.embed(ids) * keep.unsqueeze(-1)
        hidden = early + self.frozen(early) + self.up(self.down(early))
        if self.training:
            self.steps += 1
            hidden = hidden * 1.5
        hidden = torch.tanh(hidden @ table) * scale + (0 if extra is None else extra)
        hidden = (hidden + self.mix(hidden.cumsum(1)).relu()) * keep.unsqueeze(-1)
        logits = self.head(self.norm(hidden)) ** power
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        kept = keep.sum(1)
        return {"loss": loss, "logits": logits, "early": early, "kept": kept, "nothing": None, "power": power}


def _batch(size: int) -> dict[str, Any]:
    """Few valid labels, very unevenly; the first samples, a micro-batch, have none."""
    ids, keep = torch.randint(0, 11, (size, 5)), torch.rand(size, 5) > 0.2
    labels = torch.where(torch.rand(size, 5) < 0.5, -100, ids.roll(-1, 1))
    labels[:2] = -100
    labels[-1] = ids[-1]
    return {"ids": ids, "labels": labels, "keep": keep}


def _shared() -> dict[str, Any]:
    return {"table": torch.eye(6) + 0.1, "scale": torch.tensor(0.7), "extra": None, "power": 1}


_DIMS = {"ids": 0, "labels": 0, "keep": 0, "table": None, "scale": None, "extra": None, "power": None}


def _mesh(pp: int) -> Any:
    return init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))


def _own(full: dict[str, Any], split: tuple[int, ...], rank: int) -> dict[str, Any]:
    return {name: part(value, split, rank) for name, value in full.items()}


# ---- several steps of one loop ----

_LOOPS: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": {"microbatches": 4}},
    "zero bubble, recomputed": {
        "pipeline": {"schedule": "zero-bubble", "microbatches": 2},
        "activation_checkpointing": "always",
    },
    "interleaved": {"pipeline": {"schedule": "interleaved", "stages": 4, "microbatches": 3}},
}
_TWO = ("zero bubble, recomputed", "interleaved")


def _loop(options: dict[str, Any], batches: tuple[tuple[int, ...], ...]) -> tuple[float, list[Any]]:
    """Train with AdamW and clipping, with validation in between; the worst error, and the final state."""
    torch.set_default_dtype(torch.float64)
    model = Everything()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, _mesh(2), backend="eager", batch_dims=((), _DIMS), **options)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-3) for m in (compiled, twin)]
    rank, errors = compiled.mesh.rank, []
    for step, split in enumerate(batches):
        torch.manual_seed(step)
        full = _batch(sum(split))
        given = [(compiled, _own(full, split, rank)), (twin, full)]
        outputs = [net(**own, **_shared()) for net, own in given]
        for output in outputs:
            (output["loss"] * 0.5).backward()
        errors.append(worst_error(model, outputs[0], twin, outputs[1], split, rank))
        norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.1) for net, _ in given]
        errors.append(difference(norms[0], norms[1]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step != 1:
            errors.append(_validate(compiled, twin, split))
    assert compiled.state_dict().keys() == twin.state_dict().keys()
    assert model.unused.grad is None
    assert model.frozen.weight.grad is None
    state = [value.tolist() for value in compiled.state_dict().values()]
    pairs = zip(compiled.state_dict().values(), twin.state_dict().values(), strict=True)
    return max(*errors, *(difference(a, b) for a, b in pairs)), state


def _validate(compiled: fxdp.CompiledModule, twin: nn.Module, split: tuple[int, ...]) -> float:
    """The worst error of all outputs in evaluation mode."""
    full = _batch(sum(split))
    given = [(compiled, _own(full, split, compiled.mesh.rank)), (twin, full)]
    for net, _ in given:
        net.zero_grad()
        net.eval()
    with torch.no_grad():
        outputs = [net(**own, **_shared()) for net, own in given]
    for net, _ in given:
        net.train()
    assert not outputs[0]["logits"].requires_grad
    return worst_error(compiled, outputs[0], twin, outputs[1], split, compiled.mesh.rank)


def _know() -> None:
    torch.set_default_dtype(torch.float64)
    for trains in (True, False):
        with torch.set_grad_enabled(trains):
            options = {"pipeline": {"microbatches": 2}, "batch_dims": ((), _DIMS)}
            model = Everything().train(trains)
            capture_ahead(__name__, model, (), {**_batch(8), **_shared()}, {"pp": 2}, **options)


def _loops(names: tuple[str, ...], batches: tuple[tuple[int, ...], ...]) -> list[tuple[float, list[Any]]]:
    with captured_once(KNOWN.setdefault(__name__, {})):
        return [_loop(_LOOPS[name], batches) for name in names]


def test_steps_of_adamw_with_clipping_and_validation(ranks: RankPool) -> None:
    """Errors against one device, and all ranks end with the same bits."""
    ranks.prepare(_know)
    cases = ((2, _TWO, ((8,), (7,), (6,))), (4, ("1f1b",), ((4, 4), (3, 4), (6, 0))))
    for world, names, batches in cases:
        for found in zip(*ranks.run(world, _loops, names, batches), strict=True):
            assert max(error for error, _ in found) <= 1e-9
            assert all(state == found[0][1] for _, state in found)


# ---- gradients of inputs, and of parameters that are always added ----


class Sums(nn.Module):
    """The gradients of `a` and `b` are one value, made on two stages; `w` has no batch dim; a weight's mean
    is read, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        hidden = self.first(x * (self.a + self.b)) * self.first.weight.mean()
        hidden = self.last(hidden.tanh()) + hidden * w + (self.a + self.b)
        return hidden.square().mean() + self.last.weight.square().sum()


def _input_gradients() -> float:
    torch.set_default_dtype(torch.float64)
    model, x, w = Sums(), torch.randn(5, 5), torch.randn(5)
    twin = counterpart_of(model)
    compiled = fxdp.compile(
        model, _mesh(2), pipeline={"microbatches": 3, "schedule": "zero-bubble", "stages": ["last"]},
        backend="eager", batch_dims=((0, None), {}),
    )  # fmt: skip
    inputs = [(x.clone().requires_grad_(), w.clone().requires_grad_()) for _ in range(2)]
    for net, given in zip((compiled, twin), inputs, strict=True):
        (net(*given) * 3).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)  # in place: no two gradients may be one tensor
    pairs = [(mine.grad, theirs.grad) for mine, theirs in zip(*inputs, strict=True)]
    errors = [difference(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    assert len(errors) == 2
    return max(*errors, *gradient_errors(model, twin))


def test_gradients_of_inputs(ranks: RankPool) -> None:
    assert max(ranks.run(2, _input_gradients)) <= 1e-9


# ---- random numbers that all samples share ----


class Gates(nn.Module):
    """The same random gates on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, gates: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if gates is None:  # numbers, and a mask
            gates = torch.rand(5, dtype=x.dtype) + F.dropout(torch.ones(5, dtype=x.dtype))
        return (self.last(self.first(x) * gates).tanh() * gates).square().mean(), gates


def _shared_gates() -> float:
    model, x = Gates().double(), torch.randn(4, 5, dtype=torch.float64)
    twin = counterpart_of(model)
    compiled = fxdp.compile(
        model, _mesh(2), pipeline={"microbatches": 2, "stages": ["last"]}, backend="eager"
    )
    torch.manual_seed(dist.get_rank())  # as of ranks that drew other numbers before
    loss, gates = compiled(x)
    expected, _ = twin(x, gates)
    loss.backward()
    expected.backward()
    return max(difference(loss.detach(), expected.detach()), *gradient_errors(model, twin))


def test_stages_draw_the_same_shared_numbers_whatever_their_ranks_drew_before(ranks: RankPool) -> None:
    assert max(ranks.run(2, _shared_gates)) <= 1e-9
