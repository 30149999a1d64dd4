"""A torch.fx compiler for automatic data parallelism with single-device semantics.

compiled = fxdp.compile(model, mesh)
loss = compiled(x, y); loss.backward(); optimizer.step()
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

# `fxdp --help` and the errors need no torch, whose import takes seconds: all else is imported when asked for
if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fxdp import skip
    from fxdp.capture.batch_dims import RowsPerSample
    from fxdp.ir.placements import P, R, S
    from fxdp.module.checkpoint.safetensors_file import save_safetensors
    from fxdp.module.checkpoint.saving import load, save
    from fxdp.module.compiled import CompiledModule
    from fxdp.module.dry_run import explain, plan
    from fxdp.oracle.report import Report
    from fxdp.oracle.verify import verify
    from fxdp.ranks.launcher import launch
    from fxdp.reports.plan import Plan
    from fxdp.reports.rows import CommRow
    from fxdp.rules.custom import register_rule
    from fxdp.rules.proof import Sample, check_rule


__all__ = [
    "AgreementError",
    "CaptureError",
    "CommRow",
    "CompiledModule",
    "DeadlockError",
    "ExactnessError",
    "FxdpError",
    "InputError",
    "MeshError",
    "P",
    "PlacementError",
    "Plan",
    "R",
    "RankFailedError",
    "Report",
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
    "explain",
    "launch",
    "load",
    "plan",
    "register_rule",
    "save",
    "save_safetensors",
    "skip",
    "verify",
]


_HOMES = {
    "CommRow": "reports.rows",
    "CompiledModule": "module.compiled",
    "P": "ir.placements",
    "Plan": "reports.plan",
    "R": "ir.placements",
    "Report": "oracle.report",
    "RowsPerSample": "capture.batch_dims",
    "S": "ir.placements",
    "Sample": "rules.proof",
    "check_rule": "rules.proof",
    "explain": "module.dry_run",
    "launch": "ranks.launcher",
    "load": "module.checkpoint.saving",
    "plan": "module.dry_run",
    "register_rule": "rules.custom",
    "save": "module.checkpoint.saving",
    "save_safetensors": "module.checkpoint.safetensors_file",
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
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    strategy: str = "replicate",
    memory_limit: int | None = None,
    reshard_after_forward: bool | int = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    batch_dims: Any = None,
    pad: Any = None,
    bucket_mb: float | None = None,
    link_gbit: float | None = None,
    rng: str = "sharded",
    uneven: bool = True,
    compute: str = "inductor",
    microbatches: int = 1,
    schedule: str = "1f1b",
    stages: int | Sequence[str] | None = None,
    checkpoint: str = "never",
    activation_memory_budget: float = 1.0,
    recompute: Sequence[str] = (),
    gradients: str = "everywhere",
    batch_stats: str = "global",
    check_replicas: int = 100,
    verify: bool = True,
    strict: bool = False,
    dump_dir: Path | str | None = None,
) -> CompiledModule:
    """Make `model` train data-parallel and pipelined over `mesh`, with the results of one device.

    Each rank passes its local batch; the global batch is their concatenation in rank order, uneven or
    empty parts included. Compilation happens at the first call.

    Parameters
    ----------
    model : any module that can be captured as one graph; it is not changed.
    mesh : a DeviceMesh with axes named `pp`, `dp`, `dp_replicate` or `dp_shard`. None: all ranks of the
        process group, or of torchrun, or this process alone.
    loss_fn : then `compiled(*inputs, target=y)` returns `loss_fn(model(*inputs), y)`, a scalar. In evaluation
        a call without `target=` returns the model's own output.
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
    batch_dims : the batch dim of each input, a pytree prefix of `(args, kwargs)` of int or None (no batch
        dim). None: dim 0 of every tensor input with at least one dim. `fxdp.RowsPerSample(4)` in the place
        of an int: four rows are one sample and stay together on a rank, as the model's `view(-1, 4)` asks.
    pad : the value with which each input is padded, at its end, to the longest rank's sequence: a number, or
        a pytree prefix of `(args, kwargs)`. None: all ranks must pass the same sizes, the batch aside.
    bucket_mb : MiB of gradients that are reduced in one all-reduce. None: 25; where ranks share memory 4, or
        half of all if that is between 1 and 4; over a network (gloo) as many as let the sums run while the
        backward does, by the link's speed, which is measured once. Sharded parameters are not cut apart: as
        many (4 where ranks share memory), or the least more, below twice as many, with which they are
        `ceil(bytes / bucket)` buckets; a larger one has its own.
    link_gbit : the speed of the network between the ranks, in Gbit/s. By it buckets are cut, and gradients
        summed or computed in full on each rank from their factors: what samples bring to a linear layer or an
        embedding is often less to send than its gradient. None: measured, where ranks share no memory (gloo).
    rng : `"sharded"`: ranks draw different random numbers, reproducible from one seed at a given mesh;
        `"single-device"`: all ranks draw what one device would for contiguous inputs (with `compute="eager"`,
        bit for bit); a call that draws is refused for others (a slice, a transposed one, `channels_last`).
        The ranks' generators must be in one state (`torch.manual_seed` with one number).
    uneven : False: you promise that at each call the inputs of all ranks have the same sizes, in all dims,
        which saves a small exchange per call; only the first call of each size is checked.
    compute : `"inductor"`: compiled; what it cannot compile runs as with `"eager"`, with a warning;
        `"eager"`: run the graph's ops as they are.
    microbatches : into how many parts a step splits each rank's batch, one after the other. Above 1, and on
        a mesh with a `pp` axis, the call itself runs forward and backward, and `loss.backward()` hands the
        gradients out; the loss must be in the graph, as the output named `loss` or the first scalar.
    schedule : in which order stages and micro-batches run: `"gpipe"`, `"1f1b"`, `"interleaved"`,
        `"zero-bubble"`, or the path of a CSV file in torch's action words.
    stages : how many pipeline stages, balanced by cost, or the names of the modules at which stages 1, 2, ...
        begin. None: one per pipeline rank (two with `"interleaved"`).
    checkpoint : for which micro-batches a stage runs its forward again instead of keeping what the backward
        needs: `"never"`, `"except_last"` or `"always"`.
    activation_memory_budget : the share of the activations that a forward may save for its backward, 0 to 1:
        below 1 the backward computes others again, those first that cost least for their bytes, by torch's
        partitioner. Random numbers are saved, and nothing is communicated twice.
    recompute : names of modules, in which `*` and `?` stand for anything, as in `["layers.*"]`: a backward
        computes their forward again from what goes into them, instead of saving it, with `compute="eager"`,
        too. What leaves them is saved; random numbers and sums over ranks are, too, so that none is drawn or
        communicated twice.
    gradients : `"everywhere"`: every rank gets every gradient, so that any optimizer, clipping and state dict
        are those of one device; `"owner"`: a parameter's gradient stays on the ranks whose stages read it
        and is None elsewhere, which sends nothing but the gradients of weights tied over stages.
    batch_stats : what a BatchNorm in training normalizes by. `"global"`: mean and variance of the full
        batch, which a micro-batch cannot know: `microbatches` above 1 are refused. `"microbatch"`: those of
        each micro-batch of each rank alone (one value per channel has no variance: it becomes the bias); the
        running statistics move once per step, by mean and unbiased variance of the global batch, on all ranks
        alike.
    check_replicas : after how many calls the ranks compare, by 64 bits, the parameters and buffers that
        programs read, inputs without a batch dim, and the batch where several ranks pass the same (in a
        pipeline); also at the first call after `eval()` or `state_dict()`, unless `uneven=False` spares its
        exchange. Left out are parameters that are sharded, or whose gradients stay with their owners, as
        ranks hold different values of these. 0: never.
    verify : check the invariants of the graph after each pass.
    strict : an op without a placement rule, which would run replicated, is an error.
    dump_dir : a folder for the program's text after each pass.

    Raises
    ------
    UnsupportedTorchError : torch is too old, or built without `torch.distributed`.
    MeshError : a mesh that does not fit, unknown axes, no process group.
    InputError : options that do not exist; a model that is compiled or wrapped for data parallelism already.
    ScheduleError : an unknown schedule.
    StageError, ScheduleError : at the first call, stages or a schedule that do not fit the model.
    """
    from fxdp.module.compiled import CompiledModule
    from fxdp.options import Options

    options = Options(
        loss_fn=loss_fn, strategy=strategy, memory_limit=memory_limit,
        reshard_after_forward=reshard_after_forward, mp_policy=mp_policy,
        batch_dims=batch_dims, pad=pad, bucket_mb=bucket_mb, link_gbit=link_gbit, rng=rng, uneven=uneven,
        compute=compute, microbatches=microbatches, schedule=schedule, stages=stages, checkpoint=checkpoint,
        activation_memory_budget=activation_memory_budget,
        recompute=recompute,
        gradients=gradients, batch_stats=batch_stats, check_replicas=check_replicas,
        verify=verify, strict=strict, dump_dir=dump_dir,
    )  # fmt: skip
    return CompiledModule(model, mesh, options)
