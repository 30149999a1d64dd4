"""The ranks among which global tensors are sharded: their batch axes, and the order of their messages."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.equal_operands import Comparisons, PlainValues, unequal
from fxdp.eager.message_report import user_line
from fxdp.errors import AgreementError, InputError, MeshError
from fxdp.ir.types.even_batches import even_batches
from fxdp.ir.types.mesh import Mesh
from fxdp.ranks.agreement import Agreement, gather_objects
from fxdp.ranks.comms import Comms
from fxdp.ranks.comms.sequence_log import SAME_ORDER
from fxdp.ranks.hooks import install_hook
from fxdp.ranks.liveness.failure import everywhere, guard
from fxdp.ranks.mesh_init import init_mesh
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.ranks.same_order import check_order

if TYPE_CHECKING:
    from fxdp.eager.tensor import GlobalTensor

_AXES = 1024  # axes that stay interned; masks make new ones at each step
_NAME = "global tensors"


class DataRanks:
    """The data ranks of a mesh, seen from one rank; `data_ranks` returns one object per mesh.

    Attributes
    ----------
    rank, world : this rank's index and the number of ranks.
    group : the name of the process group.
    unit : the axis of values without a batch.
    generators_differ : whether the ranks' random generators had different states at the last batch.
    entered : parameters with their global values by `id`, until a backward ends or the next batch enters.
    entries : numbers of the parameters' entries, equal on all ranks.
    plain : what was noted on plain tensors, for the next message; `compares` says whether entries are noted.
    told : lines at which batches of other parts were told to meet.
    held : small sums that wait for one that is needed, to be reduced in one message; None: none waits.
    """

    def __init__(self, process_mesh: ProcessMesh) -> None:
        mesh = process_mesh.mesh
        self.process_mesh, self.mesh = process_mesh, mesh
        self.rank, self.world, self.group = mesh.rank, mesh.size, mesh.group()
        self._agreement = Agreement(process_mesh)
        self._axes: dict[tuple[int, ...], BatchAxis] = {}
        self.unit = BatchAxis(self, (1,) * self.world, user_line())
        self._messages, self._number = 0, 0
        self.generators_differ = False
        self.entered: dict[int, tuple[Tensor, Any]] = {}
        self.entries = itertools.count()
        self.plain, self.compares, self._schedule = PlainValues(mesh.alike), False, Comparisons()
        self.told: set[str] = set()
        self.held: list[GlobalTensor] | None = None
        if process_mesh.comms is not None:
            self._number = process_mesh.comms.sequence_log.add_module(_NAME)
            self.let_go_of_parameters()

    def axis(self, sizes: Sequence[int]) -> BatchAxis:
        """Return the axis with these sizes of the ranks' parts."""
        key = tuple(sizes)
        found = self._axes.get(key)
        if found is None:
            if len(self._axes) >= _AXES:
                del self._axes[next(iter(self._axes))]
            found = self._axes[key] = BatchAxis(self, key, user_line())
        return found

    def even_axis(self, total: int, block: int = 1) -> BatchAxis:
        """Return the axis of `total` samples, split as evenly as blocks of this many samples allow."""
        return self.axis(even_batches(total, self.world, block))

    def counted(self, size: int) -> BatchAxis:
        """Exchange each rank's number of samples, and return the axis; a collective call."""
        with self.message("count"):
            return self.axis([row[0] for row in self.exchange((size,))])

    def drawing_apart(self) -> InputError:
        """Return the error for an op that draws while the ranks' generators differ."""
        return InputError(
            "an op on global tensors draws random numbers, but the ranks' generators had different states "
            "when the last batch entered, so each rank would draw other numbers; expected one state: call "
            "torch.manual_seed with one number on all ranks"
        )

    def exchange(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return all ranks' integers, in rank order; a collective call."""
        return self._agreement.exchange(values)

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' values of Python, in rank order; a collective call."""
        return gather_objects(self.process_mesh, value)

    def let_go_of_parameters(self) -> None:
        """Forget the parameters' global values, as a step ends."""
        self.entered.clear()
        self.compares = self.process_mesh.comms is not None and self._schedule.due()

    def message(self, what: str) -> AbstractContextManager[None]:
        """Return the context of one message: errors reach all ranks, and ranks must be at the same message.

        `what` names the message; ranks are at the same one if it and the user's line are equal.

        Raises
        ------
        AgreementError : (on entering) ranks are at different messages; names the lines of both.
        RankFailedError : a rank failed, died, or did not come in time.
        """
        return _Message(self, what)

    def begin_message(self, what: str) -> None:
        """Log a message with the user's line, and compare it with the messages of all ranks."""
        comms = self.process_mesh.comms
        if comms is None:
            return
        self._messages += 1
        comms.sequence_log.begin_call(self._number, self._messages)
        own = f"{what} at {user_line()}"
        self._met(comms, own, own, ())

    def enter(self, what: str, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return all ranks' integers where a batch enters, at any line; a collective call.

        Raises
        ------
        AgreementError : ranks are at something else, or have passed other plain tensors before.
        """
        comms = self.process_mesh.comms
        if comms is None:
            return self.exchange(values)
        return self._met(comms, what, f"{what} at {user_line()}", values)

    def _met(self, comms: Comms, key: str, own: str, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Exchange integers between ranks that are at the same `key`; `own` says where this rank is."""
        head = zlib.crc32(key.encode()), comms.sequence_log.order, self.plain.digest
        rows = self.exchange((*head, *values))
        notes = self.plain.taken()
        if any(row[:3] != head for row in rows):
            if any(row[0] != head[0] or len(row) != len(rows[0]) for row in rows):
                self._refuse_apart(comms, own)
            if any(row[1] != head[1] for row in rows):
                check_order(self.process_mesh)
            self._compare(notes)
        return [row[3:] for row in rows]

    def _compare(self, notes: Sequence[tuple[str, int]]) -> None:
        """Compare what the ranks have noted on plain tensors; a collective call."""
        found = unequal([
            [(str(text), int(value)) for text, value in of_rank]
            for of_rank in self.gather(notes)
        ])  # fmt: skip
        if found is None:
            return
        use, places = found
        raise everywhere(AgreementError(
            f"{use} that has other values on ranks {places} than on rank 0; expected equal ones, as one "
            "device has one value: call torch.manual_seed with one number on all ranks, or pass each "
            "rank's part of a batch through fxdp.global_batch"
        ))  # fmt: skip

    def _refuse_apart(self, comms: Comms, own: str) -> NoReturn:
        words = gather_objects(self.process_mesh, own)
        named = ", ".join(f"rank {rank} is at {text}" for rank, text in zip(comms.ranks, words, strict=True))
        text = f"{named}: messages of global tensors that do not belong together; {SAME_ORDER}"
        comms.liveness.fail(text)
        raise AgreementError(text)


class _Message:
    def __init__(self, ranks: DataRanks, what: str) -> None:
        self._ranks, self._what, self._guard = ranks, what, guard(ranks.process_mesh)

    def __enter__(self) -> None:
        self._guard.__enter__()
        try:
            self._ranks.begin_message(self._what)
        except BaseException as error:
            self._guard.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *raised: object) -> None:
        self._guard.__exit__(*raised)  # type: ignore[arg-type]


_BY_COMMS: dict[int, DataRanks] = {}
"""By the identity of their connections, until the process group is destroyed."""
_ALONE: dict[Mesh, DataRanks] = {}
WITH_GROUPS: list[Callable[[], None]] = []
"""What is called as a process group is destroyed: caches let go of its ranks."""


def data_ranks(mesh: DeviceMesh | Mapping[str, int] | None, device_type: str) -> DataRanks:
    """Return the data ranks of a mesh; all ranks of the mesh must call this at the same point.

    Raises
    ------
    MeshError : the mesh has a pipeline axis, or sizes only.
    """
    process_mesh = init_mesh(mesh, device_type)
    process_mesh.check_ranks()
    return ranks_of(process_mesh)


def ranks_of(process_mesh: ProcessMesh) -> DataRanks:
    """Return the data ranks of a mesh whose ranks are connected.

    Raises
    ------
    MeshError : the mesh has a pipeline axis.
    """
    comms, found_mesh = process_mesh.comms, process_mesh.mesh
    if found_mesh.pipeline.size > 1:
        raise MeshError(
            f"global tensors on {found_mesh} with a pipeline axis of {found_mesh.pipeline.size} ranks; "
            "expected data axes only: pass the mesh's data axes, as mesh['dp']"
        )
    if comms is None:
        return _ALONE.setdefault(found_mesh, DataRanks(process_mesh))
    install_hook()
    found = _BY_COMMS.get(id(comms))
    if found is None:
        found = _BY_COMMS[id(comms)] = DataRanks(process_mesh)
        comms.when_ended(partial(_let_go, id(comms)))
    return found


def _let_go(comms: int) -> None:
    """Let go of the ranks whose process group is destroyed."""
    _BY_COMMS.pop(comms, None)
    for call in WITH_GROUPS:
        call()
