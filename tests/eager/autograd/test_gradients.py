"""Gradients reduced at the end of a backward are there for everybody who can see them earlier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxdp
from tests.eager.programs import Batch, data, gradients, net
from tests.eager.running import EXACT, OnRanks, difference, on_one_device, plain
from tests.rank_pool import RankPool


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch(*data())
    return F.cross_entropy(model(x), y)


def hooks_of_parameters(batch: Batch) -> dict[str, Any]:
    model, seen = net(norm=True), {}

    def see(name: str) -> Callable[[Tensor], Tensor]:
        return lambda grad: seen.update({name: grad.clone()}) or 2 * grad

    for name, p in list(model.named_parameters())[::2]:
        p.register_hook(see(f"hook of {name}"))
    last = model[-1].weight
    last.register_post_accumulate_grad_hook(lambda p: seen.update(after=p.grad.clone()))
    _loss(model, batch).backward()
    return seen | gradients(model)


def hooks_of_activations(batch: Batch) -> dict[str, Any]:
    model, (x, y), seen = net(), batch(*data()), {}
    hidden = model[0](x)
    hidden.register_hook(lambda grad: seen.update(early=model[2].weight.grad.clone(), norm=grad.norm()))
    F.cross_entropy(model[2](model[1](hidden)), y).backward()
    return seen | gradients(model)


def returned_instead_of_accumulated(batch: Batch) -> dict[str, Any]:
    model = net(norm=True)
    weights = list(model.parameters())
    loss = _loss(model, batch)
    returned = torch.autograd.grad(loss, weights[:3], retain_graph=True)
    loss.backward(inputs=weights[-2:])
    assert all(type(grad) is Tensor for grad in returned)
    return {f"returned {i}": grad for i, grad in enumerate(returned)} | gradients(model)


def accumulated(batch: Batch) -> dict[str, Any]:
    model = net()
    first = _loss(model, batch)
    first.backward(retain_graph=True)
    first.backward()
    model[0].weight.requires_grad_(False)
    (_loss(model, batch) + model[2].weight.square().sum()).backward()
    return gradients(model)


def after_a_backward_that_failed(batch: Batch) -> dict[str, Any]:
    model = net()
    x, y = batch(*data())
    hidden = model[0](x)

    def fail(grad: Tensor) -> None:
        raise KeyError

    hidden.register_hook(fail)
    try:
        F.cross_entropy(model[2](model[1](hidden)), y).backward()
    except KeyError:
        model.zero_grad()
    _loss(model, batch).backward()
    return gradients(model)


def uses_and_other_values(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(6, 6, 6), batch(*data())
    tied = model[0].weight
    for _ in range(3):
        x = F.linear(x, tied).tanh()
    tied.data = tied.data * 0.5  # as averages of weights are swapped in
    x = F.linear(x, tied, bias=model[2].bias)
    loss = F.cross_entropy(x, y) + (tied @ model[2].weight).sum() * x.mean()
    tied.data = tied.data * 2
    loss.backward()
    return {"loss": loss, **gradients(model)}


def checkpoints(batch: Batch) -> dict[str, Any]:
    model, (x, y), found = net(norm=True), batch(*data()), {}
    for reentrant in (False, True):
        model.zero_grad()
        hidden = checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=reentrant)
        F.cross_entropy(model[2:](hidden), y).backward()
        assert all(type(parameter.grad) is Tensor for parameter in model.parameters())
        found |= {f"{reentrant} {name}": grad for name, grad in gradients(model).items()}
    return found


def gradients_of_gradients(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), batch(*data())
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    weights = list(model.parameters())
    firsts = torch.autograd.grad(model(x).mean(), weights, create_graph=True)
    (slope.norm(dim=1).sub(1).square().mean() + sum(g.square().sum() for g in firsts)).backward()
    return {"of x": x.grad, **gradients(model)}


def memory_of_their_own(batch: Batch) -> dict[str, Any]:
    weights = [nn.Parameter(torch.ones(6)) for _ in range(2)]
    x = batch(data()[0])
    ((x.mean(0) + weights[0]) + weights[1]).sin().sum().backward()
    for weight in weights:
        assert weight.grad is not None
        weight.grad.mul_(2)
    return {str(i): weight.grad for i, weight in enumerate(weights)}


def written_into_plain_tensors(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), batch(*data())
    weight = nn.Parameter(torch.linspace(1, 2, len(x) * 4).view(-1, 4))
    scores = torch.zeros(2, len(x), 4)
    for i in range(2):
        scores[i] = model(x * (i + 1))
    scaled = weight * 2
    scaled[0] = model(x)[0]
    scaled[x[:, 0] > 0] = 0.5
    row = scaled[2]
    row.mul_(model(x)[2]).add_(scaled.mean())
    scaled.mul_(model(x))
    (scores.square().mean() + (scaled * x.mean()).sum()).backward()
    assert type(weight.grad) is Tensor
    return {"of a weight": weight.grad, **gradients(model)}


CASES = (
    hooks_of_parameters, hooks_of_activations, returned_instead_of_accumulated, accumulated,
    after_a_backward_that_failed, uses_and_other_values, checkpoints, gradients_of_gradients,
    memory_of_their_own, written_into_plain_tensors,
)  # fmt: skip


def _errors(split: tuple[int, ...]) -> dict[str, tuple[float, str]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for case in CASES:
        torch.manual_seed(0)
        expected = plain(case(on_one_device))
        torch.manual_seed(0)
        found[case.__name__] = difference(expected, plain(case(OnRanks(split))))
    return found


def test_gradients_are_right_wherever_they_are_read(ranks: RankPool) -> None:
    for found in ranks.run(3, _errors, (5, 0, 3)):
        assert not {name: where for name, where in found.items() if where[0] > EXACT}


def _messages() -> dict[str, Any]:
    model = net(6, 40, 4, norm=True)
    batch = OnRanks((5, 3))
    _loss(model, batch).backward()  # the first time plans are made
    before = fxdp.eager_report()
    _loss(model, batch).backward()
    counts = {(row.line, row.op, row.kind): row.calls for row in before.rows}
    after = [
        (row.op, row.calls - counts.get((row.line, row.op, row.kind), 0)) for row in fxdp.eager_report().rows
    ]
    return {op: calls for op, calls in after if calls}


def test_a_step_sends_one_message_for_gradients_and_one_for_the_loss(ranks: RankPool) -> None:
    for found in ranks.run(2, _messages):
        assert found == {
            "fxdp.moments.default": 1, "aten.div.Tensor": 1,  # BatchNorm's statistics, both sums of the loss
            "aten.sub.Tensor": 1, "gradients": 1,  # both sums of BatchNorm's backward, all parameters
        }  # fmt: skip
