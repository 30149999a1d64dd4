"""`rng="single-device"` where activations do not lie in memory in the order of their dims."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.capture.refusals.input_layouts import is_contiguous
from fxdp.errors import FxdpError, InputError
from fxdp.ir.ops.full_batch_draws import twin
from tests.exactness.cases import Model
from tests.lockstep import check
from tests.rank_pool import RankPool

SPLITS = ((8,), (4, 3), (5, 2, 0, 1))
FIRST: dict[str, Any] = {"memory_format": torch.channels_last}


def _filled(z: Tensor) -> Tensor:
    z[:, ::2].normal_()
    z[:, 1, :, 0].normal_()
    z[:, 2, :, 1:3].uniform_()
    return z[..., 1:]


LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "channels_last": lambda conv, x: F.dropout(conv(x.to(**FIRST)).relu()),
    "permuted": lambda conv, x: F.dropout(conv(x).permute(0, 2, 3, 1)),
    "fixed_batch": lambda conv, x: F.dropout(conv(x).view(int(x.shape[0]), 3, 4, 4).permute(0, 2, 3, 1)),
    "unread": lambda conv, x: (F.dropout(conv(x)), F.dropout(conv(x)), torch.rand_like(x))[1],
    "batch_last": lambda conv, x: F.dropout(conv(x).permute(1, 3, 2, 0)),
    "sliced": lambda conv, x: F.dropout(conv(x).transpose(1, 3)[:, 1:3]),
    "expanded": lambda conv, x: F.dropout(x.transpose(1, 3)[:, :, None].expand(-1, -1, 2, -1, -1)),
    "expanded_over_the_batch": lambda conv, x: F.dropout(
        conv.weight.flatten(1)[:, None].expand(-1, x.shape[0], -1)
    ),
    "chosen_by_the_data": lambda conv, x: torch.rand_like(conv(x)[x[:, 0, 0, 0] > 0].transpose(1, 2)),
    "in_place": lambda conv, x: F.alpha_dropout(conv(x).transpose(1, 3), training=True),
    "slices_in_place": lambda conv, x: conv(x) * _filled(torch.zeros(x.shape[0], 3, 4, 5)),
    "rrelu": lambda conv, x: F.rrelu(conv(x).transpose(1, 3), training=True),
    "noise": lambda conv, x: conv(x).transpose(0, 2) + torch.randn_like(x.transpose(0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_are_drawn_in_the_order_of_eagers_memory(name: str) -> None:
    model, x = _subject(name, 8)
    check(model, (x,), splits=SPLITS, rng="single-device")


ALONE: dict[str, Callable[..., Tensor]] = {
    "product": lambda conv, x: F.dropout(torch.einsum("bti,ij->bjt", conv(x).flatten(2), _matrix(conv))),
    "reshaped": lambda conv, x: F.dropout(conv(x).flatten(2).transpose(1, 2).reshape(-1, 3)),
    "in_place": lambda conv, x: torch.einsum("bti,ij->bjt", x.flatten(2), _matrix(conv)).uniform_(),
    "chosen_by_the_data": LAYOUTS["chosen_by_the_data"],
    "as_with_others": LAYOUTS["channels_last"],
}
"""What one device lays out otherwise, or not, if it has a single sample."""


def _matrix(conv: nn.Module) -> Any:
    return conv.weight.flatten()[:80].view(16, 5)


@pytest.mark.parametrize("name", ALONE)
def test_a_single_sample_is_drawn_for_as_it_lies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, name, ALONE[name])
    model, x = _subject(name, 8)
    check(model, (x,), splits=((1,), (0, 1), (2, 0)), rng="single-device")


def test_the_number_of_samples_decides_which_program_draws() -> None:
    torch.manual_seed(0)
    model = Model(ALONE["product"], nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64))
    compiled = fxdp.compile(model, rng="single-device", backend="eager")
    for n in (1, 3, 1, 2):
        x = _wide(n, 3, 4, 4)
        torch.manual_seed(n)
        found = compiled(x)
        torch.manual_seed(n)
        torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-12)
    fxdp.verify(model, (x,), mesh={"dp": 2}, rng="single-device", splits=[(1, 1), (0, 1)]).raise_if_wrong()


def test_a_part_of_a_mask_has_memory_of_its_own() -> None:
    """Inductor takes results of ops for aligned; of a byte per number a part begins anywhere."""
    draw = twin(torch.ops.aten.native_dropout.default)
    out, mask = draw(torch.ones(3, 7), 0.5, True, [8, 7], [0], [0, 1], [], 0, 1, 8, 5, 3, None)
    assert (out.storage_offset(), mask.storage_offset(), mask.untyped_storage().nbytes()) == (0, 0, 21)


def _train(split: list[int], names: tuple[str, ...]) -> list[Tensor]:
    """This rank's part of each layout's output, all of one program; the compiler must know how it lies."""
    model, x = _subjects(names, sum(split))
    compiled = fxdp.compile(model, rng="single-device")
    torch.manual_seed(5)
    return [out.detach() for out in compiled(x.split(split)[dist.get_rank()])]


def _subjects(names: tuple[str, ...], batch: int) -> tuple[nn.Module, Tensor]:
    _, x = _subject(names[0], batch)
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64)
    return Model(lambda conv, x: tuple(LAYOUTS[name](conv, x).tanh() for name in names), conv), x


def _subject(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64)
    model = Model(lambda conv, x: LAYOUTS[name](conv, x).tanh(), conv)
    return model, torch.randn(batch, 3, 4, 4, dtype=torch.float64)


INPUTS: dict[str, Callable[[int], Tensor]] = {
    "channels_last": lambda n: _wide(n, 3, 4, 4).to(**FIRST),
    "channels_last_crop": lambda n: _wide(n, 4, 6, 5).to(**FIRST)[:, 1:, 2:, 1:],
    "crop": lambda n: _wide(n, 3, 5, 4)[:, :, 1:],
    "one_channel": lambda n: _wide(n, 1, 4, 4).to(**FIRST).expand(-1, 3, -1, -1),
    "batch_last": lambda n: _wide(4, 4, 3, n).permute(3, 2, 0, 1),
    "some_of_batch_last": lambda n: _wide(4, 4, 3, n + 2)[..., 1:-1].permute(3, 2, 0, 1),
    "expanded": lambda n: _wide(3, 1, 4).expand(n, 3, 4, 4),
    "overlapping": lambda n: _wide(n, 3, 4, 6).unfold(3, 3, 1)[..., 1],
}  # fmt: skip


def _wide(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


SAID = r"\.py:\d+ `.*: rng=.* lie otherwise: args\[0\]. Pass args\[0\].contiguous\(\)$"


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_lie_otherwise_are_refused_where_numbers_are_drawn(name: str) -> None:
    x = INPUTS[name](8)
    assert x.contiguous().shape == (8, 3, 4, 4), "as below"
    with pytest.raises(InputError, match=SAID):
        check(_noisy(), (x,), splits=SPLITS, rng="single-device")
    check(_noisy().eval(), (x,), splits=((4, 4),), rng="sharded")
    check(Model(lambda x: x.sin().tanh()), (x,), splits=SPLITS, rng="single-device")


@pytest.mark.parametrize("ask", [fxdp.plan, fxdp.verify])
def test_who_plans_is_told_so_too(ask: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=SAID):
        ask(_noisy(), (INPUTS["crop"](8),), mesh={"dp": 2}, rng="single-device")


def test_contiguous_inputs_are_taken() -> None:
    check(_noisy(), (_wide(8, 3, 4, 4),), splits=SPLITS, rng="single-device")


def test_one_channel_has_two_orders() -> None:
    """Contiguous for torch, and yet eager lays down what a convolution makes of it in channels_last."""
    x = _wide(8, 1, 4, 4).to(**FIRST)
    conv = nn.Conv2d(1, 3, 3, padding=1, dtype=torch.float64)
    assert x.is_contiguous()
    assert not conv(x).is_contiguous()
    model = Model(lambda conv, x: F.dropout(conv(x)).tanh(), conv)
    copy = r"Pass args\[0\].clone\(memory_format=torch.contiguous_format\)"
    with pytest.raises(InputError, match=copy):
        check(model, (x,), splits=SPLITS, rng="single-device")
    x = x.clone(memory_format=torch.contiguous_format)
    assert conv(x).is_contiguous()
    check(model, (x,), splits=SPLITS, rng="single-device")


IN_ORDER: dict[str, Tensor] = {
    "scalar": torch.ones(()),
    "rows": torch.ones(9, 3)[2:5],
    "one_channel": torch.ones(4, 1, 2, 2),
    "one_pixel": torch.ones(4, 3, 1, 1),
    "no_samples": torch.ones(0, 3, 2, 2).to(**FIRST),
    "new_axis": torch.from_numpy(np.ones((4, 6))[:, None]),
    "one_row_of_columns": torch.ones(5, 1).t(),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_lies_as_new_memory_does(name: str) -> None:
    assert is_contiguous(IN_ORDER[name])


def _noisy() -> nn.Module:
    conv = nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64)
    return Model(lambda conv, x: F.dropout(conv(x) + x).tanh() + F.dropout(x) * torch.rand_like(x), conv)


def _call(parts: list[list[Tensor]]) -> list[Any]:
    """What each of several calls returned, or why not."""
    torch.manual_seed(0)
    compiled, found = fxdp.compile(_noisy(), rng="single-device", backend="eager"), []
    for step in parts:
        torch.manual_seed(5)
        try:
            found.append(compiled(step[dist.get_rank()]).detach())
        except InputError as error:
            found.append(str(error))
    torch.manual_seed(dist.get_rank())
    with pytest.raises(InputError, match=r"generators .* are in different states\. Call torch.manual_seed"):
        compiled(parts[1][dist.get_rank()])
    torch.manual_seed(5)
    found.append(compiled(parts[1][dist.get_rank()]).detach())
    return found


def test_all_ranks_refuse_what_lies_otherwise_on_one(ranks: RankPool) -> None:
    x, first = _wide(4, 3, 4, 4), _wide(4, 3, 4, 4).to(**FIRST)
    none = torch.empty(0, 3, 4, 4, dtype=torch.float64).to(**FIRST)
    steps: list[tuple[Tensor | str, list[Tensor]]] = [
        (r"args\[0\] \(rank 1\)\. Pass args\[0\].contiguous\(\)$", [x[:1], first[2:]]),
        (x, [x[:2], x[2:]]),
        (r"args\[0\] \(rank 0, 1\)\. Pass args\[0\].contiguous\(\)$", [first[:2], first[2:]]),
        (first.contiguous(), [first[:2].contiguous(), first[2:].contiguous()]),
        (x[:2], [none, x[:2]]),
        (r"args\[0\] \(rank 0\)\. Pass args\[0\].contiguous\(\)$", [first[:2], none]),
    ]
    found = ranks.run(2, _call, [parts for _, parts in steps])
    for i, (full, _) in enumerate([*steps, steps[1]]):
        results = [own[i] for own in found]
        if isinstance(full, str):
            assert all(re.search(full, text) for text in results), results
            continue
        torch.manual_seed(0)
        model = _noisy()
        torch.manual_seed(5)
        torch.testing.assert_close(torch.cat(results), model(full), rtol=1e-12, atol=1e-12)


def _call_promised_even(parts: list[list[Tensor]]) -> str:
    model = Model(lambda x: F.dropout(x).mean())
    compiled = fxdp.compile(model, rng="single-device", backend="eager", communication={"uneven": False})
    for _ in range(2):  # at the second call replicas are compared, so the ranks exchange what they know
        compiled(parts[0][dist.get_rank()])
    dist.barrier()  # else one rank may fail in its third call while the other is in its second
    with pytest.raises(FxdpError) as caught:
        compiled(parts[1][dist.get_rank()])
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_that_do_not_exchange_stop_together(ranks: RankPool) -> None:
    x = _wide(4, 3, 4, 4)
    found = ranks.run(2, _call_promised_even, [[x[:2], x[2:]], [x[:2], x[2:].to(**FIRST)]])
    assert found[0].startswith("RankFailedError"), found[0]
    assert found[1].startswith("InputError")
    for text in found:
        assert "these inputs lie otherwise: args[0]. Pass args[0].contiguous()" in text


def test_inductor_knows_how_they_lie(ranks: RankPool) -> None:
    names = ("channels_last", "in_place")
    found = ranks.run(2, _train, [3, 2], names)
    model, x = _subjects(names, 5)
    torch.manual_seed(5)
    for parts, expected in zip(zip(*found, strict=True), model(x), strict=True):
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-12, atol=1e-12)
