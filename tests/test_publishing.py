"""`python -m tests.publishing` names what a release lacks, and nothing once it is there."""

from __future__ import annotations

import shutil
from pathlib import Path

from fxdp.version import __version__
from tests.publishing import ROOT, lacking

_FILES = ("pyproject.toml", "CITATION.cff", ".github/CODEOWNERS", "CHANGELOG.md")


def _written(folder: Path, *edits: tuple[str, str, str]) -> Path:
    """A checkout of the files that are asked, with edits: file, what goes, what comes."""
    for name in _FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name, old, new in edits:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
    return folder


def test_a_host_that_is_not_named_fails_a_release(tmp_path: Path) -> None:
    root = _written(
        tmp_path,
        ("pyproject.toml", "[project.urls]", "[tool.nothing]"),
        (".github/CODEOWNERS", "* ", "* someone@mail.invalid "),
        ("CHANGELOG.md", f"[{__version__}] - ", f"[{__version__}] - soon "),
    )
    owners, owner = lacking(root, __version__), "someone@mail.invalid"
    assert [line.partition(":")[0] for line in owners] == [
        "pyproject.toml", ".github/CODEOWNERS", "CHANGELOG.md"
    ]  # fmt: skip
    assert owner in owners[1]


def test_a_release_that_has_all_lacks_nothing(tmp_path: Path) -> None:
    host = 'Repository = "https://host.org/us/fxdp"'
    root = _written(tmp_path, ("pyproject.toml", "[project.urls]", f"[project.urls]\n{host}\n[tool.rest]"))
    (root / ".github" / "CODEOWNERS").write_text("* @us/maintainers\n")
    (root / "CHANGELOG.md").write_text(f"## [{__version__}] - 2026-12-01\n")
    (line,) = lacking(root, __version__)
    assert line.startswith("CITATION.cff: expected the line `repository-code: https://host.org/us/fxdp`")
    with (root / "CITATION.cff").open("a") as citation:
        citation.write("repository-code: https://host.org/us/fxdp\n")
    assert lacking(root, __version__) == []
