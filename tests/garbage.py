"""How often Python looks for garbage in tests: seldom, from a process's first import on."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def collect_seldom() -> None:
    """For processes that run tests: half a million objects, fifty megabytes, may wait to be freed.

    Python's own 700 cost each import of torch a second, and tests a tenth of their time. Nor may ten million
    wait. Each graph module has a class of its own, and where a trace sets attributes of `nn.Module`, Python
    goes through all subclasses: milliseconds where there are 5,000. A test that counts objects collects them
    itself.
    """
    gc.set_threshold(500_000, 20, 50)


def collect_once_at_the_end(config: pytest.Config) -> None:
    """Look once for errors in what is freed at the end of a session, where pytest looks five times.

    A look takes each worker a second; the other four are for what a finalizer has kept alive.
    """
    from _pytest.unraisableexception import gc_collect_iterations_key

    config.stash[gc_collect_iterations_key] = 1
