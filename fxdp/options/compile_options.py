"""What a user may choose about a compilation, checked once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxdp.capture.batch_dims import RowsPerSample
from fxdp.capture.mixed_precision import MixedPrecision, policy_faults
from fxdp.capture.ragged_rows import Rows
from fxdp.errors import InputError, a_kind
from fxdp.ir.network.link_cost import LinkCost
from fxdp.options.option_checks import ANY_COUNT, SWITCH, Expected, faults_of, is_count, one_of, shown
from fxdp.options.option_names import refuse_unknown
from fxdp.options.option_values import (
    GROUPS,
    ActivationCheckpointing,
    Bitwise,
    Communication,
    Debug,
    OptionGroup,
    Pipeline,
)

_log = logging.getLogger("fxdp")
CHEAPEST_FIRST = "replicate", "optimizer", "shard"
"""Strategies by what they communicate and wait for, the least first; the last needs the least memory."""


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `fxdp.compile`; see there for their meaning.

    Options that hold several others are given as None, a dict or another form that `fxdp.compile` accepts;
    the attribute is always their dataclass.
    """

    loss_fn: Callable[..., Tensor] | None = None
    backend: str = "inductor"
    strategy: str = "replicate"
    memory_limit: int | None = None
    reshard_after_forward: bool | int = True
    mp_policy: Any = None
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    pipeline: Pipeline = field(default_factory=Pipeline)
    communication: Communication = field(default_factory=Communication)
    batch_dims: Any = None
    pad: Any = None
    rng: str = "sharded"
    numerics: Bitwise = field(default_factory=Bitwise)
    strict: bool = False
    fallback: str | None = None
    debug: Debug = field(default_factory=Debug)

    def __post_init__(self) -> None:
        faults = faults_of(vars(self), _EXPECTED)
        for name, kind in GROUPS.items():
            value, found = kind.read(name, getattr(self, name))
            object.__setattr__(self, name, value)  # frozen for everybody else
            faults += found
        faults += self._budget_faults() + self._block_faults()
        faults += _leaf_faults("batch_dims", self.batch_dims, (int, RowsPerSample, Rows), _DIMS)
        faults += _leaf_faults("pad", self.pad, (int, float, bool), "a number")
        faults += policy_faults(self.mp_policy)
        loss_fn: Any = self.loss_fn
        if loss_fn is not None and not callable(loss_fn):
            faults.append(f"loss_fn is {a_kind(loss_fn)}, expected a callable (output, target) -> loss")
        if faults:
            raise InputError("fxdp.compile cannot take these options:\n  " + "\n  ".join(faults))

    def _budget_faults(self) -> list[str]:
        budget = self.activation_checkpointing.memory_budget
        if budget < 1 and self.backend == "eager":
            return [
                f"activation_checkpointing: memory_budget is {budget} with backend='eager', which saves all; "
                "expected backend='inductor', or modules, as activation_checkpointing=['layers.*']"
            ]
        return []

    def _block_faults(self) -> list[str]:
        if self.block is None:
            return []
        others = {
            f"pipeline={self.pipeline}": self.pipeline.microbatches > 1,
            f"rng={self.rng!r}": self.single_device_rng,
            f"fallback={self.fallback!r}": self.fallback is not None,
        }
        why = "blocks are the micro-batches, draw alike on any mesh, and global tensors have none"
        return [f"numerics is {self.numerics} with {name}: {why}" for name, given in others.items() if given]

    @classmethod
    def named(
        cls, given: Mapping[str, Any], where: str = "fxdp.compile", others: Sequence[str] = ()
    ) -> Options:
        """Return the options of these names; `where` is the function that got them, `others` its own options.

        Raises
        ------
        InputError : names that are no options, with today's spelling or a near name; invalid values.
        """
        refuse_unknown(given, [*(f.name for f in fields(cls)), *others], where)
        return cls(**given)

    @property
    def single_device_rng(self) -> bool:
        """Whether random values are drawn in full on every rank, as one device would draw them."""
        return self.rng == "single-device"

    @property
    def equal_draws(self) -> bool:
        """Whether the ranks' generators must be in one state when a program draws."""
        return self.single_device_rng or self.block is not None

    @property
    def block(self) -> int | None:
        """The number of samples in a block of the global batch, for `fxdp.Bitwise`; None: no blocks."""
        return self.numerics.block

    @property
    def fuses_blocks(self) -> bool:
        """Whether Inductor compiles the blocks of `fxdp.Bitwise`, so that the bits depend on the stages."""
        return self.block is not None and self.backend == "inductor"

    @property
    def has_microbatches(self) -> bool:
        """Whether a rank's batch may be split into several micro-batches; a block is one, even if alone."""
        return self.block is not None or self.pipeline.microbatches > 1

    @property
    def own_statistics(self) -> bool:
        """Whether BatchNorm normalizes each micro-batch of each rank by its own statistics."""
        return self.pipeline.batch_stats == "microbatch"

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
        size = self.communication.bucket_cap_mb
        return None if size is None else max(1, int(size * 1024 * 1024))

    @property
    def link(self) -> LinkCost | None:
        """What the network between the ranks costs, if the user says."""
        speed = self.communication.link_gbit
        return None if speed is None else LinkCost.of_speed(speed)

    def warn_idle(self) -> None:
        """Say which options given have no effect on a program without stages and micro-batches."""
        given = {
            f"pipeline=fxdp.Pipeline(stages={self.pipeline.stages!r})": self.pipeline.stages not in (None, 1),
            f"activation_checkpointing={self.activation_checkpointing.mode!r}":
                self.activation_checkpointing.mode != "never",
        }  # fmt: skip
        if idle := [name for name, is_given in given.items() if is_given]:
            _log.warning(
                "%s: without effect, as the mesh has no pp axis of several ranks and microbatches is 1",
                ", ".join(idle),
            )

    def lines(self) -> list[str]:
        """Return the options as text that must be equal on all ranks."""
        named: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            inner = vars(value) if isinstance(value, OptionGroup) else {}
            named |= {f"{f.name}.{name}": own for name, own in inner.items()} or {f.name: value}
        del named["loss_fn"], named["debug.dump_dir"]
        loss = getattr(self.loss_fn, "__qualname__", type(self.loss_fn).__qualname__)
        return [*(f"option {name}={value!r}" for name, value in named.items()), f"option loss_fn={loss}"]


_DIMS = "an int, fxdp.Rows, RowsPerSample"
_EXPECTED: dict[str, Expected] = {
    "backend": one_of("inductor", "eager"),
    "strategy": one_of(*CHEAPEST_FIRST, "auto"),
    "rng": one_of("sharded", "single-device"),
    "fallback": (lambda value: value in (None, "eager"), "None or 'eager'"),
    "strict": SWITCH,
    "reshard_after_forward": (
        lambda value: isinstance(value, bool) or is_count(value, most=ANY_COUNT),
        "True, False, or among how many ranks the backward gathers parameters",
    ),
    "memory_limit": (
        lambda value: value is None or is_count(value, most=ANY_COUNT),
        "the bytes that a rank may hold, as 16 * 2**30",
    ),
}
"""Of the options that one can judge by themselves."""


def _leaf_faults(name: str, value: Any, kinds: tuple[type, ...], words: str) -> list[str]:
    """Return the fault of a pytree prefix with a leaf of another type; the first call checks the rest."""
    leaves = [leaf for leaf in tree_leaves(value) if leaf is not None]
    # a bool is an int to Python, and True the dim 1, which nobody means
    wrong = [x for x in leaves if not isinstance(x, kinds) or (isinstance(x, bool) and bool not in kinds)]
    if not wrong:
        return []
    return [f"{name} has {shown(wrong[0])}, expected {words}, None, or a container of these"]
