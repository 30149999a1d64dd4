"""States of the random generators of Python, NumPy and torch, and numbers by which ranks compare them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from fxdp.ir.network.raw_bytes import number_of


def generator_states() -> list[Any]:
    """Return the states of all global generators, as comparable values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = (name, np.asarray(keys).tobytes(), *rest)
    found = [random.getstate(), torch.get_rng_state().numpy().tobytes(), numpy_state]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.get_rng_state().numpy().tobytes())
    return found


def set_generator_states(found: list[Any]) -> None:
    """Set all global generators to states that `generator_states` returned."""
    random.setstate(found[0])
    torch.set_rng_state(torch.frombuffer(bytearray(found[1]), dtype=torch.uint8))
    name, keys, *rest = found[2]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    if len(found) > 3:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(found[3]), dtype=torch.uint8))


def torch_generators(device_type: str) -> int:
    """Return a number below 2**62 for the state of the generators that a program draws from."""
    states = [torch.get_rng_state()]
    if device_type == "cuda":
        states.append(torch.cuda.get_rng_state())
    return number_of(b"".join(state.numpy().tobytes() for state in states))


def python_generator() -> int:
    """Return a number below 2**62 for the state of Python's generator."""
    return number_of(repr(random.getstate()).encode())


def numpy_generator() -> int:
    """Return a number below 2**62 for the state of NumPy's generator."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return number_of(repr((name, rest)).encode() + np.asarray(keys).tobytes())
