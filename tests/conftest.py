"""Fixtures for all tests.

With `-n 3` pytest itself runs none: nothing that takes seconds is imported at the top, before workers start.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.limits import TEST_S

if TYPE_CHECKING:
    from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes, shared by the entire session (see tests/rank_pool.py)."""
    from tests.rank_pool import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n 3 --dist loadgroup`, tests that share rank processes run one after the other in one worker.

    Those of a module that share captures or a fixture, too: each worker would make them anew. What `slow.txt`
    lists is left out without `-m`, as pytest's own plugin for marks reads this after us.
    """
    from tests.slow import is_slow, slow_tests

    listed = slow_tests()
    for item in items:
        if is_slow(item.nodeid, listed):
            item.add_marker(pytest.mark.slow)
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif hasattr(getattr(item, "module", None), "KNOWN") or _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))  # type: ignore[attr-defined]


def _shares_a_fixture(item: pytest.Item) -> bool:
    found = getattr(item, "_fixtureinfo", None)
    definitions = found.name2fixturedefs.values() if found else ()
    return any(each.scope == "module" for several in definitions for each in several)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """One worker imports everything, then the others: Python compiles each file once, not in each of them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # not an entire run, which imports Inductor sooner or later
        return (yield)
    with Path(__file__).open() as iteration:
        try:
            fcntl.flock(iteration, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(iteration, fcntl.LOCK_SH)
        from tests.quick_kernels import compile_kernels_quickly

        compile_kernels_quickly()
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[object]:
    """With `FXDP_WINGS=off` more models are refused, and that is all: a refusal skips the test."""
    if os.environ.get("FXDP_WINGS") != "off":
        return (yield)
    try:
        return (yield)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"  # of a rank, or of a test that expects another refusal
        if "CaptureError" not in text and "FXDP_WINGS=off" not in text:
            raise
        return pytest.skip(f"refused without wings: {str(error)[:200]}")


def pytest_configure(config: pytest.Config) -> None:
    """A limit for each test. One thread each, as on ranks: workers share a few cores; programs inherit it."""
    from tests import reached

    if "TESTS_REACHED" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="fxdp-reached-")
        config.add_cleanup(folder.cleanup)
        reached.begin(Path(folder.name, "statements"))
    else:
        reached.go_on()
    if config.pluginmanager.hasplugin("timeout") and config.option.timeout is None:
        config.option.timeout = TEST_S  # before pytest-timeout reads it
    if getattr(config.option, "dist", "no") != "no" and not config.option.collectonly:
        return  # workers run the tests
    from tests.garbage import collect_once_at_the_end, collect_seldom

    collect_once_at_the_end(config)
    collect_seldom()  # before what takes seconds to import
    import torch

    from tests.rank_pool import THREADS

    torch.set_num_threads(1)
    os.environ.update(THREADS)
    os.environ.setdefault("FXDP_CACHE", "0")  # a test sees what it makes itself
    # Of models as small as in tests, remembering what ops do to fake tensors costs more than it saves: a
    # fifth of a capture. Ranks that live as programs do (`RankPool.spawn`) remember it, as users' programs.
    torch._dynamo.config.fake_tensor_cache_enabled = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """With `TESTS_REACHED=80` a table of what the tests reached, and a failure below 80 %."""
    yield
    floor = os.environ.get("TESTS_REACHED")
    if floor and "PYTEST_XDIST_WORKER" not in os.environ:
        from tests import reached

        rows, total = reached.table(Path(os.environ[reached.FILE]))
        low = total < float(floor)
        last = [f"expected at least {floor} %"] if low else []
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        for row in ["", "reached by the tests:", *rows, *last]:
            terminal.write_line(row)
        if low:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    """What is imported is no garbage; at the end it is, or nanobind reports all of it as leaked."""
    atexit.register(gc.unfreeze)
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in each test, whatever ran before it."""
    from fxdp.ir.graph.draws import reseed

    reseed(0)


@pytest.fixture
def float64() -> Iterator[None]:
    """New tensors and parameters are float64."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
