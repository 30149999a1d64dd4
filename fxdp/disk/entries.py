"""`Entries`: a cache on disk of values from earlier runs, keyed by a hash of all inputs.

    key_of("joint", graph's text, options)  ->  9f31...     also of the versions of fxdp, torch and Python
    entries.find(key)                       ->  the value, or None
    entries.keep(key, value)

No operation raises: for a full, read-only or shared folder, or a damaged entry, one line is logged (logger
`fxdp.disk`, on the first rank of each host), and the run goes on without the cache.
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
import torch.distributed as dist

from fxdp.disk.private_folder import PrivateFolder, UnusableFolderError
from fxdp.torch_compat import exact_torch_release, inductor_folder

_log = logging.getLogger("fxdp.disk")

_HEAD = b"fxdp entry 1\n"
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Entries:
    """Cache entries in a folder; without a folder nothing is found and nothing is stored."""

    folder: PrivateFolder | None

    @staticmethod
    def within(folder: str | None, megabytes: float) -> Entries:
        """Return the entries in a folder (None: next to Inductor's cache); no folder for a limit of 0 MB."""
        if not megabytes:
            return Entries(None)
        path = Path(folder) if folder else Path(inductor_folder()) / "fxdp"
        return Entries(PrivateFolder(path, int(megabytes * 2**20)))

    def find(self, key: str, load: Callable[[bytes], Any] = pickle.loads) -> Any:
        """Return the value stored under a key; None if there is no usable value."""
        if self.folder is None:
            return None
        try:
            content = self.folder.read(key)
            _log.debug("%s on disk: %s", key, "nothing" if content is None else f"{len(content)} bytes")
            return None if content is None else load(_checked(content))
        except (UnusableFolderError, OSError) as error:
            _say(self._unusable(error))
        except Exception as error:  # any error of unpickling a damaged or foreign entry
            _say(f"an entry of the cache in {self.folder.path} is ignored: {type(error).__name__}: {error}")
            self.folder.remove(key)
        return None

    def keep(self, key: str, value: Any, dump: Callable[[Any], bytes] = pickle.dumps) -> None:
        """Store a value under a key; a value that cannot be pickled is not stored."""
        if self.folder is None:
            return
        try:
            content = dump(value)
        except Exception as error:  # for example, a user's class that pickle cannot import
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
    """Return the key of an entry that depends on these texts and on all versions of involved software."""
    hashed = hashlib.sha256(_versions().encode())
    for part in parts:
        text = part.encode()
        hashed.update(f"\n{len(text)}\n".encode())  # lengths make joined lists of texts unique
        hashed.update(text)
    return hashed.hexdigest()


def _checked(content: bytes) -> bytes:
    """Return the content behind the header, after comparing the digest."""
    start = len(_HEAD) + _DIGEST
    digest = hashlib.sha256(content[start:]).digest()
    if not content.startswith(_HEAD) or digest != content[len(_HEAD) : start]:
        raise ValueError("damaged, or of another version")
    return content[start:]


@functools.cache
def _versions() -> str:
    """Return the versions of torch, sympy and Python, and a hash of fxdp's source, as text."""
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
    folders = (root, (root / "passes").resolve())  # the second is a link, which `rglob` does not follow
    for file in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        hashed.update(f"{file.name}\n".encode() + file.read_bytes())
    return hashed.hexdigest()


@functools.cache  # log each reason once
def _say(text: str) -> None:
    first = dist.get_node_local_rank(fallback_rank=0) == 0  # all ranks of a host have the same folder
    _log.log(logging.WARNING if first else logging.DEBUG, "%s", text)
