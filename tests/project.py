"""The package's own description, `[project]` of pyproject.toml."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def project(root: Path = ROOT) -> dict[str, Any]:
    """Return the table of a checkout; Python 3.10, which has no tomllib, reads it by pip's own copy."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
    found: dict[str, Any] = toml.loads((root / "pyproject.toml").read_text())["project"]
    return found
