"""Lightning: `Trainer(strategy=FxdpStrategy())`, and Fabric: `Fabric(strategy=FxdpFabricStrategy())`.

Importing this file registers the names "fxdp" and "fxdp_eager" (`backend="eager"`) with both, so that
`Trainer(strategy="fxdp")` and `--trainer.strategy fxdp` of a `LightningCLI` work.

Each full step of a LightningModule (`training_step`, `validation_step`) is a program: on every rank the loss
is the loss of the global batch, for any sizes of the local batches. Logged values become outputs of the
program and are logged afterwards. A `training_step` with manual optimization steps inside, so it runs on
global tensors, op by op. With Fabric, the forward of a module is a program.

Loaders keep their order; batches are split into parts for the ranks, without repeated samples in the last
batch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler

import fxdp
from fxdp.errors import a_kind
from fxdp.integrations.batch_parts import BatchParts, check_batches, loader_arguments
from fxdp.integrations.checks import check_replicated

_log = logging.getLogger("fxdp")


class FxdpStrategy(DDPStrategy):
    """Strategy that trains a LightningModule with fxdp; the options are those of `fxdp.compile`.

    A module with a compiled submodule runs unchanged; then the loss should be one of `loss_fn=`.
    """

    strategy_name = "fxdp"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        check_replicated(options)
        self._options = options
        self._steps: dict[str, Callable[..., Any]] = {}

    def setup_distributed(self) -> None:
        """Keep the random state, as on one device; Lightning would seed again, as `seed_everything` did."""
        on_gpu = self.root_device.type == "cuda"
        with isolate_rng(include_cuda=False), torch.random.fork_rng([self.root_device] if on_gpu else []):
            super().setup_distributed()

    def setup(self, trainer: Any) -> None:
        """Keep the loaders' own samplers: Lightning's sampler would shuffle and repeat samples."""
        trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of this rank's parts."""
        return _parts_of(dataloader, self)

    def configure_ddp(self) -> None:
        """Do not wrap the model."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own step on the global batch."""
        with self.precision_plugin.train_step_context():
            return self._step("training_step")(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own step on the global batch."""
        with self.precision_plugin.val_step_context():
            return self._step("validation_step")(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own step on the global batch."""
        with self.precision_plugin.test_step_context():
            return self._step("test_step")(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own step; the outputs are this rank's rows."""
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step")(*args, **kwargs)

    def _step(self, name: str) -> Callable[..., Any]:
        if name not in self._steps:  # created at the first step, when the module has all attributes
            module = self.lightning_module
            assert module is not None
            own = getattr(module, name)
            inside = _is_compiled_inside(module)
            self._steps[name] = own if inside else _compiled_step(own, module, self._options)
        return self._steps[name]

    def teardown(self) -> None:
        """Drop the programs of this fit."""
        self._steps.clear()
        super().teardown()


class FxdpFabricStrategy(FabricDDPStrategy):
    """Strategy for which `fabric.setup` compiles modules; the options are those of `fxdp.compile`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        check_replicated(options)
        self._options = options
        self._backward_sync_control: Any = _NothingToBlock()

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """None, to keep the loaders' own samplers."""
        return None

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of this rank's parts."""
        return _parts_of(dataloader, self)

    def setup_module(self, module: nn.Module) -> Any:
        """Return the compiled module."""
        return module if isinstance(module, fxdp.CompiledModule) else fxdp.compile(module, **self._options)


class _NothingToBlock:
    """Stand-in for Fabric's control of gradient synchronization; each backward of fxdp sums over ranks."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for `fabric.no_backward_sync` that does nothing."""
        return contextlib.nullcontext()


class _LoggingStep(nn.Module):
    """A step of a LightningModule as a module that returns the step's output and logged values."""

    def __init__(self, own: Callable[..., Any], module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self._own = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step, with the size of the global batch for values logged without a batch size."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        size = next((t.shape[0] for t in tensors if t.ndim), 1)  # a symbol: the size of the global batch
        logged: list[Any] = []

        def log(name: str, value: Any, *rest: Any, **how: Any) -> None:
            if rest:
                raise fxdp.CaptureError(f"self.log({name!r}, ...): expected its options as keyword arguments")
            if not isinstance(value, (Tensor, int, float)):
                raise fxdp.CaptureError(
                    f"self.log({name!r}, ...) was given {a_kind(value)}; expected a number or "
                    "tensor. Update and log metrics in on_train_batch_end or on_validation_batch_end"
                )
            given = how.get("batch_size")
            logged.append((name, value, {**how, "batch_size": size if given is None else given}))

        with _unreadable(self.module, log):
            return self._own(*args, **kwargs), logged


def _compiled_step(
    own: Callable[..., Any], module: LightningModule, options: dict[str, Any]
) -> Callable[..., Any]:
    if not module.automatic_optimization and own.__name__ == "training_step":
        return _global_step(own, module, options)
    compiled = fxdp.compile(_LoggingStep(own, module), **options)

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        numbers = {name: _Unread(name) for name in kwargs if name in ("batch_idx", "dataloader_idx")}
        first, *rest = args
        output, logged = compiled(first, *[_Unread("batch_idx") for _ in rest], **{**kwargs, **numbers})
        for name, value, how in logged:
            module.log(name, value, **_of_all_ranks(how))
        return output

    return step


def _global_step(
    own: Callable[..., Any], module: LightningModule, options: dict[str, Any]
) -> Callable[..., Any]:
    """Return a step that optimizes by itself, on global tensors."""
    _log.warning(
        "%s optimizes by itself, in its training_step, so this step runs on global tensors: exact, but op by "
        "op. A step that returns its loss is compiled; so is self.net = fxdp.compile(net, loss_fn=...)",
        type(module).__name__,
    )

    @functools.wraps(own)
    def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch = fxdp.global_batch(batch, options.get("mesh"), options.get("batch_dims"))
        size = next((t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.ndim), 1)

        def log(name: str, value: Any, *rest: Any, **how: Any) -> None:
            how = {**how, "batch_size": how.get("batch_size") or size}
            original(name, _plain(value), *rest, **_of_all_ranks(how))

        original, vars(module)["log"] = module.log, log
        try:
            return pytree.tree_map(_plain, own(batch, *args, **kwargs))
        finally:
            del vars(module)["log"]

    return step


def _plain(value: Any) -> Any:
    """Return a value of the global batch as a plain tensor: this rank's rows, or all of it."""
    if not isinstance(value, fxdp.GlobalTensor):
        return value
    return value.local if value.local_sizes else value.full()


def _of_all_ranks(how: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `self.log` for a value of the global batch, to be summed over steps alone."""
    return {**how, "sync_dist": False} if how.get("reduce_fx") in ("sum", torch.sum) else how


class _Unread:
    """Placeholder for an argument that a program for all steps must not read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unread)

    def __hash__(self) -> int:
        return hash(_Unread)

    def _refuse(self, *_: Any) -> NoReturn:
        raise _unknown(self._name)

    __bool__ = __index__ = __int__ = __float__ = __mod__ = __add__ = __mul__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = _refuse


class _NoTrainer:
    """Placeholder for the trainer, because a program would keep the counters of the first step."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _unknown(f"self.trainer.{name}")


def _unknown(name: str) -> fxdp.CaptureError:
    return fxdp.CaptureError(
        f"the step reads {name}, which a program of all steps does not know; expected that in a hook such as "
        "on_train_batch_start, which may write it into a buffer for the step"
    )


@contextlib.contextmanager
def _unreadable(module: LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Replace `self.log`, and make the trainer and its counters unreadable, inside the block."""
    names = vars(module)
    trainer = names["_trainer"]
    names.update(_trainer=_NoTrainer(), log=log)
    try:
        yield
    finally:
        names["_trainer"] = trainer
        del names["log"]


def _is_compiled_inside(module: nn.Module) -> bool:
    parts = (part for m in module.modules() for part in m._modules.values())
    return any(isinstance(part, fxdp.CompiledModule) for part in parts)


def _parts_of(loader: Any, strategy: Any) -> Any:
    """Return a loader of this rank's parts; a loader whose sampler knows the rank is returned unchanged.

    Raises
    ------
    InputError : the loader reads a stream, so the batches are unknown.
    """
    done = (DistributedSampler, BatchParts)
    if strategy.world_size == 1 or not isinstance(loader, DataLoader):
        return loader
    if isinstance(loader.sampler, done) or isinstance(loader.batch_sampler, done):
        return loader
    check_batches(loader)
    parts = BatchParts(
        loader.batch_sampler, strategy.global_rank, strategy.world_size, agree=strategy.broadcast
    )
    return DataLoader(loader.dataset, **loader_arguments(loader, parts))


for _registry, _kind in ((StrategyRegistry, FxdpStrategy), (STRATEGY_REGISTRY, FxdpFabricStrategy)):
    _registry.register("fxdp", _kind, "data-parallel programs of the global batch, by fxdp")
    _registry.register("fxdp_eager", _kind, "the same, op by op instead of by Inductor", backend="eager")
