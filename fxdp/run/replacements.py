"""All that is different in a process while a script runs; the table that `fxdp run` installs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from fxdp.run.file_calls import file_patches
from fxdp.run.loaders import GlobalBatches, fetched
from fxdp.run.scratch_files import NotedFiles, ScratchFiles
from fxdp.run.session import Session
from fxdp.torch_compat import MapFetcher, Patch, around


def replacements(session: Session) -> Iterator[Patch]:
    """Yield the replacements for a script."""

    def batches(plain: Any, loader: Any) -> Any:
        return GlobalBatches(plain(loader), session)

    def fetch(plain: Any, fetcher: Any, indices: Any) -> Any:
        return fetched(plain, fetcher, indices, session)

    own = session.options.logs
    journal = own / "new_files"
    files = (
        ScratchFiles(own / f"rank{session.ranks.rank}.files", journal)
        if session.ranks.rank
        else NotedFiles(journal)
    )
    yield from file_patches(files, str(own))
    yield Patch(DataLoader, "__iter__", around(batches))
    yield Patch(MapFetcher, "fetch", around(fetch))
