"""`CompiledModule`: the user's model as a data-parallel program."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxdp.capture.python_values import SpecializationError
from fxdp.compiler.prepare import is_cut
from fxdp.compiler.strategy_choice import legal_strategies
from fxdp.errors import InputError, StateError
from fxdp.ir.types.mesh import Mesh
from fxdp.module.branch_specialization import OtherBranch
from fxdp.module.cache_entry import CacheEntry, LastCall
from fxdp.module.call import Call
from fxdp.module.call_exchange import CallExchange, CallExchanged
from fxdp.module.fallback import RAGGED, Fallback, FallsBackError
from fxdp.module.forward_signature import SignedForward, signed
from fxdp.module.function_module import FunctionModule, names_in
from fxdp.module.global_calls import call_on_parts, holds_global
from fxdp.module.guards.guards import Guards
from fxdp.module.guards.surroundings import refuse_transforms
from fxdp.module.inspected import Inspected
from fxdp.module.model_checks import OptimizerWatch, check_home, check_model, check_put, home_of, no_values
from fxdp.module.programs import Programs
from fxdp.module.reader import CallReader
from fxdp.module.replicas import Replicas
from fxdp.module.strategies import WantsShardingError, begins_sharded, shard_model
from fxdp.options import Options
from fxdp.ranks.hooks import install_hook
from fxdp.ranks.liveness.failure import everywhere, guard
from fxdp.ranks.mesh_init import init_mesh
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.runtime.unsharded_parameters import UnshardedParameters
from fxdp.sharding.sharded_optimizers import ShardedOptimizers
from fxdp.sharding.sharded_parameters import share_values
from fxdp.torch_compat import warn_untested

_log = logging.getLogger("fxdp")


class CompiledModule(Inspected):
    """Result of `fxdp.compile`, called like the model itself.

    Parameters, buffers and state-dict keys are the model's own; `train()`, `eval()`, `to()` act on the
    model. Compilation happens at the first call of each kind.
    """

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        mesh: DeviceMesh | Mapping[str, int] | None,
        options: Options,
    ) -> None:
        warn_untested(2)
        module = check_model(module)
        refuse_transforms("made")
        super().__init__(module)
        self._forward = signed(CompiledModule.__dict__["forward"], module, options.loss_fn is not None)
        self._options, self._unset = options, set()
        self._process_mesh = init_mesh(mesh, home_of(module, mesh, options.may_shard))
        self._mesh = self._process_mesh.mesh
        self._process_mesh.check_ranks()
        if self._mesh.world > 1:
            install_hook()
        legal_strategies(self._mesh, options)
        self._full, self._sharded = UnshardedParameters(module), False
        if begins_sharded(module, self._process_mesh, options):
            self._shard_parameters()
        if not is_cut(self._mesh, options):
            options.warn_idle()
        elif options.fallback is not None:
            raise InputError(
                f"fallback={options.fallback!r} with stages or micro-batches, which calls op by op have "
                "not; expected fallback=None, or data axes only and one micro-batch"
            )
        self._last_call, self._started, self._watch = LastCall(), False, None
        self._fallback = Fallback(module, options)
        self._generation = self._number = 0
        self._build()

    _forward: Callable[..., Any]
    """`forward` with the signature of the model's own, for frameworks that read it."""
    _options: Options
    _process_mesh: ProcessMesh
    _mesh: Mesh
    _last_call: LastCall
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
        self._reader = CallReader(self._model, chosen.batch_dims, device, self._guards)
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
        ShardedOptimizers(self._model, self._process_mesh, self._full.note_step)

    @SignedForward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for this rank's part of the batch.

        A sharded output is this rank's part of the global output. All further outputs, like the loss, belong
        to the global batch and are equal on all ranks. With `loss_fn=` the result is the loss; in evaluation
        without `target=` the result is the model's own output.

        Raises
        ------
        InputError : batch sizes differ between inputs, an input is on the wrong device, ...
        AgreementError : ranks pass different kinds of inputs, or hold different models.
        CaptureError : the model cannot be captured as one graph.
        RankFailedError : another rank failed.
        """
        if isinstance(self._model, FunctionModule) and self._model.has_modules(args, kwargs):
            args, kwargs = self._without_modules(self._model, args, kwargs)
        if holds_global(args, kwargs):
            return self._called_globally(args, kwargs)
        self._guards.check_surroundings()
        if self._unset:
            raise no_values(self._unset)
        last, comms = self._last_call, self._process_mesh.comms
        with guard(self._process_mesh):
            if not self._started:
                self._start()
            last.number += 1
            if comms is not None:
                comms.sequence_log.begin_call(self._number, last.number)
            if self._watch is not None and self._watch.remove_when_done():
                self._watch = None
            if not self._guards.tensors_unchanged():
                self._renew()
            if self._fallback.is_ragged(args, kwargs):
                return self._run_ragged(args, kwargs)
            call, ranks = self._read(args, kwargs)
            batches = ranks.batches
            if (cache_entry := self._programs.find(call.kind, call.dims, batches)) is None:
                if (made := self._make_or_fall_back(call, batches, args, kwargs)) is None:
                    if self._options.pad is not None:
                        args, kwargs = call.inputs.rebuild(call.inputs.tensors)
                    return self._fallback.run_on_parts(self._process_mesh, self._options, args, kwargs)
                call, cache_entry = made
                self._begin(cache_entry)
            while True:
                if cache_entry.draws:
                    self._exchange.check_drawing(ranks, cache_entry.program.captured, call.inputs)
                last.cache_entry = cache_entry
                made = self._programs.run(cache_entry, call, batches)
                if not isinstance(made, OtherBranch):
                    return made
                cache_entry = self._programs.other_branch(cache_entry, call, batches, made)
                self._begin(cache_entry)

    def _without_modules(
        self, function: FunctionModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Register the modules among a call's arguments, and return the arguments without them."""
        before = dict(function.named_children())
        args, kwargs = function.without_modules(args, kwargs)
        added = [name for name, module in function.named_children() if before.get(name) is not module]
        if added and (self._sharded or self._options.shards):
            raise InputError(
                f"{', '.join(added)} of a function whose parameters are sharded is a module and an argument; "
                "expected modules that are known before the first call: fxdp.compile(functools.partial("
                "function, module))"
            )
        if added:
            check_model(function)
            if not self._started:
                self._build()
        return args, kwargs

    def _called_globally(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of a call with global tensors, as global tensors."""
        last, options = self._last_call, self._options
        self._fallback.in_parts = True
        try:
            return call_on_parts(
                self.forward, lambda: last.cache_entry, self._process_mesh, options.batch_dims, args, kwargs
            )
        except FallsBackError:
            return self._fallback.run(self._process_mesh, args, kwargs)
        finally:
            self._fallback.in_parts = False

    def _make_or_fall_back(
        self, call: Call, batches: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, CacheEntry] | None:
        """Return `_make`; None if capture refuses the call, which then runs op by op.

        Raises
        ------
        FallsBackError : the call was made with the parts of global tensors.
        """
        if not self._fallback.takes(call.kind):
            try:
                return self._make(call, batches, args, kwargs)
            except FallsBackError as error:
                self._fallback.add(call.kind, error)
        last = self._last_call
        last.cache_entry, last.refused, last.batch = None, self._fallback.reason(call.kind), sum(batches)
        if self._fallback.in_parts:
            raise everywhere(FallsBackError("a call with global tensors"))
        return None

    def _run_ragged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with a ragged batch op by op; a collective call."""
        if not self._shared:
            self._share()
        self._last_call.cache_entry, self._last_call.refused = None, RAGGED
        return self._fallback.run_on_parts(self._process_mesh, self._options, args, kwargs)

    def _begin(self, cache_entry: CacheEntry) -> None:
        """Guard and compare all that a program reads, before its first run."""
        self._guards.watch(cache_entry.program.captured)
        self._replicas.read_by(cache_entry.program)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, CallExchanged]:
        """Return this rank's call, and the facts that all ranks exchange about it; a collective call."""
        try:
            call = self._reader.read(args, kwargs)
        except Exception as error:
            self._exchange.refuse(error)
            raise
        number = self._last_call.number
        due, asks = self._replicas.wants(number)
        ranks = self._exchange.of(call, asks, due)
        if not self._shared:
            self._share()
        elif due or ranks.asked:
            self._replicas.compare(number, call)
        return (call if ranks.alike else self._exchange.padded(call, args, kwargs)), ranks

    def _make(
        self, call: Call, batches: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, CacheEntry]:
        """Return a call's new entry, with the call as the entry takes it; a collective call.

        Numbers that differ from an earlier call become inputs of the program. If the code decides on a
        value, the value becomes a constant and a part of the key, and the call is read again.
        """
        alike = self._programs.alike(call.kind)
        kind, numbers = self._reader.make_dynamic(call, alike)
        self._programs.expect(kind, numbers)
        if numbers:
            call, _ = self._read(args, kwargs)
        while True:
            try:
                found = self._programs.find(call.kind, call.dims, batches)
                cache_entry = found or self._programs.make(call, batches)
                break
            except SpecializationError as error:
                call.values.decide(error.names)
                call, _ = self._read(args, kwargs)
            except WantsShardingError:
                self._shard_parameters()
                self._build_anew()
                return self._make(self._read(args, kwargs)[0], batches, args, kwargs)
        self._reader.tell(call, alike)
        return call, cache_entry

    def _renew(self) -> None:
        """Drop all programs, as the model holds different tensors than they read; a collective call."""
        if isinstance(self._model, FunctionModule):
            self._model.reach_again()
        with self._exchange.refusing():
            check_put(self._model, sharded=self._sharded)
        _log.warning(
            "%s: its programs are compiled anew. To keep them, write values in place, as copy_() and "
            "load_state_dict() without assign=True do",
            self._guards.tensor_changes(),
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

    def train(self, mode: bool = True) -> CompiledModule:
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
        self._unset -= set(names_in(self._model, state_dict))
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> CompiledModule:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """Copy the model and compile the copy on the same mesh."""
        twin = CompiledModule.__new__(CompiledModule)
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
            ShardedOptimizers(twin._model, twin._process_mesh, twin._full.note_step)
        twin._build()
        return twin
