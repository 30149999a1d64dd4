"""What a checkpoint computes again in the backward it also writes again: running statistics move twice.

    y = checkpoint(block, x)     eager: block's BatchNorm moves its statistics here,
    y.sum().backward()           and once more, by the same numbers, when its activations are computed anew

A graph keeps activations or computes them again as it sees fit, which is no second run of the user's code. So
the second moves of BatchNorm are written at the end of the forward, in the order in which the backward makes
them, the last checkpoint first. Other writes in a checkpoint are refused.
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
    """One update of a BatchNorm: its statistics before and after, and how many there have been."""

    norm: _BatchNorm
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    count: Tensor | None

    def again(self) -> None:
        """Move the statistics as they are now by the same batch."""
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
            setattr(norm, name, moved)  # not in place: the backward holds what was there


@dataclass
class _Region:
    """One run of a checkpointed function; the recomputation ends with the last tensor that it must save."""

    buffers: dict[str, tuple[int, int]]
    moves: list[_Move] = field(default_factory=list)
    repeated: int = 0
    saved: bool = False

    def save(self, tensor: Tensor) -> Tensor:
        """Note that the backward needs what was computed so far."""
        self.repeated, self.saved = len(self.moves), True
        return tensor


class _Recorder:
    """All checkpoints of a forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._open: list[_Region] = []
        self.done: list[_Region] = []

    @contextlib.contextmanager
    def region(self) -> Iterator[_Region]:
        """Around the run of a checkpointed function."""
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
        """Run a BatchNorm; note how it moves its statistics."""
        moves = norm.training and norm.track_running_stats and norm.running_mean is not None
        if not self._open or not moves:
            return run(norm, x)
        if len(self._open) > 1:
            raise CaptureError(
                f"at {location_of_call()}: a BatchNorm in training is in a checkpoint inside of another "
                "one: one "
                "device moves its running statistics each time it runs, which depends on what is computed "
                "again. Take one of the two checkpoints away"
            )
        (region,) = self._open
        # the batch's own statistics stay inside of the kernel: what they were is seen by what they moved
        before = _statistics(norm)
        place = len(region.moves)
        result = run(norm, x)
        count = None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
        after = _statistics(norm)
        region.moves.append(_Move(norm, before, after, count))
        if region.repeated == place and result.requires_grad:  # its own kernel saved the last tensor
            region.repeated += 1
        return result

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """The identity and the version of all buffers that are no statistics of a BatchNorm."""
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
                f"{', '.join(written)}: "
                "one device writes it again when its backward runs the function anew. Write buffers outside "
                "of the checkpoint"
            )


_STATISTICS = ("running_mean", "running_var")


def _statistics(norm: _BatchNorm) -> tuple[Tensor, ...]:
    return tuple(getattr(norm, name).clone() for name in _STATISTICS)


@contextlib.contextmanager
def repeated_updates(module: nn.Module) -> Iterator[None]:
    """Inside, a forward is traced; at its end what its checkpoints compute again is written again.

    Raises
    ------
    CaptureError : a checkpoint writes other buffers than running statistics, or is in another one.
    """
    recorder = _Recorder(module)
    with patched(_noting(recorder)):
        yield
    with torch.no_grad():
        for region in reversed(recorder.done):
            for move in region.moves[: region.repeated]:
                move.again()


def _noting(recorder: _Recorder) -> tuple[Patch, ...]:
    """Around each BatchNorm and each checkpointed function."""

    def checkpoint(plain: Callable[..., Iterator[None]], *args: Any, **kwargs: Any) -> Iterator[None]:
        # Of hooks on saved tensors torch calls the innermost: ours hide those of the checkpoint, so that
        # nothing is packed for a recomputation, which is the partitioner's business.
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
    """A reentrant checkpoint without its own backward, in which export would lose the gradients.

    As it does, it gives none if no argument needs one. What is recomputed is the partitioner's business.
    """

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        needed = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        with contextlib.nullcontext() if needed else torch.no_grad():
            return function(*args)

    return staticmethod(apply)


REENTRANT = Patch(CheckpointFunction, "apply", _without_backward)
"""While a model is captured."""
