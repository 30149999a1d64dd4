"""Which strategy serves the programs of a compiled model, where memory decides or is limited."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from fxdp.capture.captured import Captured
from fxdp.compiler.device_memory import device_memory
from fxdp.compiler.prepare import regathers
from fxdp.compiler.program import Program
from fxdp.compiler.strategy_choice import check_fit, choose, legal_strategies
from fxdp.errors import InputError
from fxdp.module.model_checks import device_type
from fxdp.module.plain_modes import plain_modes
from fxdp.module.sharded_parameters import materialise, shard_parameters
from fxdp.options import CHEAPEST_FIRST, Options
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.failure import everywhere, refusing
from fxdp.ranks.joined import Joined
from fxdp.ranks.resolve import with_rows

_STATIC = 4
"""Values of each trained parameter's size that lie in memory all the time: it, its gradient, Adam's two."""


class WantsRowsError(Exception):
    """The cheapest strategy that fits deals out parameters which all ranks hold whole as yet."""


class Strategies:
    """Makes programs, each by the strategy that was asked for, or by the cheapest that fits."""

    def __init__(self, joined: Joined, options: Options, *, dealt: bool) -> None:
        """`dealt` says whether the parameters lie in rows by now."""
        self._joined, self._options, self._dealt = joined, options, dealt
        self._limit: int | None = None

    def make(self, captured: Captured, sizes: Mapping[str, int]) -> Program:
        """The program of a capture, for the largest part of the batch; all ranks call this together.

        Raises
        ------
        WantsRowsError : on all ranks alike.
        InputError : the predicted peak is above the limit.
        """
        if self._limit is None:
            self._limit = limit_of(self._joined, self._options)
        among = CHEAPEST_FIRST[1:] if self._dealt else CHEAPEST_FIRST
        mesh, limit = self._joined.mesh, self._limit
        with refusing(self._joined), plain_modes():
            program = choose(captured, mesh, self._options, sizes, limit, among=among)
        if limit is None or program.predicted <= limit:
            if program.options.shards and not self._dealt:
                raise WantsRowsError
            return program
        with refusing(self._joined), plain_modes():
            other = self._best_of_all(captured, sizes, limit)
        try:
            check_fit(program, sizes, limit, other)
        except InputError as error:
            raise everywhere(error) from None
        return program

    def _best_of_all(self, captured: Captured, sizes: Mapping[str, int], limit: int) -> Program | None:
        """What `strategy="auto"` would have chosen, for the refusal of another."""
        if self._options.strategy == "auto":
            return None
        return choose(captured, self._joined.mesh, replace(self._options, strategy="auto"), sizes, limit)


def limit_of(joined: Joined, options: Options) -> int | None:
    """The bytes that a rank may plan with, None for whatever it needs; all ranks call this together."""
    if options.memory_limit is not None or options.strategy != "auto":
        return options.memory_limit
    device = joined.mesh.device_type
    rows: list[tuple[str, int]] = gather_objects(joined, (socket.gethostname(), device_memory(device)))
    hosts = [host for host, _ in rows]
    # ranks of one host share its memory, but not GPUs
    return min(size // (hosts.count(host) if device == "cpu" else 1) for host, size in rows)


def begins_dealt(module: nn.Module, joined: Joined, options: Options) -> bool:
    """Whether parameters are dealt out before the first call: if that is asked for, or surely needed."""
    if options.strategy != "auto":
        return options.shards
    legal = legal_strategies(joined.mesh, options)
    if legal == ("replicate",) or joined.mesh.world == 1:
        return False
    parameters = list(module.parameters())
    if "replicate" not in legal or any(p.is_meta for p in parameters):
        return True
    whole = sum(p.nbytes * (_STATIC if p.requires_grad else 1) for p in parameters)
    limit = limit_of(joined, options)
    return limit is not None and limit < whole


def deal_out(module: nn.Module, joined: Joined, options: Options) -> tuple[Joined, set[str]]:
    """Deal a model's parameters out; with groups for rows, and the names of tensors that got no values.

    All ranks call this together.

    Raises
    ------
    AgreementError : the ranks hold different models.
    RankFailedError : another rank failed or died.
    """
    joined = with_rows(joined, regathers(joined.mesh, options))
    if device_type(module) == "meta":
        return joined, materialise(module, joined)
    shard_parameters(module, joined)
    return joined, set()
