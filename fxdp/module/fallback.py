"""Calls that capture refuses, run op by op on global tensors: `fxdp.compile(model, fallback="eager")`.

    plain inputs, this rank's part --call_on_batch--> global tensors --model--> global tensors --> plain

The outputs mean what those of a program mean: a tensor along the batch is this rank's part, and its gradient
is divided by the number of ranks; all else is of the global batch. Code that draws numbers of Python or NumPy
beside global tensors draws alike on all ranks:

    if np.random.random() < self.layerdrop:     one device draws once; ranks that draw apart compute apart
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.inputs import run_model
from fxdp.capture.leaves import register_containers
from fxdp.capture.ragged_rows import has_rows
from fxdp.errors import CaptureError
from fxdp.ir.graph.model_tensors import full_value, is_sharded
from fxdp.ir.types.placements import Shard
from fxdp.module.calls.call import ProgramKey
from fxdp.options import Options
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.generator_states import numpy_generator, python_generator
from fxdp.ranks.liveness.failure import everywhere, refusing
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.runtime.bound import AVERAGED

_T = TypeVar("_T")
RAGGED = "its batch is ragged"
_TENSORS_AND_NUMBERS = frozenset({Tensor, int, float, bool, str, type(None)})
"""Classes of arguments of which no call becomes ragged by itself."""
_log = logging.getLogger("fxdp")


class FallsBackError(CaptureError):
    """Signal, on all ranks alike, that a call runs on global tensors.

    Parameters
    ----------
    sizes : the `CallSizes.key` of the calls that do, if not all of their kind.
    """

    def __init__(self, text: str, sizes: Any = None) -> None:
        super().__init__(text)
        self.sizes = sizes


def captured_by_all(process_mesh: ProcessMesh, capture: Callable[[], _T]) -> _T:
    """Return the capture of a call; a collective call.

    Raises
    ------
    FallsBackError : on all ranks alike, a rank's capture is refused.
    """
    found, refusal = None, None
    with refusing(process_mesh):
        try:
            found = capture()
        except CaptureError as error:
            refusal = error
    texts = gather_objects(process_mesh, "" if refusal is None else str(refusal))
    text = next(filter(None, texts), None)
    if text is not None:
        raise everywhere(FallsBackError(text)) from refusal
    assert found is not None
    return found


class Fallback:
    """The calls of a compiled module that run op by op, and their run."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._step = _Step(model, options)
        self._refused: dict[Any, str] = {}
        self._warned = False
        self._is_asked, self._has_rows = options.fallback is not None, has_rows(options.batch_dims)
        self.in_parts = False
        """Whether the running call was made with the parts of global tensors."""

    def check(self, key: ProgramKey, sizes: Any) -> None:
        """Raise `FallsBackError` if calls of this kind, or of it with these sizes, were refused before."""
        for refused in (None, sizes) if self._refused else ():
            if text := self._refused.get((_kind(key), refused)):
                raise FallsBackError(text, refused)

    def is_ragged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], process_mesh: ProcessMesh | None = None
    ) -> bool:
        """Return whether a call runs op by op as its batch is ragged, by `Rows`, class or lists.

        With `process_mesh` it is equal on all ranks, also where one has a list of no image. With
        `fallback=None` the call is compiled, as far as its rows can be.
        """
        if not self._is_asked:
            return False
        values = (*args, *kwargs.values())
        if self._has_rows or all(type(value) in _TENSORS_AND_NUMBERS for value in values):
            return self._has_rows
        from fxdp.eager.ragged.kinds import is_recognised

        if any(map(is_recognised, values)):
            return True
        found = _has_targets(dict(enumerate(args))) or _has_targets(kwargs)
        if process_mesh is None or not (found or any(map(_has_empty_list, values))):
            return found
        return any(gather_objects(process_mesh, found))

    def add(self, key: ProgramKey, error: FallsBackError) -> None:
        """Run calls of this kind, with the sizes of the error, op by op from now on."""
        known = self.reasons
        self._refused[_kind(key), error.sizes] = str(error)
        if self.reasons == known:
            return
        _log.warning(
            "%s: capture refuses it, so it runs on global tensors, as fallback='eager' asks: exact, but each "
            "op is looked up in Python (6 to 15 us), and nothing is fused or overlapped; "
            "fxdp.eager_report() counts its messages by line. Capture says: %s",
            type(self._step.model).__name__, str(error).partition("\n")[0],
        )  # fmt: skip

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why calls run op by op, one text for each kind."""
        return tuple(dict.fromkeys(self._refused.values()))

    def run(self, process_mesh: ProcessMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model on global tensors."""
        from fxdp.eager.data_ranks import ranks_of

        full = {name: full_value(p) for name, p in self._step.named_parameters() if is_sharded(p)}
        with _equal_generators(ranks_of(process_mesh).exchange):
            if full:
                return torch.func.functional_call(self._step, full, args, kwargs)
            return self._step(*args, **kwargs)

    def run_on_parts(
        self, process_mesh: ProcessMesh, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the model on this rank's rows, and return the outputs as a program does."""
        from fxdp.eager.data_ranks import ranks_of
        from fxdp.eager.loader import call_on_batch

        ranks = ranks_of(process_mesh)
        args, kwargs = call_on_batch(ranks, args, kwargs, options.batch_dims)
        output = self.run(process_mesh, args, kwargs)
        register_containers(output)
        return pytree.tree_map_only(Tensor, self._plain, output)

    def _plain(self, output: Tensor) -> Tensor:
        from fxdp.eager.local_parts import local_part
        from fxdp.eager.tensor import GlobalTensor

        if not isinstance(output, GlobalTensor):
            return output
        spec = output._spec
        if not isinstance(spec.placement, Shard):
            return output.full()
        part, world = local_part(output, spec.axis, spec.placement), spec.axis.ranks.world
        if part.requires_grad and world > 1:
            part.register_hook(lambda grad: self._averaged(grad, world))  # type: ignore[no-untyped-call]
        return part

    def _averaged(self, grad: Tensor, world: int) -> Tensor:
        if not self._warned:
            self._warned = True
            _log.warning(AVERAGED, world)
        return grad / world


class _Step(nn.Module):
    """A call of the model and of its loss, which see one device, as all modules on global tensors do."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__()
        self.model, self._options = model, options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        asks_output = not self.model.training and "target" not in kwargs
        loss_fn = None if asks_output else self._options.loss_fn
        return run_model(self.model, args, kwargs, loss_fn, self._options.precision)


def _has_targets(holder: Mapping[Any, Any]) -> bool:
    """Return whether there are lists of detection: with a dict of boxes or masks for each image."""
    from fxdp.eager.ragged.kinds import rows_of_lists

    below = (value for value in holder.values() if type(value) in (list, tuple, dict))
    nested = (value if isinstance(value, dict) else dict(enumerate(value)) for value in below)
    return bool(rows_of_lists(holder)) or any(map(_has_targets, nested))


def _has_empty_list(value: Any) -> bool:
    if type(value) is dict:
        return any(map(_has_empty_list, value.values()))
    return type(value) in (list, tuple) and (not value or any(map(_has_empty_list, value)))


def _kind(key: ProgramKey) -> Any:
    """Return the key without Python values: a model that counts its calls is refused at each count."""
    return key.structure, key.tensors, key.grad, key.training


@contextlib.contextmanager
def _equal_generators(exchange: Callable[[Sequence[int]], list[tuple[int, ...]]]) -> Iterator[None]:
    """Let all ranks draw alike inside the block: by their own states if these are equal, else by one seed.

    `exchange` returns all ranks' integers. Different states are as before after the block.
    """
    rows = exchange((python_generator(), numpy_generator()))
    if len(set(rows)) == 1:
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(rows[0][0])
    np.random.seed(rows[0][1] % (1 << 32))
    try:
        yield
    finally:
        # the next block has other numbers; the first draw tells the ranks' own states apart, as before
        random.setstate(python)
        np.random.set_state(numpy)
        random.random()
        np.random.random()
