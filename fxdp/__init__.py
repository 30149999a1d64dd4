"""A torch.fx compiler for automatic data parallelism with single-device semantics.

compiled = fxdp.compile(model, mesh)
loss = compiled(x, y); loss.backward(); optimizer.step()
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from typing_extensions import Never

from fxdp.errors import (
    AgreementError,
    CaptureError,
    DeadlockError,
    ExactnessError,
    FxdpError,
    InputError,
    MeshError,
    PlacementError,
    RankFailedError,
    RuleError,
    ScheduleError,
    StageError,
    StateError,
    TorchMismatchError,
    UnsupportedTorchError,
    UntestedTorchWarning,
    VerifierError,
)
from fxdp.version import __version__ as __version__

if sys.platform == "win32":
    raise FxdpError("fxdp does not run on Windows, as its ranks are forked; expected Linux, such as WSL 2")

# `fxdp --help` and the errors need no torch, whose import takes seconds: all else is imported when asked for
if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fxdp import skip
    from fxdp.capture.batch_dims import RowsPerSample
    from fxdp.capture.ragged_rows import Rows
    from fxdp.eager.data.resumable_loader import ResumableLoader, data_loader
    from fxdp.eager.dispatch import eager_report
    from fxdp.eager.loader import global_batch, shard
    from fxdp.eager.tensor import GlobalTensor
    from fxdp.ir.types.placements import P, R, S
    from fxdp.module.checkpoint.safetensors_file import save_safetensors
    from fxdp.module.checkpoint.saving import load, save
    from fxdp.module.compiled import CompiledModule
    from fxdp.module.dry_run import explain, plan
    from fxdp.options.option_values import ActivationCheckpointing, Bitwise, Communication, Debug, Pipeline
    from fxdp.oracle.report import Report
    from fxdp.oracle.verify import verify
    from fxdp.ranks.launcher import launch
    from fxdp.reports.plan import Plan
    from fxdp.reports.rows import CommRow
    from fxdp.rules.custom import register_rule
    from fxdp.rules.proof import Sample, check_rule


__all__ = [
    "ActivationCheckpointing",
    "AgreementError",
    "Bitwise",
    "CaptureError",
    "CommRow",
    "Communication",
    "CompiledModule",
    "DeadlockError",
    "Debug",
    "ExactnessError",
    "FxdpError",
    "GlobalTensor",
    "InputError",
    "MeshError",
    "P",
    "Pipeline",
    "PlacementError",
    "Plan",
    "R",
    "RankFailedError",
    "Report",
    "ResumableLoader",
    "Rows",
    "RowsPerSample",
    "RuleError",
    "S",
    "Sample",
    "ScheduleError",
    "StageError",
    "StateError",
    "TorchMismatchError",
    "UnsupportedTorchError",
    "UntestedTorchWarning",
    "VerifierError",
    "check_rule",
    "compile",
    "data_loader",
    "eager_report",
    "explain",
    "global_batch",
    "launch",
    "load",
    "plan",
    "register_rule",
    "save",
    "save_safetensors",
    "shard",
    "skip",
    "verify",
]


_HOMES = {
    "ActivationCheckpointing": "options.option_values",
    "Bitwise": "options.option_values",
    "CommRow": "reports.rows",
    "Communication": "options.option_values",
    "CompiledModule": "module.compiled",
    "Debug": "options.option_values",
    "GlobalTensor": "eager.tensor",
    "P": "ir.types.placements",
    "Pipeline": "options.option_values",
    "Plan": "reports.plan",
    "R": "ir.types.placements",
    "Report": "oracle.report",
    "ResumableLoader": "eager.data.resumable_loader",
    "Rows": "capture.ragged_rows",
    "RowsPerSample": "capture.batch_dims",
    "S": "ir.types.placements",
    "Sample": "rules.proof",
    "check_rule": "rules.proof",
    "data_loader": "eager.data.resumable_loader",
    "eager_report": "eager.dispatch",
    "explain": "module.dry_run",
    "global_batch": "eager.loader",
    "launch": "ranks.launcher",
    "load": "module.checkpoint.saving",
    "plan": "module.dry_run",
    "register_rule": "rules.custom",
    "save": "module.checkpoint.saving",
    "save_safetensors": "module.checkpoint.safetensors_file",
    "shard": "eager.loader",
    "verify": "oracle.verify",
}
"""Where the names are that are imported when they are asked for."""


@atexit.register
def _broadcast_uncaught() -> None:
    """Tell ranks that wait at start-up for this one of the error by which it ends before it has compiled."""
    if getattr(sys, "last_value", None) is None or "fxdp.ranks.hooks" in sys.modules:  # which does so itself
        return
    torch_dist = sys.modules.get("torch.distributed")
    if torch_dist is not None and torch_dist.is_available() and torch_dist.is_initialized():
        import_module("fxdp.ranks.hooks")._broadcast_uncaught()


def __getattr__(name: str) -> Any:
    """A public name, or a room, which `import fxdp` has not imported yet."""
    if name in _HOMES:
        globals()[name] = found = getattr(import_module(f"fxdp.{_HOMES[name]}"), name)
        return found
    if not name.startswith("_"):
        try:
            return import_module(f"fxdp.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"fxdp.{name}":
                raise
    raise AttributeError(f"module 'fxdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def compile(
    model: nn.Module | Callable[..., Any],
    mesh: DeviceMesh | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    backend: str = "inductor",
    strategy: str = "replicate",
    memory_limit: int | None = None,
    reshard_after_forward: bool | int = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    activation_checkpointing: (
        ActivationCheckpointing | Mapping[str, Any] | Sequence[str] | str | float | None
    ) = None,
    pipeline: Pipeline | Mapping[str, Any] | None = None,
    communication: Communication | Mapping[str, Any] | None = None,
    batch_dims: Any = None,
    pad: Any = None,
    rng: str = "sharded",
    numerics: Bitwise | Mapping[str, Any] | str | None = None,
    strict: bool = False,
    fallback: str | None = None,
    debug: Debug | Mapping[str, Any] | None = None,
    **unknown: Never,  # refused with today's name of the option
) -> CompiledModule:
    """Make `model` train data-parallel and pipelined over `mesh`, with the results of one device.

    Each rank passes its local batch; the global batch is their concatenation in rank order, uneven or
    empty parts included. Compilation happens at the first call.

    An option with a value of several parts (`pipeline`, `communication`, `debug`, `activation_checkpointing`)
    takes a dict of the same names, too: `pipeline={"microbatches": 4}`.

    Parameters
    ----------
    model : any module that can be captured as one graph; it is not changed. Or a function that uses modules
        (of closures, globals, a bound method, `functools.partial`, arguments), as a loss of two networks:
        these modules are the model, under the names of the variables; a lone one keeps its own keys.
    mesh : a DeviceMesh with axes named `pp`, `dp`, `dp_replicate` or `dp_shard`. None: all ranks of the
        process group, or of torchrun, or this process alone.
    loss_fn : then `compiled(*inputs, target=y)` returns `loss_fn(model(*inputs), y)`, a scalar. In evaluation
        a call without `target=` returns the model's own output.
    backend : `"inductor"`: compiled; what it cannot compile runs as with `"eager"`, with a warning;
        `"eager"`: run the graph's ops as they are.
    strategy : `"replicate"`: every rank holds all parameters. `"shard"`: every rank holds its rows of each
        parameter, of its gradient and of the optimizer's state; the model's parameters become `DTensor`s, of
        which an optimizer is made afterwards. They are sharded along the axis `dp_shard`, or the only one.
        A model may be on the meta device: it is never materialized in full; its values are drawn by
        `reset_parameters()` and `_init_weights()`, module by module, or loaded. `"optimizer"`: gradients
        and optimizer state are sharded; each rank keeps full parameters, which are gathered once after each
        optimizer step.
        `"auto"`: the first of these that fits, `"shard"` with as many of the last layers unsharded until the
        backward as fit; `compiled.plan` says what it took and why. Parameters become `DTensor`s when memory
        asks for it, in a model that is small enough to be trained unsharded not before the first call.
    memory_limit : the bytes that a rank may hold, optimizer state as Adam's included. A program that is
        predicted to need more is refused before it runs. None: with `"auto"` those of the device.
    reshard_after_forward : with `strategy="shard"`, whether full values go after the forward and are
        gathered once more for the backward; False keeps them until it has read them. An int, a divisor of
        the ranks that hold shards: the size of the groups that keep one full copy each for the backward,
        which gathers within a group, as a host (ranks of one host that share memory need no second gather).
    mp_policy : in which dtypes the model computes: `param_dtype` for the parameters that its code sees and,
        with `cast_forward_inputs`, for its inputs; `output_dtype` for what it returns; `reduce_dtype` for the
        sums of gradients over ranks (None: `param_dtype`). Parameters, their gradients and the optimizer's
        state keep their own dtype. None: all as the model has it.
    activation_checkpointing : which activations a backward computes again instead of reading saved ones: a
        memory budget, the share that may be saved (0.5), or names of modules (`["layers.*"]`), or the
        micro-batches whose forward a stage of a pipeline runs again (`"always"`, `"except_last"`), or all of
        these as `fxdp.ActivationCheckpointing(...)`. None: everything is saved.
    pipeline : micro-batches, stages and their schedule, and the statistics of BatchNorm in micro-batches:
        `fxdp.Pipeline(microbatches=4)`. None: one micro-batch, and on a mesh with a `pp` axis one stage per
        pipeline rank.
    communication : size of buckets, speed of the network, and whether ranks may pass batches of different
        sizes: `fxdp.Communication(bucket_cap_mb=25)`. None: bucket and speed are chosen, the latter measured.
    batch_dims : the batch dim of each input, a pytree prefix of `(args, kwargs)` of int or None (no batch
        dim). None: dim 0 of every tensor input with at least one dim. `fxdp.RowsPerSample(4)` in the place
        of an int: four rows are one sample and stay together on a rank, as the model's `view(-1, 4)` asks.
        `fxdp.Rows("nodes")`: a ragged batch, whose axes have sizes of their own (docs/ragged.md).
    pad : the value with which each input is padded, at its end, to the longest rank's sequence: a number, or
        a pytree prefix of `(args, kwargs)`. None: all ranks must pass the same sizes, the batch aside; text
        with an `attention_mask` is padded as tokenizers do, with one line of the log.
    rng : `"sharded"`: ranks draw different random numbers, reproducible from one seed at a given mesh;
        `"single-device"`: all ranks draw what one device would for contiguous inputs (with `backend="eager"`,
        bit for bit); a call that draws is refused for others (a slice, a transposed one, `channels_last`).
        The ranks' generators must be in one state (`torch.manual_seed` with one number).
    numerics : `"exact"` (or None): equal to one device up to rounding, as the order of sums depends on the
        mesh. `fxdp.Bitwise(block=4)`: the same bits on any mesh whose ranks hold full blocks of 4 samples.
    strict : an op without a placement rule, which would run replicated, is an error; plans, and errors of
        capture, list all strategies of capture with the reason why each was left or not tried.
    fallback : `"eager"`: a call that capture refuses runs on global tensors, op by op: exact and slow. One
        warning names the line that capture refuses, and `compiled.plan` does. None: the call raises.
    debug : checks while compiling and running, and a folder for the text of the program:
        `fxdp.Debug(dump_dir="dumps")`. None: graphs are checked, and the replicas at calls 2, 4, 8, ..., and
        every 100.

    Raises
    ------
    UnsupportedTorchError : torch is too old, or built without `torch.distributed`.
    MeshError : a mesh that does not fit, unknown axes, no process group.
    InputError : options that do not exist, each with the one that is near or took its place; invalid values,
        all of them at once; a model that is compiled or wrapped for data parallelism already.
    ScheduleError, StageError : an unknown schedule; at the first call, one or stages that do not fit.
    """
    from fxdp.module.compiled import CompiledModule
    from fxdp.options import Options

    options = Options.named({
        "loss_fn": loss_fn, "backend": backend, "strategy": strategy, "memory_limit": memory_limit,
        "reshard_after_forward": reshard_after_forward, "mp_policy": mp_policy,
        "activation_checkpointing": activation_checkpointing, "pipeline": pipeline,
        "communication": communication, "batch_dims": batch_dims, "pad": pad, "rng": rng,
        "numerics": numerics, "strict": strict, "fallback": fallback, "debug": debug, **unknown,
    })  # fmt: skip
    return CompiledModule(model, mesh, options)
