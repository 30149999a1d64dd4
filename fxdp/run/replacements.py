"""All that is different in a process while a script runs; the table that `fxdp run` installs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from fxdp.run.calls.module_calls import module_patches
from fxdp.run.children import child_patches
from fxdp.run.files.databases import database_patches
from fxdp.run.files.file_calls import FileCalls, file_patches
from fxdp.run.files.scratch_files import NotedFiles, ScratchFiles
from fxdp.run.full_values import full_value_patches
from fxdp.run.generators import seed_patches
from fxdp.run.loaders import GlobalBatches, fetched
from fxdp.run.parallel_wrappers import wrapper_patches
from fxdp.run.printed_tensors import text_patches
from fxdp.run.process_groups import group_patches
from fxdp.run.rank_zero import RankZero
from fxdp.run.session import Session
from fxdp.run.standard_input import input_patches, share_input
from fxdp.run.started_programs import program_patches
from fxdp.run.threads import thread_patches
from fxdp.torch_compat import MapFetcher, Patch, around


def file_calls(session: Session) -> FileCalls:
    """Return how a rank's script finds files."""
    own = session.options.logs
    journal = own / "new_files"
    rank = session.ranks.rank
    files = ScratchFiles(own / f"rank{rank}.files", journal) if rank else NotedFiles(journal)
    return FileCalls(files, str(own))


def replacements(session: Session, calls: FileCalls) -> Iterator[Patch]:
    """Yield the replacements for a script."""

    def batches(plain: Any, loader: Any) -> Any:
        if session.is_child:
            session.alone = True
            return plain(loader)
        loader.in_order = True  # else the order is that in which a rank's workers end
        return GlobalBatches(plain(loader), loader, session)

    def fetch(plain: Any, fetcher: Any, indices: Any) -> Any:
        return fetched(plain, fetcher, indices, session)

    rank_zero = RankZero(session)
    yield from file_patches(calls)
    yield from database_patches(calls, rank_zero.meet)
    yield from child_patches(calls.files, str(session.options.logs))
    yield from seed_patches(session.seeded)
    yield from group_patches()
    yield from wrapper_patches()
    yield from text_patches()
    yield from full_value_patches()
    yield from thread_patches()
    share_input(rank_zero)
    yield from input_patches(rank_zero)
    yield from program_patches(rank_zero)
    yield Patch(DataLoader, "__iter__", around(batches))
    with contextlib.suppress(ImportError):  # torchdata's, which has one of its own
        stateful = importlib.import_module("torchdata.stateful_dataloader")
        yield Patch(stateful.StatefulDataLoader, "__iter__", around(batches))
    yield Patch(MapFetcher, "fetch", around(fetch))
    yield from module_patches(session)
