"""What the user's code reads of a tensor beside its values: its length, its `data`, how it lies in memory.

    len(x)                              must be an int and so would fix the batch size: a symbol instead
    y.data                              a detached tensor, and an assignment to it a write in place
    x.as_strided((n, 4), (1, 5))        strides, offsets, and views that are spelled by them
    if not x.is_contiguous(): ...
    len(repr(x))                        a text, which shows no values while they are traced
    self[f"expert_{i}"]                 unless they are known

Export does not see `.data`: what that gives has left the trace, and becomes a constant without values. And a
trace answers for contiguous inputs, which the caller's need not be (`refusals/input_layouts.py`). What is
read of parameters and buffers is the same at each call, and does not count.
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
"""Their code needs real ints, and is no part of a model."""


def symbolic_len(module: nn.Module, loss_fn: Callable[..., Any] | None) -> Patch:
    """Shadow the builtin `len` in all modules that may hold code of the model.

    In `builtins` itself all code would pay for it, Python's own and torch's tracing most of all.
    """
    wanted = tuple(names for names in _user_globals(module, loss_fn) if "len" not in names)
    return Patch(wanted, "len", around(_length))


def _length(plain: Callable[[Any], int], value: Any) -> Any:
    """A tensor's size as what it is, symbolic while it is traced."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() > 0 else plain(value)


def _user_globals(module: nn.Module, loss_fn: Callable[..., Any] | None) -> list[dict[str, Any]]:
    """The global names of all loaded modules that may hold code of the model."""
    found: dict[int, dict[str, Any]] = {}
    for name, loaded in list(sys.modules.items()):
        root = name.partition(".")[0]
        if root not in _LIBRARIES and root not in sys.stdlib_module_names:
            names = getattr(loaded, "__dict__", {})
            found[id(names)] = names
    # a class that was made by `exec`, or in a notebook, is in no loaded module
    functions = [loss_fn, *(type(child).forward for child in module.modules())]
    for function in functions:
        names = getattr(function, "__globals__", {})
        if str(names.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
            found[id(names)] = names
    return [names for names in found.values() if names.get("__name__") and isinstance(names, dict)]


def _traced_data(plain: Any) -> property:
    """`.data` for the user's code; torch's own, which reads it to leave the trace, has it as it is."""

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
    """A text may be printed; code that computes with it would compute with that of a traced tensor."""
    made = plain(self, *args, **kwargs)
    return _Text(made) if is_user_file(calling_frame().f_code.co_filename) else made


def _formatted(plain: Callable[..., str], self: Tensor, form: str = "") -> str:
    """The same, but of a number that is known while it is traced."""
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
"""What code asks a text by which it decides; to show one needs none of these."""
_Text = type("_Text", (str,), {**dict.fromkeys(_ASKED, _refused), "__hash__": str.__hash__})
TEXTS = (
    *(Patch(owner, "__repr__", around(_text)) for owner in (Tensor, nn.Parameter, FunctionalTensor)),
    Patch(Tensor, "__format__", around(_formatted)),  # between this and `__repr__` lie frames of torch
)


def value_reads(found: dict[int, ReadValue]) -> tuple[Patch, ...]:
    """While the user's code is exported, note what it reads of tensors that no trace has made.

    self.scale = torch.tensor(2.0); y * self.scale.item()       the graph has the number 2
    """

    def read(plain: Callable[..., Any], self: Tensor, *args: Any) -> Any:
        if type(self) is Tensor:
            found.setdefault(id(self), ReadValue(self, location_of_call()))
        return plain(self, *args)

    return tuple(Patch(Tensor, name, around(read)) for name in _VALUES)


_VALUES = ("item", "tolist", "numpy", "__float__", "__int__", "__index__", "__complex__", "__array__")


def layout_reads(found: list[LayoutRead], module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Patch, ...]:
    """While the user's code is exported, note what it reads; of views only those of `inputs` themselves."""
    held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    given = {id(tensor): i for i, tensor in enumerate(inputs)}

    def derived(tensor: Tensor, _: Any) -> bool:
        return id(tensor) not in held

    def regrouped(tensor: Tensor, result: Tensor) -> bool:
        # a view that keeps all dims (`ids.view(-1, length)`) is possible of any strides; texts add no guards
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
"""By whom, under which name, and with how many arguments more than it is said where in a storage to begin: an
answer then depends on where in its own the tensor does. None: it never does."""
