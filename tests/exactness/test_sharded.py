"""Sharded parameters on gloo ranks: the plain loop equals one device on the global batch."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxdp
from fxdp.errors import InputError, MeshError, StateError
from fxdp.ir.tensor_difference import difference
from tests.captures import KNOWN, capture_ahead, captured_once
from tests.exactness.models import part
from tests.fallbacks import no_fallback
from tests.rank_pool import RankPool


class Words(nn.Module):
    """Tied, frozen, without dims, fewer rows than ranks, used twice, and one that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 9)
        self.norm = nn.LayerNorm(9)
        self.outer = nn.Linear(9, 5, bias=False)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        h = self.table(words)
        for _ in range(2):
            h = h + self.frozen(self.outer(torch.relu(self.norm(self.inner(h)))))
        return F.cross_entropy(self.head(h * self.scale * self.one), target)


def _batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 7, (size,), generator=generator) for _ in range(2))  # type: ignore[return-value]


def _mesh(axes: tuple[str, ...]) -> Any:
    world = dist.get_world_size()
    sizes = (world,) if len(axes) == 1 else (2, world // 2)
    return init_device_mesh("cpu", sizes, mesh_dim_names=axes)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _same_start() -> tuple[nn.Module, nn.Module]:
    """This rank's model, with values of its own, and rank 0's."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(dist.get_rank())
    model = Words()
    torch.manual_seed(0)
    return model, Words()


def _know() -> None:
    torch.set_default_dtype(torch.float64)
    capture_ahead(__name__, Words(), _batch(0, 4), {}, {"dp_shard": 2}, strategy="shard")


def _data_rank(axes: tuple[str, ...], parts: int) -> int:
    return dist.get_rank() // 2 if axes[-1] == "pp" and parts > 1 else dist.get_rank() % parts


def _holds_its_share(compiled: nn.Module, axes: tuple[str, ...]) -> None:
    """Of each parameter a rank has its rows alone, sharded over all axes but that of replicas."""
    ranks = dist.get_world_size() // (2 if "dp_replicate" in axes else 1)
    for parameter in compiled.parameters():
        assert isinstance(parameter, DTensor) == (parameter.dim() > 0)
        if isinstance(parameter, DTensor):
            rows = len(parameter)
            for send_to_owners in (2, ranks // 2) if "pp" in axes else (ranks,):
                rows = -(-rows // max(send_to_owners, 1))
            assert len(parameter.to_local()) <= rows


def _train(
    axes: tuple[str, ...], split: list[int], first: list[int] | None = None, **options: Any
) -> tuple[float, float]:
    """Worst errors of losses and parameters; `first` is the split of the first step.

    Inductor compiles a program of even parts once for all ranks, half by half, and then one of any sizes.
    """
    model, twin = _same_start()
    kind = getattr(torch.optim, options.pop("optimizer", "AdamW"))
    with no_fallback(), captured_once(KNOWN.setdefault(__name__, {})):
        compiled = fxdp.compile(model, _mesh(axes), **{"strategy": "shard", **options})
        optimizers = [kind(m.parameters(), 1e-2) for m in (compiled, twin)]
        worst = 0.0
        for step in range(4):
            sizes = first if first and step == 0 else split
            full = _batch(step, sum(sizes))
            own = tuple(part(t, sizes, _data_rank(axes, len(sizes))) for t in full)
            for inputs in (own, own) if step == 1 else (own,):  # accumulates
                loss = compiled(*inputs)
                loss.backward()
                expected = twin(*full)
                expected.backward()
                worst = max(worst, float((loss - expected).detach().abs()))
            for net, optimizer in zip((compiled, twin), optimizers, strict=True):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            split = split[::-1]
    _holds_its_share(compiled, axes)
    pairs = zip(compiled.parameters(), twin.parameters(), strict=True)
    return worst, max(difference(_full(a).detach(), b.detach()) for a, b in pairs)


@pytest.mark.parametrize(
    ("axes", "split", "options"),
    [
        (("dp",), [4, 1], {"backend": "eager", "communication": {"bucket_cap_mb": 0.0005}}),
        (("dp_shard",), [4, 0, 1, 2], {"backend": "eager", "reshard_after_forward": False}),
        (
            ("dp_replicate", "dp_shard"),
            [4, 0, 1, 2],
            {"backend": "eager", "communication": {"bucket_cap_mb": 0.0005}},
        ),
        (
            ("dp_shard",),
            [4, 0, 1, 2],
            {"backend": "eager", "communication": {"bucket_cap_mb": 0.0005}, "reshard_after_forward": 2},
        ),
        (
            ("dp_shard",),
            [2, 2, 2, 2],
            {"communication": {"bucket_cap_mb": 0.0005}, "reshard_after_forward": 2},
        ),
        (
            ("dp_shard",),
            [2, 3],
            {"communication": {"bucket_cap_mb": 0.0005}, "activation_checkpointing": 0.2, "first": [2, 2]},
        ),
        (("dp",), [4, 4], {"pipeline": {"microbatches": 2}}),
        (("dp_replicate", "dp_shard"), [4, 0, 1, 2], {"backend": "eager", "pipeline": {"microbatches": 3}}),
        (
            ("dp",),
            [5, 2],
            {
                "backend": "eager",
                "activation_checkpointing": ["inner", "norm"],
                "communication": {"bucket_cap_mb": 0.0005},
            },
        ),
        (("pp", "dp_shard"), [4, 3], {"backend": "eager", "pipeline": {"microbatches": 2}}),
        (
            ("pp", "dp"),
            [4, 1],
            {"backend": "eager", "communication": {"bucket_cap_mb": 0.0005}, "optimizer": "Adafactor"},
        ),
        (
            ("dp", "pp"),
            [2, 3],
            {"backend": "eager", "pipeline": {"schedule": "interleaved", "microbatches": 2}},
        ),
        (("pp",), [5], {"backend": "eager"}),
        (("dp_replicate", "dp_shard"), [2, 2, 2, 2], {"communication": {"bucket_cap_mb": 0.0005}}),
        (("dp",), [2, 2], {"strategy": "optimizer", "communication": {"bucket_cap_mb": 0.0005}}),
        (
            ("dp_replicate", "dp_shard"),
            [4, 0, 1, 2],
            {"backend": "eager", "strategy": "optimizer", "communication": {"bucket_cap_mb": 0.0005}},
        ),
        (
            ("pp", "dp_shard"),
            [4, 3],
            {"backend": "eager", "strategy": "optimizer", "pipeline": {"microbatches": 2}},
        ),
        (("dp",), [5, 2], {"backend": "eager", "strategy": "optimizer", "optimizer": "Adafactor"}),
    ],
)
def test_training_equals_one_device(
    ranks: RankPool, axes: tuple[str, ...], split: list[int], options: dict[str, Any]
) -> None:
    """Each strategy on each form of mesh and each through Inductor, one of them for any sizes, too."""
    ranks.prepare(_know)
    count = len(split) * (2 if "pp" in axes else 1)
    for worst_loss, worst_parameter in ranks.run(count, _train, axes, split, **options):
        assert worst_loss <= 1e-12
        assert worst_parameter <= 1e-9


class Normed(nn.Module):
    """The gradients of a norm are terms that its backward sums for itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), target)


def _normed_gradients(strategy: Any, backend: Any) -> float:
    """The worst error of a gradient; AdamW would step by nearly as much if it were twice as large.

    To the loss a penalty on the weights is added, computed before the ranks share the first values.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x, target = Normed(), torch.randn(8, 6), torch.randint(0, 4, (8,))
    twin = copy.deepcopy(model)
    with no_fallback():
        compiled = fxdp.compile(model, _mesh(("dp",)), strategy=strategy, backend=backend)
        penalty = _squares(compiled)
        (compiled(*(part(t, [5, 3], dist.get_rank()) for t in (x, target))) / 2 + penalty).backward()
    (twin(x, target) / 2 + _squares(twin)).backward()
    pairs = zip(compiled.parameters(), twin.parameters(), strict=True)
    return max(float((_full(p.grad) - q.grad).abs().max()) for p, q in pairs)  # type: ignore[arg-type, operator]


def _squares(model: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.tensor(0.0))


@pytest.mark.parametrize(("strategy", "backend"), [("shard", "inductor"), ("replicate", "eager")])
def test_what_a_backward_sums_for_itself_is_dealt_out_once(
    ranks: RankPool, strategy: Any, backend: Any
) -> None:
    assert max(ranks.run(2, _normed_gradients, strategy, backend)) < 1e-12


def _left(backend: str) -> list[int]:
    """Bytes beside rows that a forward leaves to its backward, by how full values go."""
    torch.set_default_dtype(torch.float32)
    found = []
    for lifetime in (True, 2, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(30, 30, bias=False) for _ in range(3)))
        compiled = fxdp.compile(
            model,
            strategy="shard",
            reshard_after_forward=lifetime,
            backend=backend,
            communication={"bucket_cap_mb": 1e-3},
        )
        result = compiled(torch.ones(2, 30))  # it is kept: torch 2.11 lets go of what it depends on, too
        function = result.grad_fn
        own = {p.to_local().untyped_storage().data_ptr() for p in compiled.parameters()}
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in function.saved_tensors}
        found.append(sum(size for at, size in held.items() if at not in own))
    return found


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_forward_leaves_parts_of_whole_values_to_neighbours(ranks: RankPool, backend: str) -> None:
    full = 3 * 30 * 30 * 4
    for nothing, parts, all_of_them in ranks.run(4, _left, backend):
        part = 2 * 15 * 30 * 4  # the first layer's gradient reads no weight
        assert nothing + part <= parts <= nothing + part + full // 6
        assert all_of_them >= nothing + 2 * 30 * 30 * 4


def _state() -> None:
    model, twin = _same_start()
    twin_state = copy.deepcopy(twin.state_dict())
    compiled = fxdp.compile(model, _mesh(("dp_shard",)), strategy="shard", backend="eager")
    state = compiled.state_dict()
    assert list(state) == list(twin_state)
    assert all(difference(_full(state[name]), twin_state[name]) == 0 for name in state)
    for module in (compiled, model, model.get_submodule("inner")):
        kept = module.state_dict(keep_vars=True)
        assert all(kept[name] is p for name, p in module.named_parameters(remove_duplicate=False))
        saved = io.BytesIO()
        torch.save(module.state_dict(), saved)  # of the model, too: that is what one device's loop saves
        saved.seek(0)
        loaded, copied = torch.load(saved, weights_only=False), copy.deepcopy(module.state_dict())
        for name, value in module.state_dict().items():
            assert difference(_full(copied[name]), _full(value)) == 0
            assert difference(_full(loaded[name]), _full(value)) == 0
    held = sum(p.to_local().numel() for p in compiled.parameters() if isinstance(p, DTensor))
    assert held < sum(p.numel() for p in twin.parameters())
    doubled = {name: 2 * value for name, value in twin_state.items()}
    compiled.load_state_dict(doubled)
    assert difference(_full(compiled.get_parameter("inner.weight")), doubled["inner.weight"]) == 0
    compiled.load_state_dict(state)  # DTensors go in as they came out: these are the parameters themselves
    full = _batch(0, 4)
    own = tuple(part(t, [3, 1], dist.get_rank()) for t in full)
    with torch.no_grad():
        twin.load_state_dict(doubled)
        assert difference(compiled(*own), twin(*full)) <= 1e-12
    before, small = copy.deepcopy(model.state_dict()), {name: torch.zeros(2) for name in doubled}
    for module in (compiled, model):
        with pytest.raises(InputError, match=r"inner.weight \[2\], expected \[9, 5\](\n.*)*\n  outer.weight"):
            module.load_state_dict({**small, "inner.bias": doubled["inner.bias"]})
    assert all(difference(_full(v), _full(before[name])) == 0 for name, v in model.state_dict().items())
    for net in (model, twin):  # whatever writes values: the model, one of its modules, torch's helpers
        net.load_state_dict(copy.deepcopy(twin_state), assign=True)
        net.get_submodule("outer").load_state_dict({"weight": doubled["outer.weight"]})
        net.get_parameter("norm.weight").data = torch.full((9,), 3.0)
        nn.utils.vector_to_parameters(net.get_parameter("inner.bias") * 5, [net.get_parameter("inner.bias")])
        net.get_parameter("one").data *= 7
    with torch.no_grad():
        assert difference(compiled(*own), twin(*full)) <= 1e-12
    with pytest.raises(StateError, match=r"float32\[9\]` for a sharded parameter of torch.float64"):
        compiled.get_parameter("norm.weight").data = torch.ones(9, dtype=torch.float32)
    model.get_submodule("norm").weight = nn.Parameter(torch.ones(9))
    with pytest.raises(StateError, match=r"norm.weight of the model is complete, where the .* before fxdp"):
        compiled(*own)
    with pytest.raises(StateError, match=r"before fxdp\.compile"):
        compiled.float()
    with pytest.raises(InputError, match="DTensors"):
        fxdp.compile(model, strategy="shard")
    torch.save(state, io.BytesIO())


def _copied_with_gradients() -> float:
    """The worst error of a copy's gradients, when it and its original have gone on."""
    model, twin = _same_start()
    full = _batch(0, 4)
    own = tuple(part(t, [3, 1], dist.get_rank()) for t in full)
    with captured_once(KNOWN.setdefault(__name__, {})):
        compiled = fxdp.compile(model, _mesh(("dp_shard",)), strategy="shard", backend="eager")
        compiled(*own).backward()
        copied = copy.deepcopy(compiled)
        torch.save([p.grad for p in compiled.parameters()], io.BytesIO())
        for net in (compiled, copied):
            net(*own).backward()
    for _ in range(2):
        twin(*full).backward()
    errors = []
    for net in (compiled, copied):
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            # torch leaves a plain parameter's gradient out of its copy
            if a.grad is not None and b.grad is not None and (net is compiled or isinstance(a, DTensor)):
                errors.append(difference(_full(a.grad), b.grad))
    return max(errors)


def _given_before() -> None:
    """Hooks, an attribute and a gradient of before are the sharded parameter's, too."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(2, 3, bias=False)
    twin, weight = copy.deepcopy(model), model.weight
    x, target, rank, seen = torch.randn(4, 2), torch.randn(4, 3), dist.get_rank(), []
    for parameter in (weight, twin.weight):
        parameter.grad = torch.full((3, 2), 0.25)
        parameter.no_decay = True  # type: ignore[attr-defined]
    handles = [p.register_hook(lambda g: 3 * g) for p in (weight, twin.weight)]
    weight.register_post_accumulate_grad_hook(seen.append)
    compiled = fxdp.compile(model, strategy="shard", loss_fn=F.mse_loss, backend="eager")
    own = part(x, [1, 3], rank), part(target, [1, 3], rank)
    for steps in (1, 2):
        compiled(own[0], target=own[1]).backward()
        F.mse_loss(twin(x), target).backward()
        assert twin.weight.grad is not None
        assert difference(_full(model.weight.grad), twin.weight.grad) <= 1e-12  # type: ignore[arg-type]
        assert len(seen) == steps
        assert seen[0] is model.weight is not weight
        assert model.weight.no_decay
        for handle in handles:
            handle.remove()


def test_what_a_parameter_was_given_before_stays(ranks: RankPool) -> None:
    ranks.run(2, _given_before)


def test_a_copy_has_gradients_of_its_own(ranks: RankPool) -> None:
    ranks.prepare(_know)
    assert max(ranks.run(2, _copied_with_gradients)) <= 1e-12


def test_state_has_the_models_keys_and_takes_whole_tensors(ranks: RankPool) -> None:
    ranks.run(2, _state)


@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}])
@pytest.mark.parametrize(
    "lifetime",
    [{"strategy": "shard"}, {"strategy": "shard", "reshard_after_forward": False}, {"strategy": "optimizer"}],
)
def test_verify_runs_the_sharded_program(mesh: dict[str, int], lifetime: dict[str, Any]) -> None:
    with captured_once(KNOWN.setdefault(__name__, {})):
        report = fxdp.verify(
            Words(), _batch(0, 9), mesh=mesh, communication={"bucket_cap_mb": 0.0005}, **lifetime
        )
    assert report.ok, str(report)


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp_replicate": 2, "dp_shard": 4}])
def test_verify_runs_what_neighbours_gather(mesh: dict[str, int]) -> None:
    report = fxdp.verify(
        Words(),
        _batch(0, 9),
        mesh=mesh,
        communication={"bucket_cap_mb": 0.0005},
        strategy="shard",
        reshard_after_forward=2,
    )
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("mesh", "options", "words"),
    [
        ({"dp_shard": 2}, {}, "expected strategy='shard'"),
        ({"dp_replicate": 2}, {"strategy": "shard"}, r"expected \('dp',\), \('dp_shard',\) or"),
        ({"dp": 2, "dp_shard": 2}, {"strategy": "shard"}, "parameters are sharded along 'dp_shard'"),
        (
            {"pp": 2, "dp_shard": 2},
            {"strategy": "shard", "pipeline": {"gradients": "owner"}},
            "leave gradients= out",
        ),
    ],
)
def test_illegal_combinations_list_the_legal_ones(
    mesh: dict[str, int], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(MeshError, match=words):
        fxdp.plan(Words(), _batch(0, 4), mesh=mesh, **options)


def test_bytes_of_the_plan() -> None:
    """The forward gathers all parameters, the backward what it reads; gradients are the trainable ones'."""
    model = Words()
    rows = fxdp.plan(model, _batch(0, 4), mesh={"dp": 2}, strategy="shard").communication
    sharded = {name: p for name, p in model.named_parameters() if p.dim()}
    padded = {name: -(-p.shape[0] // 2) * 2 * p[0].numel() * p.itemsize for name, p in sharded.items()}
    read = padded.keys() - {"unused"}
    forward = sum(row.bytes for row in rows if row.op == "all_gather_shards" and row.phase == "forward")
    assert forward == sum(padded[name] for name in read)
    trained = read - {"frozen.weight", "frozen.bias"}
    assert sum(row.bytes for row in rows if row.op == "reduce_scatter_shards") == sum(
        padded[name] for name in trained
    )
    biases = {"inner.bias", "frozen.bias"}  # no gradient depends on them
    backward = sum(row.bytes for row in rows if row.op == "all_gather_shards" and row.phase == "backward")
    assert backward == sum(padded[name] for name in read - biases)


class Fused(nn.Module):
    """One weight cut in two, as a projection of queries and keys is: the backward cuts its own gather."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both.split([4, 2])
        return ((x @ first.t()).relu() @ first).square().mean() + (x @ second.t()).square().mean()


def test_a_weight_that_is_cut_is_cut_again_in_the_backward() -> None:
    report = fxdp.verify(Fused(), (torch.randn(5, 4, requires_grad=True),), mesh={"dp": 2}, strategy="shard")
    assert report.ok, str(report)
