"""Numbers for the states of random generators, by which ranks compare these."""

from __future__ import annotations

import random

import numpy as np
import torch

from fxdp.ir.network.raw_bytes import number_of


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
