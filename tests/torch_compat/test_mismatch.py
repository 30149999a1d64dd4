"""Errors by which fxdp does not fit a torch do not accuse the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.capture.python import autograd_functions
from fxdp.errors import TorchMismatchError
from fxdp.startup.memoized import memoized_fakes
from fxdp.torch_compat import exporting, torch_mismatch, why_not_compiled


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class _Own(nn.Module):
    """A layer, and a function with a derivative of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return _Twice.apply(self.layer(x)).sum()  # type: ignore[no-any-return]


def _planned() -> TorchMismatchError:
    with pytest.raises(TorchMismatchError) as caught:
        fxdp.plan(_Own(), (torch.ones(4, 3),))
    text = str(caught.value)
    assert text.startswith(f"fxdp does not fit torch {torch.__version__} (proven with 2.11 to 2.15): ")
    assert text.endswith("The model is not at fault: please report it, with what `fxdp doctor` prints")
    assert "rewrite this line" not in text
    return caught.value


def test_torch_calls_what_stands_in_its_place_in_another_way() -> None:
    """As torch 2.15 did, with an argument less; the last frame is the caller's."""
    made = memoized_fakes._Copies(lambda *given: given).method()
    try:
        made(1)
    except TypeError as error:
        found = torch_mismatch(error)
    assert found is not None
    assert "TypeError: _Copies.method.<locals>.made() missing 3 required positional arguments" in str(found)


def test_a_function_of_torch_takes_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(stack: Any, module: Any, fakes: Any) -> None: ...

    monkeypatch.setattr(exporting, "aot_export_joint_with_descriptors", changed)
    monkeypatch.setenv("FXDP_CACHE", "0")
    assert "got an unexpected keyword argument 'decompositions' (at exporting.py:" in str(_planned())


def test_a_name_of_torch_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 did, in which `Function.apply` has no `__func__`."""
    monkeypatch.setattr(autograd_functions, "_APPLY", object())
    assert "AttributeError: 'object' object has no attribute '__get__' (at autograd_functions.py:" in str(
        _planned()
    )


def test_mistakes_of_the_model_stay_its_own() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.rand(x.shape[0], size="large").sum()  # type: ignore[call-overload,no-any-return]

    with pytest.raises(fxdp.CaptureError, match=r"test_mismatch\.py") as caught:
        fxdp.plan(Wrong(), (torch.ones(4, 3),))
    assert not isinstance(caught.value, fxdp.TorchMismatchError)


def test_a_compiler_that_is_missing_has_a_remedy() -> None:
    words = why_not_compiled(RuntimeError("InvalidCxxCompiler: No working C++ compiler found in (None, '')"))
    assert words.endswith("Install g++ 11 or newer, or set CXX to a C++ compiler that knows C++20")
    assert "Install" not in why_not_compiled(RuntimeError("a size"))
