"""`BuiltModule`: a model with all that is built for it, and built anew when the model changes."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from typing_extensions import Self

from fxdp.errors import StateError
from fxdp.module.cache_entry import LastCall
from fxdp.module.calls.call_exchange import CallExchange
from fxdp.module.calls.reader import CallReader
from fxdp.module.fallback import Fallback
from fxdp.module.function_module import FunctionModule
from fxdp.module.guards.guards import Guards
from fxdp.module.inspected import Inspected
from fxdp.module.model_checks import OptimizerWatch, check_home, check_put
from fxdp.module.programs import Programs
from fxdp.module.replicas import Replicas
from fxdp.module.strategies import shard_model
from fxdp.runtime.unsharded_parameters import UnshardedParameters
from fxdp.sharding.sharded_optimizers import ShardedOptimizers
from fxdp.sharding.sharded_parameters import share_values

_log = logging.getLogger("fxdp")


class BuiltModule(Inspected):
    """Base class of a compiled module, without its calls."""

    _forward: Callable[..., Any]
    """`forward` with the signature of the model's own, for frameworks that read it."""
    _unset: set[str]
    """The parameters and buffers without values, in a model from the meta device."""
    _sharded: bool
    """Whether the parameters are sharded."""
    _started: bool
    """Whether the ranks have agreed on the model and the options."""
    _generation: int
    """The number of times that the model's tensors were replaced."""
    _number: int
    """The index of this module among the compiled modules of the ranks, in the order of first calls."""
    _shared: bool
    """Whether the ranks hold rank 0's values."""
    _watch: OptimizerWatch | None
    _guards: Guards
    _reader: CallReader
    _exchange: CallExchange
    _replicas: Replicas
    _programs: Programs
    _fallback: Fallback
    _full: UnshardedParameters
    """The unsharded parameters that live until shards change."""

    def _build(self) -> None:
        self._shared = False
        self._full.drop()
        chosen, device = self._options, self._mesh.device_type
        self._guards = Guards(self._model, device, chosen.loss_fn, self._generation, chosen.single_device_rng)
        self._reader = CallReader(
            self._model, chosen.batch_dims, device, self._guards, chosen.pipeline.microbatches, chosen.block,
            recognises=chosen.communication.uneven,
        )  # fmt: skip
        self._exchange = CallExchange(self._process_mesh, chosen, self._reader, self._full)
        self._replicas = Replicas(self._model, self._process_mesh, chosen)
        self._programs = Programs(
            self._model, self._process_mesh, self._options, self._full, sharded=self._sharded
        )

    def _shard_parameters(self) -> None:
        """Shard the parameters; a collective call."""
        self._process_mesh, unset = shard_model(self._model, self._process_mesh, self._options)
        self._mesh, self._sharded = self._process_mesh.mesh, True
        self._unset |= unset
        self._step_shards()

    def _step_shards(self) -> None:
        """Make optimizers of the model's parameters step on shards."""
        bitwise = self._options.block is not None
        ShardedOptimizers(self._model, self._process_mesh, self._full.note_step, bitwise=bitwise)

    def _renew(self) -> None:
        """Drop all programs, as the model holds different tensors than they read; a collective call."""
        if isinstance(self._model, FunctionModule):
            self._model.reach_again()
        with self._exchange.refusing():
            check_put(self._model, sharded=self._sharded)
        _log.warning(
            "%s: its programs are compiled anew. To keep them, write values in place, as copy_() and "
            "load_state_dict() without assign=True do",
            self._guards.tensors.words(),
        )
        self._build_anew()

    def _build_anew(self) -> None:
        self._generation += 1
        self._build()
        self._watch_optimizers()

    def _start(self) -> None:
        """Agree on the model and the options before the first exchange; a collective call."""
        check_home(self._model, self._mesh.device_type)
        self._share()
        if self._process_mesh.comms is not None:
            self._number = self._process_mesh.comms.sequence_log.add_module(type(self._model).__name__)
        self._watch_optimizers()
        self._started = True

    def _watch_optimizers(self) -> None:
        """Check the next optimizers that step, while this module lives."""
        if self._watch is not None:
            self._watch.remove()
        self._watch = OptimizerWatch(self._model)
        weakref.finalize(self, self._watch.remove)

    def _share(self) -> None:
        """Check that the ranks hold one model, and broadcast rank 0's values; a collective call."""
        share_values(self._model, self._process_mesh, self._options.lines())
        self._shared = True
        self._replicas.shared(max(1, self._last_call.number))

    def train(self, mode: bool = True) -> Self:
        """Switch the model's mode; each mode has its own program."""
        if not mode and self._model.training:
            self._replicas.ask()
        return super().train(mode)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own state dict, with a `DTensor` for each sharded parameter."""
        self._replicas.ask()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load values into the model, which may come from the meta device without values."""
        result = super().load_state_dict(state_dict, *args, **kwargs)
        self._unset -= set(_names_in(self._model, state_dict))
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """`to()`, `double()`, ... change the model; programs are compiled anew.

        Raises
        ------
        StateError : the parameters are sharded.
        """
        if self._sharded:
            raise StateError(
                "the parameters are sharded, and cannot be moved or converted any more; expected the model "
                "on its device and of its dtype before fxdp.compile"
            )
        self._model._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._last_call.cache_entry, self._started = None, False
        self._build()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the model and compile the copy on the same mesh."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        Inspected.__init__(twin, copy.deepcopy(self._model, memo))
        twin._forward = self._forward
        twin._options, twin._process_mesh, twin._mesh = self._options, self._process_mesh, self._mesh
        twin._last_call, twin._started = LastCall(), False
        twin._generation = twin._number = 0
        twin._fallback = Fallback(twin._model, twin._options)
        twin._watch, twin._unset = None, set(self._unset)
        twin._full, twin._sharded = UnshardedParameters(twin._model), self._sharded
        if twin._sharded:
            twin._step_shards()
        twin._build()
        return twin


def _names_in(model: nn.Module, names: Iterable[str]) -> Iterator[str]:
    """Return the names of tensors of `model.own` as they are in a model that may be a function."""
    own = model.own if isinstance(model, FunctionModule) else model
    prefix = next((f"{name}." for name, child in model._modules.items() if child is own), "")
    return (prefix + name for name in names)
