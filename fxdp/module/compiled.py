"""`CompiledModule`: the user's model as a data-parallel program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxdp.capture.python_values import SpecializationError
from fxdp.compiler.prepare import is_cut
from fxdp.compiler.strategy_choice import legal_strategies
from fxdp.errors import InputError
from fxdp.module.branch_specialization import OtherBranch
from fxdp.module.built_module import BuiltModule
from fxdp.module.cache_entry import CacheEntry, LastCall
from fxdp.module.calls.absent_images import with_images
from fxdp.module.calls.call import Call, ProgramKey
from fxdp.module.calls.call_exchange import CallExchanged
from fxdp.module.fallback import RAGGED, Fallback, FallsBackError
from fxdp.module.forward_signature import SignedForward, signed
from fxdp.module.function_module import FunctionModule
from fxdp.module.global_calls import call_on_parts, has_several_sizes, holds_global
from fxdp.module.guards.surroundings import refuse_transforms
from fxdp.module.model_checks import check_model, home_of, no_values
from fxdp.module.strategies import WantsShardingError, begins_sharded
from fxdp.options import Options
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.hooks import install_hook
from fxdp.ranks.liveness.failure import everywhere, guard
from fxdp.ranks.mesh_init import init_mesh
from fxdp.ranks.rank_counts import warn_of_rank_counts
from fxdp.runtime.unsharded_parameters import UnshardedParameters
from fxdp.torch_compat import warn_untested

_log = logging.getLogger("fxdp")


class CompiledModule(BuiltModule):
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
        warn_of_rank_counts(module, self._mesh.size)
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
        if isinstance(self._model, FunctionModule):
            args, kwargs, added = self._model.without_modules(args, kwargs)
            if added:
                self._add_modules(added)
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
            if not self._guards.tensors.unchanged():
                self._renew()
            if self._fallback.is_ragged(args, kwargs, self._process_mesh):
                return self._run_ragged(args, kwargs)
            call, ranks = self._read(args, kwargs)
            batches = ranks.batches
            if (cache_entry := self._programs.kinds.entry(call.kind, call.dims, batches)) is None:
                try:
                    self._fallback.check(call.kind, (call.dims, batches))
                    call, cache_entry = self._make(call, batches)
                except FallsBackError as error:
                    self._fall_back(call.kind, batches, error)
                if cache_entry is None:
                    return self._fallback.run_on_parts(self._process_mesh, self._options, *call.inputs.given)
                self._begin(cache_entry)
            while True:
                if cache_entry.draws:
                    self._exchange.check_drawing(ranks, cache_entry.program.captured, call.inputs)
                last.cache_entry, last.split = cache_entry, batches
                made = self._programs.run(cache_entry, call, batches)
                if not isinstance(made, OtherBranch):
                    return made
                cache_entry = self._programs.other_branch(cache_entry, call, batches, made)
                self._begin(cache_entry)

    def _add_modules(self, names: Sequence[str]) -> None:
        """Make modules that were among a call's arguments part of the model."""
        if self._sharded or self._options.shards:
            raise InputError(
                f"{', '.join(names)} of a function whose parameters are sharded is a module and an argument; "
                "expected modules that are known before the first call: fxdp.compile(functools.partial("
                "function, module))"
            )
        check_model(self._model)
        if not self._started:
            self._build()

    def _called_globally(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of a call with global tensors, as global tensors."""
        last, options = self._last_call, self._options
        if self._fallback.is_ragged(args, kwargs) or (options.fallback and has_several_sizes(args, kwargs)):
            with guard(self._process_mesh):
                if not self._started:
                    self._start()
            return self._fallback.run(self._process_mesh, args, kwargs)
        self._fallback.in_parts = True
        try:
            return call_on_parts(
                self.forward, lambda: last.cache_entry, self._process_mesh, options.batch_dims, args, kwargs
            )
        except FallsBackError:
            return self._fallback.run(self._process_mesh, args, kwargs)
        finally:
            self._fallback.in_parts = False

    def _fall_back(self, key: ProgramKey, batches: tuple[int, ...], error: FallsBackError) -> None:
        """Note that capture refuses calls of a kind, which then run op by op.

        Raises
        ------
        FallsBackError : the call was made with the parts of global tensors.
        """
        self._fallback.add(key, error)
        last = self._last_call
        last.cache_entry, last.refused, last.batch = None, str(error), sum(batches)
        if self._fallback.in_parts:
            raise everywhere(FallsBackError("a call with global tensors")) from error

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
        except InputError as error:
            self._exchange.tell_unread(error)
            raise
        except Exception as error:
            self._exchange.refuse(error)
            raise
        number = self._last_call.number
        due, asks = self._replicas.wants(number)
        ranks = self._exchange.of(call, asks, due)
        if ranks.news or ranks.images:
            return self._read_as_ragged(*with_images(args, kwargs, ranks.images), is_new=ranks.news)
        if not self._shared:
            self._share()
        elif due or ranks.asked:
            self._replicas.compare(number, call)
        if ranks.alike:
            return call, ranks
        padded = self._exchange.padded(call)
        return self._read_as_ragged(args, kwargs) if padded is None else (padded, ranks)

    def _read_as_ragged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_new: bool = True
    ) -> tuple[Call, CallExchanged]:
        """Return the call read by the keys of its inputs, as all ranks do; a collective call."""
        if is_new or not self._reader.reads_as_ragged(args, kwargs):
            is_new = True
            with self._exchange.refusing():
                gather = partial(gather_objects, self._process_mesh)
                if not self._reader.take_rows(args, kwargs, gather):
                    raise InputError(
                        "by the keys of their inputs other ranks' batches are ragged, this rank's is not; "
                        "expected one kind of batch, or batch_dims= that says what dims are"
                    )
        call, ranks = self._read(args, kwargs)
        if is_new and self._process_mesh.index == 0:
            named = zip(call.inputs.paths, call.inputs.axes.rows, strict=False)
            _log.warning(
                "%s is called with a ragged batch, by the keys of its inputs: %s; batch_dims= says otherwise",
                type(self._model).__name__, ", ".join(f"{path}: {rows}" for path, rows in named),
            )  # fmt: skip
        return call, ranks

    def _make(self, call: Call, batches: tuple[int, ...]) -> tuple[Call, CacheEntry]:
        """Return a call's new entry, with the call as the entry takes it; a collective call.

        Numbers that differ from an earlier call become inputs of the program. If the code decides on a
        value, the value becomes a constant and a part of the key, and the call is read again.
        """
        alike = self._programs.alike(call.kind)
        kind, numbers = self._reader.make_dynamic(call, alike)
        self._programs.expect(kind, numbers)
        if numbers:
            call, _ = self._read(*call.inputs.given)
        while True:
            try:
                found = self._programs.kinds.entry(call.kind, call.dims, batches)
                cache_entry = found or self._programs.make(call, batches)
                break
            except SpecializationError as error:
                call.values.decide(error.names)
                call, _ = self._read(*call.inputs.given)
            except WantsShardingError:
                self._shard_parameters()
                self._build_anew()
                return self._make(self._read(*call.inputs.given)[0], batches)
        self._reader.tell(call, alike)
        return call, cache_entry
