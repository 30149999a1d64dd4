"""Invariants of a graph whose nodes have stages; the verifier runs these checks at level STAGED.

stage 0 -> 1 -> 2    values of the forward
stage 0 <- 1 <- 2    values of the backward
epilogue             reads the sums of all micro-batches; no micro-batch reads from it
between rounds       ops that run once read any stage's blocks, and give to any stage
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxdp.ir.graph.metadata import meta

_Fault = tuple[fx.Node, str]


def _own_nodes_have_stages(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that every op that reads a stage's value belongs to a stage (STAGED)."""
    for node in graph.nodes:
        if node.op != "call_function" or meta(node).stage is not None or meta(node).exchanged:
            continue
        for source in node.all_input_nodes:
            if meta(source).stage is not None:
                yield node, f"has no stage, but reads %{source.name} of stage {meta(source).stage}"
                break


def _forward_goes_on(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that no forward op reads a value of a later stage (STAGED)."""
    for node, source, here, there in _edges(graph):
        if not meta(node).backward and not meta(source).backward and there > here:
            yield node, f"of stage {here} reads %{source.name} of stage {there}: the forward only goes on"


def _backward_comes_back(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that no backward op reads a gradient of an earlier stage (STAGED)."""
    for node, source, here, there in _edges(graph):
        if meta(node).backward and meta(source).backward and there < here:
            yield node, f"of stage {here} reads %{source.name} of stage {there}: the backward only comes back"


def _steps_end_last(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that no micro-batch reads a value computed after the last micro-batch (STAGED)."""
    for node in graph.nodes:
        if node.op != "call_function" or meta(node).once:
            continue
        for source in node.all_input_nodes:
            if meta(source).once:
                yield node, f"runs in each micro-batch, but reads %{source.name}, which comes after the last"


def _edges(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, int, int]]:
    """Yield ops of a micro-batch with an operand, if both have stages, and the stages of both."""
    for node in graph.nodes:
        here = meta(node).stage
        if node.op != "call_function" or here is None or _runs_once(node):
            continue
        for source in node.all_input_nodes:
            there = meta(source).stage
            if there is not None and not _runs_once(source):
                yield node, source, here, there


def _runs_once(node: fx.Node) -> bool:
    return meta(node).once or meta(node).exchanged


STAGE_CHECKS = (_own_nodes_have_stages, _forward_goes_on, _backward_comes_back, _steps_end_last)
"""All checks, in the order in which faults are reported."""
