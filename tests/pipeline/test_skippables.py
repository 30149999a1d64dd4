"""Skippables as users write them, over stages and micro-batches in this process, beside one eager device."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.skip import Namespace, pop, skippable, stash
from tests.exactness.models import counterpart_of, step_both


@skippable(stash=["a"])
class Out(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("a", x)
        return self.fc(x).relu()


@skippable(pop=["a"])
class In(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Generator[pop, Tensor | None, Tensor]:
        value = yield pop("a")
        return self.fc(x) + (0 if value is None else value)


@skippable(stash=["a", "index"])
class Both(nn.Module):
    """Stashes what is detached, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def kept(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("a", x.detach())
        return x.sin()

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        hidden = yield from self.kept(self.fc(x))
        yield stash("index", x.argmax(-1))
        return hidden


@skippable(pop=["index", "a"])
class Reads(nn.Module):
    """Pops one tensor without using it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 6)

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        index = yield pop("index")
        yield pop("a")
        return x * self.table(index)


@skippable(stash=["a"])
class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("a", None)
        return x * 2


class Deep(nn.Module):
    """Skippables inside of a user's own module, at several depths, run more than once."""

    def __init__(self) -> None:
        super().__init__()
        space = Namespace()
        self.down = nn.Sequential(Out(), nn.Linear(6, 6))
        self.up = nn.ModuleDict({"last": In()})
        inner = nn.Sequential(nn.Sequential(Out().isolate(space)), nn.Linear(6, 6))
        self.inner = nn.Sequential(inner, In().isolate(space))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.up["last"](self.inner(self.down(x)).tanh())
        return x


def _only() -> nn.Module:
    space = Namespace()
    return nn.Sequential(
        Both().isolate(space, only=["index"]),
        Out().isolate(space),
        nn.Linear(6, 6),
        In().isolate(space),
        Reads().isolate(space, only=["index"]),
    )


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "one name in a namespace": _only,
    "None": lambda: nn.Sequential(Nothing(), nn.Linear(6, 6), In()),
    "in user's modules": Deep,
}


class Net(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = self.head(self.body(x))
        return F.cross_entropy(found, y), found


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", _MODELS)
def test_skippables(name: str, schedule: str) -> None:
    model = Net(_MODELS[name]()).double()
    twin = counterpart_of(model)
    compiled = fxdp.compile(
        model,
        pipeline={"stages": 3, "microbatches": 3, "schedule": schedule},
        backend="eager",
        activation_checkpointing="except_last",
    )
    for size in (5, 2):
        full = torch.randn(size, 6, dtype=torch.float64), torch.randint(0, 5, (size,))
        assert step_both(compiled, twin, (full, {}), None, [size], 0) <= 1e-12
    assert list(compiled.state_dict()) == list(twin.state_dict())
