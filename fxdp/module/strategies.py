"""Choose the strategy of a compiled model's programs if memory decides or is limited."""

from __future__ import annotations

import contextlib
import socket
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxdp.capture.captured import Captured
from fxdp.compiler.device_memory import device_memory
from fxdp.compiler.prepare import post_forward_size
from fxdp.compiler.program import Program
from fxdp.compiler.strategy_choice import check_fit, choose, legal_strategies
from fxdp.errors import InputError
from fxdp.module.model_checks import device_type
from fxdp.options import CHEAPEST_FIRST, Options
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.liveness.failure import everywhere, refusing
from fxdp.ranks.mesh_init import with_shard_group
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.sharding.sharded_parameters import materialise, shard_parameters
from fxdp.torch_compat import compile_lock, compute_full_norms

_STATIC = 4
"""The number of values per element of a trained parameter held all the time: value, gradient, Adam's two."""


class WantsShardingError(Exception):
    """Signal that the cheapest strategy that fits shards parameters which all ranks still hold in full."""


class Strategies:
    """Factory of programs, each by the requested strategy or by the cheapest strategy that fits."""

    def __init__(self, process_mesh: ProcessMesh, options: Options, *, sharded: bool) -> None:
        """Create a factory; `sharded` says whether the parameters are already sharded."""
        self._process_mesh, self._options, self._sharded = process_mesh, options, sharded
        self._limit: int | None = None

    def make(self, captured: Captured, sizes: Mapping[str, int]) -> Program:
        """Return the program of a capture, for the largest part of the batch; a collective call.

        Raises
        ------
        WantsShardingError : on all ranks.
        InputError : the predicted peak is above the limit.
        """
        if self._limit is None:
            self._limit = _limit_of(self._process_mesh, self._options)
        among = CHEAPEST_FIRST[1:] if self._sharded else CHEAPEST_FIRST
        mesh, limit = self._process_mesh.mesh, self._limit
        with refusing(self._process_mesh), plain_modes():
            program = choose(captured, mesh, self._options, sizes, limit, among=among)
        if limit is None or program.predicted <= limit:
            if program.options.shards and not self._sharded:
                raise WantsShardingError
            return program
        with refusing(self._process_mesh), plain_modes():
            other = self._best_of_all(captured, sizes, limit)
        try:
            check_fit(program, sizes, limit, other)
        except InputError as error:
            raise everywhere(error) from None
        return program

    def _best_of_all(self, captured: Captured, sizes: Mapping[str, int], limit: int) -> Program | None:
        """Return the program that `strategy="auto"` would choose, to be named when a strategy is refused."""
        if self._options.strategy == "auto":
            return None
        return choose(
            captured, self._process_mesh.mesh, replace(self._options, strategy="auto"), sizes, limit
        )


def _limit_of(process_mesh: ProcessMesh, options: Options) -> int | None:
    """Return the bytes that a rank may plan with, None for no limit; a collective call."""
    if options.memory_limit is not None or options.strategy != "auto":
        return options.memory_limit
    device = process_mesh.mesh.device_type
    rows: list[tuple[str, int]] = gather_objects(process_mesh, (socket.gethostname(), device_memory(device)))
    hosts = [host for host, _ in rows]
    # ranks of one host share memory, but not GPUs
    return min(size // (hosts.count(host) if device == "cpu" else 1) for host, size in rows)


def begins_sharded(module: nn.Module, process_mesh: ProcessMesh, options: Options) -> bool:
    """Return whether to shard parameters before the first call: if requested, or certainly needed."""
    if options.strategy != "auto":
        return options.shards
    legal = legal_strategies(process_mesh.mesh, options)
    if legal == ("replicate",) or process_mesh.mesh.world == 1:
        return False
    parameters = list(module.parameters())
    if "replicate" not in legal or any(p.is_meta for p in parameters):
        return True
    full = sum(p.nbytes * (_STATIC if p.requires_grad else 1) for p in parameters)
    limit = _limit_of(process_mesh, options)
    return limit is not None and limit < full


def shard_model(
    module: nn.Module, process_mesh: ProcessMesh, options: Options
) -> tuple[ProcessMesh, set[str]]:
    """Shard a model's parameters; return the mesh with shard groups, and the names of tensors without values.

    A collective call.

    Raises
    ------
    AgreementError : the ranks hold different models.
    RankFailedError : another rank failed or died.
    """
    process_mesh = with_shard_group(process_mesh, post_forward_size(process_mesh.mesh, options))
    if device_type(module) == "meta":
        unset = materialise(module, process_mesh)
    else:
        shard_parameters(module, process_mesh)
        unset = set()
    if options.block is not None:
        for mesh in {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}:
            compute_full_norms(mesh)
    return process_mesh, unset


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """Compile outside of inference mode, with the caller's gradient mode, one thread at a time.

    Inductor warns about itself (deprecations, tunables); these warnings must not end a run with `-W error`.
    """
    enabled = torch.is_grad_enabled()
    with (
        compile_lock,
        torch.inference_mode(False),
        torch.set_grad_enabled(enabled),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
