"""Plans are found by a key that tells apart what may differ; views keep no graph and write through copies."""

from __future__ import annotations

import gc
import math
import weakref
from unittest import mock

import torch

import fxdp
from fxdp.eager import dispatch
from fxdp.eager.plans.call_key import call_key


def _batch() -> fxdp.GlobalTensor:
    found = fxdp.global_batch(torch.arange(12.0, dtype=torch.float64).view(4, 3))
    assert isinstance(found, fxdp.GlobalTensor)
    return found


def test_a_second_call_of_a_kind_makes_no_plan() -> None:
    x = _batch()
    first = torch.addcmul(x, x, x.sin(), value=3)
    with mock.patch.object(dispatch, "_way", side_effect=AssertionError):
        again = torch.addcmul(x, x, x.sin(), value=3)
    assert torch.equal(again.full(), first.full())


def test_as_many_plans_are_kept_as_the_bound_says() -> None:
    x = _batch()
    with mock.patch.multiple(dispatch, _PLANS={}, _PLANS_KEPT=3):
        for number in range(5):
            (x + number).add(number)
            assert fxdp.eager_report().plans <= 3
        assert torch.equal((x + 0).full(), x.full())


def test_numbers_that_are_equal_and_not_the_same_have_plans_of_their_own() -> None:
    x = _batch()
    for values in ((1, True, 1.0), (0.0, -0.0), ([1, 2], [1], 1)):
        keys = {call_key(None, (x, value), {}) for value in values}
        assert len(keys) == len(values), values
    assert len({call_key(None, args, {}) for args in (([x], x), ([x, x],), (x, [x]))}) == 3
    assert [math.copysign(1, torch.full_like(x, zero)[0, 0].item()) for zero in (0.0, -0.0)] == [1, -1]
    assert (x * True).dtype == (x * 1).dtype == x.dtype


def test_a_view_keeps_no_graph() -> None:
    x = _batch().requires_grad_()
    saved = x.exp()
    row, alias = (saved * saved)[1], (saved * saved).detach()
    kept = weakref.ref(saved.local)
    row = row.detach()
    del saved
    gc.collect()
    assert kept() is None
    assert row.shape == alias[0].shape


def test_a_write_into_a_view_of_a_copy_reaches_the_base() -> None:
    x, expected = _batch(), _batch().full()
    for full in (x, expected):
        full[1].detach()[2:].fill_(7)
        full[2].view(3, 1)[0, 0] = 9
    assert torch.equal(x.full(), expected)
