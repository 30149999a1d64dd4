"""Options that belong together as one value of `fxdp.compile`: a frozen dataclass or a dict of its fields."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from fxdp.errors import InputError
from fxdp.options.option_checks import (
    ANY_COUNT,
    COUNT,
    SWITCH,
    Expected,
    are_names,
    faults_of,
    folder_faults,
    is_count,
    is_share,
    is_size,
    one_of,
    shown,
)
from fxdp.pipeline.schedule.catalogue import check_name

_SLOWEST = 1e-6
"""Gbit/s: less is no network."""


@dataclass(frozen=True, repr=False)
class OptionGroup:
    """Base class of options that belong together: checks all fields at once, prints as the user's code."""

    _expected: ClassVar[Mapping[str, Expected]] = {}

    def __post_init__(self) -> None:
        if faults := self._faults(vars(self)):
            lines = "\n  ".join(faults)
            raise InputError(f"fxdp.{type(self).__name__} cannot take these values:\n  {lines}")

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return f"fxdp.{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the fields."""
        return [f.name for f in fields(cls)]

    @classmethod
    def written(cls, given: Mapping[str, Any]) -> str:
        """Return the code that makes a value of these fields, in few words; they need not be accepted."""
        return f"fxdp.{cls.__name__}({', '.join(f'{name}={shown(x)}' for name, x in given.items())})"

    @classmethod
    def read(cls, option: str, given: Any) -> tuple[Self, list[str]]:
        """Return the value of this option as the user gave it, and one line for each fault of it."""
        if given is None or isinstance(given, cls):
            return given or cls(), []
        if not isinstance(given, Mapping):
            return cls(), [f"{option} is {shown(given)}, expected {cls._forms()}"]
        faults = [_unknown(name, cls.names()) for name in given if name not in cls.names()]
        faults += cls._faults(given)
        return (cls(), [f"{option}: {fault}" for fault in faults]) if faults else (cls(**given), [])

    @classmethod
    def _faults(cls, given: Mapping[str, Any]) -> list[str]:
        return faults_of(given, cls._expected)

    @classmethod
    def _forms(cls) -> str:
        return f"fxdp.{cls.__name__}(...), or a dict of {', '.join(cls.names())}"


@dataclass(frozen=True, repr=False)
class Pipeline(OptionGroup):
    """The pipeline: micro-batches, stages, and the order in which they run.

    With `microbatches` above 1, and on a mesh with a `pp` axis, the call itself runs forward and backward,
    and `loss.backward()` hands the gradients out; the loss must be in the graph, as the output named `loss`
    or the first scalar.

    Parameters
    ----------
    microbatches : the number of parts into which a step splits each rank's batch, one after the other.
    schedule : the order of stages and micro-batches: `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zero-bubble"`,
        or the path of a CSV file in torch's action words. None: `"1f1b"`; rounds where blocks need others.
    stages : the number of pipeline stages, balanced by cost, or the names of the modules at which stages 1,
        2, ... begin. None: one per pipeline rank (two with `"interleaved"`).
    batch_stats : the statistics by which a BatchNorm in training normalizes. `"global"`: mean and variance of
        the full batch, which a micro-batch cannot know: `microbatches` above 1 are refused. `"microbatch"`:
        those of each micro-batch of each rank alone (one value per channel has no variance: it becomes the
        bias); the running statistics move once per step, by mean and unbiased variance of the global batch,
        on all ranks alike.
    gradients : `"everywhere"`: every rank gets every gradient, so that any optimizer, clipping and state dict
        are those of one device; `"owner"`: a parameter's gradient stays on the ranks whose stages read it
        and is None elsewhere, which sends nothing but the gradients of weights tied over stages.

    Raises
    ------
    InputError : values that are not accepted, all of them at once.
    ScheduleError : an unknown schedule.
    """

    microbatches: int = 1
    schedule: str | None = None
    stages: int | Sequence[str] | None = None
    batch_stats: str = "global"
    gradients: str = "everywhere"

    _expected: ClassVar = {
        "microbatches": COUNT,
        "schedule": (lambda x: x is None or isinstance(x, str), "a name, or the path of a file *.csv"),
        "stages": (
            lambda value: value is None or are_names(value) or is_count(value),
            "an integer of at least 1, or a list of module names",
        ),
        "batch_stats": one_of("global", "microbatch"),
        "gradients": one_of("everywhere", "owner"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.schedule)


@dataclass(frozen=True, repr=False)
class ActivationCheckpointing(OptionGroup):
    """The activations that a backward computes again instead of reading what the forward saved.

    Random numbers and sums over ranks are always saved, so that none is drawn or communicated twice.

    Parameters
    ----------
    memory_budget : the share of the activations that a forward may save for its backward, 0 to 1: below 1 the
        backward computes others again, those first that cost least for their bytes, by torch's partitioner
        (`torch._functorch.config.activation_memory_budget`). Needs `backend="inductor"`.
    modules : names of modules, in which `*` and `?` stand for anything, as in `["layers.*"]`: a backward
        computes their forward again from their inputs, as `torch.utils.checkpoint` does, with
        `backend="eager"`, too. The outputs of the modules are saved.
    mode : the micro-batches for which a stage of a pipeline runs its forward again: `"never"`,
        `"except_last"` or `"always"`.

    Raises
    ------
    InputError : values that are not accepted, all of them at once.
    """

    memory_budget: float = 1.0
    modules: Sequence[str] = ()
    mode: str = "never"

    _expected: ClassVar = {
        "memory_budget": (is_share, "a share from 0 to 1"),
        "modules": (
            lambda value: are_names(value) and all(value), "a list of names of modules, as in ['layers.*']"
        ),
        "mode": one_of("never", "except_last", "always"),
    }  # fmt: skip

    @classmethod
    def read(cls, option: str, given: Any) -> tuple[Self, list[str]]:
        """Read a number as memory budget, a list as modules, a string as mode, others as every group."""
        if isinstance(given, str):
            given = {"mode": given}
        elif isinstance(given, (list, tuple)):
            given = {"modules": given}
        elif isinstance(given, (int, float)) and not isinstance(given, bool):
            given = {"memory_budget": given}
        return super().read(option, given)

    @classmethod
    def _forms(cls) -> str:
        return f"a memory budget from 0 to 1, a list of modules, a mode, {super()._forms()}"


@dataclass(frozen=True, repr=False)
class Communication(OptionGroup):
    """The sizes of messages, and the speed of the network that they are cut for.

    Parameters
    ----------
    bucket_cap_mb : MiB of gradients that are reduced in one all-reduce. None: 25; where ranks share memory 4,
        or half of all if that is between 1 and 4; over a network (gloo) as many as let the sums run while the
        backward does, by the link's speed, which is measured once. Sharded parameters are not cut apart: as
        many (4 where ranks share memory), or the least more, below twice as many, with which they are
        `ceil(bytes / bucket)` buckets; a larger one has its own.
    uneven : False: you promise that at each call the inputs of all ranks have the same sizes, in all dims,
        which saves a small exchange per call; only the first call of each size is checked.
    link_gbit : the speed of the network between the ranks, in Gbit/s. By it buckets are cut, and gradients
        summed or computed in full on each rank from their factors: what samples bring to a linear layer or an
        embedding is often less to send than its gradient. None: measured, where ranks share no memory (gloo).

    Raises
    ------
    InputError : values that are not accepted, all of them at once.
    """

    bucket_cap_mb: float | None = None
    link_gbit: float | None = None
    uneven: bool = True

    _expected: ClassVar = {
        "bucket_cap_mb": (lambda value: value is None or is_size(value), "a size in MiB above 0"),
        "link_gbit": (
            lambda value: value is None or (is_size(value) and value > _SLOWEST),
            "the Gbit/s of the network, above 0",
        ),
        "uneven": SWITCH,
    }


@dataclass(frozen=True, repr=False)
class Debug(OptionGroup):
    """Checks while compiling and running, and the text of what is compiled.

    Parameters
    ----------
    verify : check the invariants of the graph after each pass.
    check_replicas : the number of calls after which the ranks compare, by 64 bits, the parameters and buffers
        that programs read, inputs without a batch dim, and the batch where several ranks pass the same (in a
        pipeline); also at calls 2, 4, 8, ..., and at the first call after `eval()` or `state_dict()`, unless
        `uneven=False` spares its exchange. Left out are parameters that are sharded, or whose gradients stay
        with their owners, as ranks hold different values of these. 0: never.
    dump_dir : a folder for the program's text after each pass.

    Raises
    ------
    InputError : values that are not accepted, all of them at once.
    """

    verify: bool = True
    check_replicas: int = 100
    dump_dir: Path | str | None = None

    _expected: ClassVar = {
        "verify": SWITCH,
        "check_replicas": (
            lambda value: is_count(value, least=0, most=ANY_COUNT), "a number of calls, or 0 for never"
        ),
    }  # fmt: skip

    @classmethod
    def _faults(cls, given: Mapping[str, Any]) -> list[str]:
        return super()._faults(given) + folder_faults("dump_dir", given.get("dump_dir"))


@dataclass(frozen=True, repr=False)
class Bitwise(OptionGroup):
    """The same bits on any mesh: a step runs over blocks of the global batch, whose borders no mesh moves.

    Each rank holds full blocks, runs one after the other as micro-batches, and losses, counts and gradients
    are summed in one binary tree over the numbers of the blocks. The reference is the same program on one
    device, which equals the model up to rounding. See docs/bitwise.md.

    Parameters
    ----------
    block : the number of consecutive samples of the global batch in a block; the last one may be smaller.
        None: no blocks, which is `numerics="exact"`.

    Raises
    ------
    InputError : values that are not accepted, all of them at once.
    """

    block: int | None = None

    _expected: ClassVar = {
        "block": (
            lambda value: value is None or is_count(value, most=ANY_COUNT), "a number of samples, at least 1"
        ),
    }  # fmt: skip

    @classmethod
    def read(cls, option: str, given: Any) -> tuple[Self, list[str]]:
        """Read `"exact"` as no blocks, others as every group."""
        return super().read(option, None if isinstance(given, str) and given == "exact" else given)

    @classmethod
    def _forms(cls) -> str:
        return "'exact', fxdp.Bitwise(block=...), as fxdp.Bitwise(block=4), or a dict of block"


GROUPS: dict[str, type[OptionGroup]] = {
    "activation_checkpointing": ActivationCheckpointing,
    "pipeline": Pipeline,
    "communication": Communication,
    "numerics": Bitwise,
    "debug": Debug,
}
"""The options that hold several, by name."""


def _unknown(name: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, 1)
    return f"has no {shown(name)}, expected {near[0] if near else 'some of ' + ', '.join(known)}"
