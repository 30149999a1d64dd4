"""The mechanism: what is installed for one thread, and put back."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from fxdp.torch_compat import Patch, calling_frame, patched
from tests.limits import HANG_S


class _Base:
    count = property(lambda self: self._count, lambda self, value: setattr(self, "_count", value))

    def __init__(self, count: int = 1) -> None:
        self._count = count

    def plain(self, x: int) -> tuple[str, int]:
        return "plain", self._count + x

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    @staticmethod
    def fixed() -> str:
        return "fixed"

    def __bool__(self) -> bool:
        return True


class _Inherits(_Base):
    pass


def _user(name: str = "user") -> types.ModuleType:
    module = types.ModuleType(name)
    exec("def plain(x):\n    return 2 * x\n\ndef calls(x):\n    return plain(x), len([x])\n", vars(module))
    return module


def _elsewhere(function: Callable[[], Any]) -> Any:
    """What a function gives in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(HANG_S)


def _methods(owner: type[_Base]) -> tuple[Patch, ...]:
    def plain(old: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, x: ("new", old(self, x))

    def count(old: property) -> property:
        return property(lambda self: -old.__get__(self), lambda self, value: old.__set__(self, 10 * value))

    return (
        Patch(owner, "plain", plain),
        Patch(owner, "count", count),
        Patch(owner, "made", lambda old: classmethod(lambda cls: f"new {cls.__name__} {old()}")),
        Patch(owner, "fixed", lambda old: staticmethod(lambda: f"new {old()}")),
        Patch(owner, "__bool__", lambda old: lambda self: not old(self)),
    )


def _uses(thing: _Base) -> tuple[Any, ...]:
    thing.count = 3
    count, thing._count = thing.count, 1
    return thing.plain(1), count, thing.made(), type(thing).made(), thing.fixed(), bool(thing)


_PLAIN = (("plain", 2), 3, "_Inherits", "_Inherits", "fixed", True)


@pytest.mark.parametrize("owner", [_Base, _Inherits])
def test_all_kinds_of_class_attributes(owner: type[_Base]) -> None:
    thing, before = _Inherits(), (dict(vars(_Base)), dict(vars(_Inherits)))
    with patched(_methods(owner)):
        made = f"new _Inherits {owner.__name__}"
        assert _uses(thing) == (("new", ("plain", 2)), -30, made, made, "new fixed", False)
        assert _elsewhere(lambda: _uses(thing)) == _PLAIN
    assert _uses(thing) == _PLAIN
    assert (dict(vars(_Base)), dict(vars(_Inherits))) == before


def test_another_thread_has_the_very_object() -> None:
    """By which torch's tables know it."""
    item, data, truth = Tensor.item, Tensor.data, Tensor.__bool__
    make: Callable[[Any], Any] = lambda old: lambda self: None  # noqa: E731
    with patched(Patch(Tensor, name, make) for name in ("item", "data", "__bool__")):
        assert Tensor.item is not item
        there = _elsewhere(lambda: (Tensor.item, Tensor.data, Tensor.__bool__))
        assert all(map(lambda a, b: a is b, there, (item, data, truth)))
        assert _elsewhere(lambda: torch.tensor(3).item()) == 3
    assert not {"item", "data", "__bool__"} & set(vars(Tensor))


def test_functions_of_modules() -> None:
    module = _user()
    plain, names = module.plain, set(vars(module))

    def make(old: Callable[[int], int]) -> Callable[[int], int]:
        return lambda x: -old(x)

    patches = (Patch(module, "plain", make), Patch(vars(module), "len", lambda old: lambda x: 70 + old(x)))
    with patched(patches):
        assert module.calls(2) == (-4, 71)
        assert _elsewhere(lambda: module.calls(2)) == (4, 1)
        assert module.plain.__name__ == "plain"
    assert module.plain is plain
    assert set(vars(module)) == names


def test_one_name_in_several_modules() -> None:
    several = [_user(name) for name in ("one", "two", "three")]
    names = set(vars(several[0]))
    with patched([Patch(tuple(map(vars, several)), "len", lambda old: lambda x: 70 + old(x))]):
        assert [module.calls(2)[1] for module in several] == [71] * 3
        assert _elsewhere(lambda: several[2].calls(2)) == (4, 1)
        vars(several[1])["len"] = min  # by somebody else
    assert set(vars(several[0])) == set(vars(several[2])) == names
    assert several[1].len is min


def test_what_is_still_held_afterwards_is_the_original() -> None:
    module, thing = _user(), _Base()
    with patched([Patch(module, "plain", lambda old: lambda x: 0), *_methods(_Base)]):
        held, unbound = module.plain, vars(_Base)["plain"]
    assert held(4) == 8
    assert unbound.__get__(thing, _Base)(1) == ("plain", 2)


def test_patches_in_patches() -> None:
    module = _user()

    def adding(number: int) -> tuple[Patch, ...]:
        make = lambda old: lambda *args: (*old(*args), number)  # noqa: E731
        return Patch(_Base, "plain", make), Patch(module, "calls", make)

    with patched(adding(1)):
        with contextlib.suppress(ZeroDivisionError), patched(adding(2)):
            assert _Base().plain(1) == ("plain", 2, 1, 2)
            assert module.calls(1) == (2, 1, 1, 2)
            assert _elsewhere(lambda: (_Base().plain(1), module.calls(1))) == (("plain", 2), (2, 1))
            raise ZeroDivisionError
        assert _Base().plain(1) == ("plain", 2, 1)
        assert module.calls(1) == (2, 1, 1)
    assert _Base().plain(1) == ("plain", 2)
    assert module.calls(1) == (2, 1)


def test_a_patch_that_cannot_be_made_leaves_nothing() -> None:
    before = dict(vars(_Base))
    wrong = patched((*_methods(_Base), Patch(_Base, "nothing", lambda old: old)))
    with pytest.raises(AttributeError, match="nothing"), wrong:
        raise AssertionError
    assert dict(vars(_Base)) == before


def test_who_replaces_it_meanwhile_keeps_that(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _user()
    monkeypatch.setattr(_Base, "plain", _Base.plain)  # to be put back
    with patched((Patch(module, "plain", lambda old: old), *_methods(_Base))):
        module.plain = _Base.plain = print  # type: ignore[assignment, method-assign]
    assert module.plain is print
    assert _Base.plain is print


def test_an_instance_may_have_a_method_of_its_own() -> None:
    thing = _Base()
    with patched(_methods(_Base)):
        thing.plain = lambda x: ("own", x)  # type: ignore[method-assign]
        assert thing.plain(1) == ("own", 1)


def test_two_threads_patch_one_after_the_other() -> None:
    """Neither sees the other's, whoever comes first."""
    inside: list[int] = []

    def patch(number: int) -> Any:
        with patched([Patch(_Base, "plain", lambda old: lambda self, x: number)]):
            inside.append(number)
            found = {_Base().plain(1) for _ in range(1000)}
            assert inside == [number]
            inside.remove(number)
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(patch, range(20))) == [{number} for number in range(20)]
    assert _Base().plain(1) == ("plain", 2)


def test_the_frame_that_called() -> None:
    module = _user()

    def make(old: Any) -> Callable[..., str]:
        return lambda *_: calling_frame().f_code.co_name

    data = Patch(Tensor, "data", lambda old: property(make(old)))
    with (
        patched([Patch(module, "plain", make), Patch(_Base, "plain", make), data]),
        patched([Patch(module, "plain", lambda old: functools.partial(old))]),
    ):
        here = sys._getframe().f_code.co_name
        assert (module.plain(), _Base().plain(0), torch.ones(1).data) == (here, here, here)
