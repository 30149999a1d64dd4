"""Whatever fxdp replaces while it captures and compiles is replaced for that thread alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fxdp
from fxdp.torch_compat import as_if_exporting, is_guard
from tests.torch_compat.replaced import Change, owners, replaced

# torch warns when it imports Inductor
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning"),
]

_EACH, _OFTEN = 400, 60
"""Fake ops from one look to the next, at what fxdp does and at what torch does."""
_WAIT = 300.0


class _Net(nn.Module):
    """Trains a BatchNorm, and has a loss that torch's own decomposition mistakes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.multilabel_margin_loss(self.second(self.norm(self.first(x)).relu()), target)


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 6), torch.tensor([[2, 0, -1, 1]]).repeat(5, 1)


def _step(backend: Any) -> None:
    """A model is captured, compiled, and run."""
    with inductor_config.patch(force_disable_caches=True):
        fxdp.compile(_Net(), backend=backend)(*_batch()).backward()


def _torchs(backend: Any) -> None:
    """The same by torch alone, which replaces some functions and flags for all threads, too."""
    torch.export.export(_Net(), _batch(), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},) * 2, strict=False)
    backend = {"eager": "aot_eager", "inductor": "inductor"}[backend]
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        torch.compile(_Net(), backend=backend, dynamic=True)(*_batch()).backward()


@contextlib.contextmanager
def _looking(monkeypatch: pytest.MonkeyPatch, each: int) -> Iterator[dict[Change, Any]]:
    """What is replaced at some moment: looked at once in so many fake ops, and in Inductor."""
    from torch._inductor import graph, memory, scheduler

    found: dict[Change, Any] = {}
    calls = 0

    def look() -> None:
        found.update(replaced(before, owners()))

    def looking(owner: Any, name: str, each: int) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % each == 0:
                look()
            return plain(*args, **kwargs)

        context.setattr(owner, name, call)

    with monkeypatch.context() as context:
        looking(FakeTensorMode, "dispatch", each)
        looking(scheduler.Scheduler, "__init__", 1)
        looking(graph.GraphLowering, "codegen", 1)
        looking(memory, "estimate_peak_memory", 1)
        before = owners()
        yield found
        assert calls > each, "nothing was looked at"


def test_all_that_is_replaced_is_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Inductor: what runs as it is captured in the same way, and replaces nothing more."""
    backend = "inductor"
    _step(backend)  # what is imported and replaced for good at first: test_permanent.py
    _torchs(backend)
    with _looking(monkeypatch, _OFTEN) as by_torch:
        _torchs(backend)
    with _looking(monkeypatch, _EACH) as found:
        _step(backend)
    open_ = {change: new for change, new in found.items() if not is_guard(new) and change not in by_torch}
    guarded = [change for change, new in found.items() if is_guard(new)]
    assert open_ == {}, f"seen by all threads, beside {len(guarded)} that are not"
    assert len(guarded) > 100
    assert ("torch.fx.graph_module.GraphModule", "recompile") in found
    assert ("torch._inductor.async_compile", "AsyncCompile") in found
    assert ("torch.fx.experimental.symbolic_shapes.ShapeEnv", "_rename_unbacked_to") in found


def test_a_replaced_flag_combines_with_others() -> None:
    """Transformers says `tracing |= is_fake_tensor(x)` of what `torch.compiler.is_compiling()` returned."""
    with as_if_exporting():
        flag, tracing = torch.compiler.is_compiling(), False
        tracing |= flag
        assert tracing is True
        assert ((flag | False), (flag & False), (False & flag), (flag ^ True)) == (True, False, False, False)
        assert all((flag >= 1, not flag < 1, not flag > 1))


def test_nothing_stays_afterwards() -> None:
    _step("inductor")
    before = owners()
    _step("inductor")
    assert [change for change, new in replaced(before, owners()).items() if is_guard(new)] == []


class _Rounds:
    """Another thread that does things again and again, with functions that nobody has traced before."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.done = 0
        self.traced = fx.symbolic_trace(nn.Linear(2, 2))

    def run(self) -> None:
        # Torch's own flag "an fx tracer runs" is one for all threads (any make_fx sets it), and torch.compile
        # refuses to run under it: here it runs the function as it is instead. A setting is each thread's own.
        torch._dynamo.config.error_on_nested_fx_trace = False
        # traced before: fx.symbolic_trace itself replaces `nn.Module.__call__` for all threads
        flatten, traced = pytree.tree_flatten((1, [2, {"a": 3}])), self.traced
        while not self.over.is_set() or not self.done:
            assert pytree.tree_flatten((1, [2, {"a": 3}])) == flatten
            assert fx.GraphModule(traced, traced.graph).code == traced.code
            assert not torch.jit.is_tracing()  # type: ignore[no-untyped-call]
            self._compiled()
            self.done += 1

    def _compiled(self) -> None:
        def plain(x: Tensor) -> Tensor:
            return x.sin() + len(pytree.tree_leaves([x, (x, 2)]))

        # of a name of its own: Dynamo counts how often it traces the same code
        own = FunctionType(plain.__code__.replace(co_name=f"plain_{self.done}"), plain.__globals__)
        backend: Callable[..., Any] = lambda gm, _: gm.forward  # noqa: E731
        x = torch.randn(3)
        assert torch.equal(torch.compile(own, backend=backend)(x), plain(x))


def test_another_thread_traces_and_compiles_meanwhile() -> None:
    other = _Rounds()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(other.run)
        try:
            for backend in ("eager", "inductor", "eager"):
                _step(backend)
        finally:
            other.over.set()
        running.result(_WAIT)
    assert other.done > 0
