"""Track which ranks update each parameter under `Pipeline(gradients="owner")`.

Gradients then stay on the stages that read the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxdp.compiler.program import Program
from fxdp.errors import StageError
from fxdp.ir.graph.signature import Gradient, Parameter


@dataclass
class Owners:
    """The pipeline ranks that train and that read each parameter, over all programs of one model.

    All remaining ranks keep the parameter's first value. A program of another mode or for different inputs
    may be cut at different places (without a backward the stages are balanced differently) and then read a
    stale value.
    """

    _read: dict[Parameter, set[int]] = field(default_factory=dict)
    _trained: dict[Parameter, set[int]] = field(default_factory=dict)

    def add(self, program: Program) -> None:
        """Add the readers and trained parameters of one more program.

        Raises
        ------
        StageError : a rank reads a parameter that another program trains on other ranks.
        """
        given = {spec.of for spec, _, _ in program.partition.results if isinstance(spec, Gradient)}
        read, trained = dict(self._read), dict(self._trained)
        for spec, ranks in program.partition.readers(program.scheduled().schedule.placement).items():
            read[spec] = read.get(spec, set()) | ranks
            if spec in given:
                trained[spec] = trained.get(spec, ranks) & ranks
        stale = [spec.name for spec, ranks in trained.items() if not read[spec] <= ranks]
        if stale:
            raise StageError(
                'fxdp.Pipeline(gradients="owner"): this call is cut into stages at other places than one '
                f"before it, so {', '.join(stale)} would be read on ranks that do not train them. Name in "
                "stages= the modules at which stages begin, so that all calls are cut alike, or use "
                'gradients="everywhere"'
            )
        self._read, self._trained = read, trained
