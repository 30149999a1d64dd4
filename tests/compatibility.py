"""What fxdp works with, from runs, as the table of docs/environment.md:

    python -m tests.compatibility PYTHON...

Each interpreter's environment has torch and what the tests need. It runs `fxdp doctor` and a sample of the
tests: splits of batches, README's example, unedited scripts, resuming, and the three trainers. Rows of other
environments stay.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "environment.md"
PACKAGES = ("torch", "numpy", "transformers", "accelerate", "lightning")
HEAD = ("Python", *PACKAGES, "doctor", "tests", "date")
TESTS = (
    "tests/exactness/test_splits.py", "tests/test_readme.py::test_the_example_runs",
    "tests/run/test_scripts.py", "tests/eager/data", "tests/integrations/test_transformers.py",
    "tests/integrations/test_accelerate.py", "tests/integrations/test_lightning.py",
)  # fmt: skip
_BEGIN = "<!-- compatibility: written by `python -m tests.compatibility` -->\n"
_END = "<!-- end of compatibility -->"
_VERSIONS = (
    "import json, platform; from importlib.metadata import version; "
    f"print(json.dumps([platform.python_version(), *map(version, {PACKAGES})]))"
)


def row(python: str) -> tuple[str, ...]:
    """Run all in an environment; the cells of its row."""
    versions = json.loads(_run(python, "-c", _VERSIONS).stdout)
    doctor = _run(python, "-m", "fxdp", "doctor")
    tests = _run(python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *TESTS)
    print(doctor.stdout[-500:] if doctor.returncode else "", tests.stdout[-2000:])
    summary = re.findall(r"^(.*\d+ passed.*?|.*\d+ failed.*?) in [\d.]+", tests.stdout, re.M)
    return (
        *(text.split("+")[0] for text in versions),
        "all is well" if doctor.returncode == 0 else "fails",
        summary[-1].strip("= ") if summary else f"exit code {tests.returncode}",
        datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def rows() -> list[tuple[str, ...]]:
    """The rows of the page."""
    lines = PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def write(found: list[tuple[str, ...]]) -> None:
    """Put rows into the page, in the order of Python and torch."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    ordered = sorted(found, key=lambda cells: [int(n) for text in cells[:2] for n in text.split(".")])
    head, *lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, *ordered)]
    table = "\n".join([head, "|---" * len(HEAD) + "|", *lines])
    PAGE.write_text(f"{before}{_BEGIN}{table}\n{_END}{after}")


def _run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


if __name__ == "__main__":
    for python in sys.argv[1:]:
        new = row(python)
        print(" | ".join(new), flush=True)
        write([*(old for old in rows() if old[:2] != new[:2]), new])
