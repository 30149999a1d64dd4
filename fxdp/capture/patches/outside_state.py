"""External Python state that a model's code changes, outside of module attributes: restored after each run.

    global STEP; STEP += 1        LOG.append(loss)        type(self).calls += 1        self.config.step += 1

A program cannot change this state at each step, and a trace would leave tensors without values there. A
string constant of the code (`self.config.problem_type = "regression"`) is equal at each step, and may be
left.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from fxdp.capture.external_places import ExternalPlace, ReadState
from fxdp.capture.snapshot import ABSENT, FILLED, ValueSnapshot


class ExternalState:
    """The external state that code may read, with snapshots, and the places that the code has changed."""

    def __init__(self, read: ReadState) -> None:
        self.read = read
        self.changed: dict[tuple[int, Any], ExternalPlace] = {}
        """The places that the code changed, by `ExternalPlace.known_by`."""
        self.words: dict[tuple[int, Any], str] = {}
        """String constants of the code that were found in changed places, by `ExternalPlace.known_by`."""

    def _attributes(self) -> Iterator[ExternalPlace]:
        """Yield all attributes that objects and classes have now."""
        for name, attributes, holder in self.read.objects:
            for key in attributes:
                yield ExternalPlace(f"{key} of {name}", attributes, key, holder)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Run code inside the block, and restore the external state afterwards."""
        own = list(self._attributes())
        places = {place.known_by: place for place in (*self.read.places, *own)}
        before = [(place, ValueSnapshot(place.value())) for place in places.values()]
        misses = [cache.cache_info().misses for cache in self.read.caches]
        try:
            yield
        finally:
            now = {place.known_by: place for place in self._attributes()}
            made = [place for at, place in now.items() if at not in places]
            for place, kept in [*before, *((place, ValueSnapshot(ABSENT)) for place in made)]:
                value = place.value()
                if kept.is_changed(value):
                    self.changed[place.known_by] = place
                    if isinstance(value, str) and self.read.has_constant(value):
                        self.words[place.known_by] = value
                    else:
                        self.words.pop(place.known_by, None)
                kept.put_back()
                if value is not kept.value and not _is_made_once(kept.value, value):
                    place.put(kept.value)
            for cache, missed in zip(self.read.caches, misses, strict=True):
                if cache.cache_info().misses != missed and _holds_traced(cache):
                    cache.cache_clear()


def _is_made_once(before: Any, now: Any) -> bool:
    """Return whether a value is an object created on first use; creating the object again may be an error."""
    return (before is None or before is ABSENT) and not isinstance(now, (*FILLED, Tensor, int, float, str))


def _holds_traced(cache: Any) -> bool:
    """Return whether the cache of a function holds a tensor of a trace."""
    found = [cache]
    for _ in range(_INSIDE):
        found = [x for one in found for x in gc.get_referents(one) if not isinstance(x, _NO_RESULTS)]
        if any(isinstance(x, Tensor) and type(x) not in (Tensor, Parameter) for x in found):
            return True
    return False


_INSIDE = 4  # the cache is a dict, of links in a list, of results, which may be tuples
_NO_RESULTS = (type, types.FunctionType, types.ModuleType)
