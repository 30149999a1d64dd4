"""Trace and cut a program of a few of its repeated layers, and expand both halves to all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxdp.ir.graph.signature import InputSpec
from fxdp.lowering.inductor.forward_backward import Cut
from fxdp.lowering.shapes import Shapes
from fxdp.startup.repeated.expanded_check import check_expanded
from fxdp.startup.repeated.expanded_pair import expanded
from fxdp.startup.repeated.reduced_program import shortened
from fxdp.startup.repeated.repeated_program import OtherLayersError
from fxdp.torch_compat import is_on

_log = logging.getLogger("fxdp")


def pair_by_layer(
    own: Callable[..., Cut], gm: fx.GraphModule, values: Mapping[InputSpec, Any], shapes: Shapes,
    device: torch.device, budget: float,
) -> Cut:  # fmt: skip
    """Extend `partition`: cut a few of many equal layers, and expand both halves to all."""
    found = _by_layer(own, gm, values, shapes, device, budget) if is_on("repeated_layers") else None
    return found or own(gm, values, shapes, device, budget)


def _by_layer(
    own: Callable[..., Cut], gm: fx.GraphModule, values: Mapping[InputSpec, Any], shapes: Shapes,
    device: torch.device, budget: float,
) -> Cut | None:  # fmt: skip
    """Return the cut of the expanded program; None where layers differ."""
    try:
        short = shortened(gm, values)
    except OtherLayersError as error:
        _log.debug("all layers are lowered one by one: %s", error)
        return None
    except Exception as error:  # a shortcut may not decide whether a program runs
        _log.debug("repeated layers are left out: no search for them, for a bug in fxdp: %r", error)
        return None
    found = own(short.gm, values, shapes, device, budget)
    try:
        pair = expanded(short, (found.forward, found.backward, found.saved_order))
        check_expanded(gm, pair)
    except OtherLayersError as error:
        _log.debug("all layers are lowered one by one: %s", error)
        return None
    except Exception as error:
        _log.debug("repeated layers are left out: lengthening failed, a bug in fxdp: %r", error)
        return None
    forward, backward, saved_order = pair
    return replace(found, forward=forward, backward=backward, saved_order=saved_order)
