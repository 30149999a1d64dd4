"""Second updates of running statistics by checkpoints: the recomputation in the backward updates again.

    y = checkpoint(block, x)     eager: block's BatchNorm updates its statistics here,
    y.sum().backward()           and again from the same batch when activations are recomputed

Recomputation in a graph is the partitioner's choice and does not run the user's code again. So the second
updates of BatchNorm are written at the end of the forward, in the order of the backward: last checkpoint
first. All other writes in a checkpoint are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointFunction

from fxdp import torch_compat
from fxdp.capture.locations import location_of_call
from fxdp.errors import CaptureError
from fxdp.torch_compat import Patch, around, patched


@dataclass(frozen=True)
class _Move:
    """One update of a BatchNorm: the statistics before and after, and the number of batches so far."""

    norm: _BatchNorm
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    count: Tensor | None

    def again(self) -> None:
        """Update the current statistics again by the same batch."""
        norm = self.norm
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        for name, before, after in zip(_STATISTICS, self.before, self.after, strict=True):
            now = getattr(norm, name)
            if norm.momentum is not None:
                moved = (1 - norm.momentum) * now + (after - (1 - norm.momentum) * before)
            elif self.count is not None and norm.num_batches_tracked is not None:
                batch = before + (after - before) * self.count.to(now.dtype)
                moved = now + (batch - now) / norm.num_batches_tracked.to(now.dtype)
            setattr(norm, name, moved)  # not in place: the backward saved the old tensor


@dataclass
class _Region:
    """One run of a checkpointed function; the recomputation ends with the last tensor that was saved."""

    buffers: dict[str, tuple[int, int]]
    moves: list[_Move] = field(default_factory=list)
    repeated: int = 0
    saved: bool = False

    def save(self, tensor: Tensor) -> Tensor:
        """Record that the backward needs everything computed so far, and return the tensor."""
        self.repeated, self.saved = len(self.moves), True
        return tensor


class _Recorder:
    """Recorder of all checkpoints of a forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._open: list[_Region] = []
        self.done: list[_Region] = []

    @contextlib.contextmanager
    def region(self) -> Iterator[_Region]:
        """Record the run of a checkpointed function inside the block."""
        region = _Region(self._buffers())
        self._open.append(region)
        try:
            yield region
        finally:
            self._open.pop()
        if region.saved:
            self._check(region)
            self.done.append(region)

    def forward(self, run: Callable[..., Tensor], norm: _BatchNorm, x: Tensor) -> Tensor:
        """Run a BatchNorm, and record the update of the running statistics."""
        moves = norm.training and norm.track_running_stats and norm.running_mean is not None
        if not self._open or not moves:
            return run(norm, x)
        if len(self._open) > 1:
            raise CaptureError(
                f"at {location_of_call()}: a BatchNorm in training is in a checkpoint inside of another one: "
                "one device moves its running statistics each time it runs, which depends on what is "
                "computed again. Take one of the two checkpoints away"
            )
        (region,) = self._open
        # the batch's own statistics stay inside of the kernel; they follow from the update of the running
        # ones
        before = _statistics(norm)
        place = len(region.moves)
        result = run(norm, x)
        count = None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
        after = _statistics(norm)
        region.moves.append(_Move(norm, before, after, count))
        if region.repeated == place and result.requires_grad:  # the kernel itself saved the last tensor
            region.repeated += 1
        return result

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Return identity and version of all buffers, except statistics of BatchNorms."""
        return {
            f"{path}.{name}".lstrip("."): (id(value), value._version)
            for path, owner in self._module.named_modules()
            if not isinstance(owner, _BatchNorm)
            for name, value in owner._buffers.items()
            if value is not None
        }

    def _check(self, region: _Region) -> None:
        now = self._buffers()
        written = [name for name, state in now.items() if region.buffers.get(name) != state]
        if written:
            raise CaptureError(
                f"at {location_of_call()}: a function under torch.utils.checkpoint writes "
                f"{', '.join(written)}: one device writes it again when its backward runs the function anew. "
                "Write buffers outside of the checkpoint"
            )


_STATISTICS = ("running_mean", "running_var")


def _statistics(norm: _BatchNorm) -> tuple[Tensor, ...]:
    return tuple(getattr(norm, name).clone() for name in _STATISTICS)


@contextlib.contextmanager
def repeated_updates(module: nn.Module) -> Iterator[None]:
    """Trace a forward inside the block; at the end, repeat the updates that checkpoints recompute.

    Raises
    ------
    CaptureError : a checkpoint writes buffers that are not running statistics, or is nested in a checkpoint.
    """
    recorder = _Recorder(module)
    with patched(_noting(recorder)):
        yield
    with torch.no_grad():
        for region in reversed(recorder.done):
            for move in region.moves[: region.repeated]:
                move.again()


def _noting(recorder: _Recorder) -> tuple[Patch, ...]:
    """Return patches that record each BatchNorm and each checkpointed function."""

    def checkpoint(plain: Callable[..., Iterator[None]], *args: Any, **kwargs: Any) -> Iterator[None]:
        # Torch calls only the innermost hooks on saved tensors: these hide the hooks of the checkpoint, so
        # that nothing is packed for a recomputation. Recomputation is decided by the partitioner.
        full = plain(*args, **kwargs)
        next(full)
        with (
            recorder.region() as region,
            torch.autograd.graph.saved_tensors_hooks(region.save, lambda tensor: tensor),
        ):
            yield
        with contextlib.suppress(StopIteration):
            next(full)

    def reentrant(plain: Callable[..., Any]) -> Any:
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with recorder.region() as region:
                result = plain(function, preserve, *args)
                if any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
                    region.repeated, region.saved = len(region.moves), True
            return result

        return staticmethod(apply)

    return (
        Patch(_BatchNorm, "forward", around(recorder.forward)),
        Patch(nn.SyncBatchNorm, "forward", around(recorder.forward)),
        Patch(*torch_compat.CHECKPOINT, around(checkpoint)),
        Patch(CheckpointFunction, "apply", reentrant),
    )


def _without_backward(plain: Any) -> Any:
    """Run a reentrant checkpoint without its own backward, in which export would lose the gradients.

    As in eager mode, no gradients result if no argument requires any. The partitioner decides about
    recomputation.
    """

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        needed = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        with contextlib.nullcontext() if needed else torch.no_grad():
            return function(*args)

    return staticmethod(apply)


REENTRANT = Patch(CheckpointFunction, "apply", _without_backward)
"""Patch for the capture of a model."""
