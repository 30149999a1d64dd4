from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxdp.ir.ops import layouts, local_ops
from fxdp.ir.ops.aligned_bias import attend
from fxdp.ir.ops.empty_parts import UNWARNED
from fxdp.ir.ops.library import existing
from fxdp.lowering.eager import lower_eager
from fxdp.lowering.op_by_op import _FUNCTIONS, _METHODS, _call_plainly
from fxdp.torch_compat import OpOverload
from tests.lowering.test_eager import _scaled

aten = torch.ops.aten
X = torch.arange(1.0, 13.0).view(3, 4)
CUBE = X.view(1, 3, 4)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "reshape": (X.t(), [2, 6]), "view": (X, [2, 6]), "expand": (X, [2, -1, -1]), "narrow": (X, 1, 1, 2),
    "transpose.int": (X, 0, -1), "permute": (CUBE, [2, 0, 1]), "unsqueeze": (X, -1), "squeeze.dim": (CUBE, 0),
    "select.int": (X, 1, 2), "unbind.int": (X, 1), "mm": (X, X.t()), "bmm": (CUBE, CUBE.mT),
    "addmm": (X[:, 0], X, X.t()), "baddbmm": (X[:, 0], CUBE, CUBE.mT), "mv": (X, X[0]),
    "add.Tensor": (X, 2), "sub.Tensor": (X, 2), "mul.Tensor": (X, 2), "div.Tensor": (X, 2),
    "sum.dim_IntList": (X, [0], True), "mean.dim": (X, [0]), "cat": ([X, X], 1), "stack": ([X, X], 1),
    "where.self": (X > 4, X, X[0]), "native_layer_norm": (X, [4], X[0], None, 1e-5),
    "embedding": (X, torch.tensor([2, 0]), 0), "add_.Tensor": (X, X), "addmm_": (X, X[:, :3], X),
    "copy_": (X, X + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", [*_FUNCTIONS, *_METHODS, "gelu"])
def test_a_function_gives_what_its_op_gives(name: str) -> None:
    (op,) = existing(name)
    arguments = ARGUMENTS.get(name, (X,))
    gm, copied = _called(op, arguments), _plainly(_called(op, arguments))
    assert copied.graph.find_nodes(op="call_function", target=op) == []
    expected, found = gm(*_fresh(arguments)), copied(*_fresh(arguments))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if isinstance(expected, Tensor):
        assert found.stride() == expected.stride()


def _plainly(gm: fx.GraphModule) -> fx.GraphModule:
    _call_plainly(gm.graph)
    gm.recompile()
    return gm


def _fresh(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) for a in _tensors(arguments)]


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    flat = [b for a in arguments for b in (a if isinstance(a, list) else [a])]
    return [a for a in flat if isinstance(a, Tensor)]


def _called(op: Any, arguments: tuple[Any, ...]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = {}
    for index, value in enumerate(_tensors(arguments)):
        node = nodes.setdefault((index, id(value)), graph.placeholder(f"x{index}"))
        node.meta["val"] = value
    made = iter(nodes.values())
    args = fx.node.map_aggregate(arguments, lambda a: next(made) if isinstance(a, Tensor) else a)
    graph.output(graph.call_function(op, args))  # type: ignore[arg-type]
    return fx.GraphModule({}, graph)


def test_what_runs_as_it_is_calls_torch_as_a_user_does() -> None:
    graph = _plainly(lower_eager(_scaled()).forward_graph).graph
    assert len(graph.find_nodes(op="call_function", target=torch.mul)) == 2


def test_numbers_for_tensors_go_to_ops_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.add.Tensor, (2, x)))
    copied = _plainly(fx.GraphModule({}, graph))
    assert torch.equal(copied(X), X + 2)


def test_compositions_are_called_as_functions() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    rows = graph.call_function(layouts.in_rows, (x,))
    graph.output((rows, graph.call_function(local_ops.amax, (rows, 1))))
    copied = _plainly(fx.GraphModule({}, graph))
    assert not copied.graph.find_nodes(op="call_function", target=layouts.in_rows)
    rows_of, largest = copied(X.t())
    assert rows_of.is_contiguous()
    assert torch.equal(largest, X.amax(0))


def test_an_op_that_no_python_can_name() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(getattr(aten.random, "from"), (graph.placeholder("x"), 7, 8)))
    _call_plainly(graph)
    assert fx.GraphModule({}, graph)(X).eq(7).all()


def test_attention_is_called_with_an_aligned_bias() -> None:
    """Also where nothing says that the first operand is a tensor."""
    graph = fx.Graph()
    query, key, value, bias = map(graph.placeholder, ("query", "key", "value", "bias"))
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    attended = graph.call_function(op, (query, key, value, bias, True, 0.1))
    _call_plainly(graph)
    assert attended.target is attend


@pytest.mark.parametrize("op", UNWARNED, ids=str)
def test_spreads_of_an_empty_part_warn_of_nothing_and_others_as_torch_does(op: OpOverload) -> None:
    """A part of no samples is no mistake of the user's; a single value in a sum is, on one device too."""
    empty, single = torch.ones(0, 4), torch.ones(3, 1)
    code = _plainly(_called(op, (empty, [1])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = code(empty)
    expected = op(torch.ones(2, 4), [1])
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert one.shape == (0,)
        assert one.dtype == other.dtype

    def warned(run: Any) -> int:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
        return len(seen)

    assert warned(lambda: code(single)) == warned(lambda: op(single, [1]))
