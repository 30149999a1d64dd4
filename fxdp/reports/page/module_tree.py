"""The modules of a model with what their values are and what travels for them; equal layers in one row.

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

from fxdp.reports.graph_display import COLOURS, lies
from fxdp.reports.plan_data.collective import Need
from fxdp.reports.plan_data.details import Details


@dataclass
class Branch:
    """A module, or several alike that follow one another, with all that is inside.

    Attributes
    ----------
    values : how many of its values, those of its children included, lie in which way.
    parameters : bytes of its parameters.
    traffic : bytes that travel for its lines and parameters.
    times : how many modules it stands for.
    """

    name: str
    values: Counter[str] = field(default_factory=Counter)
    parameters: int = 0
    traffic: int = 0
    times: int = 1
    children: dict[str, Branch] = field(default_factory=dict)

    def at(self, path: str) -> Iterable[Branch]:
        """This branch and those down to a module's path, made where they are missing."""
        branch = self
        yield branch
        for name in path.split(".") if path else ():
            branch = branch.children.setdefault(name, Branch(name))
            yield branch

    def shares(self) -> list[tuple[str, float]]:
        """Of each kind the percentage of all values."""
        total = sum(self.values.values()) or 1
        return [(kind, 100 * self.values[kind] / total) for kind in COLOURS if self.values[kind]]

    def shape(self) -> tuple[object, ...]:
        """What layers have in common that count as alike."""
        return self.parameters, tuple((name, child.shape()) for name, child in self.children.items())


def module_tree(details: Details) -> Branch:
    """The tree of a plan's modules, folded."""
    root = Branch(details.model or "the model")
    for row in details.explanations:
        kind = lies(row.placement)
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
    """The module for which a value travels: that of the parameter, if it is a gradient."""
    return (
        need.text.removeprefix("gradient of ").rpartition(".")[0] if need.gradient else need.location.module
    )


def _folded(branch: Branch) -> Branch:
    """The branch with numbered children that are alike and follow one another in one."""
    children = [_folded(child) for child in branch.children.values()]
    found: dict[str, Branch] = {}
    for _, run in itertools.groupby(children, _alike):
        alike = list(run)
        merged = alike[0] if len(alike) == 1 else _merged(alike, f"{alike[0].name} to {alike[-1].name}")
        found[merged.name] = merged
    branch.children = found
    return branch


def _alike(branch: Branch) -> object:
    return branch.shape() if branch.name.isdecimal() else branch.name


def _merged(alike: list[Branch], name: str) -> Branch:
    """Several branches of one shape as one, their numbers added up."""
    children = {
        child: _merged([one.children[child] for one in alike if child in one.children], child)
        for child in alike[0].children
    }
    values: Counter[str] = Counter()
    for one in alike:
        values.update(one.values)
    parameters, traffic = sum(one.parameters for one in alike), sum(one.traffic for one in alike)
    return Branch(name, values, parameters, traffic, sum(one.times for one in alike), children)
