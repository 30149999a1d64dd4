"""A compiled module is its model in all but its call."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import fxdp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


def _compiled() -> tuple[Net, fxdp.CompiledModule]:
    model = Net()
    return model, fxdp.compile(model, backend="eager")


def test_what_is_set_on_it_is_set_on_the_model() -> None:
    model, compiled = _compiled()
    x = torch.randn(4, 3)
    compiled(x)
    compiled.scale = 2.0
    compiled.fc = nn.Linear(3, 5)
    assert model.scale == 2.0
    assert compiled(x).shape == (4, 5)
    torch.testing.assert_close(compiled(x), model.fc(x) * 2)
    compiled.register_buffer("seen", torch.zeros(1))
    compiled.register_parameter("bias", nn.Parameter(torch.zeros(2)))
    compiled.add_module("extra", nn.Identity())
    assert {"seen", "bias", "fc.weight"} <= model.state_dict().keys() == compiled.state_dict().keys()
    assert model.extra is compiled.extra
    del compiled.extra
    assert not hasattr(model, "extra")


def test_its_mode_is_the_models() -> None:
    model = Net().eval()
    compiled = fxdp.compile(model, backend="eager")
    assert not compiled.training
    assert compiled.train() is compiled
    assert model.training
    model.eval()
    assert not compiled.training
    assert not copy.deepcopy(compiled).training


def test_apply_sees_the_model_and_not_what_stands_in_for_it() -> None:
    seen: list[nn.Module] = []
    model = nn.Linear(2, 2)
    compiled = fxdp.compile(model)
    assert compiled.apply(seen.append) is compiled
    assert seen == [model]


def test_pickling_gives_the_users_model() -> None:
    model, compiled = _compiled()
    compiled(torch.randn(4, 3))
    loaded = pickle.loads(pickle.dumps([compiled, compiled]))
    assert type(loaded[0]) is Net
    assert loaded[0] is loaded[1]
    torch.testing.assert_close(loaded[0].state_dict(), model.state_dict(), rtol=0, atol=0)
    with pytest.raises(fxdp.StateError, match="cannot be copied with its programs"):
        copy.copy(compiled)
    with pytest.raises(fxdp.StateError, match="a compiled function cannot be pickled"):
        pickle.dumps(fxdp.compile(model.forward, backend="eager"))


def test_a_model_must_stay_on_its_type_of_device() -> None:
    model, compiled = _compiled()
    compiled(torch.randn(4, 3))
    compiled.to("meta")
    with pytest.raises(fxdp.MeshError, match="moved to meta after it was compiled for cpu"):
        compiled(torch.randn(4, 3))
    assert model.fc.weight.is_meta


def test_module_is_the_users_model() -> None:
    model, compiled = _compiled()
    assert compiled.module is model
    assert isinstance(compiled.module, Net)


def test_a_sequence_of_layers_stays_one() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    compiled = fxdp.compile(model, backend="eager")
    assert compiled[1] is model[1]
    assert len(compiled) == 2
    assert list(compiled) == list(model)
    assert bool(fxdp.compile(nn.ModuleList(), backend="eager"))
    _, other = _compiled()
    for read in (lambda: other[0], lambda: len(other), lambda: iter(other)):
        with pytest.raises(TypeError, match="Net"):
            read()


def test_an_unknown_attribute_names_both() -> None:
    _, compiled = _compiled()
    with pytest.raises(
        AttributeError, match=r"neither a compiled module nor its model \(Net\) has 'fcs'"
    ) as error:
        compiled.fcs  # noqa: B018
    assert error.value.name == "fcs"
    with pytest.raises(
        AttributeError, match=r"register_comm_hook.*gradients are summed by the program itself"
    ):
        compiled.register_comm_hook  # noqa: B018
    with pytest.raises(AttributeError, match=r"torch.nn.utils.clip_grad_norm_\(compiled.parameters\(\)"):
        compiled.clip_grad_norm_  # noqa: B018
    assert getattr(compiled, "unknown", 3) == 3


def test_an_error_inside_of_a_models_property_stays() -> None:
    class Odd(Net):
        @property
        def width(self) -> int:
            return self.missing

    with pytest.raises(AttributeError, match="'Odd' object has no attribute 'width'"):
        fxdp.compile(Odd(), backend="eager").width  # noqa: B018
