"""What a user may choose about a compilation, checked once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from fxdp.capture.mixed_precision import MixedPrecision, policy_faults
from fxdp.errors import InputError
from fxdp.pipeline.schedule.catalogue import check_name

_log = logging.getLogger("fxdp")
_CHOICES = {
    "strategy": ("replicate", "shard"),
    "rng": ("sharded", "single-device"),
    "compute": ("inductor", "eager"),
    "checkpoint": ("never", "except_last", "always"),
    "gradients": ("everywhere", "owner"),
    "batch_stats": ("global", "microbatch"),
}


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `fxdp.compile`; see there for their meaning."""

    loss_fn: Callable[..., Tensor] | None = None
    strategy: str = "replicate"
    reshard_after_forward: bool = True
    mp_policy: Any = None
    batch_dims: Any = None
    pad: Any = None
    bucket_mb: float = 25.0
    rng: str = "sharded"
    uneven: bool = True
    compute: str = "inductor"
    microbatches: int = 1
    schedule: str = "1f1b"
    stages: int | Sequence[str] | None = None
    checkpoint: str = "never"
    gradients: str = "everywhere"
    batch_stats: str = "global"
    check_replicas: int = 100
    verify: bool = True
    strict: bool = False
    dump_dir: Path | str | None = None

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {getattr(self, name)!r}, expected one of {choices}"
            for name, choices in _CHOICES.items()
            if getattr(self, name) not in choices
        ]
        if not _is_size(self.bucket_mb):
            faults.append(f"bucket_mb is {self.bucket_mb!r}, expected a size in MiB above 0")
        reshard: Any = self.reshard_after_forward
        if not isinstance(reshard, bool):
            faults.append(f"reshard_after_forward is {reshard!r}, expected True or False")
        faults += policy_faults(self.mp_policy)
        faults += self._staging_faults()
        loss_fn: Any = self.loss_fn
        if loss_fn is not None and not callable(loss_fn):
            kind = type(loss_fn).__name__
            faults.append(f"loss_fn is a {kind}, expected a callable (output, target) -> loss")
        if faults:
            raise InputError("fxdp.compile was given options it does not know:\n  " + "\n  ".join(faults))
        check_name(self.schedule)

    def _staging_faults(self) -> list[str]:
        faults = []
        if not _is_count(self.microbatches):
            faults.append(f"microbatches is {self.microbatches!r}, expected an integer of at least 1")
        schedule: Any = self.schedule
        if not isinstance(schedule, str):
            faults.append(f"schedule is {self.schedule!r}, expected a name, or the path of a file *.csv")
        named = isinstance(self.stages, (list, tuple)) and all(isinstance(n, str) for n in self.stages)
        if not (self.stages is None or named or _is_count(self.stages)):
            faults.append(
                f"stages is {self.stages!r}, expected an integer of at least 1, or a list of module names"
            )
        return faults

    @property
    def single_device_rng(self) -> bool:
        """Whether random values are drawn whole on every rank, as one device would draw them."""
        return self.rng == "single-device"

    @property
    def own_statistics(self) -> bool:
        """Whether BatchNorm normalizes each micro-batch of each rank by its own statistics."""
        return self.batch_stats == "microbatch"

    @property
    def shards(self) -> bool:
        """Whether parameters, their gradients and the optimizer's state are dealt out over ranks."""
        return self.strategy == "shard"

    @property
    def precision(self) -> MixedPrecision | None:
        """In which dtypes the model computes, if not in its own."""
        return MixedPrecision.of(self.mp_policy)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a gradient bucket."""
        return max(1, int(self.bucket_mb * 1024 * 1024))

    def warn_idle(self) -> None:
        """Say which options given have no effect on a program without stages and micro-batches."""
        given = {"stages": self.stages not in (None, 1), "checkpoint": self.checkpoint != "never"}
        idle = [f"{name}={getattr(self, name)!r}" for name, is_given in given.items() if is_given]
        if idle:
            _log.warning(
                "%s: without effect, as the mesh has no pp axis of several ranks and microbatches is 1",
                ", ".join(idle),
            )

    def lines(self) -> list[str]:
        """The options as text that must be equal on all ranks."""
        skipped = {"loss_fn", "dump_dir"}
        named = [f"option {f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in skipped]
        loss = getattr(self.loss_fn, "__qualname__", type(self.loss_fn).__qualname__)
        return [*named, f"option loss_fn={loss}"]


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
