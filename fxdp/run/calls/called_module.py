"""`CalledModule`: a module that a script calls, run op by op at first, and compiled from some call on.

    call 1 ... 49    op by op; in the last two: does the code print, count, draw in Python? and in all: is
                     its gradient differentiated again, or twice, and not seldom? then this kind of call
                     stays op by op
    call 50 ...      compiled, with `compile_from=50`, if the calls took as long as compiling does, else from
                     call 100, 200, 400, ...; a backward that a program has not, as that of a penalty each
                     16th step, runs the call again (`ReplayedCall`)

Calls are of one kind if one program may serve them: equal structure, dtypes, modes and Python state. The
ranks decide alike, because they run the same lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxdp.eager.batch_axis import BatchAxis
from fxdp.errors import FxdpError
from fxdp.ranks.liveness.failure import fails_this_call_alone
from fxdp.run.calls.call_arguments import CallArguments
from fxdp.run.calls.kind_of_calls import KindOfCalls
from fxdp.run.calls.module_program import ModuleProgram
from fxdp.run.calls.observed_call import Backwards, Effects
from fxdp.run.calls.replayed_call import ReplayedCall
from fxdp.torch_compat import HOOKS, is_of_torch

_log = logging.getLogger("fxdp")

_KINDS = 64
_PROGRAMS = 8
_COMPILED = 16
_ANEW = 4
"""The most calls in a row of which each compiles a program, as with a number that is another at each call."""
_RENEWED = 3
_LOOKS = 2
"""The calls before the first compiled one that are looked at for what they do beside their result."""
_PATIENCE = 4
"""Calls that may have a backward wait for the first one as many times longer."""
_WITH_BACKWARD = 3
"""How many times as long as its forward a call takes, about."""


@dataclass(frozen=True)
class CompileRule:
    """Which calls are compiled, and how.

    Parameters
    ----------
    compile_from : the number of the first compiled call of a kind.
    backend : as of `fxdp.compile`.
    axis_of : the batch axis of so many samples.
    pays : says, on all ranks alike, whether compiling costs no more than so many seconds op by op.
    least_work : the number of parameters times samples from which on plain arguments are cut.
    """

    compile_from: int
    backend: str
    axis_of: Callable[[int], BatchAxis]
    least_work: int = 1 << 20
    pays: Callable[[float], bool] = lambda seconds: True


@dataclass(eq=False)
class CalledModule:
    """What is known of the calls of one module, of a class with this name."""

    name: str
    rule: CompileRule
    refused: str = ""
    programs: dict[Any, ModuleProgram] = field(default_factory=dict)
    kinds: dict[Any, KindOfCalls] = field(default_factory=dict)
    renewed: int = 0
    anew: int = 0
    parameters: int | None = None

    def call(
        self, plain: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the module, compiled if that is one device's; `plain(module, ...)` calls it op by op."""
        given = None if self.refused else CallArguments.read(args, kwargs)
        if given is None or (given.is_plain and not self._is_work(module, given.total)):
            return plain(module, *args, **kwargs)
        place = given.spec, given.dims
        program = self.programs.get(place)
        if program is not None and not program.holds_same_tensors:
            if not _has_parameters(module):
                return plain(module, *args, **kwargs)
            self._renew()
            program = None
        kind = self._kind(module, given, program)
        kind.add(given.shapes)
        waits = kind.waits(given.shapes, self._first_call(kind))
        is_due = not waits and kind.looks >= self._least_looks and kind.is_turn(given.shapes)
        if self.refused or kind.refused or not is_due:
            return self._observed(plain, module, kind, given, is_looked_at=waits <= self._least_looks)
        why = kind.effect or ("" if kind.replays_pay else kind.difference)
        if why or (not kind.hooks and _hooked(module)):
            self._stay_eager(kind, why or "it has hooks")
            return plain(module, *args, **kwargs)
        kind.hooks = True
        if not (kind.takes(given.shapes) or self.rule.pays(kind.seconds)):
            kind.postpone()
            return self._observed(plain, module, kind, given, is_looked_at=False)
        program = program or self._made(module, kind, given)
        if program is None:
            return plain(module, *args, **kwargs)
        return self._compiled(plain, module, program, kind, given)

    def _is_work(self, module: nn.Module, samples: int) -> bool:
        """Return whether parts of a plain batch are worth their messages; not without sizes of parameters."""
        if self.parameters is None:
            if any(map(is_lazy, module.parameters())):
                return False
            self.parameters = sum(p.numel() for p in module.parameters())
        return self.parameters * samples >= self.rule.least_work

    def _kind(self, module: nn.Module, given: CallArguments, program: ModuleProgram | None) -> KindOfCalls:
        key = (given.key, module.training) if program is None else (given.key, program.state)
        found = self.kinds.get(key)
        if found is None:
            if len(self.kinds) >= _KINDS:
                self.refuse(f"its calls are of more than {_KINDS} kinds")
            found = self.kinds[key] = KindOfCalls()
        return found

    def _first_call(self, kind: KindOfCalls) -> int:
        """Return the number of the first call of a kind that is to be compiled, as far as is known."""
        derives_later = torch.is_grad_enabled() and not kind.derived
        return self.rule.compile_from * (_PATIENCE if derives_later and self.rule.compile_from > 1 else 1)

    @property
    def _least_looks(self) -> int:
        return min(_LOOKS, self.rule.compile_from - 1)

    def _observed(
        self,
        plain: Callable[..., Any],
        module: nn.Module,
        kind: KindOfCalls,
        given: CallArguments,
        *,
        is_looked_at: bool,
    ) -> Any:
        """Run a call op by op, and note what would be no single device's in a program."""
        if kind.refused or self.refused:
            return plain(module, *given.args, **given.kwargs)
        start = time.perf_counter()
        if is_looked_at:
            effects = Effects()
            with effects.of(module):
                output = plain(module, *given.args, **given.kwargs)
            kind.effect, kind.looks = effects.found, kind.looks + 1
        else:
            output = plain(module, *given.args, **given.kwargs)
        took = time.perf_counter() - start
        kind.seconds += took * _WITH_BACKWARD if torch.is_grad_enabled() else took
        if not Backwards(lambda unlike: self._derived(kind, unlike)).watch(output):
            self._stay_eager(kind, "it returns no tensors")
        return output

    def _derived(self, kind: KindOfCalls, unlike: str) -> None:
        kind.derived = True
        kind.note(unlike)

    def _made(self, module: nn.Module, kind: KindOfCalls, given: CallArguments) -> ModuleProgram | None:
        """Return the programs for calls of these arguments; None if the module cannot be compiled."""
        if not _has_parameters(module):
            return None  # inside of `functional_call`, this once
        if len(self.programs) >= _PROGRAMS:
            self.refuse(f"its arguments have more than {_PROGRAMS} structures")
            return None
        try:
            program = ModuleProgram(module, given.prefix(), self.rule.backend)
        except FxdpError as error:
            self.refuse(str(error).partition("\n")[0])
            return None
        _log.info("%s is compiled, for arguments %s with batch dims %s", self.name, given.spec, given.dims)
        self.programs[given.spec, given.dims] = program
        self.kinds[given.key, program.state] = kind
        return program

    def _compiled(
        self,
        plain: Callable[..., Any],
        module: nn.Module,
        program: ModuleProgram,
        kind: KindOfCalls,
        given: CallArguments,
    ) -> Any:
        args, kwargs = given.entered(self.rule.axis_of)
        replayed = None
        if torch.is_grad_enabled():
            replayed = ReplayedCall(plain, program, args, kwargs, kind.note)
        compiled = program.compiled
        if not kind.programs:
            program.expect(kind.is_varied, kind.has_varied_dims(given.dims))
        try:
            output = program.call(args, kwargs)
        except FxdpError as error:
            if not fails_this_call_alone(error):
                raise
            self._stay_eager(kind, str(error).partition("\n")[0])
            return plain(module, *given.args, **given.kwargs)
        if program.refusal:
            kind.refused = program.refusal
            return output
        anew = program.compiled > compiled
        if anew or not kind.takes(given.shapes):
            kind.compiled(given.shapes, anew=anew, for_any=program.takes_any_size)
        self.anew = self.anew + 1 if anew else 0
        if self.anew > _ANEW:
            self.refuse("each call compiles anew, as by a number that decides in Python and changes")
        elif program.compiled > _COMPILED:
            self.refuse(f"more than {_COMPILED} programs were compiled for calls of one structure")
        return output if replayed is None else replayed.watch(output)

    def _renew(self) -> None:
        """Begin anew, as the module has other parameters, buffers or children."""
        self.renewed += 1
        if self.renewed > _RENEWED:
            self.refuse("its parameters, buffers or children are replaced again and again")
        self._drop()

    def _drop(self) -> None:
        self.programs.clear()
        self.kinds.clear()

    def _stay_eager(self, kind: KindOfCalls, why: str) -> None:
        if kind.refused:
            return
        kind.refused = why
        _log.info("%s runs op by op: %s", self.name, why)

    def refuse(self, why: str) -> None:
        """Run all calls op by op from now on."""
        self.refused = why
        self._drop()
        _log.info("%s runs op by op: %s", self.name, why)


def _hooked(module: nn.Module) -> bool:
    """Return whether a module or a part of it has hooks that are not torch's own."""
    return any(
        not is_of_torch(hook)
        for each in module.modules()
        for hooks in map(each.__dict__.get, HOOKS)
        for hook in (hooks or {}).values()
    )


def _has_parameters(module: nn.Module) -> bool:
    """Return whether all parameters are parameters, as they are not inside of `functional_call`."""
    return all(isinstance(p, nn.Parameter) for _, p in module.named_parameters(remove_duplicate=False))
