"""Libraries of kernels that were built before, by their source: loaded without asking how they are built.

Inductor names a library by its source and the command that builds it. To write that command it asks the
compiler what it is, and imports all that builds extensions of Python: a tenth of a warm start.
What the command depends on is in the key here; the library itself stays where Inductor has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxdp.disk.entries import Entries, key_of
from fxdp.settings import CacheSettings
from fxdp.torch_compat import is_on, library_built_before, library_environment


def cached_library(extension_cache: Any, source: str, submit: Callable[..., Any]) -> Callable[[], Any]:
    """What gives the library of a source: one that is there, else one that is being built from now on."""
    settings = CacheSettings.from_environment()
    entries = Entries.within(settings.folder, settings.megabytes if is_on("cached_libraries") else 0)
    environment = library_environment() if entries.folder is not None else None
    if environment is None:
        return extension_cache.load_async(source, submit_fn=submit)  # type: ignore[no-any-return]
    key = key_of("library", environment, source)
    known = entries.find(key)
    library = None if known is None else library_built_before(extension_cache, *known)
    if library is not None:
        return lambda: library
    building = extension_cache.load_async(source, submit_fn=submit)

    def built() -> Any:
        made = building()
        entries.keep(key, (made.__file__, made.key))
        return made

    return built
