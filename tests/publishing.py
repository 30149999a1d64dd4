"""What a release lacks before it can be published, a line each; exit code 1 if it lacks anything:

    python -m tests.publishing

`[project.urls]` of pyproject.toml is the one place that names the host; what else names it is compared with
it. CI asks none of this: it publishes nothing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fxdp.version import __version__
from tests.project import project

ROOT = Path(__file__).resolve().parent.parent
_NOT_READ = ("example", "invalid", "test", "localhost")
"""Top-level domains that no mail reaches (RFC 2606)."""


def lacking(root: Path, version: str) -> list[str]:
    """Return what is missing in a checkout for a release of this version, each with its file."""
    repository = project(root).get("urls", {}).get("Repository")
    found = []
    if not repository:
        found.append(
            'pyproject.toml: expected Repository = "https://HOST/OWNER/fxdp" in [project.urls], where '
            "issues, reviews and private reports are"
        )
    elif f"repository-code: {repository}\n" not in (root / "CITATION.cff").read_text():
        found.append(f"CITATION.cff: expected the line `repository-code: {repository}`, as in [project.urls]")
    for owner in re.findall(r"^\*\s+(.*)$", (root / ".github" / "CODEOWNERS").read_text(), re.M):
        if owner.rpartition(".")[2] in _NOT_READ:
            found.append(f".github/CODEOWNERS: no mail reaches {owner}; SECURITY.md sends reports there")
    changes = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.M):
        found.append(f"CHANGELOG.md: the section of {version} has no date")
    return found


if __name__ == "__main__":
    lacks = lacking(ROOT, __version__)
    print("\n".join(lacks) or f"fxdp {__version__} can be published")
    sys.exit(bool(lacks))
