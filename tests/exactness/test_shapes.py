"""Shapes: which dim is the batch is known, never guessed from sizes; all sizes here are equal."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.errors import CaptureError, FxdpError, InputError
from tests.exactness.cases import D, Model, classes, exact, exact_body, in_fours, linear, rows, traffic
from tests.lockstep import check


class Attention(nn.Module):
    """One transformer layer; batch, sequence and width are all `D`."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(self.layer(x))
        return F.cross_entropy(out.flatten(0, 1), y.flatten()), out


def test_all_sizes_equal() -> None:
    """Hidden, sequence, classes and batch are equal."""
    local = exact(Attention(batch_first=True), rows(D, D), classes(D))
    assert sum(row.bytes for row in traffic(local)) <= 16


def test_batch_on_dim_1_with_all_sizes_equal() -> None:
    local = exact(Attention(batch_first=False), rows(D, D), classes(D), batch_dims=1)
    assert sum(row.bytes for row in traffic(local)) <= 16


def test_batch_dims_by_name_and_by_position() -> None:
    def body(fc: nn.Linear, x: Tensor, bias: Tensor, *, y: dict[str, Tensor], scale: Tensor) -> Tensor:
        out = fc(x.transpose(0, 1)) + bias
        return ((out - y["target"]) * y["weight"][:, None] * scale).square().mean()

    y = {"target": rows(), "weight": rows(1)[:, 0]}
    check(
        Model(body, linear()), (rows(), torch.randn(1, D)), {"y": y, "scale": torch.tensor(2.0)},
        splits=((4, 3), (5, 2, 0, 1)), batch_dims=((1, None), {"y": {"weight": -1}}),
    )  # fmt: skip


def test_recurrent_network_with_batch_on_dim_1() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(D, D)
            self.head = nn.Linear(D, D)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out, (h, _) = self.rnn(x)
            return F.cross_entropy(self.head(out).permute(1, 2, 0), y), h

    exact(Tagger(), torch.randn(4, D, D), classes(4), batch_dims=((1, 0), {}), splits=((4, 3), (5, 2, 0, 1)))


def test_inputs_without_a_batch_dim() -> None:
    def body(fc: nn.Linear, x: Tensor, table: Tensor, scalar: Tensor) -> Tensor:
        return (fc(x) @ table * scalar).square().mean() + table.sum()

    exact_body(body, rows(), rows(), torch.tensor(3.0), batch_dims=((0, None, None), {}))


class Item(NamedTuple):
    x: Tensor
    name: str


def test_numbers_none_and_nested_containers() -> None:
    def body(fc: nn.Linear, items: list[Any], flag: bool, power: int, scale: float, nothing: None) -> Any:
        out = fc(items[0].x) * scale**power + items[1]["deep"][0][1]
        assert nothing is None
        return {"out": out if flag else -out, "name": items[0].name, "list": [out.sum(), None, 3]}

    items = [Item(rows(), "first"), {"deep": [(None, rows())]}]
    exact_body(body, items, True, 2, 0.5, None)


FLATTENED = {
    "view_minus_one": lambda fc, x: fc(x.view(-1, D)).view_as(x).mean((1, 2)),
    "view_batch_sequence": lambda fc, x: fc(x.reshape(x.shape[0] * x.shape[1], D)),
    "flatten": lambda fc, x: fc(x.flatten(0, 1)).unflatten(0, (-1, D)).flatten(1),
    "unflatten": lambda fc, x: fc(x).unflatten(2, (2, 5)).transpose(1, 2).reshape(len(x), -1),
    "sequence_first": lambda fc, x: fc(x.transpose(0, 1).reshape(-1, D)).view(D, -1, D).sum(0),
    "heads": lambda fc, x: fc(x).view(-1, D, 2, 5).permute(0, 2, 1, 3).reshape(-1, D, 5).softmax(1),
    "repeat_interleave": lambda fc, x: fc(x.repeat_interleave(3, 0)).view(-1, 3, D, D).sum(1),
    "repeat": lambda fc, x: fc(x.repeat(2, 1, 1)).view(2, -1, D, D).sum((0, 2)),
    "repeat_sequence": lambda fc, x: fc(x.repeat(1, 2, 1)).mean(1),
    "expand": lambda fc, x: fc(x[:, None].expand(-1, 3, -1, -1).reshape(-1, D)).sum(),
    "tile": lambda fc, x: torch.tile(fc(x), (2, 1, 1)).square().mean(0),
    "stack_and_cat": lambda fc, x: fc(torch.cat([torch.stack([x, -x], 1).flatten(0, 1), x])).square().mean(),
    "split_features": lambda fc, x: torch.cat([-part for part in fc(x).split(3, 2)], 2).sum((0, 1)),
    "chunk_features": lambda fc, x: [part.mean() for part in fc(x).chunk(3, 1)],
    "movedim": lambda fc, x: fc(x).movedim(0, 2).contiguous().view(D, -1).sum(0),
    "squeeze": lambda fc, x: fc(x[:, :1]).squeeze(1).unsqueeze(0).squeeze(0),
    "windows": lambda fc, x: fc(x).unfold(1, 4, 3).sum((1, 2)),
    "contiguous_view": lambda fc, x: fc(x).transpose(1, 2).contiguous().view(len(x), -1),
    "as_rows_of_scalars": lambda fc, x: fc(x).view(-1).square().mean(),
    "pixel_shuffle": lambda fc, x: F.pixel_shuffle(fc(x)[:, :8].reshape(-1, 4, 4, 5), 2).mean((0, 2, 3)),
    "einsum": lambda fc, x: torch.einsum("bij,bkj->bik", fc(x), x).diagonal(dim1=1, dim2=2).sum(1),
    "triangular_mask": lambda fc, x: (fc(x) + torch.full((D, D), -1e9).triu(1)).softmax(-1),
}


@pytest.mark.parametrize("names", in_fours(FLATTENED), ids=" ".join)
def test_views(names: tuple[str, ...]) -> None:
    exact_body(lambda fc, x: tuple(FLATTENED[name](fc, x) for name in names), rows(D, D))


def test_view_of_two_halves_is_refused() -> None:
    """`view(2, B // 2, ...)` needs an even batch: refused with the line, whatever the batch is now."""
    with pytest.raises(CaptureError, match=r"x.view\(2, x.shape\[0\] // 2, D\)"):
        exact_body(lambda fc, x: fc(x.view(2, x.shape[0] // 2, D)).sum(0), rows())


def test_chunked_batch() -> None:
    """`view(2, -1, ...)` and `chunk(2)`: exact for even batches, or refused."""

    def body(fc: nn.Linear, x: Tensor) -> Tensor:
        a, b = fc(torch.cat([x, 2 * x])).chunk(2)
        return (a * b).mean()

    exact_body(body, rows())
    try:
        exact_body(
            lambda fc, x: fc(x.view(2, -1, D)).select(0, 1).sum(), rows(), splits=((3, 3), (5, 2, 0, 1))
        )
    except FxdpError as error:
        assert "x.view(2, -1, D)" in str(error)  # noqa: PT017


CONSTANTS = {
    "zeros": lambda fc, x: torch.cat([fc(x), torch.zeros(x.shape[0], 2)], 1).softmax(1),
    "ones": lambda fc, x: fc(x) * torch.ones(len(x), 1) + torch.ones(x.size(0)).sum(),
    "full": lambda fc, x: fc(x) + torch.full((x.shape[0], D), 0.5),
    "arange": lambda fc, x: fc(x) * torch.arange(x.shape[0])[:, None],
    "arange_reversed": lambda fc, x: fc(x) * torch.arange(x.shape[0] - 1, -1, -1)[:, None],
    "arange_as_index": lambda fc, x: fc(x)[torch.arange(len(x)), torch.arange(len(x)) % D],
    "arange_shifted": lambda fc, x: fc(x)[(torch.arange(len(x)) + 1) % len(x)],
    "linspace": lambda fc, x: fc(x) * torch.linspace(0, 1, len(x))[:, None],
    "eye": lambda fc, x: torch.eye(len(x)) @ fc(x) + torch.eye(len(x)).sum(),
    "tril": lambda fc, x: torch.ones(len(x), len(x)).tril() @ fc(x),
    "zeros_then_fill": lambda fc, x: torch.zeros(len(x), 2 * D).index_copy(1, torch.arange(D), fc(x)),
    "new_zeros": lambda fc, x: torch.cat([x.new_zeros(len(x), 1), fc(x)], 1).cumsum(1),
    "batch_as_number": lambda fc, x: fc(x).sum() / x.shape[0] + x.shape[0] ** 0.5,
    "one_hot": lambda fc, x: F.one_hot(torch.arange(len(x)), len(x)).to(x.dtype) @ fc(x),
    "scatter": lambda fc, x: torch.zeros(len(x), D).scatter(1, x.argmax(1, keepdim=True), 1.0) * fc(x),
    "index_put": lambda fc, x: fc(x).index_put((torch.arange(len(x)), x.argmax(1)), torch.zeros(len(x))),
    "meshgrid": lambda fc, x: fc(x) * torch.meshgrid(torch.arange(len(x)), torch.arange(D), indexing="ij")[0],
    "whole_constant": lambda fc, x: fc(x).sum() * torch.arange(float(x.shape[0])).mean(),
    "returned": lambda fc, x: (fc(x), torch.arange(len(x)), torch.zeros(len(x), 2), x.shape[0], x.shape),
}


@pytest.mark.parametrize(
    "names", in_fours(CONSTANTS, alone=("linspace", "one_hot", "whole_constant")), ids=" ".join
)
def test_constants_sized_by_the_batch(names: tuple[str, ...]) -> None:
    exact_body(lambda fc, x: tuple(CONSTANTS[name](fc, x) for name in names), rows())


DATA_DEPENDENT = {
    "mask_mean": lambda fc, x: fc(x)[x[:, 0] > -9].mean(),
    "mask_sum_of_elements": lambda fc, x: fc(x)[x > 0].square().sum(),
    "masked_select": lambda fc, x: torch.masked_select(fc(x), x > 0).sum(),
    "nonzero": lambda fc, x: fc(x)[torch.nonzero(x[:, 0] > -9).squeeze(1)].square().mean(),
    "nonzero_count": lambda fc, x: fc(x).sum() * torch.nonzero(x > 0).shape[0],
    "where_index": lambda fc, x: fc(x)[torch.where(x[:, 0] > 0)[0]].sum(),
    "unique": lambda fc, x: fc(x).sum() * torch.unique(x[:, 0].round()).numel(),
    "unique_inverse": lambda fc, x: torch.zeros(99).index_add(
        0, torch.unique((x[:, 0] * 2).round(), return_inverse=True)[1], fc(x)[:, 0]
    ).square().sum(),
    "mask_then_layer": lambda fc, x: fc(fc(x)[x[:, 0] > -9].relu()).mean(),
    "packed_returned": lambda fc, x: fc(x)[x[:, 0] > 0],
    "repeat_by_tensor": lambda fc, x: fc(x).repeat_interleave((x[:, 0] > 0) + 1, 0).square().mean(),
    "bincount": lambda fc, x: fc(x).mean(0) * torch.bincount(x.argmax(1), minlength=D)[:D],
    "item_in_a_tensor": lambda fc, x: fc(x) * torch.full((), (x > 0).sum().item()),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_data_dependent_shapes_are_exact_or_refused(name: str) -> None:
    """Replicated exactly, or refused with the user's line; never wrong."""
    try:
        exact_body(DATA_DEPENDENT[name], rows(), splits=((4, 3), (5, 2, 0, 1), (3, 3, 2, 2)))
    except FxdpError as error:
        print(f"refused {name}: {error}")
        assert "test_shapes.py" in str(error)  # noqa: PT017


def test_batch_dims_that_fit_no_input() -> None:
    for wrong in (5, ((0, 0), {}), ((0,), {"z": 1})):
        with pytest.raises(InputError, match="batch_dims"):
            exact_body(lambda fc, x: fc(x), rows(), batch_dims=wrong)


SIZED = {
    "free": lambda fc, x: (fc(x) * x.mean(1, keepdim=True)).square().mean() / x.shape[1],
    "loop_over_the_length": lambda fc, x: (
        sum(0.5**i * fc(x[:, i]) for i in range(x.shape[1])).square().mean()
    ),
    "branch_on_the_length": lambda fc, x: fc(x).mean() if x.shape[1] > 2 else fc(x).sum(),
    "branch_on_the_batch": lambda fc, x: fc(x).mean() if x.shape[0] > 3 else fc(x).sum(),
}


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("lengths", [(3, 1, 4, 2, 3), (1, 3, 1, 4), (3, 4, 1, 2)], ids=str)
def test_other_lengths_and_batches_at_later_calls(name: str, lengths: tuple[int, ...]) -> None:
    """A program serves only the sizes that it was captured for; the others are captured anew."""
    model = Model(SIZED[name], linear())
    compiled = fxdp.compile(model, backend="eager")
    for step, length in enumerate(lengths):
        x = torch.randn(4 - step % 2, length, D)
        loss, expected = compiled(x), model(x)
        loss.backward()
        found = model.layers[0].weight.grad
        model.zero_grad()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(found, model.layers[0].weight.grad, rtol=1e-9, atol=1e-12)
        model.zero_grad()


def test_the_memory_of_sizes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that were forgotten are served by the same program: two compilations all the same."""
    monkeypatch.setattr("fxdp.module.cache_entry._CALLS", 3)
    model = Model(SIZED["free"], linear())
    compiled = fxdp.compile(model, backend="eager")
    for length in (5, 6, 7, 8, 9, 5, 6, 7):
        x = torch.randn(4, length, D)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=0)
    assert compiled._programs.compiled == 2
    (kind,) = compiled._programs.kinds
    assert len(kind.calls) == 3


def test_rows_that_are_one_sample() -> None:
    """Four answers to each prompt, two views of each image, and a row per prompt."""

    def body(fc: nn.Linear, x: Tensor, rewards: Tensor, prompts: Tensor) -> Tensor:
        grouped = rewards.view(-1, 4)
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        first, second = fc(x).unflatten(0, (-1, 2)).unbind(1)
        scores = F.normalize(first, dim=1) @ F.normalize(second, dim=1).t()
        contrastive = F.cross_entropy(scores, torch.arange(first.shape[0]))
        policy = (advantages.flatten() * fc(x).log_softmax(-1)[:, 0]).mean()
        return contrastive - policy + fc(prompts.transpose(0, 1)).square().mean()

    four = fxdp.RowsPerSample(4)
    x = torch.randn(4 * D, D).requires_grad_()
    check(
        Model(body, linear()), (x, torch.randn(4 * D), torch.randn(D, D)),
        splits=((4, 3), (5, 2, 0, 1)), batch_dims=((four, four, 1), {}),
    )  # fmt: skip


def test_rows_of_a_sample_are_not_divided() -> None:
    model = nn.Linear(3, 2)
    compiled = fxdp.compile(model, backend="eager", batch_dims=fxdp.RowsPerSample(4, dim=-2))
    for batch in (8, 4):
        x = torch.randn(batch, 3)
        torch.testing.assert_close(compiled(x), model(x))
    with pytest.raises(InputError, match=r"input has 6 rows in dim 0 .*multiple of 4.*batch_dims="):
        compiled(torch.randn(6, 3))
    with pytest.raises(InputError, match="count is 0"):
        fxdp.RowsPerSample(0)


def test_a_batch_that_runs_at_multiples_only_is_told_how() -> None:
    def body(fc: nn.Linear, x: Tensor) -> Tensor:
        return fc(x).view(-1, 5, D).std(1).mean()

    with pytest.raises(CaptureError, match=r"multiples of 5.*batch_dims=fxdp.RowsPerSample\(5\)"):
        fxdp.plan(Model(body, linear()), (rows(),), mesh={"dp": 2})
