"""Streams and events: what each call asks of the device, in which order, and that a CPU is asked nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fxdp.runtime import p2p
from fxdp.runtime.p2p import Transport
from fxdp.runtime.stage_calls import once
from fxdp.runtime.streams import COMPUTE, P2P_FORWARD, REDUCE, Streams, _CudaStreams
from tests.fake_cuda import FakeCuda

CUDA = torch.device("cuda", 0)


class Work:
    """A transfer that notes on which stream it was issued and which one waits for it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.issued = cuda, cuda.current.name

    def wait(self) -> None:
        self.cuda.log.append(f"{self.cuda.current.name} waits for the transfer issued by {self.issued}")


def test_an_event_orders_two_streams() -> None:
    cuda = FakeCuda()
    streams = _CudaStreams(CUDA, cuda)
    streams.wait(P2P_FORWARD, streams.record(COMPUTE))
    streams.wait(COMPUTE, streams.record(REDUCE))
    assert cuda.log == [
        "the caller's records event 0 of the caller's",
        "stream 0 waits for event 0 of the caller's",
        "stream 2 records event 1 of stream 2",
        "the caller's waits for event 1 of stream 2",
    ]


def test_compute_is_the_stream_that_is_current() -> None:
    cuda = FakeCuda()
    streams = _CudaStreams(CUDA, cuda)
    with cuda.stream(cuda.Stream(CUDA)):
        streams.record(COMPUTE)
        with streams.on(COMPUTE):
            cuda.run("a stage", (), ())
    assert cuda.log == ["stream 3 records event 0 of stream 3", "stream 3 runs a stage"]


def test_each_model_has_its_own_streams() -> None:
    cuda = FakeCuda()
    for _ in range(2):
        _CudaStreams(CUDA, cuda)
    assert len(cuda.streams) == 6


def test_an_error_leaves_the_stream() -> None:
    cuda = FakeCuda()
    before = cuda.current
    with pytest.raises(ValueError, match="stage"), _CudaStreams(CUDA, cuda).on(REDUCE):
        raise ValueError("stage")
    assert cuda.current is before


def test_transfers_are_issued_on_their_stream_and_waited_for_by_compute() -> None:
    cuda = FakeCuda()
    streams: Any = _CudaStreams(CUDA, cuda)
    transport = Transport(mock.sentinel.group, [0, 1], torch.device("cpu"), streams)

    def issue(value: Tensor, peer: int, **options: Any) -> Work:
        cuda.log.append(f"{cuda.current.name} begins")
        return Work(cuda)

    with mock.patch.object(p2p, "dist", SimpleNamespace(isend=issue, irecv=issue)):
        sent = transport.send(torch.ones(2), 1, 0, stream=P2P_FORWARD)
        coming = transport.receive([2], torch.float32, 1, 0, stream=P2P_FORWARD)
    assert cuda.current.name == "the caller's"
    p2p.wait(coming)
    p2p.wait_sent(sent)
    ended = "the caller's waits for the transfer issued by stream 0"
    assert cuda.log == ["stream 0 begins", "stream 0 begins", ended, ended]


def test_a_sent_value_is_held_beside_its_copy() -> None:
    """The copy is made on another stream: the value must not be freed before that."""
    transport = Transport(mock.sentinel.group, [0, 1], torch.device("cpu"), Streams())
    value = torch.arange(6.0).view(2, 3).t()
    with mock.patch.object(p2p, "dist", mock.Mock()):
        pending = transport.send(value, 1, 0, stream=P2P_FORWARD)
    assert pending.value is value
    assert pending.copy is not None
    assert pending.copy.is_contiguous()


def test_what_runs_once_runs_on_the_stream_that_the_program_names() -> None:
    cuda = FakeCuda()
    code = mock.Mock()
    code.forward.side_effect = lambda batch, values: (cuda.current.name, "saved")
    run = once(code, _CudaStreams(CUDA, cuda))
    assert run("batch") == ("the caller's",)
    assert run("batch", stream=REDUCE) == ("stream 2",)


def test_a_cpu_has_no_streams() -> None:
    streams = Streams.of(torch.device("cpu"))
    assert type(streams) is Streams
    event = streams.record(COMPUTE)
    assert event is None
    assert streams.wait(REDUCE, event, torch.ones(1)) is None  # type: ignore[func-returns-value]
    with streams.on(REDUCE):
        pass
