"""What the inputs and results of a program are: frozen values, so that nothing is found by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Parameter:
    """Slot of a parameter, by its name in the user's module."""

    name: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """Slot of a buffer, by its name in the user's module."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """Slot of a tensor constant that the capture lifted (equal on all ranks)."""

    name: str


@dataclass(frozen=True, slots=True)
class Input:
    """Slot of a tensor input: its index among the tensor leaves of `(args, kwargs)`, and its path."""

    index: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class Tangent:
    """Slot of the incoming gradient of output `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Size:
    """Slot of a host integer: `B`, `b`, `offset` or a further symbol of the program."""

    name: str


@dataclass(frozen=True, slots=True)
class StageValue:
    """Slot and result slot of a value that one part of a cut program hands to another.

    `name` is the value's node in the entire program; with `backward` it goes against the forward's direction.
    """

    name: str
    backward: bool = False


InputSpec: TypeAlias = Parameter | Buffer | Constant | Input | Tangent | Size | StageValue


@dataclass(frozen=True, slots=True)
class Output:
    """Result slot: output `index` among the flat outputs of the user's module."""

    index: int


@dataclass(frozen=True, slots=True)
class Mutation:
    """Result slot: the new value of a parameter, buffer or input that the model changed in place."""

    of: Parameter | Buffer | Input


@dataclass(frozen=True, slots=True)
class Gradient:
    """Result slot: the gradient of a parameter or input."""

    of: Parameter | Input


OutputSpec: TypeAlias = Output | Mutation | Gradient | StageValue


def result_words(spec: OutputSpec | None) -> str:
    """A result in a user's words: `gradient of fc.weight`, `new value of bn.running_mean`, `output 0`."""
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
