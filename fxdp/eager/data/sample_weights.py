"""What the samples of a data set weigh, checked."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fxdp.errors import InputError, a_kind


def sample_weights(weights: Sequence[float] | Callable[[int], float], count: int) -> Sequence[float]:
    """Return the weight of each of `count` samples, of a sequence or a function of a sample's index.

    Raises
    ------
    InputError : weights that are no numbers of at least 0, or of another number of samples.
    """
    given: Any = list(map(weights, range(count))) if callable(weights) else weights
    try:
        found = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"data_loader: weights is {a_kind(weights)}; expected numbers") from error
    if found.shape != (count,):
        raise InputError(
            f"data_loader: weights of shape {list(found.shape)} for {count} samples; expected [{count}]: a "
            "number for each sample of the data set, or a function of a sample's index"
        )
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        raise InputError(
            f"data_loader: the weight of sample {wrong[0]} is {found[wrong[0]]}, as of {len(wrong)} samples; "
            "expected finite numbers of at least 0"
        )
    return found  # type: ignore[return-value]


def digest_of_weights(weights: Sequence[float] | None) -> int | None:
    """Return a number for weights that `sample_weights` returned, by which two runs compare theirs."""
    return None if weights is None else zlib.crc32(np.asarray(weights).tobytes())
