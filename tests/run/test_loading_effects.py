"""Data sets whose loading does more than return a sample are told from those that only return it."""

from __future__ import annotations

import importlib
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from fxdp.run.loading_effects import loading_has_effects

_SEEN: Counter[int] = Counter()
_RNG, _NUMBERS = np.random.default_rng(0), itertools.count()


class _Noise:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: Any) -> Any:
        """Add noise."""
        return x + self.rng.standard_cauchy(2)


class _Compose:
    """Transforms one after another, as a library has them."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, x: Any) -> Any:
        """Apply all."""
        for one in self.transforms:
            x = one(x)
        return x


_NOISE = _Noise()


class _Data:
    """Samples, by a function of the data set and an index."""

    def __init__(self, load: Callable[[Any, int], Any] | None = None, **kept: Any) -> None:
        self.x, self.seen, self.log, self.cache = torch.ones(4, 2), np.zeros(4), [0], {0: 1.0}
        self.__dict__.update(kept)
        if load is not None:
            kind = type("_Own", (type(self),), {"__getitem__": load})
            self.__class__ = kind


class _Through(_Data):
    """A method of its own does it."""

    def __getitem__(self, i: int) -> Any:
        return self.load(i)

    @lru_cache  # noqa: B019
    def load(self, i: int) -> Any:
        """Load, and count."""
        self.seen[i] += 1
        return self.x[i]


def _counts(data: Any, i: int) -> Any:
    data.seen[i] += 1
    return data.x[i]


def _keeps(data: Any, i: int) -> Any:
    kept = data.cache
    kept[i] = data.x[i]
    return kept[i]


def _logs(data: Any, i: int) -> Any:
    data.log.append(i)
    return data.x[i]


def _saves(data: Any, i: int) -> Any:
    torch.save(data.x[i], os.devnull)
    return data.x[i]


def _tells(data: Any, i: int) -> Any:
    print("sample", i)
    return data.x[i]


def _counts_globally(data: Any, i: int) -> Any:
    _SEEN.update([i])
    return data.x[i]


def _by_function(data: Any, i: int) -> Any:
    return _counts_globally(data, i)


def _writes_in_place(data: Any, i: int) -> Any:
    data.x[i].mul_(0.5)
    return data.x[i]


def _draws_for_some(data: Any, i: int) -> Any:
    return data.x[i] + torch.randn(2) if i % 2 else data.x[i]


def _draws_from_a_global(data: Any, i: int) -> Any:
    return data.x[i] + _RNG.normal(size=2)


def _draws_by_an_object(data: Any, i: int) -> Any:
    return _NOISE(data.x[i])


def _goes_on(data: Any, i: int) -> Any:
    return data.x[i], next(_NUMBERS)


def _returns(data: Any, i: int) -> Any:
    own, fixed = np.random.default_rng(i), torch.Generator().manual_seed(i)
    own.normal(size=torch.randn(1, generator=fixed).shape)
    sample = {"x": data.x[i].clone()}
    sample["y"], words = sample["x"].log(), []
    words.append(np.append(data.x[i], 1.0))
    sample["x"].mul_(2)
    sample.update(words=words)
    return sample


@pytest.mark.parametrize(
    "load",
    [
        _counts,
        _keeps,
        _logs,
        _saves,
        _tells,
        _counts_globally,
        _by_function,
        _writes_in_place,
        _draws_for_some,
        _draws_from_a_global,
        _draws_by_an_object,
        _goes_on,
    ],
)
def test_effects_are_found(load: Callable[[Any, int], Any]) -> None:
    assert loading_has_effects(_Data(load))
    assert loading_has_effects(Subset(_Data(load), [0, 1]))


def test_effects_of_parts_are_found() -> None:
    assert loading_has_effects(_Through())
    assert loading_has_effects(_Data(_returns, transform=lambda x: print(x)))
    assert loading_has_effects(_Data(_returns, steps=[random.Random(0)]))


def test_generators_are_found_at_any_depth() -> None:
    nested = _Compose(np.tanh, _Compose(np.tanh, _Noise()))
    assert loading_has_effects(Subset(_Data(_returns, transforms={"train": nested}), [0]))
    assert loading_has_effects(_Data(_returns, draw=partial(np.random.default_rng(0).normal, 0.0)))
    assert not loading_has_effects(Subset(_Data(_returns, transform=_Compose(np.tanh, np.exp)), [0]))


def test_functions_of_a_package_may_draw_from_its_generator(tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "site-packages" / "noisy_samples"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import random\n_RNG = random.Random(0)\ndef _draw():\n    return _RNG.random()\n"
        "class Data:\n    def __getitem__(self, i):\n        return self.load(i)\n"
        "    def load(self, i):\n        return i + _draw()\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    assert loading_has_effects(importlib.import_module("noisy_samples").Data())


def test_a_sample_of_its_own_may_be_changed() -> None:
    assert not loading_has_effects(_Data(_returns, transform=lambda x: x + 1, steps=[np.tanh]))
