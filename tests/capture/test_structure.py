"""Inputs and outputs of every shape: structures, slots, parameters, names, sites."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

from fxdp.capture.captured import OutputLeaf, SizeLeaf
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Constant, Gradient, Input, Mutation, Output, Parameter, Tangent
from fxdp.ir.types.sizes import B
from tests.capturing import capture

from .oracle import check


def specs(captured) -> list[Any]:
    return [meta(node).spec for node in captured.gm.graph.find_nodes(op="placeholder")]


def results(captured) -> tuple[Any, ...]:
    return meta(captured.gm.graph.output_node()).results


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)
        self.mid.bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.mid(self.embed(ids))).flatten(0, 1), labels.flatten())


def test_tied_frozen_and_unused_parameters() -> None:
    ids = torch.randint(0, 9, (3, 4))
    captured = check(Tied(), (ids, ids))
    assert specs(captured) == [
        Parameter("embed.weight"),
        Parameter("mid.weight"),
        Parameter("mid.bias"),
        Input(0, "ids"),
        Input(1, "labels"),
        Tangent(0),
    ]
    assert results(captured) == (
        Output(0),
        Gradient(Parameter("embed.weight")),
        Gradient(Parameter("mid.weight")),
    )


def test_placeholder_names_and_order() -> None:
    captured = capture(Tied(), (torch.zeros(3, 4, dtype=torch.long),), {"labels": torch.zeros(3, 4).long()})
    names = [node.name for node in captured.gm.graph.find_nodes(op="placeholder")]
    assert names == ["embed_weight", "mid_weight", "mid_bias", "ids", "labels", "tangent_0"]


def test_names_are_the_same_in_every_capture() -> None:
    ids = torch.randint(0, 9, (3, 4))
    graphs = [str(capture(Tied(), (ids[:n], ids[:n]), {}).gm.graph) for n in (3, 2, 0)]
    assert graphs[0] == graphs[1] == graphs[2]


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    scores: torch.Tensor
    extra: Any = None


class Rich(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.kind = kind

    def forward(self, x: torch.Tensor, scale: float = 1.0, flag: bool = True) -> Any:
        scores = self.fc(x) * scale
        loss = scores.pow(2).mean()
        outputs = {
            "tuple": (loss, scores),
            "dict": {"loss": loss, "none": None, "n": 3, "deep": [scores, {"name": "a"}]},
            "dataclass": Result(loss, scores, {"flag": flag}),
            "views": (scores.view(-1), scores, scores.T, scores),
            "input": (x, scores),
            "size": (loss, x.shape[0], 2 * x.shape[0], tuple(x.shape)),
            "parameter": (loss, self.fc.weight),
        }
        return outputs[self.kind]


@pytest.mark.parametrize("differentiable", ["loss", "all"])
@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "views", "input", "size", "parameter"])
def test_output_structure(kind: str, differentiable: str) -> None:
    check(
        Rich(kind),
        (torch.randn(3, 4),),
        {"scale": 2.0, "flag": False},
        ((torch.randn(5, 4),), {"scale": 2.0, "flag": False}),
        differentiable=differentiable,
    )


def test_detached_outputs() -> None:
    captured = check(Rich("tuple"), (torch.randn(3, 4),))
    assert captured.detached == (1,)
    assert [spec for spec in specs(captured) if isinstance(spec, Tangent)] == [Tangent(0)]
    captured = check(Rich("tuple"), (torch.randn(3, 4),), differentiable="all")
    assert captured.detached == ()
    assert [spec for spec in specs(captured) if isinstance(spec, Tangent)] == [Tangent(0), Tangent(1)]


class Parts(nn.Module):
    """Returns the parts of its loss, and the loss itself last."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.fc, self.form = nn.Linear(4, 3), form

    def forward(self, x: torch.Tensor) -> Any:
        out = self.fc(x)
        fit, size = out.sin().mean(), out.square().mean()
        return self.form(fit=fit, size=size, loss=fit + 0.1 * size)


@dataclasses.dataclass
class Report:
    fit: torch.Tensor
    size: torch.Tensor
    loss: torch.Tensor


@dataclasses.dataclass
class Answer(ModelOutput):
    fit: Any = None
    size: Any = None
    loss: Any = None


@pytest.mark.parametrize("form", [dict, Report, Answer])
def test_the_output_named_loss_is_the_loss(form: Any) -> None:
    captured = check(Parts(form), (torch.randn(3, 4),))
    assert [spec for spec in specs(captured) if isinstance(spec, Tangent)] == [Tangent(2)]
    assert captured.detached == (0, 1)


def test_output_leaves() -> None:
    captured = capture(Rich("size"), (torch.randn(3, 4),), {})
    assert captured.leaves[:3] == (OutputLeaf(0), SizeLeaf(B), SizeLeaf(2 * B))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(
        self, batch: dict[str, Any], pair: tuple[Any, ...], *rest: Any, mask: Any = None
    ) -> torch.Tensor:
        x = self.fc(batch["x"][0]) + pair[1] * pair[0] + rest[0]
        return x.sum() if mask is None else (x * mask).mean()


def test_nested_inputs() -> None:
    def inputs(b: int) -> tuple[Any, ...]:
        return {"x": [torch.randn(b, 4), None], "name": "a"}, (2, torch.randn(b, 3)), torch.tensor(2.0)

    captured = check(Nested(), inputs(3), {"mask": None}, (inputs(4), {"mask": None}))
    assert [spec.path for spec in specs(captured) if isinstance(spec, Input)] == [
        "batch['x'][0]",
        "pair[1]",
        "rest[0]",
    ]


def test_batch_on_another_dim() -> None:
    class Rnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0][-1].pow(2).mean()

    captured = check(Rnn(), (torch.randn(6, 3, 4),), {}, ((torch.randn(6, 2, 4),), {}), batch_dims=1)
    assert captured.batch == (1,)
    assert meta(captured.gm.graph.find_nodes(op="placeholder")[-2]).type.shape == (6, B, 4)


def test_other_sizes_equal_to_the_batch() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(7, 7)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return (self.fc(x) @ table).pow(2).mean()

    captured = check(Square(), (torch.randn(7, 7, 7), torch.randn(7, 7)), {}, batch_dims=((0, None), {}))
    assert captured.batch == (0, None)
    types = [meta(node).type.shape for node in captured.gm.graph.find_nodes(op="placeholder")]
    assert types == [(7, 7), (7,), (B, 7, 7), (7, 7), ()]


def test_dynamic_sequence_length() -> None:
    ids = torch.randint(0, 9, (3, 6))
    small = torch.randint(0, 9, (4, 5))
    captured = check(Tied(), (ids, ids), {}, ((small, small), {}), dynamic=True)
    assert captured.symbols == {"s0": (0, 1)}


def test_gradient_of_an_input() -> None:
    captured = check(Rich("tuple"), (torch.randn(3, 4, requires_grad=True),))
    assert Gradient(Input(0, "x")) in results(captured)


def test_inference_is_forward_only() -> None:
    with torch.no_grad():
        captured = check(Rich("tuple"), (torch.randn(3, 4),))
    assert not any(isinstance(spec, Tangent) for spec in specs(captured))
    model = Rich("tuple")
    with torch.inference_mode():
        captured = capture(model, (torch.randn(3, 4),), {})
    assert results(captured) == (Output(0), Output(1))


class Mutating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int32))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        x.add_(1)
        y = self.fc(x) * self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y.sum()


def test_mutations_and_constants() -> None:
    model = Mutating()
    captured = check(model, (torch.randn(3, 4),))
    mutated = [spec for spec in results(captured) if isinstance(spec, Mutation)]
    assert len(mutated) == 3
    assert sum(isinstance(spec, Constant) for spec in specs(captured)) == 2
    assert any(torch.equal(constant, model.table) for constant in captured.constants.values())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3).to(dtype))
            self.counts = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x @ self.weight) * self.counts
            return y.abs().float().mean()

    check(Net(), (torch.randn(3, 4).to(dtype),), tol=1e-2)


def test_sites_name_the_users_line() -> None:
    captured = capture(Rich("tuple"), (torch.randn(3, 4),), {})
    powers = [node for node in captured.gm.graph.nodes if node.target == torch.ops.aten.pow.Tensor_Scalar]
    location = meta(powers[0]).location
    assert location.file.endswith("test_structure.py")
    assert location.code == "loss = scores.pow(2).mean()"
    linear = next(node for node in captured.gm.graph.nodes if "addmm" in node.name)
    assert meta(linear).location.module == "fc"
    assert meta(linear).location.code == "scores = self.fc(x) * scale"
    backward = [
        node for node in captured.gm.graph.nodes if meta(node).backward and node.op == "call_function"
    ]
    assert backward
    assert all(meta(node).location.file.endswith("test_structure.py") for node in backward)


def test_sites_without_gradients_and_in_autocast() -> None:
    """Export makes graphs of their own of them."""

    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                mean = self.fc(x).mean(0)
            with torch.autocast("cpu", torch.bfloat16):
                low = self.fc(x)
            return (low - mean).pow(2).sum()

    captured = check(Regions(), (torch.randn(5, 4),), tol=1e-2)
    calls = [node for node in captured.gm.graph.nodes if node.op == "call_function"]
    assert not [node for node in calls if not meta(node).location.file]
    locations = {meta(node).location.code for node in calls}
    assert {"mean = self.fc(x).mean(0)", "low = self.fc(x)"} <= locations


def test_loss_function_with_buffers() -> None:
    weight = torch.rand(3)
    captured = check(
        nn.Linear(4, 3), (torch.randn(5, 4),), {"target": torch.randint(0, 3, (5,))},
        loss_fn=nn.CrossEntropyLoss(weight=weight),
    )  # fmt: skip
    assert [spec for spec in specs(captured) if isinstance(spec, Constant)] == [Constant("loss_fn.weight")]
    assert torch.equal(captured.constants["loss_fn.weight"], weight)


def test_dropout_draws_as_eager_does() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    check(model, (torch.randn(3, 4),))
