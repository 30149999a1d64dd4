"""Regions of a program: the module instances that its nodes come from, each named by its path.

    model       h = ModuleList([Block(mlp), ..])
    node        meta(node).location.module == "h.3.mlp"
    regions     h, h.3, h.3.mlp, the outermost first; number 3 of the list h

No pass searches a graph for layers: pipeline stages begin at regions, `activation_checkpointing` recomputes
them, plans are read by them, and of the regions of one list that are alike one is traced and compiled.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from functools import lru_cache

from torch import fx

from fxdp.ir.graph.metadata import meta


def region_of(node: fx.Node) -> str:
    """Return the innermost region of a node; empty for the model itself."""
    return meta(node).location.module


@lru_cache(maxsize=65536)
def regions_around(path: str) -> tuple[str, ...]:
    """Return a region's parents and the region, the outermost first; empty for the model itself."""
    parts = path.split(".") if path else []
    return tuple(".".join(parts[: i + 1]) for i in range(len(parts)))


def regions_of(nodes: Iterable[fx.Node]) -> list[str]:
    """Return the regions of nodes and their parents, in the order of the nodes."""
    paths = dict.fromkeys(map(region_of, nodes))
    return list(dict.fromkeys(region for path in paths for region in regions_around(path)))


def is_within(path: str, region: str) -> bool:
    """Return whether a path names a region, or a module or tensor inside of the region."""
    return path == region or path.startswith(f"{region}.")


def similar_regions(name: str, regions: Collection[str]) -> list[str]:
    """Return at most three regions with names like an unknown one, for an error; `*` stands for a number."""
    return difflib.get_close_matches(name.replace("*", "0"), regions, n=3, cutoff=0.5)


@lru_cache(maxsize=65536)
def numbers_in(path: str) -> tuple[tuple[str, int], ...]:
    """Return the numbered regions around a path: `h.3.mlp.0` is in number 3 of `h`, and 0 of `h.3.mlp`."""
    parts = path.split(".")
    return tuple((".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if part.isdecimal())


def number_in(path: str, container: str) -> int | None:
    """Return the number of the region of a list that a path is in; None outside of the list."""
    return next((number for of, number in numbers_in(path) if of == container), None)


def renumbered(path: str, container: str, number: object) -> str:
    """Return a path within a region of a list with another number."""
    start = f"{container}." if container else ""
    return f"{start}{number}.{path.removeprefix(start).partition('.')[2]}".rstrip(".")
