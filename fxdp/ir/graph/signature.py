"""The graph signature.

Frozen specs of a program's inputs and results, so that nothing is found by position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Parameter:
    """Input spec of a parameter, by the name in the user's module."""

    name: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """Input spec of a buffer, by the name in the user's module."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """Input spec of a tensor constant that the capture lifted (equal on all ranks)."""

    name: str


def rows_of(axis: str) -> Constant:
    """Return the input spec of the positions of an axis' real rows in a padded gather.

    No attribute can have its name.
    """
    return Constant(f"<rows {axis}>" if axis else "<rows>")


def rows_axis(name: str) -> str:
    """Return the axis of which a constant of this name has the positions (see `rows_of`)."""
    return name.strip("<>").removeprefix("rows").strip()


@dataclass(frozen=True, slots=True)
class Input:
    """Input spec of a tensor input: index among the tensor leaves of `(args, kwargs)`, and path."""

    index: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class Tangent:
    """Input spec of the incoming gradient of output `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Size:
    """Input spec of a host integer: `B`, `b`, `offset` or a further symbol of the program."""

    name: str


@dataclass(frozen=True, slots=True)
class StageValue:
    """Input and output spec of a value that one part of a partitioned program passes to another part.

    `name` is the value's node in the entire program. With `backward`, the value flows against the direction
    of the forward.
    """

    name: str
    backward: bool = False


InputSpec: TypeAlias = Parameter | Buffer | Constant | Input | Tangent | Size | StageValue


@dataclass(frozen=True, slots=True)
class Output:
    """Output spec: output `index` among the flat outputs of the user's module."""

    index: int


@dataclass(frozen=True, slots=True)
class Mutation:
    """Output spec: the new value of a parameter, buffer or input that the model changed in place."""

    of: Parameter | Buffer | Input


@dataclass(frozen=True, slots=True)
class Gradient:
    """Output spec: the gradient of a parameter or input."""

    of: Parameter | Input


OutputSpec: TypeAlias = Output | Mutation | Gradient | StageValue


def result_words(spec: OutputSpec | None) -> str:
    """Describe a result for users: `gradient of fc.weight`, `new value of bn.running_mean`, `output 0`."""
    match spec:
        case Output(index):
            return f"output {index}"
        case Gradient(Input(index, path)):
            return f"gradient of input {path or index}"
        case Gradient(Parameter(name)):
            return f"gradient of {name}"
        case Mutation(Input(index, path)):
            return f"new value of {path or index}"
        case Mutation(Parameter(name) | Buffer(name)):
            return f"new value of {name}"
        case _:
            return "result"
