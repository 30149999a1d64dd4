"""Fake tensors that are copied are those that torch makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fxdp
from fxdp.cli.demo.model import GPT, GPTConfig
from fxdp.startup.artifacts import cached_joint
from fxdp.startup.memoized.memoized_fakes import memoized_fakes

_NAME = "_get_output_tensor_from_cache_entry"

_OPS: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": torch.relu,
    "other dtype": lambda x: x > 0,
    "product": lambda x: x.bmm(x.transpose(1, 2)),
    "view": lambda x: x.transpose(0, 2),
    "view with an offset": lambda x: x[:, 1:],
    "view of a view": lambda x: x.transpose(1, 2)[:, :, 2],
    "views": lambda x: x.unbind(1),
    "several": lambda x: torch.native_layer_norm(x, [4], None, None, 1e-5),
    "a size that is computed": lambda x: x.view(-1, 4).relu(),
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
    "in place": lambda x: x.clone().mul_(2),
}


@pytest.fixture(autouse=True)
def _remembering() -> Iterator[None]:
    """Torch remembers what fake ops give, as in programs; in these tests otherwise it does not."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=True):
        yield


def _symbolic(first: DimDynamic = DimDynamic.DYNAMIC) -> tuple[FakeTensorMode, Tensor]:
    """A mode, and a tensor whose first size is a symbol, or else fixed."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = [first, DimDynamic.STATIC, DimDynamic.STATIC]
    return mode, mode.from_tensor(
        torch.empty(7, 3, 4), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic)
    )


def _said(given: Tensor, made: Any) -> list[Any]:
    """All that a tensor says of itself, and whether it lies in the memory of another."""
    found = []
    for one in made if isinstance(made, (tuple, list)) else [made]:
        storage = one.untyped_storage()
        lies = str(one.shape), str(one.stride()), str(one.storage_offset()), str(storage.nbytes())
        flags = one.is_contiguous(), one._is_view(), one.requires_grad, one._version
        views = storage._cdata == given.untyped_storage()._cdata
        found.append((lies, one.dtype, one.device, flags, views, torch._C._dispatch_key_set(one)))
    return found


@contextlib.contextmanager
def _counted() -> Iterator[list[Any]]:
    """Inside copies are made; the calls in which torch made a tensor itself."""
    plain, calls = getattr(FakeTensorMode, _NAME), list[Any]()

    def counted(*args: Any) -> Any:
        calls.append(args)
        return plain(*args)

    with mock.patch.object(FakeTensorMode, _NAME, counted), memoized_fakes():
        yield calls


@pytest.mark.parametrize("first", [DimDynamic.DYNAMIC, DimDynamic.STATIC])
@pytest.mark.parametrize("name", _OPS)
def test_copies_say_what_torch_says(name: str, first: DimDynamic) -> None:
    found = []
    for quick in (contextlib.nullcontext, memoized_fakes):
        mode, x = _symbolic(first)
        with mode, quick():
            made = [_OPS[name](x) for _ in range(4)]
            found.append([str(_said(x, one)) for one in made])
    assert found[0][1:] == found[1][1:]
    assert len(set(found[1])) == 1


def test_torch_makes_the_first_of_a_kind() -> None:
    mode, x = _symbolic()
    with mode, _counted() as calls:
        torch.relu(x)
        first = len(calls)
        assert first > 0
        for _ in range(5):
            torch.relu(x)
        assert len(calls) == first


def test_a_copy_has_memory_of_its_own() -> None:
    mode, x = _symbolic()
    with mode, memoized_fakes():
        made = [torch.relu(x) for _ in range(4)]
        views = [one.transpose(1, 2) for one in made]
        made[3].add_(1)
    assert len({one.untyped_storage()._cdata for one in made}) == 4
    assert [v.untyped_storage()._cdata for v in views] == [m.untyped_storage()._cdata for m in made]
    assert [one._version for one in made] == [one._version for one in views] == [0, 0, 0, 1]


def test_sizes_are_the_objects_that_the_operand_has() -> None:
    """Tracers tell sizes apart by identity: one that is computed stays an object of its own."""
    mode, x = _symbolic()
    with mode, memoized_fakes():
        made = [torch.relu(x) for _ in range(4)]
        flat = [x.view(-1, 4).relu() for _ in range(4)]
    assert all(one.shape[0].node is x.shape[0].node for one in made)
    assert len({id(one.numel().node) for one in made}) == 4
    assert len({id(one.shape[0].node) for one in flat}) == 4


def test_a_size_that_became_a_number_is_asked_again() -> None:
    mode, x = _symbolic()
    with mode, _counted() as calls:
        for _ in range(3):
            torch.relu(x)
        before = len(calls)
        torch._check(x.shape[0] == 7)
        again = torch.relu(x)
        assert len(calls) > before
    assert int(again.shape[0]) == 7


def test_torch_is_put_back() -> None:
    before = dict(vars(FakeTensorMode))
    with memoized_fakes():
        assert dict(vars(FakeTensorMode)) != before
    assert dict(vars(FakeTensorMode)) == before


def test_graphs_are_those_without_copies() -> None:
    tokens, texts, made = torch.zeros(4, 8, dtype=torch.long), [], []
    for setting in ("-memoized_fakes", "on"):
        with (
            mock.patch.dict("os.environ", {"FXDP_SHORTCUTS": setting}),
            mock.patch.object(cached_joint, "_key", return_value=None),  # traced anew
            mock.patch.object(torch, "empty_strided", side_effect=torch.empty_strided) as counted,
        ):
            model = GPT(GPTConfig(vocabulary=16, length=8, layers=3, width=8, heads=2))
            texts.append(fxdp.plan(model, (tokens, tokens)).text)
        made.append(counted.call_count)
    assert texts[0] == texts[1]
    assert made[1] < made[0] * 0.8
