"""Tasks on global tensors that a script hands to a pool of threads: done at once, by the thread that does so.

    executor.submit(log, step, {"outputs": y})      y is gathered here, in an order that all ranks have
    executor.submit(load, path)                     by a thread of the pool

Ranks meet by the order of what they do, and threads have none. To the script its pool was quick.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import FunctionType
from typing import Any

from fxdp.eager.tensor import GlobalTensor
from fxdp.errors import FxdpError
from fxdp.run.trees import leaves_of
from fxdp.torch_compat import Patch, around


def thread_patches() -> Iterator[Patch]:
    """Yield the replacement of what hands a task to a pool of threads."""
    yield Patch(ThreadPoolExecutor, "submit", around(_submitted))


def _submitted(plain: Callable[..., Any], pool: Any, task: Any, /, *args: Any, **kwargs: Any) -> Any:
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and _has_global((task, args, kwargs))):
        return plain(pool, task, *args, **kwargs)
    done = Future[Any]()
    try:
        done.set_result(task(*args, **kwargs))
    except FxdpError:
        raise
    except Exception as error:
        done.set_exception(error)
    return done


def _has_global(tree: Any) -> bool:
    """Return whether a task has a global tensor: among its arguments, bound to it, or enclosed."""
    for leaf in leaves_of(tree):
        if isinstance(leaf, GlobalTensor):
            return True
        if isinstance(leaf, partial) and _has_global((leaf.func, leaf.args, leaf.keywords)):
            return True
        if isinstance(leaf, FunctionType) and _has_global([*_enclosed(leaf)]):
            return True
    return False


def _enclosed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not yet set
            continue
        if not isinstance(value, FunctionType):
            yield value
