"""What capture changes in Python while the user's code runs, and puts back afterwards.

`len(tensor)` must be an int, which would fix the batch size; BatchNorm with `momentum=None` reads its
counter into Python; SyncBatchNorm would communicate while it is traced (capture sees the global batch, so
plain BatchNorm *is* the synchronised one); `module.to(dtype)` in a forward would exchange parameters.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointFunction

from fxdp import torch_compat
from fxdp.capture.patches.ctc_loss import capturable_ctc_loss
from fxdp.capture.patches.substitutes import SUBSTITUTES
from fxdp.capture.sites import site_of_call
from fxdp.errors import CaptureError
from fxdp.ir.graphs import no_collection

_WRONGLY_DECOMPOSED = torch.ops.aten.multilabel_margin_loss_forward.default
"""torch 2.13's Python decomposition counts targets after the first -1; its kernel does not."""

_REVERSE = ("grad", "grad_and_value", "vjp", "jacrev", "hessian")
"""What torch.func has of derivatives from the result back to the operands."""

_LIBRARIES = frozenset({"builtins", "fxdp", "numpy", "sympy", "torch", "mpmath", "networkx"})


@contextlib.contextmanager
def capture_patches(module: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """Everything that is different while a model is captured; leaves no trace."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(torch_compat.silent_export())
        stack.enter_context(_kept_random_state())
        stack.enter_context(no_collection())
        stack.enter_context(_symbolic_len(module, loss_fn))
        stack.enter_context(_batch_norm_forward())
        stack.enter_context(_idle_conversions())
        stack.enter_context(replaced(F, "ctc_loss", capturable_ctc_loss))
        for owner, name, function in SUBSTITUTES:
            stack.enter_context(replaced(owner, name, function))
        stack.enter_context(replaced(CheckpointFunction, "apply", _checkpoint))
        stack.enter_context(torch_compat.without_autograd_kernel(_WRONGLY_DECOMPOSED))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


def _checkpoint(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """A reentrant checkpoint without its own backward, in which export would lose the gradients.

    As it does, it gives none if no argument needs one. What is recomputed is the partitioner's business.
    """
    needed = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with contextlib.nullcontext() if needed else torch.no_grad():
        return function(*args)


@contextlib.contextmanager
def refuse_autograd() -> Iterator[None]:
    """While the user's code runs, refuse derivatives inside it: torch's export would detach them."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"at {site_of_call()}: torch.autograd.grad, backward and torch.func.grad and its kin inside the "
            "captured code are not supported. Compute such a term (a gradient penalty, say) outside of the "
            "model, or write the derivative with tensor operations or with torch.func.jvp, which is captured"
        )

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch.autograd, "grad"),
            (torch.autograd, "backward"),
            (torch.Tensor, "backward"),
            *((torch.func, name) for name in _REVERSE),
        ):
            stack.enter_context(replaced(owner, name, refuse))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute and put the old one back; an inherited one is inherited again."""
    inherited = name not in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own warnings about tracing to ourselves; the caller may treat them as errors.

    What a fake kernel refuses is logged with its whole stack, then raised; it is told in other words.
    """
    log, fake = logging.getLogger("torch"), logging.getLogger("torch._subclasses.fake_tensor")
    levels = log.level, fake.level
    if log.getEffectiveLevel() >= logging.WARNING:
        log.setLevel(logging.ERROR)
        fake.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(levels[0])
        fake.setLevel(levels[1])


@contextlib.contextmanager
def _kept_random_state() -> Iterator[None]:
    """Tracing draws no number that the user could miss later."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if _cuda_in_use() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _len(value: Any) -> Any:
    """`len` that gives a tensor's size as what it is, symbolic while it is traced."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value.shape[0]
    return builtins.len(value)


@contextlib.contextmanager
def _symbolic_len(module: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """Shadow the builtin `len` in the user's modules (not in libraries, which need real ints)."""
    patched = [names for names in _user_globals(module, loss_fn) if "len" not in names]
    for names in patched:
        names["len"] = _len
    try:
        yield
    finally:
        for names in patched:
            names.pop("len", None)


def _user_globals(module: nn.Module, loss_fn: Callable[..., Any] | None) -> list[dict[str, Any]]:
    """The global names of all loaded modules that may hold code of the model."""
    found: dict[int, dict[str, Any]] = {}
    for name, loaded in list(sys.modules.items()):
        root = name.partition(".")[0]
        if root not in _LIBRARIES and root not in sys.stdlib_module_names:
            names = getattr(loaded, "__dict__", {})
            found[id(names)] = names
    functions = [loss_fn, *(type(child).forward for child in module.modules())]
    for function in functions:
        names = getattr(function, "__globals__", {})
        if str(names.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
            found[id(names)] = names
    return [names for names in found.values() if names.get("__name__") and isinstance(names, dict)]


@contextlib.contextmanager
def _idle_conversions() -> Iterator[None]:
    """Let `module.to(dtype)` inside of a forward do nothing where it would change nothing."""
    convert = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own = (*self.parameters(recurse), *self.buffers(recurse))
        if all((made := fn(t)).dtype == t.dtype and made.device == t.device for t in own):
            return self
        return convert(self, fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    with replaced(nn.Module, "_apply", apply):
        yield


@contextlib.contextmanager
def _batch_norm_forward() -> Iterator[None]:
    """Let BatchNorm's cumulative average be a tensor computation, and SyncBatchNorm be BatchNorm."""
    plain = _BatchNorm.forward

    def forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        cumulative = self.momentum is None and self.training and self.track_running_stats
        if cumulative and self.running_mean is not None and self.running_var is not None:
            self._check_input_dim(input)  # type: ignore[no-untyped-call]
            return _cumulative_batch_norm(self, input)
        return plain(self, input)

    with replaced(_BatchNorm, "forward", forward), replaced(nn.SyncBatchNorm, "forward", forward):
        yield


def _cumulative_batch_norm(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """BatchNorm whose running statistics are the plain average over all batches so far."""
    assert self.running_mean is not None
    assert self.running_var is not None
    mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    result = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    if self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        factor = 1.0 / self.num_batches_tracked.to(torch.float64)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(running * (1 - factor).to(running.dtype) + new * factor.to(running.dtype))
    return result
