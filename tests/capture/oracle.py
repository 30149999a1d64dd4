"""Evaluates a captured graph on real, global tensors and compares it with the eager model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxdp.capture.captured import Captured, OutputLeaf, SizeLeaf
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Buffer, Constant, Gradient, Input, Mutation, Output, Parameter, Tangent
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import ScalarType, TensorType
from tests.capturing import capture


@dataclass
class Results:
    outputs: dict[int, torch.Tensor]
    mutations: dict[Any, torch.Tensor]
    gradients: dict[Any, torch.Tensor]


def interpret(
    captured: Captured, module: nn.Module, tensors: list[torch.Tensor], tangents: dict[int, Any]
) -> Results:
    """Run the graph node by node; checks every node's type on the way."""
    sizes = _sizes(captured, tensors)
    env: dict[fx.Node, Any] = {}
    for node in captured.gm.graph.nodes:
        kind = meta(node).type
        if node.op == "placeholder":
            env[node] = _value(meta(node).spec, captured, module, tensors, tangents, sizes)
        elif node.op == "output":
            return _results(node, env)
        elif node.op == "get_attr":
            env[node] = getattr(captured.gm, node.target)
        elif isinstance(kind, ScalarType) and kind.expr.free_symbols <= sizes.keys():
            env[node] = _number(kind.expr, sizes)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
            if isinstance(kind, ScalarType) and kind.expr.is_Symbol:
                sizes[kind.expr] = env[node]
        _check(node, kind, env[node], sizes)
    raise AssertionError("no output")


def _sizes(captured: Captured, tensors: list[torch.Tensor]) -> dict[Any, int]:
    sizes: dict[Any, int] = {}
    for tensor, dim in zip(tensors, captured.batch, strict=True):
        if dim is not None:
            sizes[B] = tensor.shape[dim]
    for name, (index, dim) in captured.symbols.items():
        sizes[sympy.Symbol(name, integer=True, positive=True)] = tensors[index].shape[dim]
    return sizes


def _number(expr: Any, sizes: dict[Any, int]) -> Any:
    value = expr.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_integer and value.is_Integer else float(value)


def _value(spec, captured, module, tensors, tangents, sizes):
    if isinstance(spec, Parameter):
        return module.get_parameter(spec.name).detach()
    if isinstance(spec, Buffer):
        return module.get_buffer(spec.name).clone()
    if isinstance(spec, Constant):
        return captured.constants[spec.name]
    if isinstance(spec, Input):
        return tensors[spec.index].detach()
    assert isinstance(spec, Tangent)
    return tangents[spec.index]


def _results(node: fx.Node, env: dict[fx.Node, Any]) -> Results:
    found = Results({}, {}, {})
    for spec, value in zip(meta(node).results, node.args[0], strict=True):
        if isinstance(spec, Output):
            found.outputs[spec.index] = env[value]
        elif isinstance(spec, Mutation):
            found.mutations[spec.of] = env[value]
        else:
            assert isinstance(spec, Gradient)
            found.gradients[spec.of] = env[value]
    return found


def _check(node: fx.Node, kind: Any, value: Any, sizes: dict[Any, int]) -> None:
    """The note's type is the type of the value."""
    if isinstance(kind, TensorType):
        assert value.dtype == kind.dtype, (node, kind)
        shape = [_size(d, sizes, got) for d, got in zip(kind.shape, value.shape, strict=True)]
        assert list(value.shape) == shape, (node.format_node(), list(value.shape), kind)
    elif isinstance(kind, tuple):
        for member, part in zip(kind, value, strict=True):
            if member is not None:
                _check(node, member, part, sizes)


def _size(size: Any, sizes: dict[Any, int], got: int) -> int:
    """The value of a size; a symbol that only the data fixes is learned where it is first seen."""
    if isinstance(size, int):
        return size
    unknown = size.free_symbols - sizes.keys()
    if size in unknown:
        sizes[size] = got
    return got if unknown else _number(size, sizes)


def output_tree(
    captured: Captured, outputs: dict[int, torch.Tensor], sizes: dict[Any, int] | None = None
) -> Any:
    leaves = []
    for leaf in captured.leaves:
        if isinstance(leaf, OutputLeaf):
            leaves.append(outputs[leaf.index])
        elif isinstance(leaf, SizeLeaf):
            leaves.append(_number(leaf.expr, sizes or {}))
        else:
            leaves.append(leaf)
    return pytree.tree_unflatten(leaves, captured.out_spec)


def check(
    module: nn.Module,
    args: tuple,
    kwargs: dict | None = None,
    example: tuple | None = None,
    tol: float = 1e-9,
    floor: float = 1e-6,
    **options: Any,
) -> Captured:
    """Capture with `example` (default: these inputs), interpret on the inputs, compare with eager."""
    kwargs = kwargs or {}
    pristine = copy.deepcopy(module)
    example_args, example_kwargs = example or (args, kwargs)
    state, training = torch.get_rng_state(), [m.training for m in module.modules()]
    captured = capture(module, example_args, example_kwargs, **options)
    assert torch.equal(state, torch.get_rng_state())
    assert training == [m.training for m in module.modules()]
    _unchanged(module, pristine)
    captured.gm.graph.lint()
    compare(captured, pristine, args, kwargs, options.get("loss_fn"), (tol, floor))
    return captured


def _unchanged(module: nn.Module, pristine: nn.Module) -> None:
    for (name, a), (_, b) in zip(module.state_dict().items(), pristine.state_dict().items(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), name
    assert all(parameter.grad is None for parameter in module.parameters())


def compare(
    captured: Captured, module: nn.Module, args: tuple, kwargs: dict, loss_fn: Any, tol: tuple[float, float]
) -> None:
    """Outputs, gradients and mutated buffers of the graph against the eager model."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    eager_args, eager_kwargs = copy.deepcopy((args, kwargs))
    eager_tensors = [
        leaf for leaf in pytree.tree_leaves((eager_args, eager_kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    eager = copy.deepcopy(module)
    calls = dict(eager_kwargs)
    target = calls.pop("target") if loss_fn is not None else None
    torch.manual_seed(0)
    output = eager(*eager_args, **calls)
    output = output if loss_fn is None else loss_fn(output, target)
    flat = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    tangents = _tangents(captured, flat)
    pairs = [(flat[index], tangent) for index, tangent in tangents.items()]
    if pairs:
        torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
    torch.manual_seed(0)
    with torch.no_grad():
        results = interpret(captured, module, tensors, tangents)
    rebuilt = output_tree(captured, results.outputs, _sizes(captured, tensors))
    assert type(rebuilt) is type(output)
    assert pytree.tree_structure(rebuilt) == pytree.tree_structure(output)
    for a, b in zip(pytree.tree_leaves(rebuilt), pytree.tree_leaves(output), strict=True):
        assert close(a, b.detach(), tol) if isinstance(b, torch.Tensor) else a == b
    _compare_gradients(results, eager, eager_tensors, tol)
    _compare_buffers(results, module, eager, tol)
    for of, value in results.mutations.items():
        if isinstance(of, Input):
            assert close(value, eager_tensors[of.index], tol)


def _tangents(captured: Captured, flat: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    specs = [meta(node).spec for node in captured.gm.graph.find_nodes(op="placeholder")]
    indices = [spec.index for spec in specs if isinstance(spec, Tangent)]
    generator = torch.Generator().manual_seed(1)
    return {
        i: torch.rand(flat[i].shape, dtype=torch.float64, generator=generator).to(flat[i].dtype) + 0.5
        for i in indices
    }


def _compare_gradients(
    results: Results, eager: nn.Module, tensors: list[torch.Tensor], tol: tuple[float, float]
) -> None:
    expected = {id(p): p.grad for p in eager.parameters() if p.grad is not None}
    for of, value in results.gradients.items():
        source = eager.get_parameter(of.name) if isinstance(of, Parameter) else tensors[of.index]
        assert source.grad is not None, of
        assert close(value, source.grad, tol), (of, (value - source.grad).abs().max())
        expected.pop(id(source), None)
    assert not expected, "parameters without a gradient in the graph"


def _compare_buffers(results: Results, before: nn.Module, eager: nn.Module, tol: tuple[float, float]) -> None:
    changed = {of.name: value for of, value in results.mutations.items() if isinstance(of, Buffer)}
    for name, buffer in eager.named_buffers():
        value = changed.get(name, before.get_buffer(name))
        assert close(value, buffer, tol), name


def close(a: torch.Tensor, b: torch.Tensor, tol: tuple[float, float]) -> bool:
    """Relative to the largest value, which counts as at least the second of the tolerances."""
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.shape == b.shape, (a.shape, b.shape)
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.nan_to_num(), b.nan_to_num()
    scale = max(float(b.abs().max()) if b.numel() else 0.0, 1e-30)
    return bool(((a - b).abs() <= tol[0] * max(scale, tol[1])).all()) if a.numel() else True
