"""The streams of a staged program, and the calls that order streams; no-ops on CPU.

    compute        the stream of the caller: stages, reductions, everything not named below
    p2p_forward    issues the sends and receives of values
    p2p_backward   issues the sends and receives of gradients
    reduce         collectives once per step, after the last micro-batch: gradients, the loss

Compute is the hub: each other stream waits for compute before each task, and compute waits for the task
before the program drops the values that the task read or filled. So all uses of freed memory come before the
point that compute has reached, and memory allocated afterwards, on any stream, is used later. Therefore no
tensor needs `record_stream`, which would free memory only when the device gets there, not where the program
says: a host far ahead would then hold more micro-batches at once than 1F1B requires.
`pipeline/write/happens_before.py` proves this order for each program.

A transfer itself runs on a stream of its process group, which waits for the stream that issues the transfer;
`wait` and `wait_sent` of `runtime/p2p.py` let compute wait for the transfer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

COMPUTE = "compute"
P2P_FORWARD = "p2p_forward"
P2P_BACKWARD = "p2p_backward"
REDUCE = "reduce"


class Streams:
    """Streams of a device without streams: all calls run in order."""

    @staticmethod
    def of(device: torch.device) -> Streams:
        """Return the streams of a device."""
        return _CudaStreams(device) if device.type == "cuda" else Streams()

    def record(self, stream: str) -> Any:
        """Return an event that completes when all work given to the stream so far is done."""
        return None

    def wait(self, stream: str, event: Any, *held: Any) -> None:
        """Let all further work on the stream begin after the event; the host does not wait.

        The caller keeps the values `held` alive until this call, and drops the values now.
        """

    def on(self, stream: str) -> AbstractContextManager[Any]:
        """Return a context in which work is given to the stream."""
        return _HERE


_HERE = nullcontext()


class _Cuda(Protocol):
    """The part of `torch.cuda` that is used here; tests pass a recorder instead."""

    def Stream(self, device: torch.device) -> Any: ...  # noqa: N802

    def Event(self) -> Any: ...  # noqa: N802

    def current_stream(self, device: torch.device) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...


class _CudaStreams(Streams):
    """Streams of a CUDA device, created once and shared by all programs of a model.

    `compute` is the current stream at the time of use, so a model may be called on any stream.
    """

    def __init__(self, device: torch.device, cuda: _Cuda | None = None) -> None:
        self._cuda: Any = torch.cuda if cuda is None else cuda
        self._device = device
        self._side = {name: self._cuda.Stream(device) for name in (P2P_FORWARD, P2P_BACKWARD, REDUCE)}

    def record(self, stream: str) -> Any:
        """Return an event that completes when all work given to the stream so far is done."""
        event = self._cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: str, event: Any, *held: Any) -> None:
        """Let all further work on the stream begin after the event; the host does not wait."""
        self._stream(stream).wait_event(event)

    def on(self, stream: str) -> AbstractContextManager[Any]:
        """Return a context in which work is given to the stream."""
        return _HERE if stream == COMPUTE else self._cuda.stream(self._side[stream])

    def _stream(self, name: str) -> Any:
        return self._cuda.current_stream(self._device) if name == COMPUTE else self._side[name]
