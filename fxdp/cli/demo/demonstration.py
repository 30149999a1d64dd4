"""The demonstration: one device trains on the global batch, then all ranks train on their parts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console

import fxdp
from fxdp.cli.demo.command import DemoOptions
from fxdp.cli.demo.data import TextBatch, text_batch
from fxdp.cli.demo.show import announce, count_ranks, summarize, watched
from fxdp.cli.demo.training import LENGTH, Curve, call, make_model, train
from fxdp.cli.demo.unedited import run_unedited
from fxdp.errors import MeshError
from fxdp.settings import Settings


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
    if launched is not None and options.ranks not in (None, launched.world_size):
        raise MeshError(
            f"--mesh dp={options.ranks}: got {options.ranks} ranks, but the launcher started "
            f"{launched.world_size}. Leave --mesh out, or give it the launcher's number."
        )
    local = 0 if launched is None else launched.local_rank
    _check_device(options, local + 1)
    if options.device == "cuda":
        torch.cuda.set_device(local)
    joined = dist.is_initialized()  # as ranks of `fxdp.launch` have
    try:
        return _run(options)
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()


def _check_device(options: DemoOptions, needed: int) -> None:
    if options.device != "cuda":
        return
    found = torch.cuda.device_count()  # `is_available` would initialize CUDA, which breaks later forks
    if found < needed:
        raise MeshError(
            f"--device cuda: got {found} GPUs, expected {needed}, one per rank. "
            f"Use a mesh that fits, as in --mesh dp={max(found, 1)}, or --device cpu."
        )


def _run(options: DemoOptions) -> int:
    """Train on one device, then on all ranks, each on its part of the batches."""
    model = make_model(options)
    compiled = fxdp.compile(model, backend=options.backend)
    rank, ranks = compiled.mesh.rank, compiled.mesh.size
    console = Console(quiet=rank != 0)
    announce(console, options, ranks)
    reference = _one_device(console, options, rank)
    parts = (batch.part(rank, ranks) for batch in _batches(options))
    steps = train(partial(call, options, compiled), model.parameters(), parts)
    curve = watched(console, count_ranks(ranks), options, steps, first="capture and compile")
    if reference is None:
        return 0
    return summarize(console, options, ranks, reference, curve, compiled.plan)


def _one_device(console: Console, options: DemoOptions, rank: int) -> Curve | None:
    """Train the plain model on rank 0; ranks meet at a barrier each step, so that no wait is long."""
    if rank != 0:
        for _ in range(options.steps):
            dist.barrier()
        return None
    model = make_model(options)
    steps = train(partial(call, options, model), model.parameters(), _batches(options))
    return watched(console, "one device", options, steps, meets=dist.is_initialized())


def _batches(options: DemoOptions) -> Iterator[TextBatch]:
    for step in range(options.steps):
        yield TextBatch(*(rows.to(options.device) for rows in text_batch(step, options.batch, LENGTH)))
