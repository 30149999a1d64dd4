"""The tree of a model's modules with placements and communication; equal layers are folded into one row.

h                    h
  0   attn, mlp        0 to 11  x12   attn, mlp
  ...
  11  attn, mlp
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fxdp.ir.graph.regions import regions_around
from fxdp.reports.graph_display import COLOURS, symbol_of
from fxdp.reports.plan_data.collective import Need
from fxdp.reports.plan_data.details import Details


@dataclass
class ModuleBranch:
    """A module with its submodules, or several equal modules in a row.

    Attributes
    ----------
    values : number of values with each kind of placement, values of submodules included.
    parameters : bytes of the module's parameters.
    traffic : bytes communicated for the module's lines and parameters.
    times : number of modules that this branch represents.
    """

    name: str
    values: Counter[str] = field(default_factory=Counter)
    parameters: int = 0
    traffic: int = 0
    times: int = 1
    children: dict[str, ModuleBranch] = field(default_factory=dict)

    def at(self, path: str) -> Iterable[ModuleBranch]:
        """Yield this branch and each branch on the way to a module's path; create missing branches."""
        branch = self
        yield branch
        for region in regions_around(path):
            name = region.rpartition(".")[2]
            branch = branch.children.setdefault(name, ModuleBranch(name))
            yield branch

    def shares(self) -> list[tuple[str, float]]:
        """Return the percentage of all values for each kind of placement."""
        total = sum(self.values.values()) or 1
        return [(kind, 100 * self.values[kind] / total) for kind in COLOURS if self.values[kind]]

    def shape(self) -> tuple[object, ...]:
        """Return a key that is equal for layers that may be folded into one row."""
        return self.parameters, tuple((name, child.shape()) for name, child in self.children.items())


def module_tree(details: Details) -> ModuleBranch:
    """Build the tree of a plan's modules, with equal layers folded."""
    root = ModuleBranch(details.model or "the model")
    for row in details.explanations:
        kind = symbol_of(row.placement)
        for branch in root.at(row.location.module):
            branch.values[kind] += bool(kind)
    for parameter in details.parameters:
        for branch in root.at(parameter.name.rpartition(".")[0]):
            branch.parameters += parameter.bytes
    for collective in details.collectives:
        for need in collective.needs if collective.kind != "send" else ():
            for branch in root.at(_module(need)):
                branch.traffic += need.bytes
    return _folded(root)


def _module(need: Need) -> str:
    """Return the module that needs a value: for a gradient, the module of the parameter."""
    return (
        need.text.removeprefix("gradient of ").rpartition(".")[0] if need.gradient else need.location.module
    )


def _folded(branch: ModuleBranch) -> ModuleBranch:
    """Fold consecutive numbered children with equal shape into one child."""
    children = [_folded(child) for child in branch.children.values()]
    found: dict[str, ModuleBranch] = {}
    for _, run in itertools.groupby(children, _alike):
        alike = list(run)
        merged = alike[0] if len(alike) == 1 else _merged(alike, f"{alike[0].name} to {alike[-1].name}")
        found[merged.name] = merged
    branch.children = found
    return branch


def _alike(branch: ModuleBranch) -> object:
    return branch.shape() if branch.name.isdecimal() else branch.name


def _merged(alike: list[ModuleBranch], name: str) -> ModuleBranch:
    """Merge branches of one shape and add up the counts."""
    children = {
        child: _merged([one.children[child] for one in alike if child in one.children], child)
        for child in alike[0].children
    }
    values: Counter[str] = Counter()
    for one in alike:
        values.update(one.values)
    parameters, traffic = sum(one.parameters for one in alike), sum(one.traffic for one in alike)
    return ModuleBranch(name, values, parameters, traffic, sum(one.times for one in alike), children)
