"""What a library's own tests know: how small each of its models can be, and what it is called with.

An installed library has no tests: put the folder `tests` of its repository on the path, named
`<library>_tests`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fxdp
from tests.zoo.entry import Entry, Inputs


def test_modules(library: str, folder: str, *words: str) -> Iterator[ModuleType]:
    """The modules of tests in a folder whose text has one of the words."""
    sys.modules.setdefault("requests_mock", ModuleType("requests_mock"))  # for downloads, which are not run
    package = importlib.import_module(f"{library}_tests")
    root = Path(next(iter(package.__path__)))
    for path in sorted(root.glob(f"{folder}/**/test_*model*.py")):
        if any(word in path.read_text() for word in words):
            dotted = ".".join(path.relative_to(root).with_suffix("").parts)
            with suppress(ImportError):  # of what is not installed
                yield importlib.import_module(f"{package.__name__}.{dotted}")
            torch.use_deterministic_algorithms(False)  # tests of diffusers switch it on when imported


def entry_of(build: Callable[[], Any], inputs: Callable[[int], Inputs]) -> Entry:
    """A model and its inputs in the default dtype, each with the batch dim that it grows in."""
    return Entry(build, lambda batch: _in_default_dtype(inputs(batch)), _batch_dims(inputs))


def _in_default_dtype(inputs: Inputs) -> Inputs:
    wide = torch.get_default_dtype()
    return pytree.tree_map_only(Tensor, lambda x: x.to(wide) if x.is_floating_point() else x, inputs)


def _batch_dims(inputs: Callable[[int], Inputs]) -> Any:
    """For each input the dim whose size is another for another batch; `None` for all if it is the first."""
    (two, spec), (three, other) = (pytree.tree_flatten(inputs(batch)) for batch in (2, 3))
    if spec != other:
        return None
    dims = [_grown(x, y) for x, y in zip(two, three, strict=True)]
    first = all(dim == 0 for dim, x in zip(dims, two, strict=True) if isinstance(x, Tensor) and x.dim())
    return None if first else ((), pytree.tree_unflatten(dims, spec))


def _grown(small: Any, large: Any) -> Any:
    """How an input grows from two samples to three: its dim, rows for each sample, or not at all."""
    if not isinstance(small, Tensor):
        return None
    for dim, (two, three) in enumerate(zip(small.shape, large.shape, strict=True)):
        rows = three - two
        if rows:
            return fxdp.RowsPerSample(rows, dim) if rows > 1 and two == 2 * rows else dim
    return None
