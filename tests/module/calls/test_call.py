""""""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.errors import InputError
from fxdp.module.calls.call import Call
from fxdp.module.calls.reader import CallReader


def _reader(batch_dims: Any = None) -> tuple[CallReader, nn.Module]:
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    return CallReader(module, batch_dims, "cpu"), module


def test_a_call_is_its_tensors_batch_and_other_dims() -> None:
    reader, _ = _reader()
    x, y = torch.ones(4, 3), torch.ones(4)
    call = reader.read((x,), {"target": y, "scale": 2})
    assert (call.tensors, call.batch, call.dims) == ((x, y), 4, ((3,), ()))


def test_the_batch_is_no_part_of_the_kind() -> None:
    reader, _ = _reader()
    first, second = reader.read((torch.ones(4, 3),), {}), reader.read((torch.ones(0, 5),), {})
    assert first.kind == second.kind
    assert (first.dims, second.dims) == (((3,),), ((5,),))
    assert hash(first.kind) == hash(second.kind)


KINDS: dict[str, Callable[[CallReader, nn.Module], Call]] = {
    "plain": lambda r, m: r.read((torch.ones(4, 3),), {}),
    "dtype": lambda r, m: r.read((torch.ones(4, 3).double(),), {}),
    "rank": lambda r, m: r.read((torch.ones(4, 3, 1),), {}),
    "requires_grad": lambda r, m: r.read((torch.ones(4, 3, requires_grad=True),), {}),
    "keyword": lambda r, m: r.read((), {"input": torch.ones(4, 3)}),
    "list": lambda r, m: r.read(([torch.ones(4, 3)],), {}),
    "True": lambda r, m: r.read((torch.ones(4, 3), True), {}),
    "1": lambda r, m: r.read((torch.ones(4, 3), 1), {}),
    "1.0": lambda r, m: r.read((torch.ones(4, 3), 1.0), {}),
    "eval": lambda r, m: (m.eval(), r.read((torch.ones(4, 3),), {}))[1],
    "half eval": lambda r, m: (m.train(), m[1].eval(), r.read((torch.ones(4, 3),), {}))[2],  # type: ignore[index]
    "no_grad": lambda r, m: (m.train(), torch.no_grad()(r.read)((torch.ones(4, 3),), {}))[1],
    "autocast": lambda r, m: torch.autocast("cpu", torch.bfloat16)(r.read)((torch.ones(4, 3),), {}),
    "frozen": lambda r, m: (m[0].requires_grad_(False), r.read((torch.ones(4, 3),), {}))[1],  # type: ignore[index]
}


def test_what_needs_another_program_is_another_kind() -> None:
    reader, module = _reader()
    kinds = [build(reader, module).kind for build in KINDS.values()]
    assert len(set(kinds)) == len(KINDS)
    assert len({reader.digest(kind) for kind in kinds}) == len(KINDS)


def test_batch_dims_are_the_user_s() -> None:
    reader, _ = _reader(batch_dims=((1, None), {}))
    call = reader.read((torch.ones(3, 4), torch.ones(9)), {})
    assert (call.batch, call.dims) == (4, ((3,), (9,)))


def test_without_a_batch_dim_the_batch_is_1() -> None:
    reader, _ = _reader(batch_dims=((None,), {}))
    assert reader.read((torch.ones(3, 4),), {}).batch == 1


def test_batch_sizes_that_differ() -> None:
    reader, _ = _reader()
    with pytest.raises(InputError) as caught:
        reader.read((torch.ones(4, 3),), {"target": torch.ones(5)})
    message = str(caught.value)
    assert "input: 4 in dim 0 of (4, 3)" in message
    assert "target: 5 in dim 0 of (5,)" in message
    assert "batch_dims=" in message


def test_an_input_on_another_device() -> None:
    reader, _ = _reader()
    with pytest.raises(InputError, match=r"input is on meta. Move inputs with .to\('cpu'\)"):
        reader.read((torch.ones(4, 3, device="meta"),), {})


def test_an_unhashable_value() -> None:
    reader, _ = _reader()
    with pytest.raises(InputError, match=r"the input args\[1\] is a set, which is neither a tensor"):
        reader.read((torch.ones(4, 3), {1, 2}), {})


def test_an_input_that_contains_itself() -> None:
    reader, _ = _reader()
    endless: list[Any] = [torch.ones(4)]
    endless.append({"more": endless})
    with pytest.raises(InputError, match=r"the input args\[1\], extra contains itself, or is nested too"):
        reader.read((torch.ones(4, 3), endless), {"extra": endless, "plain": 1})


def test_digests_fit_into_a_signed_integer_and_are_stable() -> None:
    (reader, module), (other, twin) = _reader(), _reader()
    assert reader.digest(KINDS["plain"](reader, module).kind) == other.digest(
        KINDS["plain"](other, twin).kind
    )
    assert all(0 <= reader.digest((i,)) < 2**62 for i in range(100))


class Setting:
    """Hashable by identity, and shown by its address."""


def test_addresses_are_no_part_of_a_digest() -> None:
    """Each rank has an object of its own, at another address."""
    (reader, _), (other, _) = _reader(), _reader()
    first, second = Setting(), Setting()
    assert repr(first) != repr(second)
    kinds = [r.read((torch.ones(4, 3), s), {}).kind for r, s in ((reader, first), (other, second))]
    assert reader.digest(kinds[0]) == other.digest(kinds[1])
    assert reader.digest(kinds[0]) != reader.digest(reader.read((torch.ones(4, 3), 1), {}).kind)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    scale: Tensor


class Plain:
    def __init__(self, x: Tensor, scale: Tensor) -> None:
        self.x, self.scale = x, scale


@dataclasses.dataclass
class Changeable:
    x: Tensor
    scale: Tensor


class Reads(nn.Linear):
    def forward(self, input: Any) -> Tensor:
        return super().forward(input.x) * input.scale


@pytest.mark.parametrize("kind", [Frozen, Plain, Changeable])
def test_tensors_inside_of_objects_are_inputs(kind: Callable[[Tensor, Tensor], Any]) -> None:
    model = Reads(3, 2)
    compiled = fxdp.compile(model, backend="eager")
    for _ in range(2):
        value = kind(torch.randn(4, 3), torch.randn(4, 1))
        torch.testing.assert_close(compiled(value), model(value))
    with pytest.raises(fxdp.InputError, match=r"input\.scale: 3 in dim 0"):
        compiled(kind(torch.randn(4, 3), torch.randn(3, 1)))
