"""Cache of built kernel libraries by source, which skips the question how a library would be built.

Inductor names a library by the source and the build command. To write the command, Inductor queries the
compiler and imports the builders of Python extensions: a tenth of a warm start. Here the inputs of the
command are part of the cache key; the library itself stays in Inductor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxdp.disk.entries import Entries, key_of
from fxdp.settings import CacheSettings
from fxdp.startup.artifacts.compiled_code import library_environment
from fxdp.torch_compat import is_on, library_built_before


def cached_library(extension_cache: Any, source: str, submit: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that returns the library of a source, from the cache or from a build started now."""
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
