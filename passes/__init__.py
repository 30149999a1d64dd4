"""The passes of the compiler, one per file.

Each pass is in the file of its name: `fxdp.passes.InsertCollectives` is in `insert_collectives.py`. The order
in which passes run is data in `fxdp/compiler/order.py`.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

_FILES = {name.title().replace("_", ""): name for _, name, _ in iter_modules(__path__)}

__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"there is no pass {name!r}; expected one of {', '.join(_FILES)}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
