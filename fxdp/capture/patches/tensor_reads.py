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
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxdp.capture.captured import LayoutRead, ReadValue
from fxdp.capture.locations import is_user_file, location_of_call, location_of_frame
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import FunctionalTensor, Patch, around, known_number

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


def _asking_frame() -> FrameType:
    """Return the frame that called what a mode or a patch of this file sees, without frames of dispatch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename in _FILES or frame.f_code.co_name in _DISPATCH or frame.f_code in _TEXT_CODE
    ):
        frame = frame.f_back
    return frame


_FILES = frozenset({__file__, around.__code__.co_filename})
_DISPATCH = frozenset({"__torch_function__", "handle_torch_function"})
_TEXT_CODE = frozenset(
    function.__code__ for function in (Tensor.__repr__, Tensor.__format__, nn.Parameter.__repr__)
)


def _text(plain: Callable[..., str], self: Tensor, *args: Any, **kwargs: Any) -> str:
    """Return a text that may be printed; computing with the text, which shows a traced tensor, is refused."""
    made = plain(self, *args, **kwargs)
    return _Text(made) if is_user_file(_asking_frame().f_code.co_filename) else made


def _formatted(plain: Callable[..., str], self: Tensor, form: str = "") -> str:
    """Return the formatted tensor; the text of a number known during the trace is not restricted."""
    if (known := known_number(self)) is not None:
        return format(known, form)
    made = plain(self, form)
    return _Text(made) if is_user_file(_asking_frame().f_code.co_filename) else made


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


def _behind(self: str, start: str) -> str:
    """Return a text behind a start, as a parameter's text has one."""
    made: str = _Text(start + str(self))
    return made


_OWN = {"__radd__": _behind, "__hash__": str.__hash__}
_Text = type("_Text", (str,), {**dict.fromkeys(_ASKED, _refused), **_OWN})
TEXT = Patch(FunctionalTensor, "__repr__", around(_text))
"""Patch for texts of traced tensors, which do not ask a mode."""


class TensorReads(TorchFunctionMode):
    """Mode that records what the user's code reads of tensors; texts and `data` are as a graph needs these.

    A mode instead of patches: modes affect only this thread, and no attribute is replaced.

    Attributes
    ----------
    values : the tensors from outside of the trace that the code reads by value.

        self.scale = torch.tensor(2.0); y * self.scale.item()       the graph has the number 2

    layouts : the lines that read memory layouts; for `view` only of the inputs themselves.
    asserted : called with each value that the code asserts by `torch._assert_async`, and with the line.
        `torch.distributions` asserts so while a model is exported, since torch 2.15.
    """

    def __init__(
        self, module: nn.Module, inputs: Sequence[Tensor], asserted: Callable[[Tensor, Location], None]
    ) -> None:
        super().__init__()
        self._asserted = asserted
        self.values: dict[int, ReadValue] = {}
        self.layouts: list[LayoutRead] = []
        self._held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._given = {id(tensor): i for i, tensor in enumerate(inputs)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _VALUES:
            if type(args[0]) is Tensor:
                self.values.setdefault(id(args[0]), ReadValue(args[0], location_of_call()))
            return func(*args, **kwargs)
        if name in _LAYOUTS:
            return self._layout(name, func, args, kwargs)
        if name in ("__get__", "__set__") and getattr(func, "__self__", None) is Tensor.data:
            return _traced_data(func, *args)
        if name == "_assert_async":
            return self._asserted(args[0], location_of_call())
        if name == "__repr__":
            return _text(func, *args, **kwargs)
        if name == "__format__":
            return _formatted(func, *args)
        result = func(*args, **kwargs)
        _check_registered((*args, *kwargs.values()), result, self._held)
        return result

    def _layout(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        tensor = args[0] if args else kwargs["input"]
        of = self._given.get(id(tensor)) if name == "view" else None
        # a view that keeps all dims (`ids.view(-1, length)`) works with any strides; comparing texts adds no
        # guards
        regrouped = of is not None and str(result.shape) != str(tensor.shape)
        counts = regrouped if name == "view" else id(tensor) not in self._held
        if counts and is_user_file((frame := _asking_frame()).f_code.co_filename):
            offset = _LAYOUTS[name]
            begins = offset is not None and (len(args) > offset or "storage_offset" in kwargs)
            self.layouts.append(LayoutRead(name, location_of_frame(frame), begins, of))
        return result


_VALUES = frozenset(
    {"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__complex__", "__array__"}
)
_LAYOUTS: dict[str, int | None] = {
    "stride": None,
    "storage_offset": 0,
    "is_contiguous": None,
    "as_strided": 3,
    "as_strided_": 3,
    "as_strided_copy": 3,
    "as_strided_scatter": 4,
    "view": None,
}
"""Functions that read memory layouts, with the position of the storage offset among the arguments.

The result depends on the tensor's own storage offset if that argument is given. None: the result never
depends on the offset.
"""


def _traced_data(func: Any, self: Tensor, *value: Any) -> Any:
    """Read or write `.data` in the user's code; code of torch, which leaves the trace so, is unaffected."""
    if not is_user_file(_asking_frame().f_code.co_filename):
        return func(self, *value)
    if func.__name__ == "__get__":
        return self.detach()
    (new,) = value
    if (new.shape, new.dtype) != (self.shape, self.dtype):
        raise CaptureError(
            f"the model assigns {new.dtype}{list(new.shape)} to the data of {self.dtype}"
            f"{list(self.shape)}. Keep shape and dtype, so that it can be written in place"
        )
    with torch.no_grad():
        self.detach().copy_(new)
    return None


def _check_registered(args: Any, result: Any, known: Collection[int]) -> None:
    """Raise if a gradient would flow from a result into a parameter whose `id` is not among the known ones.

        self.heads = [nn.Linear(8, 1)]          in a plain list; an nn.ModuleList registers
        def forward(self, x):
            return shared(self.heads[0](x))     `shared` is a global or of a closure

    Export makes a constant of such a parameter, and no error. What is read without gradient (under `no_grad`,
    detached, frozen) is a constant in eager, too.

    Raises
    ------
    CaptureError : names the line, and how to register.
    """
    for value in _parameters(args):
        if id(value) not in known and value.requires_grad and torch.is_grad_enabled() and _trains(result):
            raise CaptureError(
                f"at {location_of_call()}: a parameter of shape {list(value.shape)} is read that the model "
                "does not have as an attribute (a module in a plain list or dict, a global, a closure): it "
                "would get no gradient. Register it (self.name = module, nn.ModuleList, nn.ModuleDict), read "
                "it under torch.no_grad() if it is not trained, or pass fallback='eager'"
            )


def _parameters(args: Any) -> Iterator[Tensor]:
    for value in args:
        kind = type(value)
        if kind is nn.Parameter:
            yield value
        elif kind is list or kind is tuple:
            yield from (one for one in value if type(one) is nn.Parameter)


def _trains(result: Any) -> bool:
    results = result if isinstance(result, (list, tuple)) else (result,)
    return any(isinstance(one, Tensor) and one.requires_grad for one in results)
