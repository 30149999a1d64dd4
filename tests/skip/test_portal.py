"""Portals: what they hold and for how long, and gradients through them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from fxdp.skip.lanes import fork, join
from fxdp.skip.portal import Portal


def through(main: Tensor, skip: Tensor, *, copy: bool = False, cut: bool = False) -> Tensor:
    """`2 * main + skip`, the skip by a portal.

       skip ── blue ─┐      ┌─ orange ──┐
                     │      │           │
       main ────── join ── fork ── * 2 ─ + ──
    """  # fmt: skip
    portal = Portal(skip, tensor_life=2)
    main = join(main, portal.blue())
    if cut:
        main = main.detach()
    if copy:
        main, phony = fork(main)
        main = join(main, portal.copy(None, None, phony))
    main, phony = fork(main)
    shown = portal.orange(phony)
    assert shown is not None
    return main * 2 + shown


@pytest.mark.parametrize("copy", [False, True])
def test_gradients(copy: bool) -> None:
    main, skip = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    through(main * 3, skip * 5, copy=copy).sum().backward()
    assert torch.equal(main.grad, torch.full((3,), 6.0))
    assert torch.equal(skip.grad, torch.full((3,), 5.0))


@pytest.mark.parametrize("copy", [False, True])
def test_gradcheck(copy: bool) -> None:
    def function(main: Tensor, skip: Tensor) -> Tensor:
        return through(main.sin(), skip.exp(), copy=copy).prod()

    inputs = [torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(function, inputs)


def test_complex_gradients() -> None:
    main, skip = (torch.randn(3, dtype=torch.complex128, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: through(a, b * b), [main, skip])


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("skip_grad", [False, True])
def test_what_needs_no_gradient_gets_none(main_grad: bool, skip_grad: bool) -> None:
    main, skip = torch.rand(1, requires_grad=main_grad), torch.rand(1, requires_grad=skip_grad)
    out = through(main, skip)
    assert out.requires_grad == (main_grad or skip_grad)
    if out.requires_grad:
        out.backward()
    assert (main.grad is not None) == main_grad
    assert (skip.grad is not None) == skip_grad


def test_no_gradient_is_lost_where_the_main_lane_is_cut() -> None:
    main, skip = torch.rand(1, requires_grad=True), torch.rand(1, requires_grad=True)
    through(main, skip * 3, cut=True).backward()
    assert main.grad is None
    assert float(skip.grad) == 3


def test_integers_pass() -> None:
    portal = Portal(torch.arange(3), tensor_life=2)
    main = join(torch.rand(3, requires_grad=True), portal.blue())
    main, phony = fork(main)
    shown = portal.orange(phony)
    assert shown is not None
    assert not shown.requires_grad
    (main * shown).sum().backward()


@pytest.mark.parametrize("how", ["unused", "detached"])
@pytest.mark.parametrize("copy", [False, True])
def test_a_popped_tensor_without_use_for_its_gradient(how: str, copy: bool) -> None:
    main, skip = torch.rand(1, requires_grad=True), torch.rand(1, requires_grad=True)
    portal = Portal(skip * 1, tensor_life=2)
    lane = join(main * 1, portal.blue())
    if copy:
        lane, phony = fork(lane)
        lane = join(lane, portal.copy(None, None, phony))
    lane, phony = fork(lane)
    shown = portal.orange(phony)
    assert shown is not None
    (lane if how == "unused" else lane * shown.detach()).backward()
    assert main.grad is not None
    assert skip.grad is None


def test_backward_twice() -> None:
    main, skip = torch.rand(1, requires_grad=True), torch.rand(1, requires_grad=True)
    out = through(main, skip)
    out.backward(retain_graph=True)
    out.backward()
    assert float(skip.grad) == 2
    assert float(main.grad) == 4


def test_a_gradient_is_used_once_and_several_add_up() -> None:
    portal = Portal(torch.rand(1), tensor_life=1)
    grad = torch.ones(1)
    portal.put_grad(grad)
    assert portal.use_grad() is grad
    with pytest.raises(RuntimeError, match="grad in portal has been removed or never set"):
        portal.use_grad()
    portal.put_grad(grad)
    portal.put_grad(grad)
    assert float(portal.use_grad()) == 2


@pytest.mark.parametrize("life", [0, 1, 2, 3, 4])
def test_life(life: int) -> None:
    tensor = torch.rand(1, requires_grad=True)
    portal = Portal(tensor, tensor_life=life)
    assert (portal.tensor is tensor) == (life > 0)
    phony = portal.blue() if life > 0 else torch.empty(0)
    for _ in range(life - 1):
        shown = portal.orange(phony)
        assert shown is not None
        assert shown.data_ptr() == tensor.data_ptr()
    assert portal.tensor is None
    with pytest.raises(RuntimeError, match=r"^tensor in portal has been removed$"):
        portal.check_tensor_life()
    with pytest.raises(RuntimeError, match="removed"):
        portal.orange(phony)


def test_the_recomputed_stash_has_life_1() -> None:
    portal = Portal(torch.rand(1, requires_grad=True), tensor_life=3)
    phony = portal.blue()
    portal.orange(phony)
    portal.orange(phony)
    portal.put_tensor(torch.rand(1, requires_grad=True), tensor_life=1)
    assert portal.blue().requires_grad
    assert portal.tensor is None


def test_nothing_in_a_portal() -> None:
    portal = Portal(None, tensor_life=2)
    assert portal.blue().numel() == 0
    assert portal.copy(None, None, torch.empty(0)).numel() == 0
    assert portal.orange(torch.empty(0)) is None


def test_everything_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        skip = torch.rand(1, requires_grad=True) * 1
        portal = Portal(skip, tensor_life=2)
        alive = [weakref.ref(skip), weakref.ref(portal)]
        main, phony = fork(join(torch.rand(1, requires_grad=True) * 1, portal.blue()))
        out = main + portal.orange(phony)
        del skip, portal, main, phony
        out.backward()
        del out
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()
