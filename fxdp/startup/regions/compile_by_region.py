"""Compile a phase region by region: of several equal layers one is compiled, and called for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxdp.lowering.forward_backward_pair import Boxed
from fxdp.lowering.inductor.compile import PhaseGraph
from fxdp.lowering.inductor.strides import copied
from fxdp.startup.regions.compiled_regions import CompiledRegion, NoRegionsError, regions
from fxdp.startup.regions.region_check import check_regions
from fxdp.startup.regions.region_code import AsItIs, RegionPlan, plan_regions
from fxdp.startup.regions.sums_in_place import sum_in_place, sums_in_place
from fxdp.torch_compat import graph_module, is_on

_log = logging.getLogger("fxdp")


def compile_by_region(
    own: Callable[[PhaseGraph], tuple[Any, list[Any]]], phase: PhaseGraph
) -> tuple[Any, list[Any]]:
    """Extend `compile_phase`: compile one region of each kind; the own way where layers are not equal."""
    if not phase.keeps_strides or not is_on("repeated_layers"):
        return own(phase)
    full, found, plan = _in_regions(phase)
    if plan is None:
        return own(phase)
    given_up = donated_to(found, phase.donated)

    def compile_one(one: CompiledRegion) -> Boxed:
        graph = graph_module(full, one.graph)
        if one.between:
            return AsItIs(graph)
        code, _ = phase.compile_graph(graph, one.kept, one.fixed, given_up[one.kind])
        return code  # type: ignore[no-any-return]

    with phase.start.building():  # around all: kernels that several of them have are built once
        return plan.compile(compile_one), []


def _in_regions(phase: PhaseGraph) -> tuple[fx.GraphModule, list[CompiledRegion], RegionPlan | None]:
    """Return the graph, or a copy that sums in place, with regions and a plan; no plan: one piece."""
    try:
        full, found = _found_regions(phase)
        if not found:
            return phase.gm, [], None
        plan = plan_regions(full, found)
        check_regions(full, plan)
    except Exception as error:  # a shortcut may not decide whether a program runs
        _log.debug(
            "repeated layers are left out: a phase is compiled as one piece, for a bug in fxdp: %r", error
        )
        return phase.gm, [], None
    return full, found, plan


def _found_regions(phase: PhaseGraph) -> tuple[fx.GraphModule, list[CompiledRegion]]:
    gm, visible, fixed, hides = phase.gm, phase.visible, phase.fixed, phase.options.hides
    summed = copied(gm) if phase.options.in_place else gm
    try:
        if summed is not gm and sum_in_place(summed.graph, phase.options.in_place):
            found = regions(summed, visible, fixed, hides)
            if all(one.between or not sums_in_place(one.graph) for one in found):
                return summed, found
        return gm, regions(gm, visible, fixed, hides)
    except NoRegionsError:
        return gm, []


def donated_to(regions: Sequence[CompiledRegion], names: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Return, by kind, the numbers of the inputs that every region of the kind may write over."""
    last: dict[fx.Node, CompiledRegion] = {node: one for one in regions for node in one.takes}
    apart = {node for one in regions if one.between for node in one.takes}
    found: dict[str, set[int]] = {}
    for one in regions:
        own = {
            i for i, node in enumerate(one.takes)
            if node.name in names and node.op == "placeholder" and last[node] is one and node not in apart
        }  # fmt: skip
        found[one.kind] = found.get(one.kind, own) & own
    return {kind: tuple(sorted(numbers)) for kind, numbers in found.items()}
