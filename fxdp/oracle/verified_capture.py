"""Capture the model for verification: in float64 if possible, for a batch size that the code allows."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.batch_dims import by_axis
from fxdp.capture.captured import Captured
from fxdp.capture.driver import capture_request
from fxdp.capture.inputs import read_inputs, run_model
from fxdp.capture.refusals.stateful import aside, copy_of
from fxdp.capture.taken_branches import taken_branches
from fxdp.errors import InputError
from fxdp.ir.graph.draws import kept_random_state, reseed
from fxdp.ir.graph.metadata import Location
from fxdp.ir.types.sizes import B, axis, named_size
from fxdp.module.calls.call import request_of
from fxdp.options import Options
from fxdp.oracle.one_device import first_samples
from fxdp.oracle.precision import widen, widened
from fxdp.torch_compat import one_device, patched

_BRANCHES = 64
WIDE = "in float64"
"""The description, in a report, of a model that runs as a float64 copy."""


def capture_for(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    hint: int | None = None,
    branches: tuple[bool, ...] = (),
) -> Captured:
    """Capture the joint graph as a compiled module does."""
    inputs = read_inputs(module, args, kwargs, options.batch_dims)
    return capture_request(request_of(module, inputs, options, hint=hint, branches=branches))


def captured(
    model: nn.Module, inputs: Any, options: Options, precision: str, batch: int, seed: int
) -> tuple[nn.Module, Any, Captured, str]:
    """Return the module and inputs to run, their capture, and a description of their precision."""
    if precision == "own":
        module = copy_of(model)
        return module, inputs, capture_at(module, inputs, options, batch, seed), "in the model's own types"
    module, wide = widened(model), widen(inputs)
    reason = _why_not_wide(model, inputs, options)
    if reason:
        module, wide = copy_of(model), inputs
    found = capture_at(module, wide, options, batch, seed)
    if reason:
        return module, wide, found, f"in the model's own types, because it fails in float64 ({reason})"
    return module, wide, found, WIDE


def _why_not_wide(model: nn.Module, inputs: Any, options: Options) -> str:
    """Return the reason why eager cannot run the model in float64; empty if eager can.

    Example: `(1 - mask.float()) * torch.finfo(scores.dtype).min` is nan, because this number is infinite in
    float32, and values that are all nan would equal any values.
    """
    try:
        made = _run(widened(model), widen(inputs), options)
        if holds_nan(made) and not holds_nan(_run(copy_of(model), inputs, options)):
            return "its results are nan"
    except Exception as error:  # user code may raise any exception; capture reports faults of the model
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


def _run(twin: nn.Module, inputs: Any, options: Options) -> Any:
    """Return the output of a copy of the model."""
    args, kwargs = inputs
    if options.loss_fn is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "target"}
    with kept_random_state(), patched(one_device()):
        return twin(*args, **kwargs)


def holds_nan(made: Any) -> bool:
    """Return whether an output contains a nan."""
    leaves = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
    return any(bool(leaf.isnan().any()) for leaf in leaves if leaf.is_floating_point())


def capture_at(module: nn.Module, inputs: Any, options: Options, batch: int, seed: int) -> Captured:
    """Return a capture whose branches on sizes and flags are right for the first `batch` samples."""
    args, kwargs = inputs
    hint = 1 if batch == 1 and options.single_device_rng else None
    found = capture_for(module, args, kwargs, options, hint)
    if broken_conditions(found, inputs, batch, options.batch_dims) and batch >= 2:
        hint = batch
        found = capture_for(module, args, kwargs, options, hint)
    for _ in range(_BRANCHES):  # each capture is right for at least one more branch
        branches = branches_at(found, module, inputs, options, batch, seed)
        if on_branch(found, branches):
            break
        found = capture_for(module, args, kwargs, options, hint, branches)
    return found


def broken_conditions(found: Captured, inputs: Any, batch: int, batch_dims: Any = None) -> list[str]:
    """Return the conditions on sizes, assumed by the capture, that do not hold for this batch."""
    args, kwargs = inputs
    leaves = pytree.tree_leaves(by_axis(args, kwargs, batch_dims))
    tensors = [leaf for leaf in leaves if hasattr(leaf, "shape")]
    sizes = {named_size(name): tensors[i].shape[dim] for name, (i, dim) in found.symbols.items()}
    for i, (name, of_batch) in enumerate(zip(found.axes.names, found.batch, strict=False)):
        if name and of_batch is not None:
            sizes[axis(name).total] = tensors[i].shape[of_batch]
    return [f"{c.expr} at {c.location}" for c in found.conditions if not c.holds({B: batch, **sizes})]


def check_branch(
    found: Captured, module: nn.Module, inputs: Any, options: Options, batch: int, seed: int
) -> None:
    """Raise if a flag on which the model's code branches has a different value for this batch.

    Raises
    ------
    InputError : with the line of each such flag.
    """
    if not on_branch(found, branches_at(found, module, inputs, options, batch, seed)):
        listing = "\n  ".join(str(check.location) for check in found.checks if check.branch)
        raise InputError(
            f"the first {batch} samples go another way than the global batch at one of\n  {listing}\n"
            "Verify with splits= that have all samples, or with a smaller batch"
        )


def check_conditions(found: Captured, inputs: Any, batch: int, batch_dims: Any) -> None:
    """Raise if the model's code takes a different path for this batch than in the capture.

    Raises
    ------
    InputError : with each condition and its line.
    """
    broken = broken_conditions(found, inputs, batch, batch_dims)
    if broken:
        listing = "\n  ".join(broken)
        raise InputError(
            f"the model's Python code decided on a size in a way that does not hold for a global batch of "
            f"{batch}:\n  {listing}\nVerify with splits= whose samples are within the condition"
        )


def branches_at(
    found: Captured, module: nn.Module, inputs: Any, options: Options, batch: int, seed: int
) -> tuple[bool, ...]:
    """Return the answer at each branch of a capture for the first samples, up to the first different answer.

    `seed` must be the seed of the run to be compared, because dropout may affect the answers.
    """
    if not found.branches:
        return ()
    args, kwargs = inputs
    given = read_inputs(module, args, kwargs, options.batch_dims)
    dims = found.batch if not found.axes.names else (None,) * len(found.batch)  # all of a ragged batch
    args, kwargs = given.rebuild(first_samples(given.tensors, dims, batch))

    def run() -> None:
        reseed(seed)
        run_model(copy_of(module), args, kwargs, options.loss_fn, options.precision)

    with aside():
        asked = taken_branches(run)
    return _at_branches(found, asked)


def _at_branches(found: Captured, asked: list[tuple[Location, bool]]) -> tuple[bool, ...]:
    left: dict[Location, deque[bool]] = {}
    for location, value in asked:
        left.setdefault(location, deque()).append(value)
    branches: list[bool] = []
    for check in found.checks:
        if check.branch:
            effects = left.get(check.location)
            branches.append(effects.popleft() if effects else check.passes)
            if branches[-1] != check.passes:
                break
    return tuple(branches)


def on_branch(found: Captured, branches: tuple[bool, ...]) -> bool:
    """Return whether a capture took these branches."""
    return found.branches[: len(branches)] == branches
