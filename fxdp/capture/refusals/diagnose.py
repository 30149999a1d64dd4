"""Errors for failed captures in the user's terms: the line, the cause, and the remedy.

Causes are errors of torch's tracing, and content of a joint graph that no program of fxdp can run.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn.utils.rnn import PackedSequence

from fxdp import torch_compat
from fxdp.capture.locations import chain, location_of_exception
from fxdp.capture.ragged_rows import Rows
from fxdp.capture.refusals.dense_only import why_dense
from fxdp.capture.refusals.eager_probe import Read
from fxdp.errors import CaptureError, FxdpError
from fxdp.ir.graph.metadata import Location

_DATA_DEPENDENT = (torch_compat.GuardOnDataDependentSymNode, torch_compat.DataDependentOutputException)
_MARKS = (
    "data-dependent", "Could not guard on", "Could not extract specialized integer",
    "is not tracked with proxy",  # a size computed from such a number
    "unhashable type: non-nested SymInt",  # one that is a key, or in a set
)  # fmt: skip

_REMEDY_DATA = (
    "The Python code asks for the value of a tensor, which is not known while the model is captured. "
    "Use torch.where for a choice per element, torch.cond for a branch, keep the value in a tensor instead "
    "of .item(), int() or float(), or move this code out of the model"
)
_REMEDY_COUNT = (
    "The Python code counts the rows of an axis by the largest index that points into it, which is no index "
    "of a last row without any. Pass the number: len(y) of graphs with a y each, x.shape[0] of nodes, to "
    "torch_geometric as size=, dim_size= or num_nodes="
)
_REMEDY_LOOP = (
    "The Python code loops over the rows of a tensor, and how many there are depends on the data. Loop over "
    "a fixed number of rows, or compute all of them and choose with a mask; those mixtures of experts of "
    'transformers that can do so after model.set_experts_implementation("batched_mm")'
)
_REMEDY_DRAWN = (
    "The Python code decides by a random number, and a graph would go the one way that it went while it was "
    "captured. Switch off what draws it (layerdrop=0), or compute both and choose with torch.where"
)
_REMEDY_SELECTIONS = (
    "Two values whose sizes depend on the data meet, and nothing says that the sizes are equal. Compute the "
    "mask once and select both by it: chosen = labels != -100; loss(output[chosen], labels[chosen])"
)
_REMEDY_PACKED = (
    "a packed sequence is ragged: how many rows it has only the data knows. Give the recurrent layer the "
    "padded batch, take what counts of its output by a mask (or its last step by output.gather), and for a "
    "second direction flip each sample by its own length with gather"
)
_REMEDY_LIST = (
    "tensors in a Python list are read one by one in C++, as an index (x[rows, columns] of lists of tensors) "
    "or by torch.tensor([...]), and their values are not known while the model is captured. Keep them one "
    "tensor, or make one of them: x[torch.stack(rows), torch.stack(columns)]"
)
_OP_BY_OP = "; fxdp.compile(..., fallback='eager') runs such calls op by op"
_UNREAD = "but its data is not allocated yet"
_REMEDY_WRITTEN = (
    "autograd keeps this value for the backward, and the model writes into it (through .data eager lets it, "
    "and takes its gradients at the changed values). Write into a clone() of it, or compute a new tensor"
)
_REMEDY_CONVERTED = (
    "the forward converts the parameters of one of its modules to another dtype or device: eager does so for "
    "good, at its first call. Convert that module as this line does before the model is compiled"
)
_CONVERTED = "_apply(): Couldn't swap "
_WRITTEN = "needed for gradient computation has been modified by an inplace operation"
_OF_TORCH = re.compile(r"<class '|object at 0x|Sym(Float|Int)|tensor subclasses|L\['")
_OF_READS = re.compile(r"not supported for tensor subclasses|SymFloat|SymInt")
"""Torch's messages for an operation on a value read from data that cannot be traced."""
_CONSTRAINTS = "Constraints violated"
_FIXED = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)")
_COUNT = re.compile(r"\.max\(\)(\.item\(\))?\)? ?\+ ?1\b")
"""A line of code that takes the largest index and one more for the number of rows."""
_TWO_SELECTIONS = re.compile(r"expression Eq\(u\d+, u\d+\)")
_REMEDY_BATCH = (
    "Write it with tensor operations over the batch dim (for instance torch.arange(x.shape[0]) instead of "
    "range, x.shape[0] instead of int(...), or a mask instead of an if); if the samples lie along another "
    "dim of an input than its first, name it with batch_dims="
)


@dataclass(frozen=True)
class OnlyAt:
    """A batch size at which the model runs, as with `rows` samples less, but not with one sample less."""

    given: int
    rows: int | None

    @property
    def remedy(self) -> str:
        """Return the remedy as text."""
        if self.rows is not None:
            return (
                f"It runs at multiples of {self.rows}: if so many rows belong together, say so with "
                f"batch_dims=fxdp.RowsPerSample({self.rows}), and every rank passes a multiple of them"
            )
        return (
            "Keep the batch a dim of its own instead of splitting it into a fixed number of parts, which "
            "only some batch sizes can be"
        )


def is_data_dependent(error: BaseException) -> bool:
    """Return whether the error is caused by user code that reads the value of a tensor."""
    return any(
        isinstance(link, _DATA_DEPENDENT) or any(mark in str(link)[:400] for mark in _MARKS)
        for link in chain(error)
    )


def capture_error(
    error: BaseException, mismatch: str = "", reads: Sequence[Read] = (), only_at: OnlyAt | None = None
) -> CaptureError:
    """Return the error to raise, with the location, torch's message in one line, and the remedy.

    `reads`: all locations that read values of tensors; `only_at`: a batch size at which the model runs, if it
    does not run at all sizes.
    """
    if (mismatch_of_torch := torch_compat.torch_mismatch(error)) is not None:
        return mismatch_of_torch
    location = location_of_exception(error)
    if is_data_dependent(error) or (reads and _OF_READS.search(_first_line(error))):
        if not location.file and reads:  # torch evaluates the read value later than the code
            location = reads[0].location
        remedy = _data_remedy(error, location, reads)
        return CaptureError(
            f"{location.where}: data-dependent control flow. {remedy}{_OP_BY_OP}.{_listing(reads)}"
            f"{_torch_says(error)}"
        )
    if _is_packed(error):
        return CaptureError(f"{location.where}: {_REMEDY_PACKED}.{_torch_says(error)}")
    if _is_nested(error):
        return CaptureError(f"{location.where}: makes a tensor that is nested; {why_dense('nested')}")
    if _UNREAD in str(error):
        return CaptureError(f"{location.where}: {_REMEDY_LIST}.{_listing(reads)}")
    if _WRITTEN in str(error):
        return CaptureError(f"{location.where}: {_REMEDY_WRITTEN}.{_torch_says(error)}")
    if _CONVERTED in str(error):
        converted = str(error).partition(_CONVERTED)[2]
        return CaptureError(f"{location.where}: {_REMEDY_CONVERTED} ({converted})")
    if mismatch:
        return CaptureError(
            f"the model treats its batch size as a Python constant, and its graph could not be fitted from "
            f"several batch sizes: {mismatch}. {_REMEDY_BATCH}{_OP_BY_OP}.{_listing(reads)}"
            f"{_torch_says(error)}"
        )
    if only_at is not None:
        return CaptureError(
            f"{location.where}: the model runs at a batch of {only_at.given}, but not of "
            f"{only_at.given - 1}: {type(error).__name__}: {_first_line(error)}. {only_at.remedy}"
        )
    return CaptureError(
        f"{location.where}: the model could not be captured: {type(error).__name__}: {_first_line(error)}. "
        "If the model runs eagerly with these inputs, rewrite this line with tensor operations that "
        f"torch.export supports{_OP_BY_OP}{_listing(reads)}"
    )


def fixed_rows_error(error: BaseException, axes: Sequence[Rows | None]) -> CaptureError | None:
    """Return the error to raise where code makes the rows of a ragged batch's axes constants; else None.

    `axes`: what each tensor holds.
    """
    found = _FIXED.findall(str(error)) if _CONSTRAINTS in str(error) else ()
    names = dict.fromkeys(repr(rows.axis) for i in found if (rows := axes[int(i)]) is not None)
    if not names:
        return None
    return CaptureError(
        f"the model's Python code makes the number of rows of {' and '.join(names)} a constant: a loop over "
        "them, an int(...), or an op whose size is a plain number, as of torch.linspace. "
        f"{_REMEDY_BATCH}{_OP_BY_OP}"
    )


def eager_error(error: BaseException) -> CaptureError:
    """Return the error to raise for a model that also fails eagerly on these inputs."""
    return CaptureError(
        f"{location_of_exception(error).where}: the model itself fails on these inputs: "
        f"{type(error).__name__}: {_first_line(error)}"
    )


def reason_of(error: BaseException) -> str:
    """Where a trace stopped and why, in a line."""
    if isinstance(error, FxdpError):
        return _first_line(error)
    location, said = location_of_exception(error), _first_line(error)
    if is_data_dependent(error):
        said = "the Python code asks for the value of a tensor"
    elif _CONSTRAINTS in said:
        said = "the Python code makes the batch size a constant"
    elif _OF_TORCH.search(said):  # names its own parts
        said = type(error).__name__
    return f"{location.where}: {said}" if location.file else said


def _listing(reads: Sequence[Read]) -> str:
    lines = "".join(f"\n  {read}" for read in reads)
    return f"\nAll places that read the value of a tensor ({len(reads)}):{lines}" if reads else ""


def _data_remedy(error: BaseException, location: Location, reads: Sequence[Read]) -> str:
    if any(
        read.drawn and (read.location.file, read.location.line) == (location.file, location.line)
        for read in reads
    ):
        return _REMEDY_DRAWN
    if _is_loop_over_rows(error):
        return _REMEDY_LOOP
    if _COUNT.search(location.code):
        return _REMEDY_COUNT
    return _REMEDY_SELECTIONS if _TWO_SELECTIONS.search(_first_line(error)) else _REMEDY_DATA


def _is_packed(error: BaseException) -> bool:
    """Return whether a packed sequence was in use, or being made, where the error occurred."""
    frames = [frame for link in chain(error) for frame, _ in traceback.walk_tb(link.__traceback__)]
    return any(
        frame.f_code.co_filename.endswith("torch/nn/utils/rnn.py")
        or any(isinstance(value, PackedSequence) for value in frame.f_locals.values())
        for frame in frames
    )


def _is_nested(error: BaseException) -> bool:
    """Return whether functions of torch.nested were called; some fail in a trace before making a tensor."""
    frames = [frame for link in chain(error) for frame in traceback.extract_tb(link.__traceback__)]
    return any(frame.filename.endswith("torch/nested/__init__.py") for frame in frames)


def _is_loop_over_rows(error: BaseException) -> bool:
    """Return whether the value that was read is the number of iterations of a loop over a tensor."""
    frames = [frame for link in chain(error) for frame in traceback.extract_tb(link.__traceback__)]
    return any(frame.name == "__iter__" and frame.filename.endswith("torch/_tensor.py") for frame in frames)


def _torch_says(error: BaseException) -> str:
    """Return torch's message, unless it names torch's internals, of which the user has none."""
    said = _first_line(error)
    return "" if _OF_TORCH.search(said) else f"\ntorch: {said}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300].rstrip(".") if lines else type(error).__name__
