from __future__ import annotations

import copy
import pickle

from fxdp.skip import Namespace


def test_each_is_unique() -> None:
    a, b = Namespace(), Namespace()
    assert a != b
    assert len({a, b, None}) == 3


def test_a_copy_is_equal_and_not_identical() -> None:
    a = Namespace()
    for twin in (copy.copy(a), copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert twin == a
        assert twin is not a
        assert hash(twin) == hash(a)


def test_total_order_by_making_with_the_default_first() -> None:
    a, b = Namespace(), Namespace()
    assert sorted([b, None, a], key=lambda ns: (ns,)) == [None, a, b]
    assert sorted([(0, b, "x"), (0, None, "x"), (0, a, "x")]) == [(0, None, "x"), (0, a, "x"), (0, b, "x")]
    assert a < b
    assert b > a
    assert a <= copy.copy(a) <= b
    assert not a < None
    assert a > None
    assert a >= None


def test_the_default_is_a_namespace() -> None:
    assert isinstance(None, Namespace)
    assert not isinstance("ns", Namespace)
