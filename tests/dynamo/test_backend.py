"""`torch.compile(model, backend="fxdp")` computes what one device computes, or says why it does not."""

from __future__ import annotations

import copy
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxdp
from fxdp.dynamo.backend import backend, frame_in_flight
from fxdp.dynamo.dynamo_graph import read_graph
from fxdp.dynamo.dynamo_inputs import batch_dim
from fxdp.errors import AgreementError, InputError
from tests.project import project
from tests.rank_pool import RankPool

GROUP = "torch_dynamo_backends"
EAGER = {"backend": "eager"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
        logits = self.last(self.first(x).relu())
        return F.cross_entropy(logits, y), logits, len(x)


class MaskedMean(nn.Module):
    """A mean over what counts, whose number differs from rank to rank; its mask is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
        self.scale = torch.tensor(0.5, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) * self.scale
        mask = (y > 0).to(x.dtype)
        return ((x.squeeze(-1) - y).square() * mask).sum() / mask.sum(), x


class Normed(nn.Module):
    """BatchNorm's averages, and an average of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.net(x)
        self.seen.add_(logits.detach().sum(0))
        return F.cross_entropy(logits, y, reduction="sum") / x.shape[0], logits


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8) / 4)
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 24)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x) + self.place
        q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in self.mix(self.norm(h)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(h + mixed.transpose(1, 2).reshape(h.shape))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100), logits


def _samples(kind: type[nn.Module], count: int) -> tuple[Tensor, Tensor]:
    if kind is GPT:
        x, y = torch.randint(0, 11, (count, 5)), torch.randint(0, 11, (count, 5))
        return x, y.masked_fill(torch.rand(count, 5) < 0.4, -100)
    y = torch.randint(0, 3, (count,))
    return torch.randn(count, 4), y


def _counting() -> tuple[list[int], Callable[..., Any]]:
    """The backend, and how often torch asks it for a program."""
    graphs: list[int] = []

    def counted(gm: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        made = backend(gm, inputs, **kwargs)  # raises where torch is sent back
        graphs.append(len(inputs))
        return made

    return graphs, counted


def _apart(
    kind: type[nn.Module], optimizer: type[Any], parts: Sequence[Sequence[int]], **options: Any
) -> tuple[float, int]:
    """How far training in these parts is from training on one device, and how many graphs it needs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = kind().double()
    alone = copy.deepcopy(model)
    graphs, counted = _counting()
    compiled = torch.compile(model, backend=counted, fullgraph=True, options={**EAGER, **options})
    steps = optimizer(model.parameters(), lr=0.05), optimizer(alone.parameters(), lr=0.05)
    far = 0.0
    for sizes in parts:
        x, y = _samples(kind, sum(sizes))
        x = x.double() if x.is_floating_point() else x
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        (loss, rows, *rest), (expected, all_rows, *others) = compiled(x[own], y[own]), alone(x, y)
        assert rest == others
        far = max(far, _far(loss, expected), _far(rows, all_rows[own]))
        for step, value in zip(steps, (loss, expected), strict=True):
            step.zero_grad()
            value.backward()
            step.step()
        far = max([far, *map(_far, model.parameters(), alone.parameters())])
        far = max([far, *map(_far, model.buffers(), alone.buffers())])
    torch._dynamo.reset()
    return far, len(graphs)


def _far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item() if a.numel() else 0.0


PARTS = [(4, 3), (2, 1), (3, 0), (0, 6), (4, 3)]


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        (MLP, torch.optim.AdamW),
        (MaskedMean, torch.optim.SGD),
        (Normed, torch.optim.SGD),
        (GPT, torch.optim.SGD),
    ],
)
def test_it_trains_as_one_device(ranks: RankPool, kind: Any, optimizer: Any) -> None:
    for far, graphs in ranks.run(2, _apart, kind, optimizer, PARTS):
        assert far < 1e-12
        assert graphs == 1  # for all sizes, 0 and 1 among them


def test_inductor_compiles_it(ranks: RankPool) -> None:
    for far, _ in ranks.run(2, _inductor):
        assert far < 1e-12


def _inductor() -> tuple[float, int]:
    return _apart(MLP, torch.optim.SGD, [(4, 4)], backend="inductor")


def test_torch_finds_it_by_its_name() -> None:
    ((name, value),) = project()["entry-points"][GROUP].items()
    assert name == "fxdp"
    assert EntryPoint(name, value, GROUP).load() is backend


def test_importing_its_module_is_enough() -> None:
    """What runs here is not installed by pip, or by one that knew of no backend."""
    assert "fxdp" in torch._dynamo.list_backends()
    for _ in range(2):
        assert lookup_backend("fxdp") is backend


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.scale = torch.ones(3)
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) * self.scale
        if self.twice:
            h = h * 2
        if len(x) > 4:
            h = h + 1
        return h


def _raised(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except (InputError, AgreementError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _compiled(model: Any, fullgraph: bool = True, **options: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=fullgraph, options={**EAGER, **options})


def _refused() -> tuple[str, str]:
    torch._dynamo.reset()
    branches = _raised(_compiled(Scaled()), torch.randn(3, 4))
    torch._dynamo.reset()
    model = Scaled()
    model.twice = dist.get_rank() == 1
    return branches, _raised(_compiled(model), torch.randn(6, 4))


def test_what_ranks_cannot_do_together_is_refused_on_all(ranks: RankPool) -> None:
    for branches, others in ranks.run(2, _refused):
        assert "InputError: torch.compile traced the model for this rank's part" in branches
        assert "x.size(0) <= 4 held at" in branches
        assert "if len(x) > 4" in branches
        assert "AgreementError: ranks were given different graphs of torch.compile: line" in others
        assert "rank 1 has `call_function _operator.mul" in others


def _loss_outside() -> tuple[float, str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    alone = copy.deepcopy(model)
    x, y = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    own = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("fxdp").addHandler(handler)
    F.mse_loss(_compiled(model)(x[own]), y[own]).backward()
    logging.getLogger("fxdp").removeHandler(handler)
    F.mse_loss(alone(x), y).backward()
    return max(
        _far(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    ), said.getvalue()  # type: ignore[arg-type]


def test_a_loss_outside_is_the_mean_over_ranks_and_says_so(ranks: RankPool) -> None:
    for far, said in ranks.run(2, _loss_outside):
        assert far < 1e-15
        assert "rank" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "shard"}, r"Use compiled = fxdp\.compile\(model, strategy='shard'\), which"),
        ({"loss_fn": F.mse_loss}, r"loss_fn= needs the call's target=.*loss_fn=mse_loss"),
        ({"pipeline": {"stages": ["fc"]}}, r"fxdp.Pipeline\(stages=\[...\]\) names modules"),
        ({"stategy": "shard"}, r"options=...\) has no options.*\n  stategy: did you mean strategy='shard'\?"),
        ({"pipeline": fxdp.Pipeline(stages=["fc"])}, r"model, pipeline=fxdp\.Pipeline\(stages=\['fc'\]\)\)"),
        ({"stages": ["fc"]}, r"stages=\['fc'\]: now pipeline=fxdp\.Pipeline\(stages=\['fc'\]\)"),
        ({"pipeline": {"microbatches": 0}}, "microbatches is 0"),
        ({"batch_dims": 2}, r"gives dim 2 for x, which has shape \(5, 4\)"),
        ({"batch_dims": (0, 0, 0)}, "no prefix of the arguments"),
    ],
)
def test_options_that_no_graph_can_have_are_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        torch.compile(Scaled(), backend=backend, fullgraph=True, options=options)(torch.randn(5, 4))


def test_the_whole_function_must_be_one_graph() -> None:
    with pytest.raises(InputError, match=r"(?s)expected fullgraph=True.*one graph of this call"):
        _compiled(Scaled().forward, fullgraph=False)(torch.randn(5, 4))


class Broken(nn.Module):
    """Its forward breaks off three times, the last time in a loop of a function, which is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.net(x)
        if h.sum() > 0:
            h = h + 1
        torch._dynamo.graph_break()
        return self.scaled(h).mean()

    def scaled(self, h: Tensor) -> Tensor:
        for _ in range(2):
            h = h * h.mean().item()
        return h


def test_a_refusal_lists_every_break_with_its_line_and_reason() -> None:
    model = Broken()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError) as caught:
        _compiled(model.forward, fullgraph=False)(torch.randn(5, 4))
    first, second, third, undefined_gradients = re.findall(r"\n  (.*)", str(caught.value))
    assert re.search(r"^graph 1 of 3 .*`if h.sum\(\) > 0:`: Python decides on a tensor's value$", first)
    assert re.search(r"^graph 2 of 3 .*`torch._dynamo.graph_break\(\)`: Call to", second)
    assert re.search(r"^graph 3 of 3 .*`h = h \* h.mean\(\).item\(\)`: Unsupported Tensor.item", third)
    assert re.search(r"^no graph of scaled \(.*: graph break in loop$", undefined_gradients)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert model.calls == 0


def test_without_fullgraph_torch_may_ask_no_backend_at_all() -> None:
    """Why it is demanded: a break in a loop, and the model trains without a backend that could say so."""

    def broken(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x * weight
        return x.mean()

    graphs, counted = _counting()
    torch.compile(broken, backend=counted)(torch.randn(5, 3), torch.ones(3, requires_grad=True)).backward()
    assert graphs == []


def test_a_mode_is_refused() -> None:
    with pytest.raises(InputError, match="modes are Inductor's"):
        torch.compile(Scaled(), backend=backend, fullgraph=True, mode="max-autotune")(torch.randn(5, 4))


def test_a_batch_size_that_the_code_fixes_is_refused_with_its_line() -> None:
    def rows(model: nn.Module, x: Tensor) -> Tensor:
        return sum((model(row).sum() for row in x), torch.zeros(()))

    with pytest.raises(InputError, match="constant of the batch size of x, which is 5 on this rank"):
        _compiled(rows)(nn.Linear(4, 3), torch.randn(5, 4))


def test_a_first_part_of_one_sample_is_refused() -> None:
    with pytest.raises(InputError, match=r"first batch has 1 samples in x, .* at least 2 on each rank"):
        _compiled(Scaled())(torch.randn(1, 4))


def test_a_later_batch_of_one_sample_is_refused() -> None:
    """Torch answers what only one sample answers in another way without a guard."""

    def centered(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out - out.mean(0) if x.size(0) != 1 else out

    compiled, model = _compiled(centered), nn.Linear(4, 3)
    compiled(model, torch.randn(5, 4))
    with pytest.raises(InputError, match=r"global batch of 1 sample, expected at least 2\. Use"):
        compiled(model, torch.randn(1, 4))


def test_a_tensor_that_is_no_argument_must_stay() -> None:
    model = Scaled()
    compiled = _compiled(model)
    compiled(torch.randn(5, 4))
    model.scale = torch.zeros(3)
    with pytest.raises(InputError, match=r"L\['self'\].scale is another tensor than when"):
        compiled(torch.randn(5, 4))


def test_a_function_of_two_models_finds_each_by_its_name() -> None:
    """A batch that is as large as another dim, a dict of inputs, two models of one class in turn."""

    def loss(student: nn.Module, teacher: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["image"]
        return F.mse_loss(student(x), teacher(x).detach() * 2)

    models = [nn.Sequential(nn.Linear(4, 4)).double() for _ in range(2)]
    compiled, batch = _compiled(loss), {"image": torch.randn(4, 4).double()}
    for pair in (models, models[::-1], models):
        assert torch.equal(compiled(*pair, batch), loss(*pair, batch))
    copied = copy.deepcopy(models[0])
    assert torch.equal(compiled(copied, models[1], batch), loss(copied, models[1], batch))
    torch.save(models[0], io.BytesIO())


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, table: Tensor, weight: float, times: int
    ) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.fc(x).float() * table
        with torch.no_grad():
            norm = h.norm()
        h = h if mask is None else h * mask
        return h.mean((0, 2)).cumsum(0) * weight * times / norm


def test_batch_dims_numbers_and_regions() -> None:
    model = Weighted()
    compiled = _compiled(model, batch_dims=((1,), {"mask": 1, "table": None}))
    for weight, times, mask in ((0.1, 2, None), (0.3, 4, torch.ones(5, 6, 1)), (0.5, 5, torch.ones(5, 6, 1))):
        x, others = torch.randn(5, 6, 4), {"table": torch.randn(3), "weight": weight, "times": times}
        torch.testing.assert_close(compiled(x, mask, **others), model(x, mask, **others))


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def test_a_backward_of_the_users_own_is_refused() -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        return _Twice.apply(model(x)).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo makes what torch deprecates
        with pytest.raises(InputError, match="a region of its own kind"):
            _compiled(run)(nn.Linear(4, 3), torch.randn(5, 4))


def test_one_loss_in_micro_batches() -> None:
    def losses(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x).sum(), model(x).mean()

    with pytest.raises(InputError, match="returns 2 scalars with a gradient"):
        _compiled(losses, pipeline={"microbatches": 2})(nn.Linear(4, 3), torch.randn(6, 4))


def test_sizes_are_read_in_the_same_order_on_all_ranks() -> None:
    """Torch keeps symbols in sets, so it hands their order out by chance."""
    lines: list[str] = []

    def noting(gm: fx.GraphModule, _: Any) -> Any:
        frame = frame_in_flight(graph_breaks=False)
        lines[:] = read_graph(gm, frame, lambda given: batch_dim(given, None, frame)).graph.lines
        return gm

    def loss(*parts: Tensor) -> Tensor:
        return sum((part.sum() / (len(part) + 1) for part in parts), torch.zeros(()))

    compiled = torch.compile(loss, backend=noting, fullgraph=True)
    compiled(*(torch.randn(size, 2) for size in range(3, 11)))
    reads = [line for line in lines if "size" in line and "call_method" in line]
    assert len(reads) == 8
    assert reads == sorted(reads), "numbered as the inputs are"
