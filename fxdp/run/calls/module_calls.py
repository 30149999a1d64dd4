"""Calls of a script's modules: the outermost ones with a batch run compiled, where that is exact.

out = model(x)              nn.Module.__call__: model has parameters, x is a batch: compiled
    self.layers(h)              within another call: a part of that
loss = criterion(out, y)    no parameters: op by op

model = torch.compile(model)    what is compiled is the same; nothing is left for Dynamo
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fxdp.run.calls.called_module import CalledModule, CompileRule
from fxdp.run.session import Session
from fxdp.torch_compat import Patch, around, is_surrounded, optimized

_COMPILED = 32
"""The most modules that have programs; those of the oldest are dropped."""


class ModuleCalls:
    """The calls of all modules of a script.

    Parameters
    ----------
    is_apart : says whether ranks are at calls of their own, as while a data set loads samples.
    """

    def __init__(self, rule: CompileRule, is_apart: Callable[[], bool] = lambda: False) -> None:
        self._rule, self._is_apart = rule, is_apart
        self._known: MutableMapping[nn.Module, CalledModule] = WeakIdKeyDictionary()
        self.compiled: list[CalledModule] = []
        """The modules that have programs, the oldest first."""
        self._thread, self._inside = threading.get_ident(), False

    def call(self, plain: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module, as `nn.Module.__call__` does."""
        if self._inside or threading.get_ident() != self._thread:
            return plain(module, *args, **kwargs)
        if is_surrounded() or not _is_compiled(module) or self._is_apart():
            return plain(module, *args, **kwargs)
        called = self._of(module)
        self._inside = True
        try:
            return called.call(partial(self._op_by_op, plain), module, args, kwargs)
        finally:
            self._inside = False
            if called.programs:
                self._keep(called)

    def _op_by_op(self, plain: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module op by op, also in a backward: the modules within are no calls of their own."""
        before, self._inside = self._inside, True
        try:
            return plain(module, *args, **kwargs)
        finally:
            self._inside = before

    def _keep(self, called: CalledModule) -> None:
        """Keep the programs of a module, which keep the module; drop the oldest of too many."""
        if called not in self.compiled:
            self.compiled.append(called)
            if len(self.compiled) > _COMPILED:
                self.compiled.pop(0).refuse(f"{_COMPILED} modules were compiled after it")

    def compile(self, plain: Callable[..., Any], /, model: Any = None, **options: Any) -> Any:
        """Return what `torch.compile` is called on: its modules are compiled when they are called."""
        if model is None:
            return lambda model: self.compile(plain, model, **options)
        return optimized(model) if isinstance(model, nn.Module) else model

    def _of(self, module: nn.Module) -> CalledModule:
        found = self._known.get(module)
        if found is None:
            found = self._known[module] = CalledModule(type(module).__name__, self._rule)
        return found


def _is_compiled(module: nn.Module) -> bool:
    """Return whether a module is one to compile: with parameters, and more than one layer of torch's."""
    if "_orig_mod" in module._modules or type(module).__module__.startswith("torch.nn.parallel."):
        return False  # around the script's own
    if not module._modules and type(module).__module__.startswith("torch.nn."):
        return False
    return next(module.parameters(), None) is not None


def _pays(session: Session, seconds: float) -> bool:
    """Return whether calls have taken so long on some rank that they are compiled; a collective call."""
    least = session.options.compile_after_s
    if not least:
        return True
    with session.ranks.message("whether compiling a module pays"):
        slowest: float = max(session.ranks.gather(seconds))
    return slowest >= least


def module_patches(session: Session) -> Iterator[Patch]:
    """Yield the replacements by which a script's modules are compiled; none with `compile_from=0`."""
    options = session.options
    if options.compile_from:
        rule = CompileRule(options.compile_from, options.backend, session.axis, pays=partial(_pays, session))
        calls = ModuleCalls(rule, lambda: session.loads or session.is_child)
        yield Patch(nn.Module, "__call__", around(calls.call))
        yield Patch(torch, "compile", around(calls.compile))
