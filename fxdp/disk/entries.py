"""`Entries`: values that are kept from run to run, by a hash of all that they depend on.

    key_of("joint", graph's text, options)  ->  9f31...     also of the versions of fxdp, torch and Python
    entries.find(key)                       ->  the value, or None
    entries.keep(key, value)

Nothing here can fail: a folder that is full, read-only or not private, and an entry that is damaged, are one
line of the log, and then everything goes on as without them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pickle
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy

from fxdp.disk.private_folder import PrivateFolder, UnusableFolderError
from fxdp.torch_compat import exact_torch_release, inductor_folder

_log = logging.getLogger("fxdp")

_HEAD = b"fxdp entry 1\n"
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Entries:
    """Entries in a folder; without one nothing is found and nothing kept."""

    folder: PrivateFolder | None

    @staticmethod
    def within(folder: str | None, megabytes: float) -> Entries:
        """Those in a folder, None: beside Inductor's cache; without one where they may take no space."""
        if not megabytes:
            return Entries(None)
        path = Path(folder) if folder else Path(inductor_folder()) / "fxdp"
        return Entries(PrivateFolder(path, int(megabytes * 2**20)))

    def find(self, key: str, load: Callable[[bytes], Any] = pickle.loads) -> Any:
        """The value that was kept under the key; None where there is none that can be used."""
        if self.folder is None:
            return None
        try:
            content = self.folder.read(key)
            _log.debug("%s on disk: %s", key, "nothing" if content is None else f"{len(content)} bytes")
            return None if content is None else load(_checked(content))
        except (UnusableFolderError, OSError) as error:
            _say(self._unusable(error))
        except Exception as error:  # whatever a damaged or foreign entry makes of unpickling
            _say(f"an entry of the cache in {self.folder.path} is ignored: {type(error).__name__}: {error}")
            self.folder.remove(key)
        return None

    def keep(self, key: str, value: Any, dump: Callable[[Any], bytes] = pickle.dumps) -> None:
        """Keep a value, if it can be: what cannot be pickled is made anew each time."""
        if self.folder is None:
            return
        try:
            content = dump(value)
        except Exception as error:  # a user's class among the values, which pickle does not find
            _log.debug("not kept on disk: %s: %s", type(error).__name__, error)
            return
        try:
            self.folder.write(key, _HEAD + hashlib.sha256(content).digest() + content)
        except (UnusableFolderError, OSError) as error:
            _say(self._unusable(error))

    def _unusable(self, error: Exception) -> str:
        assert self.folder is not None
        path = self.folder.path
        reason = f"{path} is a file" if path.is_file() else str(error)
        return f"the cache of captures is not used: {reason}. Set FXDP_CACHE_DIR to a folder of your own"


def key_of(*parts: str) -> str:
    """The name of an entry that depends on these texts and on the versions of all that made it."""
    hashed = hashlib.sha256(_versions().encode())
    for part in parts:
        text = part.encode()
        hashed.update(f"\n{len(text)}\n".encode())  # no two lists of texts are alike when joined
        hashed.update(text)
    return hashed.hexdigest()


def _checked(content: bytes) -> bytes:
    """What follows the head, as it was written."""
    start = len(_HEAD) + _DIGEST
    digest = hashlib.sha256(content[start:]).digest()
    if not content.startswith(_HEAD) or digest != content[len(_HEAD) : start]:
        raise ValueError("damaged, or of another version")
    return content[start:]


@functools.cache
def _versions() -> str:
    """Of fxdp its source itself, which changes between releases, too."""
    return "\n".join(
        (
            exact_torch_release(),
            sympy.__version__,
            platform.python_version(),
            _source(),
        )
    )


def _source() -> str:
    hashed = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    folders = (root, (root / "passes").resolve())  # the latter is a link, which `rglob` does not follow
    for file in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        hashed.update(f"{file.name}\n".encode() + file.read_bytes())
    return hashed.hexdigest()


@functools.cache  # one line for one reason, however often it is met
def _say(text: str) -> None:
    _log.warning("%s", text)
