"""Make the program of a capture, and check that all ranks have made the same program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from fxdp.capture.captured import Captured
from fxdp.capture.joint.one_order import in_one_order
from fxdp.capture.python_values import SpecializationError
from fxdp.compiler.program import Program
from fxdp.errors import AgreementError
from fxdp.module.strategies import Strategies
from fxdp.ranks.agreement import agree, content_digest, gather_objects
from fxdp.ranks.process_mesh import ProcessMesh

_log = logging.getLogger("fxdp")


class SamePrograms:
    """Factory of programs; all ranks must make a program together.

    Code that iterates over a set creates nodes and buffers in an order that differs between processes. If
    programs differ, their nodes are sorted by edges alone, which may make the programs equal.
    """

    def __init__(self, process_mesh: ProcessMesh, strategies: Strategies) -> None:
        self._process_mesh, self._strategies = process_mesh, strategies
        self._in_one_order = False

    def make(
        self, found: Captured, sizes: Mapping[str, int], again: Callable[[], Captured | SpecializationError]
    ) -> Program:
        """Return the program of a capture at these sizes; `again` captures the same call once more.

        Raises
        ------
        AgreementError : on all ranks, with the first line that differs, as in their code.
        """
        told: AgreementError | None = None
        if not self._in_one_order:
            program = self._strategies.make(found, sizes)  # the program's graph is the captured graph
            try:
                self._compare(program)
            except AgreementError as error:
                other = again()
                assert isinstance(other, Captured), "the same call, captured once before"
                told, found = error, other
            else:
                return program
        program = self._strategies.make(in_one_order(found), sizes)
        try:
            self._compare(program)
        except AgreementError as error:
            raise told or error from None
        if not self._in_one_order:
            _log.info("the ranks' code goes other ways through a set: nodes are in the order of their edges")
        self._in_one_order = True
        return program

    def _compare(self, program: Program) -> None:
        """Raise if the ranks have compiled different programs."""
        if self._process_mesh.comms is None:
            return  # a single process; the text of a deep model takes longer than most passes
        if lines := program.schedule_lines():
            # ranks with different schedule files would wait for one another forever
            agree(self._process_mesh, lines, "schedules")
        constants = _tensor_lines(program.captured.constants) if self._process_mesh.mesh.world > 1 else []
        digests = gather_objects(self._process_mesh, (program.digest, *constants))
        if len(set(digests)) > 1:
            agree(self._process_mesh, program.text.splitlines(), "models")
            agree(self._process_mesh, constants, "constant tensors")
            raise AgreementError(
                "the ranks' programs differ in a constant: are the models' Python values equal?"
            )


def _tensor_lines(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return name, type and a hash of the content of each tensor, for `agree`."""
    return [
        f"{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)} content {content_digest(t)}"
        for name, t in sorted(tensors.items())
    ]
