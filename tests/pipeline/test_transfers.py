"""What pipeline ranks send one another: each value once, the bytes of the plan, every dtype."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from fxdp.ir.tensor_difference import difference
from fxdp.runtime import p2p
from tests.captures import KNOWN, captured_once
from tests.exactness.models import Tokens, counterpart_of, gradient_errors, step_both, token_batch
from tests.pipeline.models import Skips, skips
from tests.rank_pool import RankPool

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def _mesh(pp: int, names: tuple[str, str] = ("pp", "dp")) -> Any:
    sizes = {"pp": pp, **dict.fromkeys(set(names) - {"pp"}, dist.get_world_size() // pp)}
    return torch.distributed.device_mesh.init_device_mesh(
        "cpu", tuple(sizes[n] for n in names), mesh_dim_names=names
    )


# ---- bytes ----


@contextlib.contextmanager
def _counting(sent: list[int]) -> Iterator[None]:
    """Inside, the bytes of each send are added to the list."""
    isend = dist.isend

    def counted(value: Tensor, *args: Any, **options: Any) -> Any:
        sent.append(value.nbytes)
        return isend(value, *args, **options)

    with mock.patch.object(p2p.dist, "isend", counted):
        yield


def _count_sent(schedule: str, batch: int, gradients: str) -> tuple[int, int, int]:
    """Bytes that this rank sends, those of all ranks in the plan, how often one value is sent at most."""
    sent: list[int] = []
    stages = 6 if schedule == "interleaved" else None
    pipeline = {"microbatches": 4, "schedule": schedule, "stages": stages, "gradients": gradients}
    compiled = fxdp.compile(Skips(), _mesh(3), pipeline=pipeline, backend="eager")
    with _counting(sent):
        compiled(**skips(batch))["loss"].backward()
    planned = sum(row.bytes for row in compiled.plan.communication if row.op == "send")
    graph = compiled.program.graph
    branches = ("send_forward", "send_backward")
    sends = [node for way in branches for node in graph.find_nodes(op="call_module", target=way)]
    often = Counter((node.args[0], node.args[1]) for node in sends)
    return sum(sent), planned, max(often.values())


def _count_all() -> list[tuple[int, int, int]]:
    cases = [("gpipe", 8), ("1f1b", 7), ("interleaved", 8), ("zero-bubble", 3)]
    with captured_once():
        return [_count_sent(name, batch, kind) for name, batch in cases for kind in ("everywhere", "owner")]


def test_bytes_of_the_plan_are_those_sent_and_nothing_is_sent_twice(ranks: RankPool) -> None:
    for found in zip(*ranks.run(3, _count_all), strict=True):
        total = sum(sent for sent, _, _ in found)
        assert total > 0
        assert all(planned == total for _, planned, _ in found)
        assert all(often == 1 for _, _, often in found)


# ---- values of the step ----


class Biased(nn.Module):
    """All stages use a value that depends on parameters alone, as the position bias of T5."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table.softmax(0)
        hidden = (self.a(x) + bias).tanh()
        hidden = (self.b(hidden) + bias).tanh() * x.shape[0]
        return (self.c(hidden) * bias).square().mean()


def _once() -> list[tuple[float, dict[str, int], int, int]]:
    """The error; how often this rank sends each value forward; bytes sent by it, and by all in the plan."""
    torch.set_default_dtype(torch.float64)
    found = []
    for schedule, checkpoint in (("1f1b", "never"), ("zero-bubble", "always"), ("gpipe", "never")):
        torch.manual_seed(0)
        model, x = Biased(), torch.randn(7, 6)
        twin = counterpart_of(model)
        compiled = fxdp.compile(
            model, _mesh(3), pipeline={"stages": ["b", "c"], "microbatches": 4, "schedule": schedule},
            backend="eager", activation_checkpointing=checkpoint,
        )  # fmt: skip
        sent: list[int] = []
        with captured_once(KNOWN.setdefault(__name__, {})):
            error = step_both(compiled, twin, ((x,), {}), None, [7], 0)
        with _counting(sent):
            compiled(x).backward()
        planned = sum(row.bytes for row in compiled.plan.communication if row.op == "send")
        sends = compiled.program.graph.find_nodes(op="call_module", target="send_forward")
        names = Counter(str(n.args[0]).partition("_mb")[0] for n in sends if "results" not in n.name)
        found.append((error, dict(names), sum(sent), planned))
    return found


def test_what_depends_on_parameters_alone_is_sent_once(ranks: RankPool) -> None:
    for found in zip(*ranks.run(3, _once), strict=True):
        assert max(error for error, _, _, _ in found) <= 1e-9
        assert sorted(found[0][1].values()) == [2, 4]  # bias to two ranks, 4 activations
        assert sorted(found[1][1].values()) == [4]
        assert {planned for _, _, _, planned in found} == {sum(sent for _, _, sent, _ in found)}


# ---- dtypes, and values without a gradient ----


class Types(nn.Module):
    """Stages hand over half, bfloat16, complex, integer and boolean values, and one to be conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        half, brain, chosen = first.half(), first.sin().bfloat16(), first.argmax(-1)
        positive, turned = first > 0, torch.complex(first, first * 2)
        back = turned.conj()
        hidden = self.b(first) + half.double() + self.table[chosen]
        hidden = torch.where(positive, hidden, hidden * 0.1) + turned.abs()
        hidden = hidden + back.imag
        return (self.c(hidden + brain.double()) * turned.angle()).square().mean()


def _types() -> float:
    torch.set_default_dtype(torch.float64)
    errors = []
    for schedule in ("1f1b", "zero-bubble"):
        torch.manual_seed(0)
        model, x = Types(), torch.randn(5, 4)
        twin = counterpart_of(model)
        compiled = fxdp.compile(
            model,
            _mesh(3),
            pipeline={"stages": ["b", "c"], "microbatches": 2, "schedule": schedule},
            backend="eager",
        )
        with captured_once(KNOWN.setdefault(__name__, {})):
            errors.append(step_both(compiled, twin, ((x,), {}), None, [5], 0))
        dtypes = {str(edge.type.dtype) for edge in compiled._last().program.partition.edges}
        expected = {"float16", "bfloat16", "int64", "bool", "complex128"}
        assert {f"torch.{name}" for name in expected} <= dtypes, dtypes
    return max(errors)


def test_values_of_every_dtype(ranks: RankPool) -> None:
    assert max(ranks.run(3, _types)) <= 1e-9


# ---- which ranks get gradients; meshes ----


def _owned() -> tuple[list[str], float]:
    """The parameters of which this rank has a gradient, and the worst error among them."""
    torch.manual_seed(0)
    model = Skips().double()
    twin = counterpart_of(model)
    compiled = fxdp.compile(
        model, _mesh(2), pipeline={"gradients": "owner", "microbatches": 2}, backend="eager"
    )
    full = {k: v.double() if v.is_floating_point() else v for k, v in skips(6).items()}
    own = {k: v[3 * compiled.mesh.rank :][:3] for k, v in full.items()}
    (compiled(**own)["loss"] * 2).backward()
    (twin(**full)["loss"] * 2).backward()
    names = [name for name, p in model.named_parameters() if p.grad is not None]
    for name, parameter in twin.named_parameters():
        if name not in names:
            parameter.grad = None
    return names, max(gradient_errors(model, twin))


def test_gradients_of_owners_only(ranks: RankPool) -> None:
    """Rank 0 and 1 are the first stage: all data ranks of a stage own its parameters, no other stage does."""
    found = ranks.run(4, _owned)
    names = [set(owned) for owned, _ in found]
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert not names[0] & names[2]
    assert names[0] | names[2] == {name for name, _ in Skips().named_parameters()}
    assert max(error for _, error in found) <= 1e-9


def _tied() -> float:
    """The worst error of the losses of three steps, each on what the one before left in the tied weight."""
    torch.manual_seed(0)
    model = Tokens().double()
    twin = counterpart_of(model)
    compiled = fxdp.compile(
        model, _mesh(2), pipeline={"gradients": "owner", "microbatches": 2}, backend="eager"
    )
    optimizers = [torch.optim.SGD(net.parameters(), 1.0) for net in (compiled, twin)]
    errors = []
    for _ in range(3):
        ids, labels = token_batch(4)
        losses = compiled(ids, labels), twin(ids, labels)
        errors.append(difference(losses[0].detach(), losses[1].detach()))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return max(errors)


def test_a_tied_weight_gets_its_gradient_on_all_stages_that_read_it(ranks: RankPool) -> None:
    assert max(ranks.run(2, _tied)) <= 1e-9


class HeavyEnd(nn.Module):
    """Costs most at its end in training, where the beginning is frozen, but not in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        for layer in self.layers[:3]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def _trained_elsewhere(stages: Any) -> str:
    """The error, if any, of evaluation after a step of training."""
    torch.manual_seed(0)
    compiled = fxdp.compile(
        HeavyEnd(), _mesh(2), pipeline={"gradients": "owner", "stages": stages}, backend="eager"
    )
    compiled(torch.randn(4, 6)).backward()
    try:
        with torch.no_grad():
            compiled.eval()(torch.randn(4, 6))
    except fxdp.StageError as error:
        return str(error)
    return ""


def test_no_stage_reads_weights_that_others_train(ranks: RankPool) -> None:
    for text in ranks.run(2, _trained_elsewhere, None):
        assert re.search(r"so layers.\d.weight.* on ranks that do not train them. Name in stages=", text)
    assert ranks.run(2, _trained_elsewhere, ["layers.4"]) == ["", ""]


def _meshes() -> list[float]:
    errors = []
    with captured_once():
        for names in (("dp", "pp"), ("pp", "dp_replicate"), ("dp_replicate", "pp")):
            torch.manual_seed(0)
            model = Skips().double()
            twin = counterpart_of(model)
            compiled = fxdp.compile(model, _mesh(2, names), pipeline={"microbatches": 2}, backend="eager")
            full = {k: v.double() if v.is_floating_point() else v for k, v in skips(7).items()}
            errors.append(step_both(compiled, twin, ((), full), None, [5, 2], compiled.mesh.rank))
    return errors


def test_axes_in_any_order(ranks: RankPool) -> None:
    assert max(map(max, ranks.run(4, _meshes))) <= 1e-9


# ---- accumulation, and a loss function ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def _accumulated() -> float:
    """Two batches of different sizes, the second with its loss and its targets of one value."""
    torch.set_default_dtype(torch.float64)
    model = Net()
    twin = counterpart_of(model)
    loss = nn.functional.cross_entropy
    compiled = fxdp.compile(model, _mesh(2), loss_fn=loss, pipeline={"microbatches": 3}, backend="eager")
    for number, batch in enumerate((5, 4)):
        torch.manual_seed(number)
        x, y = torch.randn(batch, 6), torch.randint(0, 5, (batch,))
        y[0] = -100
        (compiled(x, target=y) / 2).backward()
        (loss(twin(x), y) / 2).backward()
    errors = gradient_errors(model, twin)
    twin.zero_grad()
    pointers = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
    assert len(pointers) == len(list(model.parameters()))  # no two gradients are one tensor
    return max(errors)


def test_accumulation_over_calls_with_a_loss_function(ranks: RankPool) -> None:
    assert max(ranks.run(2, _accumulated)) <= 1e-9
