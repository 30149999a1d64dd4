"""The demonstration: one device trains on the global batch, then all ranks train on their parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxdp
from fxdp.cli.demo.data import Corpus, TextBatch
from fxdp.cli.demo.options import DemoOptions
from fxdp.cli.demo.show import announce, count_ranks, summarize, watched
from fxdp.cli.demo.training import LENGTH, Curve, TrainingStep, call, make_model, train
from fxdp.cli.demo.unedited import run_unedited
from fxdp.errors import MeshError
from fxdp.settings import Settings
from fxdp.settings.launch import Launch

if TYPE_CHECKING:
    from fxdp.reports.plan import Plan


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of this process: rank, number of ranks, and device."""

    rank: int
    ranks: int
    device: torch.device


def run_demo(options: DemoOptions) -> int:
    """Run on the launcher's ranks, or launch ranks; return the exit code.

    Raises
    ------
    MeshError : fewer GPUs than ranks, or the launcher has started a different number of ranks.
    RankFailedError : a rank that was launched here failed.
    """
    launched = Settings.from_environment().launch
    if launched is None and options.ranks != 1:
        ranks = options.ranks or 2
        _check_device(options, ranks)
        if not run_unedited(Console(), ranks):
            return 1
        return int(max(fxdp.launch(run_demo, options, nproc=ranks)))
    rank, ranks, local = (0, 1, 0) if launched is None else _place(options, launched)
    _check_device(options, local + 1)
    device = torch.device("cuda", local) if options.device == "cuda" else torch.device("cpu")
    place = _Place(rank, ranks, device)
    with _mesh(place) as mesh:
        return _run(options, place, mesh)


def _place(options: DemoOptions, launched: Launch) -> tuple[int, int, int]:
    if options.ranks not in (None, launched.world_size):
        raise MeshError(
            f"--mesh dp={options.ranks}: got {options.ranks} ranks, but the launcher started "
            f"{launched.world_size}. Leave --mesh out, or give it the launcher's number."
        )
    return launched.rank, launched.world_size, launched.local_rank


def _check_device(options: DemoOptions, needed: int) -> None:
    if options.device != "cuda":
        return
    found = torch.cuda.device_count()  # `is_available` would initialize CUDA, which breaks later forks
    if found < needed:
        raise MeshError(
            f"--device cuda: got {found} GPUs, expected {needed}, one per rank. "
            f"Use a mesh that fits, as in --mesh dp={max(found, 1)}, or --device cpu."
        )


@contextmanager
def _mesh(place: _Place) -> Iterator[DeviceMesh | None]:
    """Yield the mesh of all ranks; None for a single rank."""
    kind = place.device.type
    if kind == "cuda":
        torch.cuda.set_device(place.device)
    if place.ranks == 1:
        yield None
        return
    joins = not dist.is_initialized()  # ranks of `fxdp.launch` have joined
    if joins:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield init_device_mesh(kind, (place.ranks,), mesh_dim_names=("dp",))
    finally:
        if joins:
            dist.destroy_process_group()


def _run(options: DemoOptions, place: _Place, mesh: DeviceMesh | None) -> int:
    console = Console(quiet=place.rank != 0)
    announce(console, options, place.ranks)
    reference = _one_device(console, options, place)
    curve, plan = _all_ranks(console, options, place, mesh)
    if reference is None:
        return 0
    return summarize(console, options, place.ranks, reference, curve, plan)


def _one_device(console: Console, options: DemoOptions, place: _Place) -> Curve | None:
    """Train the plain model on rank 0; ranks meet at a barrier each step, so that no wait is long."""
    if place.rank != 0:
        for _ in range(options.steps):
            dist.barrier()
        return None
    model = make_model(options, place.device)
    steps = train(partial(call, options, model), model.parameters(), _batches(options, place.device))
    return watched(console, "one device", options, _waited_for(place, steps))


def _waited_for(place: _Place, steps: Iterator[TrainingStep]) -> Iterator[TrainingStep]:
    for step in steps:
        if place.ranks > 1:
            dist.barrier()
        yield step


def _all_ranks(
    console: Console, options: DemoOptions, place: _Place, mesh: DeviceMesh | None
) -> tuple[Curve, Plan]:
    """Train the compiled model on all ranks, each on its part of the batches."""
    model = make_model(options, place.device)
    compiled = fxdp.compile(model, mesh, backend=options.backend)
    batches = (batch.part(place.rank, place.ranks) for batch in _batches(options, place.device))
    steps = train(partial(call, options, compiled), model.parameters(), batches)
    curve = watched(console, count_ranks(place.ranks), options, steps, first="capture and compile")
    return curve, compiled.plan


def _batches(options: DemoOptions, device: torch.device) -> Iterator[TextBatch]:
    corpus = Corpus.from_standard_library()
    for step in range(options.steps):
        yield corpus.batch(step, options.batch, LENGTH).to(device)
