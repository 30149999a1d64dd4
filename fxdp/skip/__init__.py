"""Declared skip connections: one module stashes a tensor, and a later module pops the tensor.

Skips work eagerly in a plain `nn.Sequential`, and become direct edges between stages in a compiled pipeline.
The names are those of torchgpipe and `torch.distributed.pipeline.sync.skip`: code written for either of the
two changes only an import.
"""

from fxdp.skip.base import Skippable
from fxdp.skip.exchange import pop, stash
from fxdp.skip.layout import SkipLayout, inspect_skip_layout
from fxdp.skip.namespace import Namespace
from fxdp.skip.portal import Portal
from fxdp.skip.skippable import skippable, verify_skippables
from fxdp.skip.tracker import (
    SkipTracker,
    SkipTrackerThroughPortals,
    SkipTrackerThroughPotals,
    current_skip_tracker,
    use_skip_tracker,
)

__all__ = [
    "Namespace",
    "Portal",
    "SkipLayout",
    "SkipTracker",
    "SkipTrackerThroughPortals",
    "SkipTrackerThroughPotals",
    "Skippable",
    "current_skip_tracker",
    "inspect_skip_layout",
    "pop",
    "skippable",
    "stash",
    "use_skip_tracker",
    "verify_skippables",
]
