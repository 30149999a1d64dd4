"""The streams of a staged program, and the two calls that order them; on CPU nothing happens.

    compute        the stream on which the caller runs: stages, sums, all that the table below does not name
    p2p_forward    issues the sends and receives of values
    p2p_backward   issues those of gradients
    reduce         what runs once per step after the last micro-batch and communicates: gradients, the loss

Compute is the hub: another stream waits for compute before each thing that it runs, and compute waits for
that thing before the program lets go of what it read or filled. So of whatever is freed, all uses come before
the point that compute has reached, and whatever is allocated after that, on any stream, is used later. That
is why no tensor needs `record_stream`, with which memory would be free only when the device gets there, not
where the program says: a host far ahead would hold more micro-batches at once than 1F1B must.
`pipeline/write/happens_before.py` proves this for each program.

A transfer itself runs on a stream of its process group, which waits for the stream that issues it; `wait` and
`wait_sent` of `runtime/p2p.py` let compute wait for it.
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
    """Streams of a device that has none: all runs in the order in which it is called."""

    @staticmethod
    def of(device: torch.device) -> Streams:
        """The streams of a device."""
        return CudaStreams(device) if device.type == "cuda" else Streams()

    def record(self, stream: str) -> Any:
        """An event that has passed once all that the stream was given so far is done."""
        return None

    def wait(self, stream: str, event: Any, *held: Any) -> None:
        """What the stream is given from now on begins after the event; the host does not wait.

        The caller keeps what is `held` until then, and lets go of it now.
        """

    def on(self, stream: str) -> AbstractContextManager[Any]:
        """Give the stream what is called inside."""
        return _HERE


_HERE = nullcontext()


class _Cuda(Protocol):
    """What is used of `torch.cuda`; tests give a recorder instead."""

    def Stream(self, device: torch.device) -> Any: ...  # noqa: N802

    def Event(self) -> Any: ...  # noqa: N802

    def current_stream(self, device: torch.device) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...


class CudaStreams(Streams):
    """Streams of a CUDA device, made once and used by all programs of a model.

    `compute` is the stream that is current when it is named, so a model may be called on any stream.
    """

    def __init__(self, device: torch.device, cuda: _Cuda | None = None) -> None:
        self._cuda: Any = torch.cuda if cuda is None else cuda
        self._device = device
        self._side = {name: self._cuda.Stream(device) for name in (P2P_FORWARD, P2P_BACKWARD, REDUCE)}

    def record(self, stream: str) -> Any:
        """See `Streams.record`."""
        event = self._cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: str, event: Any, *held: Any) -> None:
        """See `Streams.wait`."""
        self._stream(stream).wait_event(event)

    def on(self, stream: str) -> AbstractContextManager[Any]:
        """See `Streams.on`."""
        return _HERE if stream == COMPUTE else self._cuda.stream(self._side[stream])

    def _stream(self, name: str) -> Any:
        return self._cuda.current_stream(self._device) if name == COMPUTE else self._side[name]
