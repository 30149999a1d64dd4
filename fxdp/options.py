"""What a user may choose about a compilation, checked once."""

from __future__ import annotations

import difflib
import logging
import os
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxdp.capture.batch_dims import RowsPerSample
from fxdp.capture.mixed_precision import MixedPrecision, policy_faults
from fxdp.errors import InputError, a_kind
from fxdp.ir.link_cost import LinkCost
from fxdp.pipeline.schedule.catalogue import check_name

_log = logging.getLogger("fxdp")
_MOST = 4096
"""Of micro-batches and of stages: a step is written out, a few nodes for each."""
_SLOWEST = 1e-6
"""Gbit/s: less is no network."""
CHEAPEST_FIRST = "replicate", "optimizer", "shard"
"""Strategies by what they communicate and wait for, the least first; the last needs the least memory."""


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `fxdp.compile`; see there for their meaning."""

    loss_fn: Callable[..., Tensor] | None = None
    strategy: str = "replicate"
    memory_limit: int | None = None
    reshard_after_forward: bool | int = True
    mp_policy: Any = None
    batch_dims: Any = None
    pad: Any = None
    bucket_mb: float | None = None
    link_gbit: float | None = None
    rng: str = "sharded"
    uneven: bool = True
    compute: str = "inductor"
    microbatches: int = 1
    schedule: str = "1f1b"
    stages: int | Sequence[str] | None = None
    checkpoint: str = "never"
    activation_memory_budget: float = 1.0
    recompute: Sequence[str] = ()
    gradients: str = "everywhere"
    batch_stats: str = "global"
    check_replicas: int = 100
    verify: bool = True
    strict: bool = False
    dump_dir: Path | str | None = None

    def __post_init__(self) -> None:
        given = ((name, getattr(self, name), *wanted) for name, wanted in _EXPECTED.items())
        faults = [f"{name} is {_shown(x)}, expected {words}" for name, x, fits, words in given if not fits(x)]
        faults += self._budget_faults()
        faults += _leaf_faults("batch_dims", self.batch_dims, (int, RowsPerSample), "an int, RowsPerSample")
        faults += _leaf_faults("pad", self.pad, (int, float, bool), "a number")
        faults += _folder_faults(self.dump_dir)
        faults += policy_faults(self.mp_policy)
        loss_fn: Any = self.loss_fn
        if loss_fn is not None and not callable(loss_fn):
            faults.append(f"loss_fn is {a_kind(loss_fn)}, expected a callable (output, target) -> loss")
        if faults:
            raise InputError("fxdp.compile cannot take these options:\n  " + "\n  ".join(faults))
        check_name(self.schedule)

    def _budget_faults(self) -> list[str]:
        budget: Any = self.activation_memory_budget
        given = f"activation_memory_budget is {_shown(budget)}"
        if not isinstance(budget, (int, float)) or isinstance(budget, bool) or not 0 <= budget <= 1:
            return [f"{given}, expected a share from 0 to 1"]
        if budget < 1 and self.compute == "eager":
            return [f"{given} with compute='eager', which saves all; expected compute='inductor'"]
        return []

    @classmethod
    def named(cls, given: Mapping[str, Any]) -> Options:
        """The options of these names.

        Raises
        ------
        InputError : names that are no options, with those that are near.
        """
        known = [f.name for f in fields(cls)]
        unknown = {n: difflib.get_close_matches(n, known, n=1) for n in given if n not in known}
        if unknown:
            lines = [f"{n}: did you mean {near[0]}?" if near else n for n, near in unknown.items()]
            listing = "\n  ".join(lines)
            raise InputError(
                f"fxdp.compile has no options of these names:\n  {listing}\nexpected some of "
                + ", ".join(known)
            )
        return cls(**given)

    @property
    def single_device_rng(self) -> bool:
        """Whether random values are drawn in full on every rank, as one device would draw them."""
        return self.rng == "single-device"

    @property
    def own_statistics(self) -> bool:
        """Whether BatchNorm normalizes each micro-batch of each rank by its own statistics."""
        return self.batch_stats == "microbatch"

    @property
    def shards(self) -> bool:
        """Whether parameters, their gradients and the optimizer's state are sharded over ranks."""
        return self.strategy in ("optimizer", "shard")

    @property
    def keeps_unsharded_for_backward(self) -> bool:
        """Whether unsharded parameters stay from the forward to the backward."""
        return self.reshard_after_forward is False or self.post_forward_size == 1

    @property
    def post_forward_size(self) -> int:
        """Among how many ranks the backward gathers parameters; 0: among all that hold rows."""
        value = self.reshard_after_forward
        return 0 if isinstance(value, bool) else value

    @property
    def may_shard(self) -> bool:
        """The same, if it turns out to be needed."""
        return self.strategy != "replicate"

    @property
    def keeps_unsharded(self) -> bool:
        """Whether unsharded parameters stay from call to call, until rows change."""
        return self.strategy == "optimizer"

    @property
    def may_keep_unsharded(self) -> bool:
        """The same, if there is room."""
        return self.strategy in ("optimizer", "auto")

    @property
    def precision(self) -> MixedPrecision | None:
        """In which dtypes the model computes, if not in its own."""
        return MixedPrecision.of(self.mp_policy)

    @property
    def bucket_bytes(self) -> int | None:
        """Bytes of a bucket of gradients or parameters, if the user says."""
        return None if self.bucket_mb is None else max(1, int(self.bucket_mb * 1024 * 1024))

    @property
    def link(self) -> LinkCost | None:
        """What the network between the ranks costs, if the user says."""
        return None if self.link_gbit is None else LinkCost.of_speed(self.link_gbit)

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
    """Whether it is a number of MiB that some memory could have."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**40


def _is_count(value: Any, *, least: int = 1, most: int = _MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


_Expected: TypeAlias = "tuple[Callable[[Any], bool], str]"
"""Whether a value is one that an option can have, and what these are in words."""


def _one_of(*choices: str) -> _Expected:
    return lambda value: isinstance(value, str) and value in choices, f"one of {choices}"


_SWITCH: _Expected = lambda value: isinstance(value, bool), "True or False"
_EXPECTED: dict[str, _Expected] = {
    "strategy": _one_of(*CHEAPEST_FIRST, "auto"),
    "rng": _one_of("sharded", "single-device"),
    "compute": _one_of("inductor", "eager"),
    "checkpoint": _one_of("never", "except_last", "always"),
    "gradients": _one_of("everywhere", "owner"),
    "batch_stats": _one_of("global", "microbatch"),
    **dict.fromkeys(("uneven", "verify", "strict"), _SWITCH),
    "reshard_after_forward": (
        lambda value: isinstance(value, bool) or _is_count(value, most=sys.maxsize),
        "True, False, or among how many ranks the backward gathers parameters",
    ),
    "bucket_mb": (lambda value: value is None or _is_size(value), "a size in MiB above 0"),
    "link_gbit": (
        lambda value: value is None or (_is_size(value) and value > _SLOWEST),
        "the Gbit/s of the network, above 0",
    ),
    "memory_limit": (
        lambda value: value is None or _is_count(value, most=sys.maxsize),
        "the bytes that a rank may hold, as 16 * 2**30",
    ),
    "check_replicas": (
        lambda value: _is_count(value, least=0, most=sys.maxsize), "a number of calls, or 0 for never"
    ),
    "recompute": (
        lambda value: _are_names(value) and all(value), "a list of names of modules, as in ['layers.*']"
    ),
    "microbatches": (_is_count, f"an integer of at least 1 and at most {_MOST:,}"),
    "schedule": (lambda value: isinstance(value, str), "a name, or the path of a file *.csv"),
    "stages": (
        lambda value: value is None or _are_names(value) or _is_count(value),
        "an integer of at least 1, or a list of module names",
    ),
}  # fmt: skip
"""Of the options that one can judge by themselves."""


def _leaf_faults(name: str, value: Any, kinds: tuple[type, ...], words: str) -> list[str]:
    """Leaves of a pytree prefix that are of no such type; whether it fits the inputs, the first call says."""
    leaves = [leaf for leaf in tree_leaves(value) if leaf is not None]
    # a bool is an int to Python, and True the dim 1, which nobody means
    wrong = [x for x in leaves if not isinstance(x, kinds) or (isinstance(x, bool) and bool not in kinds)]
    if not wrong:
        return []
    return [f"{name} has {_shown(wrong[0])}, expected {words}, None, or a container of these"]


def _folder_faults(value: Any) -> list[str]:
    """What speaks against a folder, as far as every rank can tell: one of them writes it."""
    if value is None:
        return []
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        return [f"dump_dir is {_shown(value)}, expected the path of a folder, as text or a Path"]
    folder = Path(value)
    there = next((p for p in (folder, folder.parent) if p.exists()), None)
    if there is None:  # maybe on another host, whose rank writes it
        return []
    if not there.is_dir():
        return [f"dump_dir is {str(value)!r}, but {there} is no folder"]
    if not os.access(there, os.W_OK | os.X_OK):
        return [f"dump_dir is {str(value)!r}, but {there} is not writable"]
    return []


def _shown(value: Any) -> str:
    """A value in few words: a number may have thousands of digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return reprlib.repr(value)
