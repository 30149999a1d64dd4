"""Write the files, or print what is to be read of a new torch.

    python -m tests.torch_compat.surface PYTHON PYTHON ...       files of the torches of these
    python -m tests.torch_compat.surface --diff PYTHON PYTHON    what differs between two, functions as text

For a new torch give the interpreter of the release before it, too.
"""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from fxdp.torch_compat.releases import PROVEN, installed, release
from tests.torch_compat.surface.files import TABLES, differences, write
from tests.torch_compat.surface.installed import listing, surface, texts


def main(arguments: list[str]) -> int:
    """Do what the arguments say; 2 where they say nothing known."""
    if arguments == ["--print"]:
        print(json.dumps({
            "torch": installed(), "tables": surface(), "listing": sorted(listing()), "texts": dict(texts()),
        }))  # fmt: skip
    elif arguments[:1] == ["--diff"] and len(arguments) == 3:
        print("\n".join(_difference(*map(_measured, arguments[1:]))))
    elif arguments and not arguments[0].startswith("-"):
        measured = {release(found["torch"]): found for found in map(_measured, arguments)}
        if unknown := measured.keys() - set(PROVEN):
            print(f"fxdp/torch_compat/releases.py does not list {', '.join(unknown)}")
            return 1
        write(measured)
    else:
        print(__doc__)
        return 2
    return 0


def _measured(python: str) -> Any:
    command = (python, "-m", "tests.torch_compat.surface", "--print")
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _difference(old: Any, new: Any) -> Iterator[str]:
    for table in TABLES:
        before, now = old["tables"][table], new["tables"][table]
        yield from (f"{path}: came ({now[path]})" for path in sorted(now.keys() - before.keys()))
        yield from (f"{path}: is gone ({before[path]})" for path in sorted(before.keys() - now.keys()))
    yield from differences(old["tables"], new["tables"], ("names", "ops", "settings"))
    changed = [line.partition(":")[0] for line in differences(old["tables"], new["tables"], ("texts",))]
    yield f"{len(changed)} functions to read: {', '.join(changed)}"
    for path in changed:
        both = [found["texts"].get(path, "").splitlines() for found in (old, new)]
        heads = (f"{path} {found['torch']}" for found in (old, new))
        yield from difflib.unified_diff(*both, *heads, lineterm="")


sys.exit(main(sys.argv[1:]))
