"""Exchange a few integers between the ranks before a call, to agree on the call."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fxdp.capture.captured import Captured
from fxdp.capture.inputs import Inputs
from fxdp.capture.refusals.input_layouts import check_layouts, copies_in_order
from fxdp.errors import FxdpError, InputError
from fxdp.ir.types.sizes import is_even
from fxdp.module.cache import LRU
from fxdp.module.calls.absent_images import Described, differ, images_of
from fxdp.module.calls.call import Call, ProgramKey, call_lines
from fxdp.module.calls.call_batches import FURTHER, all_axes, batches_of, further_of, nonempty
from fxdp.module.calls.input_agreement import drawing_apart, drawing_strided
from fxdp.module.calls.padding import common_lengths, padded, spread_pad
from fxdp.module.calls.reader import CallReader
from fxdp.module.calls.text_padding import padded_sides, text_pads
from fxdp.module.guards.values import digest_of
from fxdp.options import Options
from fxdp.ranks.agreement import Agreement, RankColumns, gather_objects
from fxdp.ranks.generator_states import torch_generators
from fxdp.ranks.liveness.failure import everywhere, refuse, refusing
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.ranks.same_order import agree_on_call, apart, check_order
from fxdp.runtime.unsharded_parameters import UnshardedParameters

_log = logging.getLogger("fxdp")

_CALLS = 1024
"""The number of calls (kinds and sizes) that are remembered as equal on all ranks."""


class CallExchanged(NamedTuple):
    """The facts about a call that the ranks have exchanged."""

    batches: tuple[int, ...]
    """The batch size of each data rank."""
    alike: bool = True
    """True if the sizes of all further dims are equal on all ranks."""
    apart: bool = False
    """True if the ranks' generators have different states, where equal states are needed."""
    strided: bool = False
    """True if an input on any rank is not contiguous, where strides matter."""
    asked: bool = False
    """True if a rank asks to compare replicas."""
    told: bool = True
    """True if the ranks have exchanged these facts; False if `uneven=False` skips the exchange."""
    news: bool = False
    """True if a rank has found out that the call is ragged: all must read it so, and exchange again."""
    images: tuple[list[Described], ...] = ()
    """The images of each rank's call, where some rank has none of which others have the keys."""


class _Digests(NamedTuple):
    """The digests of a call's kind and dims, as exchanged."""

    kind: ProgramKey
    dims: tuple[tuple[int, ...], ...]
    of_kind: int
    of_dims: int


_NO_NUMBERS = digest_of(())
_NEWS = 2
"""In the place of `strided`: this rank has read the call as ragged by its keys, which other ranks may not."""
_UNREAD = 3
"""In the place of `strided`: this rank cannot read its inputs."""


class CallExchange:
    """The exchange of facts about calls; with `uneven=False` only until sizes were found equal."""

    def __init__(
        self, process_mesh: ProcessMesh, options: Options, reader: CallReader, full: UnshardedParameters
    ) -> None:
        self._process_mesh = process_mesh
        self._mesh = process_mesh.mesh
        self._alone = self._mesh.world == 1
        self._uneven, self._equal_draws = options.communication.uneven, options.equal_draws
        # a rank with locally changed shards must be able to announce the change at any call
        self._spared = not options.communication.uneven and not options.may_keep_unsharded
        self._pad = options.pad
        self._reader, self._full = reader, full
        self._agreement = Agreement(process_mesh)
        self._even: LRU[Any, bool] = LRU(_CALLS)
        self._last: _Digests | None = None
        self._told_padding = False
        self._pads_at_start: bool | None = None
        """The side at which texts of this run are padded; None as long as no text was."""

    def refuse(self, error: Exception) -> None:
        """Send an error before the exchange to all ranks, which wait for this rank next.

        With uneven=False there may be no exchange: ranks may have begun the step, and the error must end it.
        """
        if not self._spared or not len(self._even):
            refuse(self._process_mesh, error)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Send an error of further checks before the exchange in the same way."""
        try:
            yield
        except Exception as error:
            self.refuse(error)
            raise

    def tell_unread(self, error: InputError) -> None:
        """Take part in the exchange of a call whose inputs this rank cannot read; a collective call.

        Raises
        ------
        InputError : on all ranks alike, with the errors of all ranks.
        """
        comms = self._process_mesh.comms
        if comms is not None and not (self._spared and len(self._even)):
            order = comms.sequence_log.order
            self._check_order(self._exchanged((0, 0, 0, 0, _UNREAD, 0, order, 0, 0)))
            raise self._unread(error) from error

    def of(self, call: Call, asks: bool = False, due: bool = False) -> CallExchanged:
        """Exchange the facts about a call; all ranks must make the same kind of call.

        `asks` says whether this rank asks to compare replicas, `due` whether all ranks ask at this call. If
        shards have changed on any rank, all ranks drop their unsharded values.
        """
        if self._alone:
            return CallExchanged(
                all_axes(call, nonempty((call.batch,)), [(size,) for size in further_of(call)]),
                strided=call.strided, news=call.is_news,
            )  # fmt: skip
        numbers = call.inputs.scalars if call.inputs.open else ()
        key = (call.kind, call.dims, call.batch, call.further, numbers)
        if self._spared and not due and call.cuts is None and key in self._even:
            size = self._mesh.size
            even = all_axes(call, (call.batch,) * size, [(own,) * size for own in call.further])
            return CallExchanged(even, strided=call.strided, told=False)
        comms = self._process_mesh.comms
        order = 0 if comms is None else comms.sequence_log.order
        state = torch_generators(self._mesh.device_type) if self._equal_draws else 0
        last = self._last
        if last is None or last.kind is not call.kind or last.dims != call.dims:
            digest = self._reader.digest
            last = self._last = _Digests(call.kind, call.dims, digest(call.kind), digest(call.dims))
        told = digest_of(numbers) if numbers else _NO_NUMBERS
        flags = int(asks), int(bool(self._full.places) and self._full.changed())
        # 0 batch, 1 kind, 2 other sizes, 3 generators, 4 strided, 5 numbers, 6 order, 7 asks, 8 rows changed
        # from 9: the sizes of further axes, the samples, and where micro-batches end
        further = () if call.is_news else further_of(call)
        strided = _NEWS if call.is_news else int(call.strided)
        own = (call.batch, last.of_kind, last.of_dims, state, strided, told, order, *flags, *further)
        found = self._exchanged(own)
        if self._uneven and found.settled(same=(1, 2, 3, 5, 6), zero=(4, 7, 8)):
            return CallExchanged(self._sizes(call, found))
        self._check_order(found)
        if _UNREAD in found[4]:
            raise self._unread()
        is_news = _NEWS in found[4]
        if self._reader.recognises and (is_news or not found.same(1)):
            images = tuple(gather_objects(self._process_mesh, images_of(*call.inputs.given)))
            if is_news or differ(images):
                return CallExchanged((), news=is_news, images=images if differ(images) else ())
        if not (found.same(1) and found.same(5)):
            agree_on_call(self._process_mesh, call_lines(call))
        batches = self._sizes(call, found)
        if not self._uneven:
            if not is_even(batches):
                raise everywhere(
                    InputError(f"uneven=False promises equal local batches, but the ranks have {batches}")
                )
            self._even[key] = True
        if found.any(8):
            self._full.drop()
        return CallExchanged(batches, found.same(2), not found.same(3), found.any(4), found.any(7))

    def _exchanged(self, own: tuple[int, ...]) -> RankColumns:
        """Return the integers of all ranks; those without images, or that cannot read theirs, send fewer."""
        try:
            return self._agreement.columns(own, FURTHER)
        except ValueError:  # as many integers as of a backward
            raise apart(self._process_mesh) from None

    def _check_order(self, found: RankColumns) -> None:
        """Raise if ranks are at different calls; first, as these differ in all the rest, too."""
        if not found.same(6):
            check_order(self._process_mesh)

    def _unread(self, error: InputError | None = None) -> FxdpError:
        """Return the error for all ranks of inputs that some cannot read; a collective call."""
        texts = gather_objects(self._process_mesh, "" if error is None else str(error))
        ranks = {text: [str(rank) for rank, own in enumerate(texts) if own == text] for text in texts if text}
        return everywhere(InputError("\n".join(
            text if len(of) == len(texts) else f"rank{'s'[: len(of) > 1]} {', '.join(of)}: {text}"
            for text, of in ranks.items()
        )))  # fmt: skip

    def _sizes(self, call: Call, found: RankColumns) -> tuple[int, ...]:
        """Return the size of each data rank along all axes."""
        batches = nonempty(batches_of(self._mesh, found[0]))
        places = range(FURTHER, FURTHER + len(further_of(call)))
        return all_axes(call, batches, [batches_of(self._mesh, found[place]) for place in places])

    def padded(self, call: Call) -> Call | None:
        """Return the call padded to the sizes that all ranks agree on; a collective call.

        None: each rank has one row of packed documents, and no value to pad it with.
        """
        from fxdp.eager.ragged.recognised import is_packed

        paths, tensors, known = call.inputs.paths, call.inputs.tensors, None
        with refusing(self._process_mesh):
            pads = spread_pad(self._pad, *call.inputs.given)
            if self._pad is None:
                known = text_pads(self._reader.module, paths, tensors)
        sides = (False, False) if known is None else padded_sides(paths, tensors)
        may_pack = self._reader.recognises and self._pad is None and not call.inputs.axes.names
        packs = may_pack and is_packed(call.inputs.given)
        counts = tuple(
            1 if dim is None else tensor.shape[dim]
            for tensor, dim in zip(tensors, call.batch_dims, strict=True)
        )
        told = gather_objects(self._process_mesh, (counts, call.dims, sides, packs))
        if all(row[3] for row in told):
            return None
        rows = [row[:2] for row in told]
        at_start, at_end = (any(row[2][side] for row in told) for side in range(2))
        if at_start or at_end:
            self._pads_at_start = None if at_start and at_end else at_start
        at_start = bool(self._pads_at_start)
        if self._pads_at_start is None:
            known = None  # nobody knows the side
        wanted = common_lengths(rows, paths, call.batch_dims, known or pads)
        if known is not None:
            self._tell_padding(paths, known, at_start)
        return self._reader.read(*padded(call.inputs, wanted, known or pads, at_start))

    def _tell_padding(self, paths: Sequence[str], pads: Sequence[float | None], at_start: bool) -> None:
        if self._told_padding or self._process_mesh.index:
            return
        self._told_padding = True
        known = [(path, pad) for path, pad in zip(paths, pads, strict=True) if pad is not None]
        _log.warning(
            "the ranks' texts have different lengths, and attention_mask says which places count: they are "
            "padded at the %s to the longest rank's, %s; pad= of fxdp.compile names other values",
            "start" if at_start else "end", ", ".join(f"{path} with {pad:g}" for path, pad in known),
        )  # fmt: skip

    def check_drawing(self, ranks: CallExchanged, captured: Captured, inputs: Inputs) -> None:
        """Raise if the ranks would not draw the random numbers of one device; a collective call.

        Raises
        ------
        InputError : the generators have different states, or the strides of inputs differ from one device's.
        """
        if ranks.apart:
            raise drawing_apart()
        if ranks.strided:
            if not ranks.told:
                check_layouts(captured, inputs, full_batch_draws=True)
            rows = gather_objects(self._process_mesh, copies_in_order(inputs))
            if any(rows):  # none if padding made new tensors
                raise drawing_strided(captured, rows)
