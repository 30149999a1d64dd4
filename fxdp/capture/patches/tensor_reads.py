"""Reads of tensor properties by the user's code: length, `data`, text, strides and offset.

    len(x)                              must be an int and would fix the batch size: a symbol instead
    y.data                              a detached tensor; an assignment is a write in place
    x.as_strided((n, 4), (1, 5))        strides, offsets, and views defined by strides
    if not x.is_contiguous(): ...
    len(repr(x))                        a text, which shows no values during the trace
    self[f"expert_{i}"]                 unless the values are known

Export does not trace `.data`: the resulting tensor leaves the trace, and becomes a constant without values. A
trace reports strides of contiguous inputs, while inputs of the caller may have any strides
(`refusals/input_layouts.py`). Strides of parameters and buffers are equal at each call, and are not recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.capture.captured import LayoutRead, ReadValue
from fxdp.capture.locations import is_user_file, location_of_call, location_of_frame
from fxdp.errors import CaptureError
from fxdp.torch_compat import FunctionalTensor, Patch, around, calling_frame, known_number

_LIBRARIES = frozenset({"builtins", "fxdp", "numpy", "sympy", "torch", "mpmath", "networkx"})
"""Libraries with code that needs real ints and is not part of a model."""


def symbolic_len(module: nn.Module, loss_fn: Callable[..., Any] | None) -> Patch:
    """Shadow the builtin `len` in all modules that may contain code of the model.

    A patch of `builtins` would slow down all code, above all Python's own and torch's tracing.
    """
    wanted = tuple(names for names in _user_globals(module, loss_fn) if "len" not in names)
    return Patch(wanted, "len", around(_length))


def _length(plain: Callable[[Any], int], value: Any) -> Any:
    """Return a tensor's size, which may be symbolic during the trace, or `len(value)`."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() > 0 else plain(value)


def _user_globals(module: nn.Module, loss_fn: Callable[..., Any] | None) -> list[dict[str, Any]]:
    """Return the globals of all loaded modules that may contain code of the model."""
    found: dict[int, dict[str, Any]] = {}
    for name, loaded in list(sys.modules.items()):
        root = name.partition(".")[0]
        if root not in _LIBRARIES and root not in sys.stdlib_module_names:
            names = getattr(loaded, "__dict__", {})
            found[id(names)] = names
    # a class made by `exec`, or in a notebook, is in no loaded module
    functions = [loss_fn, *(type(child).forward for child in module.modules())]
    for function in functions:
        names = getattr(function, "__globals__", {})
        if str(names.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
            found[id(names)] = names
    return [names for names in found.values() if names.get("__name__") and isinstance(names, dict)]


def _traced_data(plain: Any) -> property:
    """Replace `.data` in the user's code; code of torch, which leaves the trace by `.data`, is unaffected."""

    def read(self: Tensor) -> Tensor:
        if is_user_file(calling_frame().f_code.co_filename):
            return self.detach()
        return plain.__get__(self)  # type: ignore[no-any-return]

    def write(self: Tensor, value: Tensor) -> None:
        if not is_user_file(calling_frame().f_code.co_filename):
            plain.__set__(self, value)
            return
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise CaptureError(
                f"the model assigns {value.dtype}{list(value.shape)} to the data of {self.dtype}"
                f"{list(self.shape)}. Keep shape and dtype, so that it can be written in place"
            )
        with torch.no_grad():
            self.detach().copy_(value)

    return property(read, write)


DATA = Patch(Tensor, "data", _traced_data)


def _text(plain: Callable[..., str], self: Tensor, *args: Any, **kwargs: Any) -> str:
    """Return a text that may be printed; computing with the text, which shows a traced tensor, is refused."""
    made = plain(self, *args, **kwargs)
    return _Text(made) if is_user_file(calling_frame().f_code.co_filename) else made


def _formatted(plain: Callable[..., str], self: Tensor, form: str = "") -> str:
    """Return the formatted tensor; the text of a number known during the trace is not restricted."""
    if (known := known_number(self)) is not None:
        return format(known, form)
    made = plain(self, form)
    return _Text(made) if is_user_file(calling_frame().f_code.co_filename) else made


def _refused(self: str, *args: Any) -> Any:
    raise CaptureError(
        f"at {location_of_call()}: reads the text of a tensor, which shows no values while the model is "
        "captured, and a graph would keep what was read. Compute with the tensor, or only print its text"
    )


_ASKED = (
    "__len__", "__iter__", "__getitem__", "__contains__", "__eq__", "__ne__", "count", "find", "index",
    "rfind", "rindex", "startswith", "endswith", "split", "rsplit", "splitlines", "partition", "rpartition",
)  # fmt: skip
"""Methods by which code could decide on a text; printing needs none of these."""
_Text = type("_Text", (str,), {**dict.fromkeys(_ASKED, _refused), "__hash__": str.__hash__})
TEXTS = (
    *(Patch(owner, "__repr__", around(_text)) for owner in (Tensor, nn.Parameter, FunctionalTensor)),
    Patch(Tensor, "__format__", around(_formatted)),  # frames of torch are between this and `__repr__`
)


def value_reads(found: dict[int, ReadValue]) -> tuple[Patch, ...]:
    """Return patches that record which tensors from outside of the trace the user's code reads by value.

    self.scale = torch.tensor(2.0); y * self.scale.item()       the graph has the number 2
    """

    def read(plain: Callable[..., Any], self: Tensor, *args: Any) -> Any:
        if type(self) is Tensor:
            found.setdefault(id(self), ReadValue(self, location_of_call()))
        return plain(self, *args)

    return tuple(Patch(Tensor, name, around(read)) for name in _VALUES)


_VALUES = ("item", "tolist", "numpy", "__float__", "__int__", "__index__", "__complex__", "__array__")


def layout_reads(found: list[LayoutRead], module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Patch, ...]:
    """Return patches that record reads of memory layouts; for `view` only of the `inputs` themselves."""
    held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    given = {id(tensor): i for i, tensor in enumerate(inputs)}

    def derived(tensor: Tensor, _: Any) -> bool:
        return id(tensor) not in held

    def regrouped(tensor: Tensor, result: Tensor) -> bool:
        # a view that keeps all dims (`ids.view(-1, length)`) works with any strides; comparing texts adds no
        # guards
        return id(tensor) in given and str(result.shape) != str(tensor.shape)

    def noted(owner: Any, name: str, offset: int | None, counts: Callable[..., bool]) -> Patch:
        def read(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            frame = calling_frame()
            tensor = args[0] if args else kwargs["input"]
            if counts(tensor, result) and is_user_file(frame.f_code.co_filename):
                begins = offset is not None and (len(args) > offset or "storage_offset" in kwargs)
                of = given[id(tensor)] if counts is regrouped else None
                found.append(LayoutRead(name, location_of_frame(frame), begins, of))
            return result

        return Patch(owner, name, around(read))

    return (*(noted(*reader, derived) for reader in _READERS), noted(Tensor, "view", None, regrouped))


_READERS: tuple[tuple[Any, str, int | None], ...] = (
    (Tensor, "stride", None),
    (Tensor, "storage_offset", 0),
    (Tensor, "is_contiguous", None),
    (Tensor, "as_strided", 3),
    (Tensor, "as_strided_", 3),
    (Tensor, "as_strided_scatter", 4),
    (torch, "as_strided", 3),
    (torch, "as_strided_copy", 3),
    (torch, "as_strided_scatter", 4),
)
"""Functions that read memory layouts: owner, name, and position of the storage offset among the arguments.

The result depends on the tensor's own storage offset if that argument is given. None: the result never
depends on the offset.
"""
