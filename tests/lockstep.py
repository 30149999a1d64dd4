"""The oracle for tests: a model on virtual ranks, node by node, and against one eager device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.annotations import (
    Buffer,
    Constant,
    Gradient,
    Input,
    Mutation,
    Output,
    Parameter,
    Slot,
    Tangent,
    note,
)
from fxdp.capture import Captured, OutputLeaf, capture
from fxdp.compiler import LocalProgram, copy_graph, prepare
from fxdp.lockstep import LockStep, difference
from fxdp.mesh import resolve_mesh
from fxdp.options import Options
from fxdp.passes import Canonicalize


def compiled(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], world: int, **options: Any
) -> tuple[LocalProgram, Captured]:
    """The program of one rank with open sizes, and the captured graph it came from."""
    chosen = Options(**options)
    return prepared(captured(module, args, kwargs, chosen), world, chosen)


def captured(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Captured:
    """The module's joint graph, as a compiled module takes it."""
    return capture(
        module, args, kwargs, batch_dims=options.batch_dims, loss_fn=options.loss_fn, differentiable="all"
    )


def prepared(found: Captured, world: int, options: Options) -> tuple[LocalProgram, Captured]:
    """The program of one of `world` ranks, and its reference; `found` itself stays as it is."""
    mesh = resolve_mesh({"dp": world}, "cpu")
    reference = replace(found, gm=Canonicalize().run(copy_graph(found.gm), mesh))
    return prepare(replace(found, gm=copy_graph(found.gm)), mesh, options), reference


def check(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    splits: Sequence[Sequence[int]] = ((3, 4), (5, 2, 0, 1)),
    tolerance: float = 1e-9,
    **options: Any,
) -> LocalProgram:
    """Run `module` on virtual ranks for each split of the batch; every node and result must be exact.

    `args` and `kwargs` hold the largest global batch; each split uses its first samples.
    """
    kwargs = kwargs or {}
    chosen = Options(**options)
    found = captured(module, args, kwargs, chosen)
    local, reference = prepared(found, len(splits[0]), chosen)
    for split in splits:
        if len(split) != local.mesh.size:
            local, reference = prepared(found, len(split), chosen)
        _check_split(module, local, reference, args, kwargs, split, tolerance)
    return local


def _check_split(
    module: nn.Module, local: LocalProgram, reference: Captured, args: tuple[Any, ...],
    kwargs: dict[str, Any], split: Sequence[int], tolerance: float,
) -> None:  # fmt: skip
    args, kwargs = first_samples((args, kwargs), reference.batch, sum(split))
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    expected, tangents = eager(module, args, kwargs, reference, local.options.loss_fn)
    symbols = {name: tensors[index].shape[dim] for name, (index, dim) in reference.symbols.items()}
    runner = LockStep(local.gm, reference.gm, split, symbols, tolerance)
    runner.single_device_rng = local.options.single_device_rng
    found = runner.run(_slots(module, reference, tensors, tangents))
    assert not runner.faults, f"split {tuple(split)}:\n" + "\n".join(map(str, runner.faults))
    _same_results(found, expected, tolerance)


def first_samples(tree: Any, batch: Sequence[int | None], size: int) -> Any:
    """The inputs with only the first `size` samples."""
    leaves, spec = pytree.tree_flatten(tree)
    dims = iter(batch)
    cut = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            dim = next(dims)
            part = leaf if dim is None else leaf.narrow(dim, 0, size)
            leaf = part.detach().clone().requires_grad_(leaf.requires_grad)
        cut.append(leaf)
    return pytree.tree_unflatten(cut, spec)


def eager(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], captured: Captured, loss_fn: Any
) -> tuple[dict[Any, Tensor], dict[int, Tensor]]:
    """What one device computes: outputs, new buffers, gradients for random tangents."""
    twin = copy.deepcopy(module)
    inputs = dict(kwargs)
    target = inputs.pop("target", None) if loss_fn is not None else None
    result = twin(*args, **inputs)
    if loss_fn is not None:
        result = loss_fn(result, target)
    leaves = pytree.tree_leaves(result)
    outputs = [
        leaf for leaf, kind in zip(leaves, captured.leaves, strict=True) if isinstance(kind, OutputLeaf)
    ]
    expected: dict[Any, Tensor] = {Output(i): o.detach() for i, o in enumerate(outputs)}
    tangents = {
        i: torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(i))
        for i, o in enumerate(outputs)
        if o.requires_grad
    }
    if tangents:
        torch.autograd.backward([outputs[i] for i in tangents], list(tangents.values()))
    expected |= {Gradient(Parameter(n)): p.grad for n, p in twin.named_parameters() if p.grad is not None}
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    expected |= {Gradient(Input(i)): t.grad for i, t in enumerate(tensors) if t.grad is not None}
    expected |= {Mutation(Buffer(n)): b for n, b in twin.named_buffers()}
    return expected, tangents


def _slots(
    module: nn.Module, captured: Captured, tensors: list[Tensor], tangents: dict[int, Tensor]
) -> dict[Slot, Any]:
    values: dict[Slot, Any] = {}
    for node in captured.gm.graph.nodes:
        match note(node).slot:
            case Parameter(name) as slot:
                values[slot] = module.get_parameter(name).detach()
            case Buffer(name) as slot:
                values[slot] = module.get_buffer(name).clone()
            case Constant(name) as slot:
                values[slot] = captured.constants[name]
            case Input(index) as slot:
                values[slot] = tensors[index].detach()
            case Tangent(index) as slot:
                values[slot] = tangents[index]
    return values


def _same_results(found: dict[Any, Tensor], expected: dict[Any, Tensor], tolerance: float) -> None:
    found = {_key(slot): value for slot, value in found.items()}
    gradients = [v.abs().max() for s, v in expected.items() if isinstance(s, Gradient) and v.numel()]
    for slot, value in found.items():
        # a gradient that is zero but for rounding (a key's bias) counts against the others
        floor = 1e-3 * float(max(gradients)) if isinstance(slot, Gradient) else 0.0
        error = difference(value, expected[slot], floor)
        assert error <= tolerance, f"{slot} differs from eager by {error:.3g}"
    wanted = {s for s in expected if isinstance(s, Gradient)}
    got = {s for s in found if isinstance(s, Gradient)}
    assert got == wanted, f"gradients of {wanted - got} are missing, of {got - wanted} too many"


def _key(slot: Any) -> Any:
    """Inputs by index alone."""
    of = getattr(slot, "of", None)
    return type(slot)(Input(of.index)) if isinstance(of, Input) else slot
