"""Compare values that must be equal on all ranks: parameters, buffers, the batch of a pipeline's ranks.

Programs keep replicas equal, but a user may change one: `load_state_dict` or a different learning rate on one
rank only. The loss is summed over the ranks and stays equal on all ranks, so the error would stay
unnoticed. Therefore, at calls 2, 4, 8, ..., then at regular calls, and at the first call after `eval()` or
`state_dict()`, the ranks exchange 64 bits:

    call 100    checksums, one number in all       usually equal: done
                checksums by tensor                only if they differ, to find the tensors
                rank 0's values of each            to measure: rounding is corrected, with a warning

Most faults are there from the start, and short runs have few calls: therefore the early comparisons.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fxdp.compiler.program import Program
from fxdp.errors import AgreementError
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.model_tensors import is_sharded, local_of
from fxdp.ir.graph.signature import Buffer, Parameter
from fxdp.ir.network.checksums import checksums, mixed
from fxdp.ir.tensor_difference import difference
from fxdp.module.calls.call import Call
from fxdp.module.calls.input_agreement import check_inputs_agree
from fxdp.options import Options
from fxdp.ranks.agreement import Agreement, broadcast_tensors
from fxdp.ranks.liveness.failure import everywhere
from fxdp.ranks.process_mesh import ProcessMesh

_log = logging.getLogger("fxdp")

_SELDOM = 20  # calls between checks on request: some loops read the state dict at each step
_SCALE = 1 << 40  # a relative difference as an integer
_TINY = 1e-300  # smaller than any value: a value that is not zero on one rank alone is not rounding


class Replicas:
    """Comparison of the replicas of one model; a collective operation, at the same calls on all ranks."""

    def __init__(self, module: nn.Module, process_mesh: ProcessMesh, options: Options) -> None:
        self._module, self._process_mesh = module, process_mesh
        self._agreement = Agreement(process_mesh)
        self._every = options.debug.check_replicas if process_mesh.mesh.world > 1 else 0
        # with Pipeline(gradients="owner"), only the owners of a parameter have the current value
        self._full = options.pipeline.gradients == "everywhere" or process_mesh.mesh.pipeline.size == 1
        self._names: dict[Parameter | Buffer, None] = {}
        self._last = 0
        self._asked = self._now = False

    def read_by(self, program: Program) -> None:
        """Compare the inputs of this program from now on."""
        for node in program.gm.graph.find_nodes(op="placeholder"):
            spec = meta(node).spec
            if isinstance(spec, (Parameter, Buffer)) and self._full:
                self._names[spec] = None

    def ask(self, *, now: bool = False) -> None:
        """Compare at the next call, unless the last comparison is recent; with `now` in any case."""
        self._asked, self._now = True, self._now or now

    def wants(self, call: int) -> tuple[bool, bool]:
        """Return whether call number `call` compares on all ranks, and whether this rank asks for that."""
        if not self._every:
            return False, False
        due = call % self._every == 0 or (call > 1 and not call & (call - 1))
        return due, self._asked and (self._now or call - self._last >= _SELDOM)

    def shared(self, call: int) -> None:
        """Note that all ranks were given rank 0's values at this call."""
        self._last = call

    def compare(self, number: int, call: Call) -> None:
        """Compare the replicas; a collective call.

        Raises
        ------
        AgreementError : names the first tensor that differs between ranks, and the ranks.
        InputError : inputs that should be equal differ.
        """
        before, self._last, self._asked, self._now = self._last, number, False, False
        tensors = self._tensors()
        own = _checksums([*tensors.values()])
        pairs = list(zip(call.tensors, call.batch_dims, strict=True))
        shared = mixed(_checksums([t for t, dim in pairs if dim is None]))
        # samples that the ranks of a pipeline share
        cut = self._process_mesh.mesh.pipeline.size > 1
        samples = mixed(_checksums([t for t, dim in pairs if dim is not None and cut]))
        rows = self._agreement.exchange((mixed(own), shared, samples))
        if len({row[0] for row in rows}) > 1:
            self._examine(tensors, self._agreement.exchange(own), before)
        places = self._process_mesh.mesh.pipeline.data_ranks or range(len(rows))
        batches = {(place, row[2]) for place, row in zip(places, rows, strict=True)}
        if len({row[1] for row in rows}) > 1 or len(batches) > len(set(places)):
            check_inputs_agree(self._process_mesh, call)

    def _tensors(self) -> dict[str, Tensor]:
        found = {}
        for spec in self._names:
            tensor: Tensor
            if isinstance(spec, Buffer):
                kind, tensor = "buffer", self._module.get_buffer(spec.name)
            else:
                kind, tensor = "parameter", self._module.get_parameter(spec.name)
            if not is_sharded(tensor):
                found[f"{kind} {spec.name}"] = tensor.detach()
        return found

    def _examine(self, tensors: Mapping[str, Tensor], rows: Sequence[Sequence[int]], before: int) -> None:
        """Raise if values differ by more than rounding; else set all ranks to rank 0's values."""
        names = list(tensors)
        differing = [name for i, name in enumerate(names) if len({row[i] for row in rows}) > 1]
        distances = {name: self._distance(tensors[name]) for name in differing}
        for name, distance in distances.items():
            if distance > _rounding(tensors[name].dtype):
                column = [row[names.index(name)] for row in rows]
                raise self._apart(name, column, distance, len(differing), before)
        broadcast_tensors(self._process_mesh, [tensors[name] for name in differing])
        _log.warning(
            "%s and %d others were not the same on all ranks, by up to %.1g of their size, which is "
            "rounding: of other processors, or of an operation that adds in no fixed order. All ranks have "
            "rank 0's values now",
            differing[0],
            len(differing) - 1,
            max(distances.values()),
        )

    def _distance(self, own: Tensor) -> float:
        """Return the largest distance of the ranks' values from rank 0's."""
        first = own.clone()
        broadcast_tensors(self._process_mesh, [first])
        # bounded, because the number must fit into 64 bits
        rows = self._agreement.exchange((int(min(difference(own, first, _TINY), 1e6) * _SCALE),))
        return max(row[0] for row in rows) / _SCALE

    def _apart(self, name: str, column: Sequence[int], distance: float, count: int, before: int) -> Exception:
        comms = self._process_mesh.comms
        assert comms is not None
        others = [str(comms.ranks[place]) for place, value in enumerate(column) if value != column[0]]
        who = f"rank {others[0]} holds" if len(others) == 1 else f"ranks {', '.join(others)} hold"
        since = f"they were equal at call {before}" if before else "they were never compared before"
        return everywhere(
            AgreementError(
                f"the model is no longer the same on all ranks: {who} other values of the {name} than rank "
                f"{comms.ranks[0]} (by up to {distance:.2g} of its largest), and {count} parameters and "
                f"buffers in all differ; {since}. Expected the same changes on all ranks: load_state_dict, "
                "learning rates and whatever writes into the model must not stand under `if rank == 0`. "
                "Start again from the last checkpoint, loaded on all ranks"
            )
        )


def _checksums(tensors: Sequence[Tensor]) -> list[int]:
    return checksums([local_of(t) for t in tensors])


def _rounding(dtype: torch.dtype) -> float:
    """Return the relative difference that different orders of sums may cause within some steps."""
    return float(torch.finfo(dtype).eps ** 0.5) if dtype.is_floating_point else 0.0
