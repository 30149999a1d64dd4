"""Accelerate: after `compile_accelerator(Accelerator())`, `prepare` compiles models and uses no DDP.

    accelerator = compile_accelerator(Accelerator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The results are those of one device: a prepared loader gives each rank its part of each batch without repeated
samples, `gather` accepts parts of different sizes, a model returns the loss of the global batch, and a
prepared scheduler steps once with the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.utils import DistributedType, gather, recursively_apply
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

import fxdp
from fxdp.integrations.batch_parts import BatchParts, loader_arguments
from fxdp.integrations.checks import check_replicated

_A = TypeVar("_A")

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def compile_accelerator(accelerator: _A, **options: Any) -> _A:
    """Make `prepare` compile models with these options of `fxdp.compile`; return the accelerator itself.

    A model that is already compiled is not compiled again.

    Raises
    ------
    InputError : the accelerator shards models, or has a plugin that would replace fxdp.
    """
    found: Any = accelerator
    check_replicated(options)
    if found.distributed_type not in _PLAIN or found.parallelism_config is not None:
        raise fxdp.InputError(
            f"the Accelerator is made for {found.distributed_type}, which shards or wraps models itself; "
            "expected one without plugins, started by torchrun or accelerate launch --multi_gpu (or --cpu)"
        )
    compiling = _Compiling(found, options)
    found.prepare_model = compiling.model
    found.prepare_data_loader = compiling.loader
    found.prepare_scheduler = compiling.scheduler
    found.gather = compiling.gather
    found.unwrap_model = compiling.unwrapped
    return accelerator


@dataclass
class _Compiling:
    """Replacements for the accelerator's methods for models, loaders, schedulers and results."""

    accelerator: Any
    options: dict[str, Any]
    _compiled: dict[int, fxdp.CompiledModule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Keep the accelerator's own methods."""
        own = self.accelerator
        self._model: Callable[..., Any] = own.prepare_model
        self._loader: Callable[..., Any] = own.prepare_data_loader
        self._scheduler: Callable[..., Any] = own.prepare_scheduler
        self._unwrapped: Callable[..., Any] = own.unwrap_model

    def model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> fxdp.CompiledModule:
        """Return the compiled model on the accelerator's device, with autocast for mixed precision."""
        place = self.accelerator.device_placement if device_placement is None else device_placement
        compiled = self._compiled_of(model, place)
        if vars(compiled).get("_is_accelerate_prepared", False):
            self._model(compiled)
            return compiled
        # two attributes set by Accelerate belong to the compiled module, not to the model
        vars(compiled).update(_original_forward=None, _is_accelerate_prepared=False)
        self._model(compiled, device_placement=False, evaluation_mode=True)  # without DDP
        compiled._is_accelerate_prepared = True
        return compiled

    def _compiled_of(self, model: nn.Module, place: bool) -> fxdp.CompiledModule:
        if isinstance(model, fxdp.CompiledModule):
            return model
        if id(model) not in self._compiled:
            model = model.to(self.accelerator.device) if place else model
            self._compiled[id(model)] = fxdp.compile(model, **self.options)
        return self._compiled[id(model)]

    def loader(self, loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Return a loader of this rank's parts.

        Raises
        ------
        InputError : the last batch would be filled with samples of the first batch.
        """
        own = self.accelerator
        if own.num_processes > 1:
            _check_loader(loader)
        prepared = self._loader(loader, *args, **kwargs)
        if own.num_processes == 1 or not isinstance(prepared.batch_sampler, BatchSamplerShard):
            return prepared
        parts = _loader_of_parts(prepared, own.process_index, own.num_processes)
        own._dataloaders[own._dataloaders.index(prepared)] = parts
        return parts

    def scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that steps once with each step of the optimizer, as on one device.

        Accelerate would step it once for each rank: for loops that count the batches of one rank.
        """
        prepared = self._scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    def gather(self, tensors: Any) -> Any:
        """Return the rows of all ranks in rank order; ranks may have different numbers of rows."""
        if self.accelerator.num_processes == 1:
            return tensors
        return recursively_apply(_gathered, tensors, error_on_other_type=True)

    def unwrapped(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the user's model."""
        found = model.module if isinstance(model, fxdp.CompiledModule) else model
        return self._unwrapped(found, *args, **kwargs)


def _check_loader(loader: DataLoader[Any]) -> None:
    """Raise for a loader that Accelerate itself would split differently from one device's batches.

    Raises
    ------
    InputError : with the loader that is expected instead.
    """
    if isinstance(loader.sampler, BatchSampler):
        raise fxdp.InputError(
            "the loader has a BatchSampler as its sampler=; expected it as batch_sampler=, so that each rank "
            "can be given its part of a batch"
        )
    if isinstance(loader.dataset, IterableDataset) and not loader.drop_last:
        raise fxdp.InputError(
            "the loader reads an IterableDataset, of which Accelerate fills up the last batch with samples "
            "of the first one; expected drop_last=True, or a dataset with a length and indices"
        )


def _loader_of_parts(prepared: Any, rank: int, world: int) -> Any:
    """Return a copy of a prepared loader with this rank's part of one device's batches."""
    shard = prepared.batch_sampler
    return DataLoaderShard(
        prepared.dataset,
        device=prepared.device,
        rng_types=prepared.rng_types,
        synchronized_generator=prepared.synchronized_generator,
        use_stateful_dataloader=prepared.use_stateful_dataloader,
        _drop_last=prepared._drop_last,
        _non_blocking=prepared._non_blocking,
        **loader_arguments(prepared, BatchParts(shard.batch_sampler, rank, world, shard.split_batches)),
    )


def _gathered(tensor: Tensor) -> Tensor:
    """Gather the rows of all ranks, which may differ in number; a scalar counts as one row."""
    rows = tensor if tensor.ndim else tensor[None]
    counts = gather(torch.tensor([len(rows)], device=tensor.device)).tolist()
    most = max(counts)
    if min(counts) < most:
        rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    found = gather(rows).split(most) if most else [rows]
    return torch.cat([part[:count] for part, count in zip(found, counts, strict=False)])
