"""Blocks of the global batch: the same bits on any mesh, and one error where that is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import Dataset

import fxdp
from fxdp.compiler.emit import Lowered, WantedPart, lower_part
from fxdp.ir.types.even_batches import check_borders
from fxdp.oracle.bit_record import digest
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from tests.captures import KNOWN, captured_once
from tests.rank_pool import RankPool

T, D, WORDS = 9, 16, 23


class Layer(nn.Module):
    """Attention and a feed-forward layer, with dropout on the weights of the attention, too."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(2, (2, D // 2)).transpose(1, 2) for t in self.qkv(self.before(x)).split(D, 2)]
        scores = heads[0] @ heads[1].transpose(-2, -1) + torch.full((T, T), float("-inf")).triu(1)
        mixed = F.dropout(scores.softmax(-1), 0.1, self.training) @ heads[2]
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class GPT(nn.Module):
    """A tied head, and a mean over real targets: a count and sums of float weights before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(T, D)
        self.layer = Layer()
        self.head = nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layer(self.words(ids) + self.places(torch.arange(T))))
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = (each * weights.flatten()).sum() / weights.sum().clamp(min=1)
        return {"loss": loss, "largest": logits.amax(), "logits": logits}


def _curve(
    parts: Sequence[int], block: int, steps: int, scale: float = 0.0, **options: Any
) -> list[tuple[str, Tensor]]:
    """Every number of a training, named: of the ranks of a process group, or of this process alone.

    With a scale it computes in bfloat16, and scales the loss.
    """
    rank = dist.get_rank() if len(parts) > 1 else 0
    torch.manual_seed(0)
    model = GPT()
    compiled = fxdp.compile(model, numerics=fxdp.Bitwise(block=block), **{"backend": "eager", **options})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", scale or 1.0, growth_interval=1, enabled=bool(scale))
    data, found = torch.Generator().manual_seed(7), list[tuple[str, Tensor]]()
    first = sum(parts[:rank])

    def keep(name: str, value: Tensor) -> None:
        found.append((name, (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()))

    for step in range(steps):
        for half in range(2):  # two backwards add up
            ids = torch.randint(0, WORDS, (sum(parts), T), generator=data)
            weights = torch.rand(sum(parts), T, generator=data)
            batch = ids, (ids * 3 + 1) % WORDS, torch.where(weights < 0.3, 0, weights)
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(scale)):
                given = compiled(*(t[first : first + parts[rank]] for t in batch))
            scaler.scale(given["loss"] * 4).backward()
            keep(f"loss {step}.{half}", given["loss"])
            keep(f"largest logit {step}.{half}", given["largest"])
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            keep(f"gradient of {name} in step {step}", parameter.grad)
        scaler.unscale_(optimizer)
        keep(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        keep(f"scale after step {step}", torch.tensor(scaler.get_scale()))
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        keep(name, parameter)
    return found


_Case = tuple[int, tuple[int, ...], dict[str, Any]]
"""Block, the ranks' batches, options."""

_CASES: tuple[_Case, ...] = (
    (1, (5, 3), {}),
    (3, (6, 2), {"strategy": "shard"}),  # the last block is shorter
    (1, (3, 3, 2), {}),
    (3, (3, 3, 0, 2), {"strategy": "shard"}),
    (3, (3, 0, 5), {"strategy": "shard", "scale": 2.0**127}),  # the first steps overflow
)


def _curves(cases: Sequence[_Case]) -> list[list[tuple[str, Tensor]]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of which the order of sums within a block depends
    with captured_once(KNOWN.setdefault(__name__, {})):
        found = [
            _curve(parts, block, 2 if len(options) == 1 else 4, **options) for block, parts, options in cases
        ]
    torch.set_num_threads(before)
    return found


def test_the_same_bits_on_any_mesh(ranks: RankPool) -> None:
    kinds = [_CASES[i] for i in (0, 1, 4)]
    first, second, scaled = _curves([(block, (sum(parts),), options) for block, parts, options in kinds])
    alone = [first, second, first, second, scaled]
    scales = [float(value) for name, value in scaled if name.startswith("scale")]
    assert scales[0] < 2.0**127
    assert max(scales[1:]) > min(scales)  # and steps without overflow
    for world in (2, 3, 4):
        chosen = [i for i, (_, parts, _) in enumerate(_CASES) if len(parts) == world]
        for curves in ranks.run(world, _curves, [_CASES[i] for i in chosen]):
            for i, curve in zip(chosen, curves, strict=True):
                pairs = zip(alone[i], curve, strict=True)
                assert [a for (a, x), (_, y) in pairs if digest(x) != digest(y)] == [], _CASES[i]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)).sin_(), torch.tensor(index % 3)


def _trained(folder: Path, start: int, stop: int, strategy: str, stages: int = 1) -> list[Tensor]:
    """The losses of these steps of a run, with parts of a loader that cuts no block; saved at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    shape = stages, (dist.get_world_size() if dist.is_initialized() else 1) // stages
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp")) if stages > 1 else None
    compiled = fxdp.compile(
        model, mesh, numerics={"block": 2}, strategy=strategy, loss_fn=F.cross_entropy, backend="eager"
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    loader = fxdp.data_loader(Rows(), 5, mesh=mesh and mesh["dp"], shuffle=True, local=True, block=2)
    if start:
        assert fxdp.load(folder, compiled, optimizer, data=loader) == start
    losses: list[Tensor] = []
    while True:
        for x, y in loader:
            losses.append(compiled(x, target=y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            if start + len(losses) == stop:
                fxdp.save(folder, compiled, optimizer, step=stop, data=loader)
                return [loss.detach() for loss in losses]


def test_a_run_that_goes_on_on_another_mesh(ranks: RankPool, tmp_path: Path) -> None:
    expected, found = _trained(tmp_path / "alone", 0, 9, "replicate"), list[Tensor]()
    for world, stop, *how in ((2, 2, "shard", 2), (3, 4, "replicate"), (4, 6, "shard", 2), (2, 9, "shard")):
        found += ranks.run(world, _trained, tmp_path / "run", len(found), stop, *how)[0]
    assert [float(a) for a in found] == [float(a) for a in expected]


def test_one_device_is_exact() -> None:
    torch.manual_seed(0)
    model = GPT().double().eval()
    ids, weights = torch.randint(0, WORDS, (7, T)), torch.rand(7, T).double()
    compiled = fxdp.compile(model, numerics=fxdp.Bitwise(block=3), backend="eager")
    given, expected = compiled(ids, ids, weights), model(ids, ids, weights)
    given["loss"].backward()
    own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    expected["loss"].backward()
    assert torch.allclose(given["loss"], expected["loss"], rtol=1e-13)
    assert torch.equal(given["logits"].argmax(-1), expected["logits"].argmax(-1))
    for gradient, parameter in zip(own, model.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, rtol=1e-9, atol=1e-13)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"pipeline": {"microbatches": 2}}, {"rng": "single-device"}, {"fallback": "eager"}], ids=str
)
def test_options_that_know_no_blocks(options: dict[str, Any]) -> None:
    with pytest.raises(fxdp.InputError, match=r"numerics is fxdp.Bitwise\(block=2\) with .*blocks are"):
        fxdp.compile(GPT(), numerics=fxdp.Bitwise(block=2), **options)


def test_a_block_that_inductor_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(wanted: WantedPart, *args: Any, compiled: bool, **options: Any) -> Lowered:
        if compiled:
            raise RuntimeError("no kernel")
        return lower_part(wanted, *args, compiled=compiled, **options)

    monkeypatch.setattr("fxdp.compiler.lowered_parts.lower_part", failing)
    compiled = fxdp.compile(nn.Linear(3, 2), numerics=fxdp.Bitwise(block=2), loss_fn=F.mse_loss)
    with pytest.raises(fxdp.StageError, match=r'stage 0: rank 0: .*no kernel\nUse backend="eager"'):
        compiled(torch.ones(4, 3), target=torch.ones(4, 2))


def test_code_is_never_for_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor fuses code for any size in another way, so that sizes of earlier calls would decide bits."""
    found: list[bool] = []

    def recorded(*args: Any, generic: bool, **options: Any) -> Lowered:
        found.append(generic)
        return lower_part(*args, generic=generic, **options)

    monkeypatch.setattr("fxdp.compiler.lowered_parts.lower_part", recorded)
    options: dict[str, Any] = {"numerics": fxdp.Bitwise(block=2), "backend": "eager", "loss_fn": F.mse_loss}
    compiled = fxdp.compile(nn.Linear(3, 1), **options)
    for batch in (4, 6, 5):
        compiled(torch.randn(batch, 3), target=torch.randn(batch, 1)).backward()
    assert len(found) > 2
    assert not any(found)


class Numbered(nn.Module):
    """Samples by their number in the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), torch.arange(len(x)))


def test_blocks_that_know_their_place_share_code(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def recorded(wanted: WantedPart, *args: Any, **options: Any) -> Lowered:
        made.append(wanted.name)
        return lower_part(wanted, *args, **options)

    monkeypatch.setattr("fxdp.compiler.lowered_parts.lower_part", recorded)
    model, x = Numbered(), torch.randn(5, 3)
    loss = fxdp.compile(model, numerics=fxdp.Bitwise(block=1), backend="eager")(x)
    assert "stage 0" in made
    assert len(made) == len(set(made))
    assert torch.allclose(loss, model(x))


class Chosen(nn.Module):
    """Samples that the batch chooses, which are gathered: gradients are equal on all ranks, and no sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        return F.cross_entropy(self.layer(x[chosen]), y[chosen])


def test_shards_of_gradients_that_are_no_sums() -> None:
    torch.manual_seed(0)
    model, x, y = Chosen(), torch.randn(6, 3), torch.randint(0, 5, (6,))
    options: dict[str, Any] = {"numerics": fxdp.Bitwise(block=2), "backend": "eager", "strategy": "shard"}
    fxdp.verify(model, (x, y), {}, {"dp": 3}, splits=[(4, 0, 2)], **options).raise_if_wrong()


def test_blocks_begin_in_memory_where_they_do_on_any_rank() -> None:
    """A product of one row takes another kernel where the row begins between vectors of the processor."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 129), torch.randn(4, 7)
    options: dict[str, Any] = {"numerics": {"block": 1}, "backend": "eager", "loss_fn": F.mse_loss}
    fxdp.verify(
        nn.Linear(129, 7), (x,), {"target": y}, {"dp": 4}, splits=[(1, 1, 1, 1)], **options
    ).raise_if_wrong()


def test_parts_that_cut_a_block() -> None:
    for batches in ([6, 2], [3, 3, 2], [0, 3, 0, 5], [8], [6, 1, 0]):
        check_borders(batches, 3)
    with pytest.raises(fxdp.InputError, match=r"\[4, 4\] cut .* at the ends of ranks 0; .* as \[6, 2\]"):
        check_borders([4, 4], 3)
    with pytest.raises(fxdp.InputError, match=r"ends of ranks 0, 1; .* as \[4, 4, 2\]"):
        check_borders([3, 2, 5], 2)


def test_blocks_of_a_rank() -> None:
    layout = MicrobatchSizes.of_blocks({"B": 8, "b": 5, "offset": 3}, 3)
    assert (layout.bounds, layout.first, layout.blocks) == (((0, 3), (3, 2)), 1, 3)
    assert layout.sizes[1] == {"B": 8, "b": 2, "offset": 6}
    empty = MicrobatchSizes.of_blocks({"B": 8, "b": 0, "offset": 8}, 3)
    assert empty.bounds == ((0, 0),)
    assert empty.is_empty


def _refused(block: int, seed: int = 0) -> str:
    torch.manual_seed(seed * dist.get_rank())
    compiled = fxdp.compile(GPT(), numerics=fxdp.Bitwise(block=block), backend="eager")
    ids = torch.zeros(2, T, dtype=torch.long)
    with pytest.raises(fxdp.InputError) as caught:
        compiled(ids, ids, torch.ones(2, T))
    return str(caught.value)


def test_calls_that_are_refused_on_all_ranks(ranks: RankPool) -> None:
    assert all("in different states" in text for text in ranks.run(2, _refused, 1, 7))
    assert all("[2, 2] cut" in text and "as [3, 1]" in text for text in ranks.run(2, _refused, 3))
