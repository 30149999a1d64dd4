"""Trace the joint graph of a few of many equal layers, and expand it to all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.annotate_joint import AnnotatedJoint, SignatureSpecs
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.joint.raw_joint import JointOptions, RawJoint
from fxdp.startup.repeated.expanded_joint import expanded
from fxdp.startup.repeated.repeated_forward import KEPT, find_layers, shortened
from fxdp.startup.repeated.repeated_program import OtherLayersError
from fxdp.torch_compat import is_on

_log = logging.getLogger("fxdp")

Joint: TypeAlias = tuple[RawJoint, Sizes, AnnotatedJoint]


def joint_by_layer(
    own: Callable[[Exported, JointOptions], Joint], exported: Exported, options: JointOptions
) -> Joint:
    """Extend `annotated_joint`: trace a few of many equal layers, and expand the joint graph to all."""
    found = _by_layer(own, exported, options) if is_on("repeated_joint") else None
    return found or own(exported, options)


def _by_layer(
    own: Callable[[Exported, JointOptions], Joint], exported: Exported, options: JointOptions
) -> Joint | None:
    try:
        layers = find_layers(exported)
    except Exception as error:  # what only saves time may not decide whether a model is captured
        _log.debug("repeated layers are left out: no search for them, for a bug in fxdp: %r", error)
        return None
    if layers is None:
        return None
    for reduced in KEPT:
        layers = replace(layers, reduced=reduced)
        raw, sizes, short = own(shortened(exported, layers), options)
        try:
            gm = expanded(short.gm, layers, SignatureSpecs(exported.owner, exported.paths))
            gm.graph.lint()
        except OtherLayersError as error:
            _log.debug("%d of %d layers are too few: %s", reduced, layers.count, error)
        except Exception as error:
            _log.debug("repeated layers are left out: lengthening failed, a bug in fxdp: %r", error)
            return None
        else:
            return raw, sizes, replace(short, gm=gm)
    return None
